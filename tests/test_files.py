"""Atomic writing: the old content or the new, never half."""

import gzip

import pytest

from shortlist.errors import OutputExistsError
from shortlist.files import atomic_directory, atomic_open, atomic_path, refuse_existing, sha256, write_json


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_open(target) as handle:
        handle.write("new")
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_gzip_bytes_depend_on_the_content_only(tmp_path):
    for name in ("a.gz", "b.gz"):
        with atomic_open(tmp_path / name) as handle:
            handle.write("één\n")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()).decode() == "één\n"
    assert sha256(tmp_path / "a.gz") == sha256(tmp_path / "b.gz")


def test_a_directory_takes_its_place_only_when_complete(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), atomic_directory(target) as part:
        (part / "x").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(target) as part:
        (part / "x").write_text("one")
    with pytest.raises(OutputExistsError, match="--overwrite"), atomic_directory(target):
        pass
    with atomic_directory(target, overwrite=True) as part:
        (part / "y").write_text("two")
    assert [path.name for path in target.iterdir()] == ["y"] and list(tmp_path.iterdir()) == [target]


def test_an_empty_directory_is_not_an_output(tmp_path):
    (tmp_path / "out").mkdir()
    refuse_existing(tmp_path / "out")
    with atomic_directory(tmp_path / "out") as part:
        (part / "x").write_text("one")
    assert (tmp_path / "out/x").read_text() == "one"


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_suffix_is_kept_for_writers_that_look_at_it(tmp_path):
    with atomic_path(tmp_path / "v.npy") as part:
        assert part.suffix == ".npy"
        part.write_bytes(b"x")
    assert (tmp_path / "v.npy").exists()

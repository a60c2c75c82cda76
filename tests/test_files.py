"""Atomic writing: the old content or the new, never half."""

import errno
import gzip
import os
import sys

import pytest

from shortlist import files
from shortlist.errors import OutputExistsError, ShortlistError
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


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("old", ["folder", "file"])
def test_a_directory_replaces_what_is_there_in_one_step_or_in_two(exchanged, old, tmp_path, monkeypatch):
    if not exchanged:
        monkeypatch.setattr(files, "exchange", lambda first, second: False)
    target = tmp_path / "out"
    if old == "folder":
        target.mkdir()
        (target / "x").write_text("old")
    else:
        target.write_text("old")
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (replace(*paths), seen.append(target.exists())))
    with atomic_directory(target, overwrite=True) as part:
        (part / "inner").mkdir()
        (part / "inner" / "y").write_text("new")
    assert (target / "inner" / "y").read_text() == "new" and list(tmp_path.iterdir()) == [target]
    assert all(seen) or not (exchanged and sys.platform.startswith("linux"))


def test_a_directory_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "exchange", lambda first, second: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("old")
    replace = os.replace

    def refuse(first, second):
        if str(first).endswith(".old") or not str(second).endswith("out"):
            return replace(first, second)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="broken"), atomic_directory(tmp_path / "out", overwrite=True) as part:
        (part / "x").write_text("new")
    assert (tmp_path / "out" / "x").read_text() == "old" and list(tmp_path.iterdir()) == [tmp_path / "out"]


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


def test_a_pipe_is_written_to_and_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_open(pipe) as handle:
        handle.write("text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)


def test_links_are_followed(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "new"):
        (tmp_path / f"to_{name}").symlink_to(name)
    for name in ("file", "new"):
        with atomic_open(tmp_path / f"to_{name}") as handle:
            handle.write("text")
        assert (tmp_path / name).read_text() == "text" and (tmp_path / f"to_{name}").is_symlink()
    for _ in range(2):
        with atomic_directory(tmp_path / "to_folder", overwrite=True) as part:
            (part / "x").write_text("text")
    assert (tmp_path / "folder" / "x").exists() and (tmp_path / "to_folder").is_symlink()
    assert not list(tmp_path.glob(".*"))


def test_the_longest_name_can_be_written(tmp_path):
    with atomic_open(tmp_path / ("é" * 125 + ".gz")) as handle:
        handle.write("text")
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_of_the_disk_names_the_output(tmp_path):
    with pytest.raises(OSError) as info, atomic_open(tmp_path / "out.run"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert info.value.filename == str(tmp_path / "out.run") and not list(tmp_path.iterdir())


def test_a_file_is_not_written_over_a_directory(tmp_path):
    with pytest.raises(OutputExistsError, match="is a directory"), atomic_path(tmp_path):
        pass


def test_a_place_where_nothing_can_be_created_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ShortlistError, match="file is not a directory"):
        refuse_existing(tmp_path / "file" / "out.run")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ShortlistError, match="is not writable"):
        refuse_existing(tmp_path / "a" / "b" / "out.run")

"""Streamed builds: few vectors, names that expand by their number, overwriting, unfinished directories, two writers."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from shortlist import ExactIndex, open_index
from shortlist.data import Document
from shortlist.errors import ConfigError, DataError, OutputExistsError, ShortlistError
from shortlist.indexes import build_index, directory, segments, verify
from shortlist.indexes.specs import clusters

VECTORS = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
IDS = [f"doc {row}" for row in range(600)]


def blocks(count=600, size=50):
    for start in range(0, count, size):
        yield IDS[start : min(start + size, count)], VECTORS[start : min(start + size, count)]


def contents(path):
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize("spec", ["flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4fs+rescore", "IVF4,SQ8", "ivf-flat", "opq"])
def test_vectors_are_stored_only_where_the_kind_keeps_them(spec, tmp_path, monkeypatch):
    # user-reports C.82: nothing needs all vectors at once
    monkeypatch.setattr(segments, "SHARD_BYTES", 100 * 32)
    assert build_index(tmp_path / "a", blocks(), dim=8, spec=spec, count=600) == 600
    index = open_index(tmp_path / "a")
    assert len(list((tmp_path / "a").rglob("vectors-*"))) == (6 if index._keeps_vectors else 0)
    assert index.stats()["tail"] == 0 and (tmp_path / "a" / "segment-00000" / "index.faiss").is_file()
    exact = ExactIndex(8)
    exact.add(IDS, VECTORS)
    expected = [{id for id, _ in result} for result in exact.search(VECTORS[:20], 10)]
    found = [{id for id, _ in result} for result in index.search(VECTORS[:20], 10)]
    assert np.mean([len(a & b) / 10 for a, b in zip(found, expected, strict=True)]) > 0.8
    # The number of vectors may be unknown at the beginning.
    build_index(tmp_path / "b", blocks(size=600), dim=8, spec=spec)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_name_expands_by_the_number_of_vectors_that_came(tmp_path):
    build_index(tmp_path / "index", blocks(), dim=8, spec="ivf-flat")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["spec"] == "ivf-flat" and manifest["factory"] == f"IVF{clusters(600)},Flat"
    assert open_index(tmp_path / "index").spec == "ivf-flat"


def test_too_few_vectors_to_train_are_searched_exactly_and_compaction_trains(tmp_path, caplog):
    # user-reports C.75
    build_index(tmp_path / "index", blocks(30), dim=8, spec="IVF4,PQ4x4fs+rescore", count=30)
    assert "too few" in caplog.text
    index, exact = open_index(tmp_path / "index"), ExactIndex(8)
    exact.add(IDS[:30], VECTORS[:30])
    assert index.search(VECTORS[:5], 7) == exact.search(VECTORS[:5], 7) and index.stats()["tail"] == 30
    index.add(IDS[30:], VECTORS[30:])
    index.commit()
    assert open_index(tmp_path / "index").stats()["tail"] == 600
    index.compact()
    index.commit()
    again = open_index(tmp_path / "index")
    assert (
        again.stats()["tail"] == 0 and again.stats()["segments"] == 1 and len(again.search(VECTORS[:1], 600)[0]) == 600
    )


def test_a_wrong_spec_is_refused_before_a_vector_is_asked_for(tmp_path):
    def none():
        pytest.fail("work was begun")
        yield

    for spec in ("annoy", "Flatt", "exact:int4", "auto", ""):
        with pytest.raises(ConfigError):
            build_index(tmp_path / "index", none(), dim=8, spec=spec)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["exact", "flat"])
def test_overwriting_keeps_the_old_index_until_the_new_one_is_complete(spec, tmp_path):
    path = tmp_path / "index"
    build_index(path, blocks(100), dim=8, spec=spec, provenance={"time": 1})
    early = open_index(path)
    seen = []

    def stream():
        for ids, vectors in blocks(200):
            seen.append(len(open_index(path)))
            yield ids, vectors

    with pytest.raises(OutputExistsError):
        build_index(path, stream(), dim=8, spec=spec)
    build_index(path, stream(), dim=8, spec=spec, overwrite=True, provenance={"time": 2})
    assert seen == [100] * 4 and len(open_index(path)) == 200
    # Who has the old one open goes on with it.
    assert len(early.search(VECTORS[:3], 500)[0]) == 100 and early.ids_at([99]) == ["doc 99"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["generation"] == 2 and [part["name"] for part in manifest["segments"]] == ["segment-00001"]
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "provenance.json", "segment-00001"]
    assert json.loads((path / "provenance.json").read_text()) == {"time": 2}
    verify(path)


def test_a_failed_overwrite_leaves_the_old_index_alone(tmp_path):
    # user-reports C.81: override never reads, and loses nothing before it is done
    path = tmp_path / "index"
    build_index(path, blocks(100), dim=8)
    before = contents(path)
    with pytest.raises(DataError, match="'doc 7' is given twice"):
        build_index(path, [*blocks(200), (["doc 7"], VECTORS[:1])], dim=8, overwrite=True)
    assert contents(path) == before and sorted(entry.name for entry in path.iterdir()) == [
        "manifest.json",
        "segment-00000",
    ]


def test_what_is_no_index_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "index"
    path.mkdir()
    (path / "notes").write_text("x")
    with pytest.raises(OutputExistsError):
        build_index(path, blocks(100), dim=8)
    with pytest.raises(DataError):
        build_index(path, [*blocks(100), (["doc 7"], VECTORS[:1])], dim=8, overwrite=True)
    assert (path / "notes").read_text() == "x" and [entry.name for entry in tmp_path.iterdir()] == ["index"]
    build_index(path, blocks(100), dim=8, overwrite=True)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "segment-00000"]
    (path / "manifest.json").write_text("{")
    build_index(path, blocks(50), dim=8, overwrite=True)
    assert len(open_index(path)) == 50


def test_an_unfinished_build_does_not_stand_in_the_way(tmp_path):
    path = tmp_path / "index"
    (path / "segment-00000").mkdir(parents=True)
    (path / "segment-00000" / "ids.utf8").write_bytes(b"abc")
    (path / "removed-00001.npy").write_bytes(b"x")
    (path / ".123.tmp.manifest.json").write_text("{")
    with pytest.raises(DataError, match="not an index"):
        open_index(path)
    assert build_index(path, blocks(100), dim=8) == 100
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "segment-00000"]
    verify(path)


def test_leftovers_of_a_killed_writer_are_removed_by_the_next(tmp_path):
    path = tmp_path / "index"
    build_index(path, blocks(100), dim=8)
    (path / "segment-00001").mkdir()
    (path / "segment-00001" / "ids.utf8").write_bytes(b"abc")
    (path / "removed-00002.npy").write_bytes(b"x")
    (path / ".123.tmp.manifest.json").write_text("{")
    (path / "README").write_text("mine")
    index = open_index(path)
    index.add(["new"], VECTORS[:1])
    index.commit()
    assert sorted(entry.name for entry in path.iterdir()) == [
        "README", "manifest.json", "segment-00000", "segment-00001",
    ]  # fmt: skip
    verify(path)


def test_the_second_writer_is_told(tmp_path):
    path = tmp_path / "index"
    message = "another process is writing the index .*index; nothing was written"

    def stream():
        with pytest.raises(ShortlistError, match=message):
            build_index(path, blocks(100), dim=8, overwrite=True)
        yield from blocks(50)

    build_index(path, stream(), dim=8)
    index = open_index(path)
    index.add(["new"], VECTORS[:1])
    before = contents(path)
    with directory.Change(path):
        for write in (index.commit, index.compact, lambda: index.save(path, overwrite=True)):
            with pytest.raises(ShortlistError, match=message):
                write()
        assert len(open_index(path)) == 50
    assert contents(path) == before and index.commit() == 2


def test_many_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "index"
    build_index(path, blocks(50), dim=8)
    written, refused = [], []

    def write(number):
        for part in range(6):
            index = open_index(path)
            index.add([f"{number} {part}"], VECTORS[:1])
            try:
                index.commit()
                written.append(f"{number} {part}")
            except ShortlistError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(open_index(path).ids) == {*IDS[:50], *written} and written
    assert all("another process is writing" in text or "open it again" in text for text in refused)
    assert len(written) + len(refused) == 24
    verify(path)


@pytest.mark.parametrize("step", ["commit", "compact", "save", "build"])
def test_a_full_disk_leaves_the_old_generation_whole(step, tmp_path, monkeypatch):
    path = tmp_path / "index"
    build_index(path, blocks(200), dim=8, documents=iter(Document(id, "", "text") for id in IDS[:200]))
    index = open_index(path)
    before = contents(path)
    # Every place where a byte goes to disk: one after another it fails.
    writes = {"commit": index.commit, "compact": index.compact, "save": lambda: index.save(path, overwrite=True),
              "build": lambda: build_index(path, blocks(300), dim=8, overwrite=True)}  # fmt: skip
    index.add(["new"], VECTORS[:1])
    index.remove(["doc 3"])
    real, failures = os.fsync, 0
    for allowed in range(60):
        calls = iter(range(1000))

        def full(handle, calls=calls, allowed=allowed):
            if next(calls) == allowed:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            try:
                writes[step]()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failures += 1
            else:
                break
        if json.loads((path / "manifest.json").read_text())["generation"] > 1:
            # Only the name of the new manifest was not flushed: the new generation is complete.
            break
        assert contents(path) == before and len(open_index(path)) == 200
        assert index.search(VECTORS[:1], 1) and len(index) == 200
    verify(path)
    assert failures >= 5 or step == "compact"


@pytest.mark.parametrize("module", [segments, directory])
def test_a_full_disk_while_arrays_are_written_does_too(module, tmp_path, monkeypatch):
    path = tmp_path / "index"
    build_index(path, blocks(200), dim=8)
    before = contents(path)
    index = open_index(path)
    index.add(["new"], VECTORS[:1])
    index.remove(["doc 3"])

    def full(file, array, **options):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.np, "save", full)
        with pytest.raises(OSError, match="No space left"):
            index.commit()
    assert contents(path) == before
    # With room again the same call succeeds.
    assert index.commit() == 2 and "new" in open_index(path)
    verify(path)


@pytest.mark.parametrize("spec", ["exact", "exact:int8", "IVF4,PQ8x4fs+rescore"])
def test_more_than_sixteen_million_numbers_are_no_limit(spec, tmp_path):
    # user-reports C.83: a quantile over a large tensor failed
    many = np.random.default_rng(0).standard_normal((17_000, 1024), dtype=np.float32)
    ids = [str(row) for row in range(17_000)]
    build_index(tmp_path / "index", [(ids, many)], dim=1024, spec=spec, count=17_000)
    index = open_index(tmp_path / "index")
    assert [result[0][0] for result in index.search(many[[3, 16_999]], 1)] == ["3", "16999"]

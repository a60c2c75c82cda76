"""The index directory: complete or absent, checked at open, the same bytes for the same input."""

import json
import logging
import re

import numpy as np
import pytest

from shortlist import ExactIndex, FaissIndex, open_index
from shortlist.data import Document
from shortlist.errors import DataError, MissingInputError, NonFiniteError, OutputExistsError
from shortlist.indexes import build_index, segments, storage, verify

KINDS = [ExactIndex, FaissIndex]
VECTORS = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
IDS = [f"doc {row}" for row in range(50)]


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    index = request.param(4)
    index.add(IDS, VECTORS)
    index.model = {"name": "m", "fingerprint": "f00"}
    path = tmp_path / "index"
    index.save(path)
    return index, path


def contents(path):
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def test_an_opened_index_is_the_saved_one(saved):
    # user-reports C.85
    index, path = saved
    again = type(index).open(path)
    assert len(again) == 50 and list(again.ids) == IDS and again.model == {"name": "m", "fingerprint": "f00"}
    assert again.search(VECTORS[:5], 7) == index.search(VECTORS[:5], 7)
    assert type(open_index(path)) is type(index) and "doc 49" in again and "doc 50" not in again


def test_an_opened_index_can_be_changed_and_saved_over(saved):
    # user-reports C.81
    index, path = saved
    index = open_index(path)
    index.add(["new"], 10 * VECTORS[:1])
    index.add(["doc 3"], -VECTORS[3:4], replace=True)
    assert index.remove(["doc 7"]) == 1
    expected = index.search(VECTORS[:5], 60)
    index.save(path, overwrite=True)
    again = open_index(path)
    assert again.search(VECTORS[:5], 60) == expected and len(again) == 50
    assert index.search(VECTORS[:5], 60) == expected
    with pytest.raises(DataError, match="'new'"):
        again.add(["new"], VECTORS[:1])


def test_an_opened_index_outlives_the_replacement_of_its_files(saved):
    index, path = saved
    first, second = open_index(path), open_index(path)
    second.remove(["doc 0"])
    second.add(["new", "newer"], VECTORS[:2])
    second.save(path, overwrite=True)
    assert first.search(VECTORS[:5], 60) == index.search(VECTORS[:5], 60)
    first.add(["other"], 9 * VECTORS[:1])
    assert first.search(VECTORS[:1], 2)[0][0][0] == "other" and len(first) == 51


def test_an_existing_output_is_kept(saved):
    index, path = saved
    before = contents(path)
    with pytest.raises(OutputExistsError):
        index.save(path)
    assert contents(path) == before


def test_the_manifest_names_everything_relative(saved):
    # user-reports C.71, C.87, conventions 9
    index, path = saved
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "shortlist-index" and manifest["format_version"] == 2 and manifest["generation"] == 1
    assert manifest["kind"] == index.kind and manifest["metric"] == "ip" and manifest["dim"] == 4
    assert manifest["count"] == 50 and manifest["dtype"] == "float32"
    assert manifest["segments"] == [{"name": "segment-00000", "count": 50, "base": True}] and manifest["removed"] == 0
    assert set(manifest["files"]) == set(contents(path)) - {"manifest.json"}
    assert str(path.parent) not in (path / "manifest.json").read_text()
    path.rename(path.with_name("moved"))
    assert len(open_index(path.with_name("moved"))) == 50


def test_equal_input_gives_equal_bytes(saved, tmp_path):
    index, path = saved
    index.save(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(path)


def test_a_cut_file_is_refused_by_name_with_both_sizes(saved):
    index, path = saved
    for name, content in contents(path).items():
        if name == "manifest.json":
            continue
        (path / name).write_bytes(content[:-1])
        with pytest.raises(
            DataError, match=rf"{re.escape(name)} has {len(content) - 1} bytes, expected {len(content)}"
        ):
            open_index(path)
        (path / name).write_bytes(content)


def test_changed_content_is_refused(saved, monkeypatch):
    index, path = saved
    file = next(file for file in path.rglob("*") if file.name.startswith(("vectors", "index.faiss")))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="sha256"):
        open_index(path)
    # Large files are compared on request only, so that opening stays fast.
    monkeypatch.setattr(storage, "_CHECKED_AT_OPEN", 10)
    open_index(path)
    with pytest.raises(DataError, match=f"{file.name} has sha256"):
        verify(path)


def test_a_missing_file_is_named(saved):
    index, path = saved
    (path / "segment-00000" / "ids.utf8").unlink()
    with pytest.raises(MissingInputError, match="ids.utf8 is missing"):
        open_index(path)


def test_what_is_not_an_index_is_refused(tmp_path):
    with pytest.raises(MissingInputError, match="no index at"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not an index"):
        open_index(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match="not an index"):
        open_index(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        open_index(tmp_path)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("format_version", 3, "version 3, this shortlist reads version 2; update shortlist"),
    ("format_version", 1, "version 1, this shortlist reads version 2; build the index again"),
    ("generation", None, "'generation' is None"),
    ("removed", True, "'removed' is True"),
    ("segments", {}, "'segments' is {}"),
    ("segments", [{"name": "../segment-00000", "count": 50}], "lacks a name, count or base"),
    ("kind", "quantum", "kind 'quantum'"),
    ("count", 49, "50 ids, expected 49"),
    ("files", {"segment-00000/../x": {"bytes": 1, "sha256": ""}}, "own directory"),
    ("files", {"../x": {"bytes": 1, "sha256": ""}}, "own directory"),
    ("files", None, "'files' is None; the index is damaged"),
    ("files", {"x": 5}, "'x' lacks its bytes"),
    ("kind", [], "'kind' is"),
    ("model", "m", "'model' is 'm'"),
    ("dim", None, "'dim' is None"),
])  # fmt: skip
def test_a_manifest_from_elsewhere_is_refused(saved, key, value, message):
    index, path = saved
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(DataError, match=message):
        open_index(path)


def test_fewer_vectors_than_ids_are_refused(tmp_path):
    index = ExactIndex(4)
    index.add(IDS, VECTORS)
    index.save(tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    (tmp_path / "index" / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(DataError, match="holds 0 vectors for 50 ids"):
        open_index(tmp_path / "index")


def test_the_other_kind_is_refused_by_open(saved):
    index, path = saved
    other = next(kind for kind in KINDS if kind is not type(index))
    with pytest.raises(DataError, match="open_index"):
        other.open(path)


def test_nothing_is_pickled(saved):
    index, path = saved
    for file in path.rglob("*.npy"):
        np.load(file, allow_pickle=False)


def test_a_failed_save_leaves_the_old_index(saved, monkeypatch):
    index, path = saved
    before = contents(path)
    monkeypatch.setattr("shortlist.indexes.directory.write_json", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        index.save(path, overwrite=True)
    assert contents(path) == before and [entry.name for entry in path.parent.iterdir()] == ["index"]


# Streaming build.


def blocks(sizes=(20, 1, 29)):
    start = 0
    for size in sizes:
        yield IDS[start : start + size], VECTORS[start : start + size]
        start += size


@pytest.mark.parametrize("spec", ["exact", "flat"])
def test_a_streamed_index_equals_a_saved_one(spec, tmp_path, monkeypatch, caplog):
    # user-reports C.82, C.86: shard by shard
    monkeypatch.setattr(segments, "SHARD_BYTES", 7 * 4 * 4)
    seen = []
    with caplog.at_level(logging.INFO, logger="shortlist"):
        count = build_index(tmp_path / "a", blocks(), dim=4, spec=spec, progress=seen.append)
    assert count == 50 and seen == [20, 1, 29] and "indexed 50 vectors" in caplog.text
    build_index(tmp_path / "b", blocks((50,)), dim=4, spec=spec)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    index = ExactIndex(4) if spec == "exact" else FaissIndex(4)
    index.add(IDS, VECTORS)
    assert open_index(tmp_path / "a").search(VECTORS, 9) == index.search(VECTORS, 9)
    assert (len(list((tmp_path / "a").rglob("vectors-*"))) == 8) == (spec == "exact")


def test_whole_files_are_linked_not_copied(tmp_path):
    shards = [tmp_path / "s0.npy", tmp_path / "s1.npy"]
    np.save(shards[0], VECTORS[:30])
    np.save(shards[1], VECTORS[30:])

    def stream():
        first = np.load(shards[0], mmap_mode="r")
        yield IDS[:30], first
        second = np.load(shards[1], mmap_mode="r")
        yield IDS[30:40], second[:10]
        yield IDS[40:], second[10:]

    build_index(tmp_path / "index", stream(), dim=4, link=True)
    index = ExactIndex.open(tmp_path / "index")
    assert np.array_equal(np.concatenate(list(index.vectors())), VECTORS)
    assert (tmp_path / "index" / "segment-00000" / "vectors-00000.npy").samefile(shards[0])
    assert len(list((tmp_path / "index").rglob("vectors-*"))) == 2


def test_a_repeated_id_in_a_stream_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match="'doc 3' is given twice"):
        build_index(tmp_path / "index", [(IDS, VECTORS), (["doc 3"], VECTORS[:1])], dim=4)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_vector_in_a_stream_is_named(tmp_path):
    vectors = VECTORS.copy()
    vectors[17, 2] = np.nan
    with pytest.raises(NonFiniteError, match="'doc 17'"):
        build_index(tmp_path / "index", [(IDS, vectors)], dim=4)


def test_an_empty_stream_is_an_empty_index(tmp_path):
    assert build_index(tmp_path / "index", [], dim=4) == 0
    index = open_index(tmp_path / "index")
    assert index.search(VECTORS[:1], 3) == [[]]
    index.add(["a"], VECTORS[:1])
    assert len(index) == 1


def documents(count=50):
    return [Document(IDS[row], f"Title {row}", f"line one\nline two \u2028 {row}") for row in range(count)]


def test_documents_are_stored_beside_the_vectors_and_follow_changes(tmp_path):
    # user-reports C.89
    build_index(tmp_path / "a", blocks(), dim=4, documents=iter(documents()))
    index = open_index(tmp_path / "a")
    assert index.document("doc 31") == {"id": "doc 31", "title": "Title 31", "text": "line one\nline two \u2028 31"}
    assert index.document("unknown") is None
    index.remove(["doc 0", "doc 30"])
    index.add(["later"], VECTORS[:1])
    index.save(tmp_path / "b")
    again = open_index(tmp_path / "b")
    assert again.document("doc 31")["title"] == "Title 31" and again.document("doc 49")["title"] == "Title 49"
    assert again.document("later") is None and again.document("doc 30") is None


@pytest.mark.parametrize(("count", "message"), [(49, "'doc 49' meets nothing"), (50, "'doc 49' has no vector")])
def test_documents_of_another_collection_are_refused(tmp_path, count, message):
    stream = [(IDS[:49], VECTORS[:49])] if count == 50 else [(IDS, VECTORS)]
    with pytest.raises(DataError, match=message):
        build_index(tmp_path / "index", stream, dim=4, documents=documents(count))


def test_build_takes_what_people_have(toy):
    class Encoder:
        dim, fingerprint, template = 2, "abc", None

        def encode_documents(self, texts):
            return np.array([[len(text), 1.0] for text in texts])

    for corpus in (toy.corpus, {"a": "x", "b": "yy"}, ["x", "yy"], [Document("a", "", "x"), Document("b", "y", "y")]):
        for kind in KINDS:
            index = kind.build(Encoder(), corpus)
            assert len(index) == len(corpus) and index.model["fingerprint"] == "abc"
    assert list(ExactIndex.build(Encoder(), {"a": "x", "b": "yy"}).ids) == ["a", "b"]
    with pytest.raises(DataError, match="is the string"):
        ExactIndex.build(Encoder(), "path/to/data")

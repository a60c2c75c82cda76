"""Export: every kind of index in full, or a sentence; nothing half-written; files for NumPy, JSON lines and Parquet."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from export_samples import (
    AWKWARD,
    DIM,
    LONG,
    TEXTS,
    check_manifest,
    check_search,
    document,
    expected,
    guide,
    queries,
    run_shown,
    sample,
)  # fmt: skip

from shortlist import ExactIndex, FaissIndex
from shortlist.data import Document
from shortlist.errors import ConfigError, DataError, OutputExistsError
from shortlist.indexes.export import TARGETS, export_index
from shortlist.indexes.exporters import rows
from shortlist.indexes.kinds import new_index, open_index
from shortlist.indexes.sharded import ShardedIndex


@pytest.fixture(scope="module")
def index():
    return sample()


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def json_lines(file):
    return [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]


def vectors_of(index):
    return np.vstack([block.vectors for block in index.blocks()])


def test_the_samples_are_awkward_enough(index):
    documents = expected(index)
    assert set(TEXTS) <= {row[1] for row in documents.values()} and LONG in {row[1] for row in documents.values()}
    assert len(set(AWKWARD) & set(documents)) >= len(AWKWARD) - 3 and "d 1" not in documents
    assert {"", "Title 1 of doc 9"} <= {row[0] for row in documents.values()}


@pytest.mark.parametrize("to", TARGETS)
def test_every_export_is_complete_and_says_so(index, to, tmp_path):
    progress = []
    result = export_index(index, to, tmp_path / "out", progress=progress.append)
    assert (result.count, result.dim, result.documents) == (len(index), DIM, True) and sum(progress) == len(index)
    manifest = check_manifest(tmp_path / "out", index)
    assert manifest["to"] == to and manifest["exact"] and not manifest["normalised"]
    assert manifest["fields"]["year"] == "int" and manifest["fields"]["tags"] == "list of string"
    assert result.bytes == sum(entry["bytes"] for entry in manifest["files"].values())
    assert "d00d" not in guide(tmp_path / "out") and "f00df00df00df00d" in guide(tmp_path / "out")


@pytest.mark.parametrize("to", TARGETS)
def test_equal_indexes_give_equal_bytes(index, to, tmp_path):
    export_index(index, to, tmp_path / "one")
    export_index(index, to, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize(("to", "options"), [("npy", {}), ("jsonl", {}), ("jsonl", {"gzip": True}), ("parquet", {})])
def test_plain_files_hold_the_vectors_and_give_the_same_results(to, options, metric, tmp_path, monkeypatch):
    index = sample(metric=metric)
    export_index(index, to, tmp_path / "out", **options)
    names = run_shown(tmp_path / "out", monkeypatch)
    np.testing.assert_array_equal(names["vectors"], vectors_of(index))  # not rounded
    check_search(names["search"], index)


def test_npy_and_jsonl_hold_the_documents(index, tmp_path):
    wanted = [{"id": id, "title": t, "text": x, "fields": f} for id, (t, x, f) in expected(index).items()]
    export_index(index, "npy", tmp_path / "npy")
    assert json_lines(tmp_path / "npy/documents.jsonl") == wanted
    assert json_lines(tmp_path / "npy/ids.jsonl") == list(index.ids)
    export_index(index, "jsonl", tmp_path / "jsonl")
    found = json_lines(tmp_path / "jsonl/documents.jsonl")
    vectors = np.array([document.pop("vector") for document in found], np.float32)
    assert found == wanted
    np.testing.assert_array_equal(vectors, vectors_of(index))


def test_parquet_holds_typed_columns(index, tmp_path):
    export_index(index, "parquet", tmp_path / "out")
    table = pq.read_table(tmp_path / "out/documents.parquet")
    assert str(table.schema.field("vector").type) == f"fixed_size_list<element: float not null>[{DIM}]" or str(
        table.schema.field("vector").type
    ).startswith("fixed_size_list")
    for row, (id, (title, text, fields)) in zip(table.to_pylist(), expected(index).items(), strict=True):
        found = {name: value for name, value in row["fields"].items() if value is not None}
        assert (row["id"], row["title"], row["text"], found) == (id, title, text, fields)


def test_fields_without_a_column_are_named_and_stay_in_the_json(tmp_path):
    index = ExactIndex(2)
    index.add(["a"], [[1.0, 0.0]], documents=[Document("a", "", "t", {"id": "x", "inner": {"deep": [1, None]}})])
    (note,) = export_index(index, "parquet", tmp_path / "parquet").notes
    assert "1 fields have no column" in note and "'id'" in note
    (row,) = pq.read_table(tmp_path / "parquet/documents.parquet")["fields"].to_pylist()
    assert json.loads(row["inner"]) == {"deep": [1, None]}
    assert export_index(index, "jsonl", tmp_path / "jsonl").notes == ()
    (line,) = json_lines(tmp_path / "jsonl/documents.jsonl")
    assert line["fields"] == {"id": "x", "inner": {"deep": [1, None]}}


def test_numbers_that_json_lacks_become_null(tmp_path):
    index = ExactIndex(2)
    index.add(["a"], [[1.0, 0.0]], documents=[Document("a", "", "t", {"x": float("inf"), "y": [1.5, float("-inf")]})])
    export_index(index, "jsonl", tmp_path / "out")
    text = (tmp_path / "out/documents.jsonl").read_text("utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["fields"] == {"x": None, "y": [1.5, None]}


@pytest.mark.parametrize("to", TARGETS)
def test_documents_that_were_added_without_text(to, tmp_path):
    index = ExactIndex(DIM)
    index.add(["with"], queries(1), documents=[document("with", 1)])
    index.add(["without"], queries(2)[1:])
    export_index(index, to, tmp_path / "out")
    if to == "jsonl":
        assert json_lines(tmp_path / "out/documents.jsonl")[1]["title"] is None
    if to in ("parquet", "lancedb"):
        last = pq.read_table(tmp_path / "out/documents.parquet").to_pylist()[1]
        assert last["id"] == "without" and last["title"] is last["text"] is last["fields"] is None


@pytest.mark.parametrize("spec", ["exact", "exact:int8", "flat", "hnsw", "IVF4,Flat", "IVF4,SQ8+rescore"])
def test_every_kind_is_exported_with_the_vectors_that_were_added(spec, tmp_path):
    vectors = np.random.default_rng(3).standard_normal((400, DIM)).astype(np.float32)
    index = new_index(spec, DIM, count=400)
    index.add([f"d{row}" for row in range(400)], vectors)
    index.remove(["d7"])
    export_index(index, "npy", tmp_path / "out")
    np.testing.assert_array_equal(np.load(tmp_path / "out/vectors.npy"), np.delete(vectors, 7, axis=0))
    assert json_lines(tmp_path / "out/ids.jsonl") == [f"d{row}" for row in range(400) if row != 7]


def test_an_index_in_parts_is_exported_as_one(tmp_path):
    whole = ExactIndex(DIM)
    for number in range(3):
        ids = [f"part {number} document {row}" for row in range(10)]
        part = ExactIndex(DIM)
        for index in (part, whole):
            index.add(ids, queries()[10 * number :][:10], documents=[document(id, row) for row, id in enumerate(ids)])
        part.save(tmp_path / str(number))
    sharded = ShardedIndex([open_index(tmp_path / str(number)) for number in range(3)])
    for index in (whole, sharded):
        index.remove(["part 1 document 4"])
        export_index(index, "jsonl", tmp_path / f"{index.kind}-export")
    export = "documents.jsonl"
    assert (tmp_path / "sharded-export" / export).read_bytes() == (tmp_path / "exact-export" / export).read_bytes()


def test_a_lossy_index_is_refused_or_said_to_be_reconstructed(tmp_path):
    index = FaissIndex(DIM, factory="SQ8")
    index.add([f"d{row}" for row in range(50)], queries())
    with pytest.raises(ConfigError, match=r"compressed vectors only.*\+rescore.*--reconstruct"):
        export_index(index, "npy", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = export_index(index, "npy", tmp_path / "out", reconstruct=True)
    assert any("approximations" in note for note in result.notes) and "approximations" in guide(tmp_path / "out")
    assert not json.loads((tmp_path / "out/manifest.json").read_text())["exact"]
    vectors = np.load(tmp_path / "out/vectors.npy")
    np.testing.assert_array_equal(vectors, index.vectors_at(np.arange(50)))
    np.testing.assert_allclose(vectors, queries(), atol=0.05)


@pytest.mark.parametrize("to", TARGETS)
def test_without_documents_there_are_vectors_only_and_it_is_said(to, tmp_path):
    index = sample(documents=False)
    result = export_index(index, to, tmp_path / "out")
    assert not result.documents and any("stores no documents" in note for note in result.notes)
    assert "stores no documents" in guide(tmp_path / "out") and "`title`" not in guide(tmp_path / "out")
    assert not (tmp_path / "out/documents.jsonl").exists() or to == "jsonl"
    full = sample()
    left_out = export_index(full, to, tmp_path / "vectors", documents=False)
    assert not left_out.documents and not any("documents" in note and "stores" in note for note in left_out.notes)


def test_guides_tell_normalised_vectors_and_frequency_priors(tmp_path):
    index = ExactIndex(4)
    vectors = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    index.add([str(row) for row in range(9)], vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    export_index(index, "npy", tmp_path / "one")
    assert "length 1" in guide(tmp_path / "one") and "does not say which model" in guide(tmp_path / "one")
    assert json.loads((tmp_path / "one/manifest.json").read_text())["normalised"]
    index.model, index.frequency_prior = {"name": "m", "fingerprint": "abc"}, {"split": "train"}
    index.add(["long"], 3 * vectors[:1])
    export_index(index, "npy", tmp_path / "two")
    assert "do not let a system normalise" in guide(tmp_path / "two") and "--frequency-bias" in guide(tmp_path / "two")
    assert json.loads((tmp_path / "two/manifest.json").read_text())["frequency_prior"] == {"split": "train"}


def test_parts_stay_small_whatever_the_texts(index, monkeypatch):
    monkeypatch.setattr(rows, "PART_BYTES", 5_000)
    parts = list(rows.read_rows(index, documents=True))
    assert [id for part in parts for id in part.ids] == list(index.ids) and len(parts) > 10
    for part in parts:
        sizes = [4 * DIM + len(stored.title) + len(stored.text) for stored in part.stored]
        assert sum(sizes[:-1]) < 5_000
    np.testing.assert_array_equal(np.vstack([part.vectors for part in parts]), vectors_of(index))


def test_numbers_as_text_are_the_same_float32():
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    numbers = np.concatenate([bits[np.isfinite(bits)], np.array([0.0, 1e-45, 3.4028235e38, 1e7, 0.1], np.float32)])
    (text,) = rows.Rows(["a"], numbers[None]).vector_texts()
    np.testing.assert_array_equal(np.array(json.loads(f"[{text}]"), np.float64).astype(np.float32), numbers)


# What is refused.


def test_an_unknown_system_is_refused_with_those_there_are(index, tmp_path):
    with pytest.raises(ConfigError, match=r"'quadrant'; did you mean 'qdrant'\? expected npy, jsonl, .* or pgvector"):
        export_index(index, "quadrant", tmp_path / "out")


def test_an_output_that_exists_is_kept(index, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="exists already"):
        export_index(index, "npy", tmp_path / "out")
    assert (tmp_path / "out/mine.txt").read_text() == "mine"
    export_index(index, "npy", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/LOAD.md").is_file() and not (tmp_path / "out/mine.txt").exists()


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("qdrant", {"gzip": True}, "gzip is for jsonl"),
        ("pgvector", {"name": 'd"; DROP'}, "does not suit every system"),
        ("milvus", {"name": "Documents"}, "does not suit every system"),
    ],
)
def test_options_that_a_system_does_not_take(index, to, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export_index(index, to, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "dim", "message"), [("milvus", 1, "at least 2"), ("pgvector", 16_001, "at most 16,000")]
)
def test_dimensions_that_a_system_does_not_take(to, dim, message, tmp_path):
    index = ExactIndex(dim)
    index.add(["a"], np.ones((1, dim)))
    with pytest.raises(ConfigError, match=message):
        export_index(index, to, tmp_path / "out")


def test_an_empty_index_is_refused(tmp_path):
    index = ExactIndex(4)
    index.add(["a"], np.ones((1, 4)))
    index.remove(["a"])
    with pytest.raises(DataError, match="is empty: there is nothing to export"):
        export_index(index, "npy", tmp_path / "out")


def test_milvus_cuts_long_texts_and_refuses_long_ids(tmp_path):
    index = ExactIndex(2)
    index.add(["a", "b"], np.eye(2), documents=[Document("a", "", "日" * 30_000), Document("b", "", "y" * 65_535)])
    (note,) = export_index(index, "milvus", tmp_path / "out").notes
    assert note.startswith("1 titles or texts") and "'a'" in note and note in guide(tmp_path / "out")
    texts = pq.read_table(tmp_path / "out/documents.parquet")["text"].to_pylist()
    assert texts == ["日" * 21_845, "y" * 65_535]
    index.add(["i" * 65_536], [[1.0, 1.0]])
    with pytest.raises(DataError, match=r"id 'iii+…' has 65,536 bytes"):
        export_index(index, "milvus", tmp_path / "long")
    index = ExactIndex(2)
    index.add(["a"], [[1.0, 0.0]], documents=[Document("a", "", "", {"notes": "n" * 70_000})])
    with pytest.raises(DataError, match="fields of document 'a' take 70,0.*--no-documents"):
        export_index(index, "milvus", tmp_path / "fields")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half-written, no temporary directory

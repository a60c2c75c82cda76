"""The document store: what was stored comes back at its position, from segments and from memory, fields included."""

import datetime
import json
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from shortlist.data.documents import Document
from shortlist.errors import DataError
from shortlist.indexes import documents as documents_module
from shortlist.indexes.documents import DOCUMENTS, OFFSETS, DocumentStore, DocumentWriter
from shortlist.indexes.fields import FIELDS
from shortlist.indexes.ids import IdWriter


def segment(directory, documents, *, stored=True):
    directory.mkdir()
    ids = IdWriter(directory)
    ids.append([document.id for document in documents])
    ids.close()
    if stored:
        writer = DocumentWriter(directory)
        writer.append(documents)
        writer.close()
    return directory


def test_documents_come_back_from_segments_and_from_memory(tmp_path):
    # user-reports C.89
    first = [Document("a", "Title", "Text\nof two lines"), Document("b", "", "ü", {"year": 2010, "tags": ["x"]})]
    second = [Document("c", "no store", ""), Document("d", "no store", "")]
    third = [Document("e", "", "third", {"year": 2012})]
    directories = [
        segment(tmp_path / "0", first), segment(tmp_path / "1", second, stored=False), segment(tmp_path / "2", third),
    ]  # fmt: skip
    store = DocumentStore.open(directories)
    store.append([Document("f", "", "in memory", {"year": 2013.5})])
    store.skip(1)
    store.append([Document("h", "", "later")])
    assert len(store) == 8
    assert [store.get(position) and store.get(position)["text"] for position in range(8)] == [
        "Text\nof two lines", "ü", None, None, "third", "in memory", None, "later",
    ]  # fmt: skip
    assert store.get(1) == {"id": "b", "title": "", "text": "ü", "metadata": {"year": 2010, "tags": ["x"]}}
    assert store.get(0) == {"id": "a", "title": "Title", "text": "Text\nof two lines"}
    assert store.get(8) is None and store.line(99) == b""
    assert [store.fields.values(position) for position in (0, 1, 2, 4, 5, 6, 7)] == [
        {}, {"year": 2010.0, "tags": ["x"]}, {}, {"year": 2012.0}, {"year": 2013.5}, {}, {},
    ]  # fmt: skip
    assert len(store.fields) == 8


def test_no_segment_with_documents_is_no_store(tmp_path):
    directory = segment(tmp_path / "0", [Document("a")], stored=False)
    assert DocumentStore.open(directory) is None and DocumentStore.open([directory]) is None


def test_lines_are_taken_over_as_they_are_with_their_fields(tmp_path):
    documents = [
        Document("a", "", "x", {"n": 1}),
        Document("b", "", 'says "metadata"'),
        Document("c", "", "z", {"n": 2}),
    ]
    store = DocumentStore.open(segment(tmp_path / "0", documents))
    (tmp_path / "1").mkdir()
    writer = DocumentWriter(tmp_path / "1")
    for position in (2, 0, 1):
        writer.append_line(store.line(position))
    writer.append_line(b"")
    assert len(writer) == 4
    writer.close()
    copy = DocumentStore.open(tmp_path / "1")
    assert [copy.line(position) for position in range(4)] == [store.line(2), store.line(0), store.line(1), b""]
    assert [copy.fields.values(position) for position in range(4)] == [{"n": 2}, {"n": 1}, {}, {}]


def test_documents_without_fields_leave_no_file_of_columns(tmp_path):
    assert not (segment(tmp_path / "0", [Document("a", "", "x")]) / FIELDS).exists()


def test_equal_documents_give_equal_bytes(tmp_path):
    documents = [
        Document(str(number), "", "x", {"n": number, "tags": ["a", "b"][: number % 3]}) for number in range(50)
    ]
    one, two = segment(tmp_path / "0", documents), segment(tmp_path / "1", documents)
    for name in (DOCUMENTS, OFFSETS, FIELDS):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_offsets_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_SLICE", 7)
    documents = [Document(str(number), "", "x" * number, {"n": number}) for number in range(30)]
    store = DocumentStore.open(segment(tmp_path / "0", documents))
    assert [store.get(number)["text"] for number in range(30)] == ["x" * number for number in range(30)]
    assert [store.fields.values(number) for number in range(30)] == [{"n": number} for number in range(30)]


def test_writing_holds_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("shortlist.indexes.fields._BATCH_ROWS", 1000)
    monkeypatch.setattr(documents_module, "_SLICE", 1000)
    tracemalloc.start()
    try:
        writer = DocumentWriter(tmp_path)
        for number in range(20_000):
            writer.append([Document(str(number), "", "x" * 500, {"year": number, "name": "n" * 50})])
        writer.close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The lines are 12 MB.
    assert peak < 3 << 20


def test_values_that_json_does_not_know_are_stored_as_what_they_mean(tmp_path):
    metadata = {
        "year": np.int64(2010), "score": np.float32(0.5), "day": datetime.date(2024, 2, 29), "nothing": float("nan"),
        "tags": ("a", "b"), "set": {"z", "y"}, "vector": np.array([1, 2]), "flag": np.bool_(True), "deep": {"x": [1]},
        7: "seven",
    }  # fmt: skip
    store = DocumentStore.open(segment(tmp_path / "0", [Document("a", "", "x", metadata)]))
    assert store.get(0)["metadata"] == {
        "year": 2010, "score": 0.5, "day": "2024-02-29", "nothing": None, "tags": ["a", "b"], "set": ["y", "z"],
        "vector": [1, 2], "flag": True, "deep": {"x": [1]}, "7": "seven",
    }  # fmt: skip
    json.loads((tmp_path / "0" / DOCUMENTS).read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert store.fields.values(0)["vector"] == [1, 2] and store.fields.values(0)["deep"] == '{"x": [1]}'


def test_metadata_without_end_is_refused_by_name(tmp_path):
    circle: dict = {}
    circle["again"] = circle
    (tmp_path / "0").mkdir()
    writer = DocumentWriter(tmp_path / "0")
    with pytest.raises(DataError, match="document 'a': its metadata cannot be stored"):
        writer.append([Document("a", "", "x", circle)])
    writer.abort()


def test_records_without_metadata_are_documents_too(tmp_path):
    @dataclass
    class Record:
        id: str
        title: str
        text: str

    store = DocumentStore()
    store.append([Record("a", "T", "x")])
    assert store.get(0) == {"id": "a", "title": "T", "text": "x"} and store.fields.names == []


def test_damaged_files_are_named(tmp_path):
    directory = segment(tmp_path / "0", [Document("a", "", "x", {"n": 1})])
    with (
        pa.OSFile(str(directory / FIELDS), "wb") as sink,
        pa.ipc.new_file(sink, pa.schema([("n", pa.int64())])) as file,
    ):
        file.write_batch(pa.record_batch([pa.array([1, 2])], names=["n"]))
    with pytest.raises(DataError, match="fields.arrow holds the fields of 2 documents, expected 1"):
        DocumentStore.open(directory)
    (directory / FIELDS).write_bytes(b"no arrow")
    with pytest.raises(DataError, match="fields.arrow is damaged"):
        DocumentStore.open(directory)
    (directory / DOCUMENTS).write_bytes(b"")
    with pytest.raises(DataError, match="docs.jsonl has 0 bytes"):
        DocumentStore.open(directory)

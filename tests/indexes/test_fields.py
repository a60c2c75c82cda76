"""The columns of fields: types that hold all values, over segments and what was added since."""

import logging

import pyarrow as pa
import pytest

from shortlist.indexes import fields as fields_module
from shortlist.indexes.fields import FIELDS, FieldStore, FieldTypes, Kind, write_fields


def types_of(*values):
    types = FieldTypes()
    for value in values:
        types.observe({"x": value})
    return str(types.kinds["x"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2], "int"),
        ([1, 2.5], "float"),
        ([2.5, 1], "float"),
        ([float("nan"), 1], "int"),
        ([True, False], "bool"),
        (["a"], "string"),
        (["2024-01-01", "2024-01-02"], "string"),
        ([["a"], ["b", "c"]], "list of string"),
        ([[1], [2.5]], "list of float"),
        (["a", ["b"]], "list of string"),
        ([[], [1]], "list of int"),
        ([[]], "list of string"),
        ([None], "string"),
        ([1, "a"], "string"),
        ([True, 1], "string"),
        ([[1], ["a"]], "list of string"),
        ([{"a": 1}], "string"),
        ([[[1]], ["a"]], "list of string"),
        ([2**63 - 1], "int"),
        ([2**63], "string"),
    ],
)
def test_types_are_inferred(values, expected):
    assert types_of(*values) == expected


@pytest.mark.parametrize(("name", "kind"), [("int", Kind("int")), ("list of string", Kind("string", many=True))])
def test_types_are_read_by_name(name, kind):
    assert Kind.parse(name) == kind and str(kind) == name


def test_values_of_other_types_are_kept_as_text_and_that_is_said_once(caplog):
    store = FieldStore()
    with caplog.at_level(logging.WARNING):
        store.append([{"x": value} for value in (1, "one", True, 2.5, None, [3, "three"])])
    assert [record.getMessage() for record in caplog.records] == [
        "the field 'x' holds int and string values; filters compare all of them as text"
    ]
    assert [store.values(row).get("x") for row in range(6)] == [["1"], ["one"], ["true"], ["2.5"], None, ["3", "three"]]


def stored(directory, rows):
    directory.mkdir()
    types = FieldTypes()
    for row in rows:
        types.observe(row or {})
    write_fields(directory / FIELDS, rows, types.kinds)
    return directory


def columns(store, name):
    """The column as a list over all positions."""
    values = [None] * len(store)
    for start, array in store.column(name):
        values[start : start + len(array)] = array.to_pylist()
    return values


def test_segments_may_differ_in_columns_and_types(tmp_path, caplog):
    directories = [
        stored(tmp_path / "0", [{"year": 1, "lang": "en", "tags": []}, {"year": 2, "tags": "a"}]),
        stored(tmp_path / "1", [{"year": 2.5, "only": True}]),
        tmp_path / "2",
    ]
    with caplog.at_level(logging.WARNING):
        store = FieldStore(directories, [2, 1, 3])
        assert store.names == ["year", "lang", "tags", "only"]
        assert store.types == {"year": "float", "lang": "string", "tags": "list of string", "only": "bool"}
        assert columns(store, "year") == [1.0, 2.0, 2.5, None, None, None]
        assert columns(store, "only") == [None, None, True, None, None, None]
        assert columns(store, "tags") == [[], ["a"], None, None, None, None]
        assert not caplog.records
        store.append([{"lang": 7, "tags": [1]}, None])
    assert len(caplog.records) == 2
    assert columns(store, "lang") == ["en", None, None, None, None, None, "7", None]
    assert columns(store, "tags")[-2:] == [["1"], None] and len(store) == 8
    assert store.values(6) == {"lang": "7", "tags": ["1"]}


def test_columns_are_mapped_from_disk(tmp_path):
    directory = stored(tmp_path / "0", [{"year": number} for number in range(1000)])
    before = pa.total_allocated_bytes()
    store = FieldStore([directory], [1000])
    ((_, array),) = store.column("year")
    assert array.to_pylist() == list(range(1000))
    assert pa.total_allocated_bytes() - before < 1000


def test_added_documents_become_columns_in_pieces(monkeypatch):
    monkeypatch.setattr(fields_module, "_PENDING", 4)
    store = FieldStore()
    for number in range(11):
        store.append([{"n": number} if number % 3 else None])
        assert columns(store, "n") == [row if row % 3 else None for row in range(number + 1)] if number else True
    store.append([{"n": 0.5}])
    assert columns(store, "n")[-1] == 0.5 and columns(store, "n")[4] == 4.0


def test_batches_are_small_where_fields_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(fields_module, "_BATCH_VALUES", 40)
    rows = [{f"f{name}": number for name in range(10)} for number in range(30)]
    store = FieldStore([stored(tmp_path / "0", rows)], [30])
    assert len(list(store.column("f3"))) == 8 and columns(store, "f3") == list(range(30))


def test_only_so_many_fields_become_columns(monkeypatch, caplog):
    monkeypatch.setattr(fields_module, "_MOST_FIELDS", 3)
    store = FieldStore()
    with caplog.at_level(logging.WARNING):
        store.append([{f"f{number}": number} for number in range(9)])
    assert store.names == ["f0", "f1", "f2"] and len(caplog.records) == 1
    assert "more than 3 fields" in caplog.text


def test_a_field_cannot_take_the_name_of_the_id(caplog):
    store = FieldStore()
    with caplog.at_level(logging.WARNING):
        store.append([{"id": "x", "year": 1}])
    assert store.names == ["year"] and "id is the id of the document" in caplog.text


def test_fields_of_other_parts_are_declared():
    store = FieldStore()
    store.append([{"year": 1}])
    store.declare({"year": "float", "lang": "string"})
    assert store.types == {"year": "float", "lang": "string"}
    assert columns(store, "year") == [1.0] and columns(store, "lang") == [None]

"""LanceDB, Qdrant (local mode) and Milvus Lite, loaded and queried with the code that LOAD.md shows."""

import uuid

import pytest
from export_samples import check_search, expected, run_shown, sample

from shortlist.indexes.export import export_index


@pytest.fixture(scope="module", params=["ip", "l2"])
def index(request):
    return sample(metric=request.param)


def stored(title, text, fields):
    return {"title": title, "text": text, "fields": fields}


def recent(index):
    return {id for id, (_, _, fields) in expected(index).items() if fields.get("year", 0) > 2020}


def test_lancedb_gives_the_same_results(index, tmp_path, monkeypatch):
    export_index(index, "lancedb", tmp_path / "out")
    names = run_shown(tmp_path / "out", monkeypatch)
    check_search(names["search"], index)
    rows = names["table"].to_arrow().to_pylist()
    for row in rows:
        row["fields"] = {name: value for name, value in row["fields"].items() if value is not None}
    found = {row["id"]: stored(row["title"], row["text"], row["fields"]) for row in rows}
    assert found == {id: stored(*row) for id, row in expected(index).items()}
    hits = names["table"].search([0.0] * index.dim).where("fields.year > 2020", prefilter=True).limit(1000).to_list()
    assert {hit["id"] for hit in hits} == recent(index)


def test_qdrant_gives_the_same_results(index, tmp_path, monkeypatch):
    from qdrant_client.models import FieldCondition, Filter, Range

    export_index(index, "qdrant", tmp_path / "out", name="my_documents")
    # In memory: the local mode's files are flushed to disk for every point.
    names = run_shown(tmp_path / "out", monkeypatch, ('"http://localhost:6333"', '":memory:"'))
    client = names["client"]
    try:
        check_search(names["search"], index)
        points, _ = client.scroll("my_documents", limit=1000, with_payload=True)
        found = {point.id: point.payload for point in points}
        wanted = {id: {"id": id, **stored(*row)} for id, row in expected(index).items()}
        assert found == {str(uuid.uuid5(uuid.NAMESPACE_OID, id)): payload for id, payload in wanted.items()}
        year = Filter(must=[FieldCondition(key="fields.year", range=Range(gt=2020))])
        points, _ = client.scroll("my_documents", scroll_filter=year, limit=1000, with_payload=True)
        assert {point.payload["id"] for point in points} == recent(index)
    finally:
        client.close()


def test_milvus_lite_gives_the_same_results(index, tmp_path, monkeypatch):
    assert export_index(index, "milvus", tmp_path / "out").notes == ()
    names = run_shown(tmp_path / "out", monkeypatch, ('"http://localhost:19530"', f'"{tmp_path}/milvus.db"'))
    client = names["client"]
    try:
        check_search(names["search"], index)
        rows = client.query("documents", filter="", output_fields=["title", "text", "fields"], limit=1000)
        assert {row.pop("id"): row for row in rows} == {id: stored(*row) for id, row in expected(index).items()}
        rows = client.query("documents", filter='fields["year"] > 2020', output_fields=["id"], limit=1000)
        assert {row["id"] for row in rows} == recent(index)
    finally:
        client.close()


@pytest.mark.parametrize("to", ["lancedb", "qdrant", "milvus"])
def test_engines_load_an_index_without_documents(to, tmp_path, monkeypatch):
    index = sample(documents=False)
    export_index(index, to, tmp_path / "out")
    servers = {
        "qdrant": [('"http://localhost:6333"', '":memory:"')],
        "milvus": [('"http://localhost:19530"', f'"{tmp_path}/milvus.db"')],
    }
    names = run_shown(tmp_path / "out", monkeypatch, *servers.get(to, []))
    try:
        check_search(names["search"], index)
    finally:
        if "client" in names:
            names["client"].close()

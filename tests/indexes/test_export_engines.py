"""LanceDB, Qdrant (local mode) and Milvus Lite, loaded and queried with the code that LOAD.md shows."""

import uuid

import pytest
from export_samples import TEXTS, check_search, expected, run_shown, sample

from shortlist.indexes.export import export_index

METRICS = ["ip", "l2"]


@pytest.fixture(scope="module", params=METRICS)
def index(request):
    return sample(metric=request.param)


def stored(title, text, fields):
    return {"title": title, "text": text, "fields": fields}


def test_lancedb_gives_the_same_results(index, tmp_path, monkeypatch):
    pytest.importorskip("lancedb")
    export_index(index, "lancedb", tmp_path / "out")
    names = run_shown(tmp_path / "out", monkeypatch)
    check_search(names["search"], index)
    rows = {row["id"]: row for row in names["table"].to_arrow().to_pylist()}
    wanted = expected(index)
    assert list(rows) == list(wanted)
    for id, (title, text, fields) in wanted.items():
        found = {name: value for name, value in (rows[id]["fields"] or {}).items() if value is not None}
        assert stored(rows[id]["title"], rows[id]["text"], found) == stored(title, text, fields)
    filtered = names["table"].search([0.0] * index.dim).where("fields.year > 2020", prefilter=True).limit(1000).to_list()
    assert {row["id"] for row in filtered} == {id for id, row in wanted.items() if row[2].get("year", 0) > 2020}


def test_qdrant_gives_the_same_results(index, tmp_path, monkeypatch):
    pytest.importorskip("qdrant_client")
    export_index(index, "qdrant", tmp_path / "out", name="my_documents")
    # In memory: the local mode's files are flushed to disk for every point.
    names = run_shown(tmp_path / "out", monkeypatch, ('"http://localhost:6333"', '":memory:"'))
    client = names["client"]
    try:
        check_search(names["search"], index)
        points, _ = client.scroll("my_documents", limit=1000, with_payload=True)
        wanted = expected(index)
        assert {point.id for point in points} == {str(uuid.uuid5(uuid.NAMESPACE_OID, id)) for id in wanted}
        for payload in (point.payload for point in points):
            assert payload.pop("id") and payload
        payloads = {point.id: point.payload for point in client.scroll("my_documents", limit=1000)[0]}
        for id, (title, text, fields) in wanted.items():
            payload = payloads[str(uuid.uuid5(uuid.NAMESPACE_OID, id))]
            assert payload == {"id": id, **stored(title, text, fields)}
    finally:
        client.close()


def test_milvus_lite_gives_the_same_results(index, tmp_path, monkeypatch):
    pytest.importorskip("milvus_lite")
    result = export_index(index, "milvus", tmp_path / "out")
    assert result.notes == ()
    names = run_shown(tmp_path / "out", monkeypatch, ('"http://localhost:19530"', f'"{tmp_path}/milvus.db"'))
    client = names["client"]
    try:
        check_search(names["search"], index)
        rows = client.query("documents", filter="", output_fields=["title", "text", "fields"], limit=1000)
        found = {row.pop("id"): row for row in rows}
        wanted = expected(index)
        assert found == {id: stored(*row) for id, row in wanted.items()}
        filtered = client.query("documents", filter='fields["year"] > 2020', output_fields=["id"], limit=1000)
        assert {row["id"] for row in filtered} == {id for id, row in wanted.items() if row[2].get("year", 0) > 2020}
    finally:
        client.close()


def test_the_samples_are_awkward_enough(index):
    texts = {row[1] for row in expected(index).values()}
    assert set(TEXTS) <= texts and max(map(len, texts)) > 30_000

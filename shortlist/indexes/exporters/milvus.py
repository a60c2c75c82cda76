"""Milvus: a Parquet table for `MilvusClient.insert` (also of Milvus Lite) and for the bulk importer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from shortlist.errors import DataError
from shortlist.indexes.exporters.parquet import FILE, write_table
from shortlist.indexes.exporters.rows import Outcome, Rows, Source, Stored, Tally, json_bytes, render, short

MAX_BYTES = 65_535  # of a VARCHAR, and what is kept free of its limit by the JSON of the fields
_REQUEST = 16 << 20  # bytes of one insert; a server takes 64 MiB


def schema(source: Source) -> pa.Schema:
    """The columns as the bulk importer wants them: vectors as plain lists, JSON as strings."""
    columns = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("vector", pa.list_(pa.float32()), nullable=False),
    ]
    if source.documents:
        columns += [pa.field(name, pa.string(), nullable=False) for name in ("title", "text", "fields")]
    return pa.schema(columns)


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `documents.parquet`; texts above the limit of a VARCHAR are cut, which is reported.

    Raises DataError for an id or for the fields of a document above it.
    """
    outcome, cut = Outcome(), Tally()
    write_table(directory / FILE, schema(source), _batches(rows, source, outcome, cut))
    if cut.count:
        outcome.notes.append(
            f"{cut.count:,} titles or texts are longer than the {MAX_BYTES:,} bytes that a VARCHAR of Milvus holds and "
            f"were cut there (for example of {cut.examples})."
        )
    return outcome


def _batches(rows: Iterable[Rows], source: Source, outcome: Outcome, cut: Tally) -> Iterator[pa.RecordBatch]:
    table = schema(source)
    for part in rows:
        offsets = pa.array(range(0, len(part) * source.dim + 1, source.dim), pa.int32())
        columns: list[Any] = [
            pa.array([_id(id) for id in part.ids], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(part.vectors.reshape(-1))),
        ]
        outcome.saw(4 * source.dim)
        if part.stored is not None:
            texts = [_texts(id, stored, cut) for id, stored in zip(part.ids, part.stored, strict=True)]
            outcome.saw(4 * source.dim + max(sum(map(len, values)) for values in texts))
            columns += [pa.array(column, pa.string()) for column in zip(*texts, strict=True)]
        yield pa.record_batch(columns, schema=table)


def _id(id: str) -> str:
    if len(id.encode()) > MAX_BYTES:
        raise DataError(f"id {short(id)} has {len(id.encode()):,} bytes; Milvus takes ids of up to {MAX_BYTES:,}.")
    return id


def _texts(id: str, stored: Stored, cut: Tally) -> tuple[str, str, str]:
    fields = json_bytes(stored.fields or {})
    if len(fields) > MAX_BYTES:
        raise DataError(
            f"the fields of document {short(id)} take {len(fields):,} bytes as JSON; Milvus takes up to "
            f"{MAX_BYTES:,}: export without documents (--no-documents) or shorten them."
        )
    return _shortened(stored.title, id, cut), _shortened(stored.text, id, cut), fields.decode()


def _shortened(text: str | None, id: str, cut: Tally) -> str:
    encoded = (text or "").encode()
    if len(encoded) <= MAX_BYTES:
        return text or ""
    cut.add(id)
    return encoded[:MAX_BYTES].decode("utf-8", "ignore")  # never half a character


def guide(source: Source, outcome: Outcome) -> str:
    """Loading with pymilvus, and a search with our scores."""
    batch = max(1, min(1_000, _REQUEST // max(outcome.largest, 1)))
    parts = {"columns": _COLUMNS, "parse": _PARSE, "json": "import json\n\n"} if source.documents else _NO_DOCUMENTS
    return render(_GUIDE, name=source.name, dim=source.dim, batch=batch, names=source.columns,
                  filter=_FILTER if source.fields else "", **parts, **_METRIC[source.metric])  # fmt: skip


_METRIC = {
    "ip": {"distance": "IP", "score": 'hit["distance"]'},
    "l2": {"distance": "L2", "score": '-hit["distance"]'},
}
_COLUMNS = """schema.add_field("title", DataType.VARCHAR, max_length=65_535)
schema.add_field("text", DataType.VARCHAR, max_length=65_535)
schema.add_field("fields", DataType.JSON)
"""
_NO_DOCUMENTS = dict.fromkeys(("columns", "parse", "json"), "")
_PARSE = """    for row in rows:
        row["fields"] = json.loads(row["fields"])
"""
_FILTER = """
Fields are members of the JSON field `fields`: `filter='fields["year"] > 2000'`.
"""
_GUIDE = """
`documents.parquet` has the columns $names. The bulk importer of a Milvus server takes the file as it is, once the
collection below is created; `fields` is JSON as a string.

## Load

`pip install pymilvus` (and `milvus-lite` for a file without a server); run in this directory.

```python
${json}import pyarrow.parquet as pq
from pymilvus import DataType, MilvusClient

SERVER = "http://localhost:19530"  # "milvus.db" is Milvus Lite, a local database without a server
client = MilvusClient(SERVER)
schema = MilvusClient.create_schema(auto_id=False)
schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=65_535)
schema.add_field("vector", DataType.FLOAT_VECTOR, dim=$dim)
${columns}index = client.prepare_index_params()
index.add_index("vector", index_type="FLAT", metric_type="$distance")  # exact; "AUTOINDEX" is faster
client.create_collection("$name", schema=schema, index_params=index)

for batch in pq.ParquetFile("documents.parquet").iter_batches(batch_size=$batch):
    rows = batch.to_pylist()
${parse}    client.insert("$name", rows)
client.flush("$name")
```

## Query

```python
def search(vector, k=10):
    hits = client.search("$name", data=[[float(x) for x in vector]], limit=k, output_fields=["id"])[0]
    return [(hit["id"], $score) for hit in hits]


print(search(rows[0]["vector"]))
```
$filter"""

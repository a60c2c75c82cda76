"""Qdrant: `vectors.npy` and one payload a line, for `QdrantClient.upload_points`.

Ids of Qdrant points are 64-bit numbers or UUIDs, so a point's id is the name-based UUID (version 5, RFC 9562 section
5.5) of the document's id, and the id itself is part of the payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shortlist.indexes.exporters.npy import VECTORS, write_header, write_vectors
from shortlist.indexes.exporters.rows import Outcome, Rows, Source, json_bytes, render

PAYLOADS = "payloads.jsonl"
_REQUEST = 16 << 20  # bytes of one request; a server takes 32 MiB unless it is told otherwise
_NUMBER = 24  # bytes of a vector's number in JSON


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `vectors.npy` and `payloads.jsonl`, row by row."""
    outcome = Outcome()
    with open(directory / VECTORS, "wb") as vectors, open(directory / PAYLOADS, "wb") as payloads:
        write_header(vectors, source)
        for part in rows:
            write_vectors(vectors, part)
            for record in part.records():
                line = json_bytes({key: value for key, value in record.items() if value is not None})
                outcome.saw(len(line) + _NUMBER * source.dim)
                payloads.write(line + b"\n")
    if outcome.largest > _REQUEST:
        outcome.notes.append(
            f"the largest document takes {outcome.largest / 2**20:.0f} MiB in a request; a Qdrant server takes 32 MiB "
            "unless `service.max_request_size_mb` says otherwise."
        )
    return outcome


def guide(source: Source, outcome: Outcome) -> str:
    """Loading with qdrant-client, and a search with our scores."""
    batch = max(1, min(256, _REQUEST // max(outcome.largest, 1)))
    return render(_GUIDE, name=source.name, dim=source.dim, batch=batch, **_METRIC[source.metric],
                  filter=_FILTER if source.fields else "")  # fmt: skip


_METRIC = {
    "ip": {"distance": "DOT", "score": "point.score"},
    "l2": {"distance": "EUCLID", "score": "-(point.score**2)"},
}
_FILTER = """
Fields lie under `fields` in the payload: a filter names `fields.year`, and
`client.create_payload_index("…", "fields.year", "integer")` makes it fast.
"""
_GUIDE = """
`vectors.npy` is a float32 array (documents, dimensions); line n of `payloads.jsonl` is the payload of row n. Qdrant
takes numbers and UUIDs as ids of points. So a point gets the UUID `uuid5(NAMESPACE_OID, id)`, by which it is replaced
or deleted later, and the document's own id is `id` in its payload.

## Load

`pip install qdrant-client`; run in this directory.

```python
import json
from uuid import NAMESPACE_OID, uuid5

import numpy as np
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

SERVER = "http://localhost:6333"  # ":memory:" tries it without a server
client = QdrantClient(SERVER)
client.create_collection("$name", vectors_config=VectorParams(size=$dim, distance=Distance.$distance))


def points():
    vectors = np.load("vectors.npy", mmap_mode="r")
    with open("payloads.jsonl", encoding="utf-8") as lines:
        for vector, line in zip(vectors, lines):
            payload = json.loads(line)
            yield PointStruct(id=str(uuid5(NAMESPACE_OID, payload["id"])), vector=vector.tolist(), payload=payload)


client.upload_points("$name", points(), batch_size=$batch, wait=True)
```

## Query

```python
def search(vector, k=10):
    found = client.query_points("$name", query=[float(x) for x in vector], limit=k, with_payload=["id"])
    return [(point.payload["id"], $score) for point in found.points]


print(search(np.load("vectors.npy", mmap_mode="r")[0]))
```

A server builds an approximate index (HNSW) once a segment is large; `search_params=SearchParams(exact=True)` (from
`qdrant_client.models`) compares all vectors, as an exact index of shortlist does.
$filter"""

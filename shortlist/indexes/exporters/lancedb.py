"""LanceDB: the Parquet table that `create_table` streams from."""

from __future__ import annotations

from shortlist.indexes.exporters.parquet import write as write
from shortlist.indexes.exporters.rows import Outcome, Source, render


def guide(source: Source, outcome: Outcome) -> str:
    """Loading with lancedb, and a search with our scores."""
    return render(
        _GUIDE,
        name=source.name,
        names=source.columns,
        **_METRIC[source.metric],
        filter=_FILTER if source.fields else "",
    )


_METRIC = {
    "ip": {"distance": "dot", "score": '1 - row["_distance"]'},
    "l2": {"distance": "l2", "score": '-row["_distance"]'},
}
_FILTER = """
Fields are members of the column `fields`: `.where("fields.year > 2000", prefilter=True)`.
"""
_GUIDE = """
`documents.parquet` has the columns $names; a vector is a list of float32 of fixed size.

## Load

`pip install lancedb`; run in this directory. The table is streamed, so that it may be larger than memory.

```python
import lancedb
import pyarrow as pa
import pyarrow.parquet as pq

database = lancedb.connect("lancedb")
file = pq.ParquetFile("documents.parquet")
batches = pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches(batch_size=1_000))
table = database.create_table("$name", data=batches)
```

## Query

```python
def search(vector, k=10):
    rows = table.search(vector).distance_type("$distance").select(["id", "_distance"]).limit(k).to_list()
    return [(row["id"], $score) for row in rows]


print(search(table.head(1)["vector"][0].as_py()))
```

Without a vector index LanceDB compares all vectors, as an exact index of shortlist does. An index trades that for
speed: `table.create_index("vector", config=lancedb.index.HnswSq(distance_type="$distance"))`.
$filter"""

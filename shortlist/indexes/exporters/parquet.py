"""Parquet tables: id, vector (a list of fixed size) and, where documents are stored, title, text and typed fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shortlist.indexes.exporters.rows import NUMPY_SCORE, Outcome, Rows, Source, note_lost, render

FILE = "documents.parquet"


def schema(source: Source) -> pa.Schema:
    """The columns of the table; the fields of a document are one column of the type struct."""
    columns = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), source.dim), nullable=False),
    ]
    if source.documents:
        columns += [pa.field("title", pa.string()), pa.field("text", pa.string())]
    if source.fields:  # a struct without members is no column that a file can hold
        columns.append(pa.field("fields", pa.struct([(name, kind.arrow) for name, kind in source.kinds.items()])))
    return pa.schema(columns)


def batches(rows: Iterable[Rows], source: Source, lost: set[str]) -> Iterator[pa.RecordBatch]:
    """The rows as Arrow batches of `schema(source)`; names of fields without a column go to `lost`."""
    table = schema(source)
    for part in rows:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(part.vectors.reshape(-1)), source.dim)
        columns: list[Any] = [pa.array(part.ids, pa.string()), vectors]
        if part.stored is not None:
            columns.append(pa.array([stored.title for stored in part.stored], pa.string()))
            columns.append(pa.array([stored.text for stored in part.stored], pa.string()))
            fields = [source.typed(stored.fields, lost) for stored in part.stored]
            if source.fields:
                columns.append(pa.array(fields, table.field("fields").type))
        yield pa.record_batch(columns, schema=table)


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `documents.parquet`, one row group a part."""
    outcome, lost = Outcome(), set[str]()
    write_table(directory / FILE, schema(source), batches(rows, source, lost))
    note_lost(lost, outcome)
    return outcome


def write_table(path: Path, table: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write `batches` as the row groups of a Parquet file."""
    # Ids, texts and vectors repeat too seldom for dictionaries.
    with pq.ParquetWriter(path, table, compression="zstd", use_dictionary=False) as writer:
        for batch in batches:
            writer.write_batch(batch)


def guide(source: Source, outcome: Outcome) -> str:
    """How to read the table."""
    return render(_GUIDE, names=source.columns, score=NUMPY_SCORE[source.metric])


_GUIDE = """
`documents.parquet` has the columns $names; a vector is a list of float32 of fixed size.
pandas, Polars, DuckDB, Spark and Arrow read it.

## Load

```python
import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("documents.parquet", columns=["id", "vector"])
ids = table["id"].to_pylist()
vectors = np.vstack([part.flatten().to_numpy().reshape(len(part), -1) for part in table["vector"].chunks])
```

More than memory holds is read part by part: `for batch in pq.ParquetFile("documents.parquet").iter_batches(10_000): …`.

## Query

```python
def search(vector, k=10):
    scores = $score
    best = np.argsort(-scores, kind="stable")[:k]
    return [(ids[row], float(scores[row])) for row in best]


print(search(vectors[0]))
```
"""

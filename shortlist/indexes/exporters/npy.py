"""Arrays and JSON lines: `vectors.npy`, the ids beside it, and the documents if they are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from shortlist.indexes.exporters.rows import NUMPY_SCORE, Outcome, Rows, Source, json_bytes, render

VECTORS, IDS, DOCUMENTS = "vectors.npy", "ids.jsonl", "documents.jsonl"


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `vectors.npy` `(docs, dim)`, `ids.jsonl` (one JSON string a line) and `documents.jsonl`, row by row."""
    with contextlib.ExitStack() as files:
        vectors = files.enter_context(open(directory / VECTORS, "wb"))
        ids = files.enter_context(open(directory / IDS, "wb"))
        documents = files.enter_context(open(directory / DOCUMENTS, "wb")) if source.documents else None
        write_header(vectors, source)
        for part in rows:
            write_vectors(vectors, part)
            ids.write(b"".join(json_bytes(id) + b"\n" for id in part.ids))
            if documents is not None:
                documents.write(b"".join(json_bytes(record) + b"\n" for record in part.records()))
    return Outcome()


def write_header(file: IO[bytes], source: Source) -> None:
    """Write the header of a `.npy` file whose rows follow as they come."""
    shape = (source.count, source.dim)
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})


def write_vectors(file: IO[bytes], part: Rows) -> None:
    """Write the next rows of the array."""
    file.write(np.ascontiguousarray(part.vectors, "<f4").tobytes())


def guide(source: Source, outcome: Outcome) -> str:
    """How to read the files."""
    return render(_GUIDE, documents=_DOCUMENTS if source.documents else "", score=NUMPY_SCORE[source.metric])


_DOCUMENTS = (
    'documents = [json.loads(line) for line in open("documents.jsonl", encoding="utf-8")]  # in the same order\n'
)
_GUIDE = """
`vectors.npy` is a float32 array (documents, dimensions). Line n of `ids.jsonl` is the id of row n as a JSON string, so
that any character can be part of an id.

## Load

```python
import json

import numpy as np

vectors = np.load("vectors.npy", mmap_mode="r")
ids = [json.loads(line) for line in open("ids.jsonl", encoding="utf-8")]
$documents```

## Query

```python
def search(vector, k=10):
    scores = $score
    best = np.argsort(-scores, kind="stable")[:k]
    return [(ids[row], float(scores[row])) for row in best]


print(search(vectors[0]))
```
"""

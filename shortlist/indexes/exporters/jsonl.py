"""One JSON object a line: id, vector and, where documents are stored, title, text and fields."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shortlist.indexes.exporters.rows import NUMPY_SCORE, Outcome, Rows, Source, json_bytes, render


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `documents.jsonl`, or `documents.jsonl.gz`, whose bytes depend on the content only."""
    with open(directory / file_name(source), "wb") as raw:
        # mtime 0 and no name: equal content gives equal bytes.
        file: Any = gzip.GzipFile("", "wb", 6, raw, 0) if source.gzip else raw
        for part in rows:
            for record, vector in zip(part.records(), part.vector_texts(), strict=True):
                file.write(with_vector(record, vector) + b"\n")
        if source.gzip:
            file.close()
    return Outcome()


def with_vector(record: dict[str, Any], vector: str) -> bytes:
    """The JSON of `record` with the numbers of `vector` after its id."""
    id = json_bytes(record["id"])
    rest = json_bytes({key: value for key, value in record.items() if key != "id"})[1:]
    return b'{"id": %b, "vector": [%b]%b' % (id, vector.encode(), rest if rest == b"}" else b", " + rest)


def file_name(source: Source) -> str:
    """Name of the one file."""
    return "documents.jsonl.gz" if source.gzip else "documents.jsonl"


def guide(source: Source, outcome: Outcome) -> str:
    """How to read the file."""
    file = file_name(source)
    opened, gzip = (f'gzip.open("{file}", "rt"', "import gzip\n") if source.gzip else (f'open("{file}"', "")
    return render(_GUIDE, names=source.columns, file=file, opened=opened, gzip=gzip, score=NUMPY_SCORE[source.metric])


_GUIDE = """
Every line of `$file` is a JSON object with the keys $names. The numbers of a vector are the float32 values of the
index, not rounded.

## Load

```python
${gzip}import json

import numpy as np

with $opened, encoding="utf-8") as lines:
    documents = [json.loads(line) for line in lines]
vectors = np.array([document.pop("vector") for document in documents], np.float32)
```

## Query

```python
def search(vector, k=10):
    scores = $score
    best = np.argsort(-scores, kind="stable")[:k]
    return [(documents[row]["id"], float(scores[row])) for row in best]


print(search(vectors[0]))
```
"""

"""OpenSearch: settings and mapping as JSON, and files for the `_bulk` API below its limit of a request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from shortlist.errors import DataError
from shortlist.files import write_json
from shortlist.indexes.exporters.jsonl import with_vector
from shortlist.indexes.exporters.rows import Outcome, Rows, Source, Tally, json_bytes, note_lost, render, short

MAPPING, LOAD = "index.json", "load.sh"
FILE_BYTES = 32 << 20  # of one bulk file, one document aside
MAX_REQUEST = 100 << 20  # `http.max_content_length` of a server that says nothing else
MAX_ID = 512  # bytes of an `_id`
_KEYWORD = {"type": "keyword", "ignore_above": 8191}  # longer ones break the 32,766 bytes of a term
_TYPES = {"bool": {"type": "boolean"}, "int": {"type": "long"}, "float": {"type": "double"}}


def mapping(source: Source) -> dict[str, Any]:
    """Settings and mapping of the OpenSearch index; exact types, so that no field is guessed from its first value."""
    space = {"ip": "innerproduct", "l2": "l2"}[source.metric]
    method = {"name": "hnsw", "engine": "faiss", "space_type": space}
    properties: dict[str, Any] = {
        "id": {"type": "keyword"},
        "vector": {"type": "knn_vector", "dimension": source.dim, "method": method},
    }
    if source.documents:
        properties |= {"title": {"type": "text"}, "text": {"type": "text"}}
    if source.fields:
        names = field_names(source.fields)
        types = {names[name]: _TYPES.get(kind.item or "", _KEYWORD) for name, kind in source.kinds.items()}
        properties["fields"] = {"properties": types}
    return {"settings": {"index": {"knn": True}}, "mappings": {"dynamic": False, "properties": properties}}


def field_names(fields: Mapping[str, str]) -> dict[str, str]:
    """Names for OpenSearch, which reads a dot as a step into an object: dots become `_`, and no two names one."""
    names: dict[str, str] = {}
    for name in sorted(fields, key=lambda name: ("." in name or not name.strip(), name)):
        safe = name.replace(".", "_") if name.strip() else "_"
        while safe in names.values():
            safe += "_"
        names[name] = safe
    return names


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `index.json` and `bulk-00000.ndjson` …; raises DataError for a document above the limit of a request."""
    outcome, hashed, lost = Outcome(), Tally(), set[str]()
    write_json(directory / MAPPING, mapping(source))
    (directory / LOAD).write_bytes(render(_LOAD, name=source.name).encode())
    names = field_names(source.fields or {})
    files = _Files(directory)
    for part in rows:
        for record, vector in zip(part.records(), part.vector_texts(), strict=True):
            if source.documents:
                fields = source.typed(record["fields"], lost)
                record["fields"] = fields and {names[name]: value for name, value in fields.items()}
            files.append(_entry(record, vector, hashed))
    files.close()
    if hashed.count:
        outcome.notes.append(
            f"{hashed.count:,} ids are longer than the {MAX_ID} bytes that an `_id` may have; the `_id` of such a "
            f"document is the SHA-256 of its id, in hex (for example {hashed.examples})."
        )
    note_lost(lost, outcome)
    renamed = [f"`{name}` is `{safe}`" for name, safe in names.items() if name != safe]
    if renamed:
        outcome.notes.append(f"OpenSearch reads dots in names as steps, so that {', '.join(renamed)}.")
    return outcome


def _entry(record: dict[str, Any], vector: str, hashed: Tally) -> bytes:
    """The two lines of one document."""
    id = record["id"]
    encoded = id.encode()
    if len(encoded) > MAX_ID:
        hashed.add(id)
        key = hashlib.sha256(encoded).hexdigest()
    else:
        key = id
    entry = b'{"index": {"_id": %b}}\n%b\n' % (json_bytes(key), with_vector(record, vector))
    if len(entry) > MAX_REQUEST - 1:
        raise DataError(
            f"document {short(id)} takes {len(entry):,} bytes; a request to OpenSearch takes {MAX_REQUEST:,}: export "
            "without documents (--no-documents) or split it."
        )
    return entry


class _Files:
    """Bulk files that are begun anew before one grows above `FILE_BYTES`."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._number, self._bytes = 0, 0

    def append(self, entry: bytes) -> None:
        if self._file is not None and self._bytes + len(entry) > FILE_BYTES:
            self.close()
        if self._file is None:
            self._file = open(self._directory / f"bulk-{self._number:05d}.ndjson", "wb")
            self._number, self._bytes = self._number + 1, 0
        self._file.write(entry)
        self._bytes += len(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def guide(source: Source, outcome: Outcome) -> str:
    """Loading with curl, and a search with our scores."""
    return render(_GUIDE, name=source.name, score=_SCORE[source.metric], filter=_FILTER if source.fields else "")


# https://docs.opensearch.org: the k-NN scores of the spaces "innerproduct" and "l2", turned round.
_SCORE = {"ip": "score - 1 if score >= 1 else 1 - 1 / score", "l2": "1 - 1 / score"}
_FILTER = """
Fields are members of the object `fields`; a filter goes beside `"k"`, so that it is applied while searching:
`"filter": {"range": {"fields.year": {"gt": 2000}}}`.
"""
_LOAD = """
#!/usr/bin/env bash
# Makes the index "$name" at $OPENSEARCH_URL and sends it every bulk file; arguments go to curl.
set -euo pipefail
cd "$(dirname "$0")"
url="$${OPENSEARCH_URL:-http://localhost:9200}/$name"
curl -fsS "$@" -X PUT "$url" -H "Content-Type: application/json" --data-binary @index.json
for file in bulk-*.ndjson; do
  answer=$(curl -fsS "$@" -X POST "$url/_bulk?filter_path=errors,items.*.error" \\
    -H "Content-Type: application/x-ndjson" --data-binary "@$file")
  if ! grep -q '"errors": *false' <<< "$answer"; then
    echo "$file: some documents were refused: $answer" >&2
    exit 1
  fi
done
curl -fsS "$@" -X POST "$url/_refresh"
"""
_GUIDE = """
`index.json` holds settings and mapping (`knn_vector`, HNSW of the engine faiss), `bulk-*.ndjson` the documents for the
`_bulk` API in files far below the limit of a request. The `_id` is the document's id, which is also the field `id`.

## Load

`load.sh` makes the index and sends the files with curl. A bulk request succeeds even if documents in it are refused, so
that the script looks into the answers. Options of curl, such as a password, go behind its name.

```bash
export OPENSEARCH_URL=http://localhost:9200
bash load.sh # for example: bash load.sh -u USER:PASSWORD
```

## Query

```python
import json
import os
from urllib.request import Request, urlopen

SERVER = os.environ.get("OPENSEARCH_URL", "http://localhost:9200")


def search(vector, k=10):
    query = {"knn": {"vector": {"vector": [float(x) for x in vector], "k": k}}}
    body = json.dumps({"size": k, "_source": ["id"], "query": query}).encode()
    with urlopen(Request(f"{SERVER}/$name/_search", body, {"Content-Type": "application/json"})) as answer:
        hits = json.load(answer)["hits"]["hits"]
    return [(hit["_source"]["id"], ours(hit["_score"])) for hit in hits]


def ours(score):
    return $score  # OpenSearch has only scores above 0


with open("bulk-00000.ndjson", encoding="utf-8") as lines:
    next(lines)
    print(search(json.loads(next(lines))["vector"]))
```
$filter"""

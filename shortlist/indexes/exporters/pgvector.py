"""PostgreSQL with pgvector: SQL for the table and its index, and the rows in the text format of COPY."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shortlist.errors import DataError
from shortlist.indexes.exporters.rows import Outcome, Rows, Source, Tally, json_bytes, render, short

SCHEMA, ROWS, LOAD = "schema.sql", "documents.copy", "load.sql"
NULL = "\\N"
_SPECIAL = re.compile(r"[\b\f\n\r\t\v\\]")
_ESCAPES = {
    "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v", "\\": "\\\\",
}  # fmt: skip


def write(rows: Iterable[Rows], source: Source, directory: Path) -> Outcome:
    """Write `schema.sql`, `documents.copy` and `load.sql`; raises DataError for an id with a NUL character."""
    outcome, replaced = Outcome(), Tally()
    (directory / SCHEMA).write_bytes(_schema(source).encode())
    (directory / LOAD).write_bytes(_load(source).encode())
    with open(directory / ROWS, "wb") as file:
        for part in rows:
            for record, vector in zip(part.records(), part.vector_texts(), strict=True):
                file.write(_line(record, vector, source, replaced).encode("utf-8", "replace"))
    if replaced.count:
        outcome.notes.append(
            f"{replaced.count:,} documents hold NUL characters, which PostgreSQL cannot store; each is now U+FFFD (for "
            f"example in {replaced.examples})."
        )
    return outcome


def _line(record: dict[str, Any], vector: str, source: Source, replaced: Tally) -> str:
    id = record["id"]
    if "\0" in id:
        raise DataError(f"id {short(id)} holds a NUL character, which PostgreSQL cannot store; rename the document.")
    columns = [copy_text(id), f"[{vector}]"]
    if source.documents:
        title, text, fields = record["title"], record["text"], record["fields"]
        found = "\0" in (title or "") or "\0" in (text or "") or _holds_nul(fields)
        if found:
            replaced.add(id)
            title, text, fields = _without_nul(title), _without_nul(text), _without_nul(fields)
        columns += [copy_text(title), copy_text(text)]
        columns.append(NULL if fields is None else copy_text(json_bytes(fields).decode()))
    return "\t".join(columns) + "\n"


def copy_text(value: str | None) -> str:
    """`value` as a column in the text format of COPY."""
    return NULL if value is None else _SPECIAL.sub(lambda match: _ESCAPES[match[0]], value)


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_holds_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_holds_nul, value))


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    return [_without_nul(item) for item in value] if isinstance(value, list) else value


def _columns(source: Source) -> str:
    return "id, vector, title, text, fields" if source.documents else "id, vector"


def _schema(source: Source) -> str:
    stored = ",\n    title text,\n    text text,\n    fields jsonb" if source.documents else ""
    return (
        "CREATE EXTENSION IF NOT EXISTS vector;\n"
        f"CREATE TABLE {source.name} (\n    id text PRIMARY KEY,\n    vector vector({source.dim}) NOT NULL{stored}\n"
        ");\n"
    )


def _load(source: Source) -> str:
    copy = f"\\copy {source.name} ({_columns(source)}) FROM '{ROWS}' WITH (FORMAT text, ENCODING 'UTF8')"
    return f"\\set ON_ERROR_STOP on\nBEGIN;\n\\i {SCHEMA}\n{copy}\nCOMMIT;\nANALYZE {source.name};\n"


def guide(source: Source, outcome: Outcome) -> str:
    """Loading with psql, and a search with our scores."""
    metric = _METRIC[source.metric]
    index = _INDEX
    if source.dim > 2_000:  # HNSW of pgvector takes 2,000 dimensions as float32, 4,000 as float16
        index = _HALF_INDEX if source.dim <= 4_000 else _NO_INDEX
    index = render(index, name=source.name, dim=source.dim, **metric)
    return render(_GUIDE, name=source.name, index=index, filter=_FILTER if source.fields else "", **metric)


_METRIC = {
    "ip": {"operator": "<#>", "classes": "ip_ops", "score": "-(vector <#> :'vector')"},
    "l2": {"operator": "<->", "classes": "l2_ops", "score": "-((vector <-> :'vector') ^ 2)"},
}
_INDEX = """
Without an index PostgreSQL compares all vectors, as an exact index of shortlist does. For speed:

```sql
CREATE INDEX ON $name USING hnsw (vector vector_$classes);
SET hnsw.ef_search = 200; -- at least the LIMIT of the query: the default 40 never gives more than 40 rows
```
"""
_HALF_INDEX = """
Without an index PostgreSQL compares all vectors, as an exact index of shortlist does. HNSW takes up to 2,000 dimensions
as float32, more as float16, and the query must then order by the same expression:

```sql
CREATE INDEX ON $name USING hnsw ((vector::halfvec($dim)) halfvec_$classes);
SET hnsw.ef_search = 200; -- at least the LIMIT of the query: the default 40 never gives more than 40 rows
SELECT id FROM $name ORDER BY vector::halfvec($dim) $operator :'vector'::halfvec($dim) LIMIT 10;
```
"""
_NO_INDEX = """
PostgreSQL compares all vectors, as an exact index of shortlist does: HNSW takes up to 4,000 dimensions.
"""
_FILTER = """
Fields are keys of the column `fields`: `WHERE (fields->>'year')::int > 2000`, or `WHERE fields @> '{"lang": "en"}'`
with `CREATE INDEX ON … USING gin (fields jsonb_path_ops)`.
"""
_GUIDE = """
`schema.sql` makes the table, `documents.copy` holds its rows in the text format of COPY, `load.sql` runs both in one
transaction: the table is there in full or not at all.

## Load

Run in this directory. The server needs the extension pgvector.

```bash
psql -X "$DATABASE_URL" -f load.sql
```

## Query

With psql, `\\set vector '[0.1,0.2,…]'` first; a program binds the vector as a parameter in the place of `:'vector'`.

```sql
SELECT id, $score AS score
FROM $name
ORDER BY vector $operator :'vector'
LIMIT 10;
```

$index$filter"""

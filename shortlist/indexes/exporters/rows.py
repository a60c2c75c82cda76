"""What every exporter is given: the documents of an index in order, in parts that stay small whatever their texts."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shortlist.indexes.base import VectorIndex
from shortlist.indexes.fields import Kind

Vectors = NDArray[np.float32]

PART_BYTES = 8 << 20  # vectors and texts of one part
# Our scores of `vectors` against `vector`, as the guides write them.
NUMPY_SCORE = {"ip": "vectors @ np.asarray(vector)", "l2": "-((vectors - np.asarray(vector)) ** 2).sum(axis=1)"}


@dataclass(frozen=True)
class Stored:
    """Title, text and fields (as they were given) of one document; all None for one that was added without text."""

    title: str | None = None
    text: str | None = None
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rows:
    """Consecutive documents: ids, float32 vectors `(docs, dim)` and, where documents are stored, what was stored."""

    ids: list[str]
    vectors: Vectors
    stored: list[Stored] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def records(self) -> Iterator[dict[str, Any]]:
        """`{"id"}`, and `{"title", "text", "fields"}` where documents are stored, of each document."""
        for row, id in enumerate(self.ids):
            if self.stored is None:
                yield {"id": id}
            else:
                stored = self.stored[row]
                yield {"id": id, "title": stored.title, "text": stored.text, "fields": stored.fields}

    def vector_texts(self) -> list[str]:
        """Each vector as numbers with commas between them, in the fewest digits that give the same float32 again."""
        docs, dim = self.vectors.shape
        numbers = pa.array(self.vectors.reshape(-1)).cast(pa.string())
        lists = pa.ListArray.from_arrays(np.arange(0, docs * dim + 1, dim, dtype=np.int32), numbers)
        return pc.binary_join(lists, ",").to_pylist()


@dataclass(frozen=True)
class Source:
    """What is exported, and under which name it is to be loaded.

    `fields` are the names and types of the stored fields, as `FieldStore.types` has them; None where no documents are
    exported.
    """

    count: int
    dim: int
    metric: str
    name: str = "documents"
    fields: Mapping[str, str] | None = None
    gzip: bool = False

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The types of the fields, for systems whose columns have one."""
        return {name: Kind.parse(kind) for name, kind in (self.fields or {}).items()}

    def typed(self, fields: Mapping[str, Any] | None, lost: set[str]) -> dict[str, Any] | None:
        """`fields` as values of their types, missing ones left out; names without a type go to `lost`."""
        if fields is None:
            return None
        lost.update(fields.keys() - self.kinds.keys())
        values = {name: self.kinds[name].values(value) for name, value in fields.items() if name in self.kinds}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def columns(self) -> str:
        """The names of what a document has, as LOAD.md lists them."""
        return "`id`, `vector`, `title`, `text` and `fields`" if self.documents else "`id` and `vector`"

    @property
    def documents(self) -> bool:
        """Whether titles, texts and fields are exported."""
        return self.fields is not None


@dataclass
class Outcome:
    """What an exporter found while writing: remarks for the reader of LOAD.md, and the bytes of the largest record."""

    notes: list[str] = field(default_factory=list)
    largest: int = 0

    def saw(self, size: int) -> None:
        """Remember the bytes of a record if it is the largest so far."""
        self.largest = max(self.largest, size)


def read_rows(index: VectorIndex, *, documents: bool) -> Iterator[Rows]:
    """The present documents of `index` in the order they were added; a part holds about `PART_BYTES`.

    Texts are read one at a time, so that a part is larger than that by one document at most.
    """
    size = max(1, min(16_384, PART_BYTES // (4 * index.dim)))
    store = index.documents if documents else None
    for block in index.blocks(size=size):
        if store is None:
            yield Rows(block.ids, block.vectors)
            continue
        start, used, stored = 0, 0, []
        for row, position in enumerate(block.positions.tolist()):
            document = _stored(store.get(position))
            stored.append(document)
            used += len(document.title or "") + len(document.text or "") + 4 * index.dim
            if used >= PART_BYTES:
                yield Rows(block.ids[start : row + 1], block.vectors[start : row + 1], stored)
                start, used, stored = row + 1, 0, []
        if stored:
            yield Rows(block.ids[start:], block.vectors[start:], stored)


def _stored(record: dict[str, Any] | None) -> Stored:
    return Stored() if record is None else Stored(record["title"], record["text"], record.get("metadata") or {})


def json_bytes(value: Any) -> bytes:
    """`value` as one line of strict JSON in UTF-8: numbers that JSON does not have become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note_lost(lost: set[str], outcome: Outcome) -> None:
    """Say which fields of the documents have no column."""
    if lost:
        names = ", ".join(map(repr, sorted(lost)[:5]))
        outcome.notes.append(
            f"{len(lost):,} fields have no column here ({names}{', …' if len(lost) > 5 else ''}): the index has no "
            "type for them. The exports to jsonl, npy, qdrant, milvus and pgvector hold them."
        )


def render(text: str, **values: Any) -> str:
    """`text` with `$name` replaced by the values; any other `$` stays as it is."""
    return string.Template(text).safe_substitute({name: str(value) for name, value in values.items()}).strip() + "\n"


@dataclass
class Tally:
    """Counts documents and remembers three of their ids, for a remark."""

    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, id: str) -> None:
        """Count the document `id`."""
        self.count += 1
        if len(self.ids) < 3:
            self.ids.append(id)

    @property
    def examples(self) -> str:
        """The remembered ids, for a sentence."""
        return ", ".join(map(short, self.ids))


def short(id: str) -> str:
    """`id` in quotes, cut where it is too long for a sentence."""
    return repr(id if len(id) <= 60 else id[:59] + "…")

"""The corpus: documents in an Arrow file on disk, memory-mapped, with an id look-up beside it.

A million documents open without growing the process: texts and ids are read from the file as they are asked for, and
the look-up is a sorted array of 64-bit id hashes (`id_hashes.npy`) with their rows (`id_rows.npy`), mapped too.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shortlist.data.cache import Entry, temporary_directory
from shortlist.data.documents import DEFAULT_TEMPLATE, Document, join, make_document
from shortlist.data.store import ARROW_FILE, HASHES_FILE, INFO_FILE, ROWS_FILE, hash_ids, write_store
from shortlist.errors import DataError

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_STEP = 1000  # rows turned into Python objects at a time


class Corpus:
    """Documents in file order, by row and by id; iteration streams, nothing is held in memory."""

    def __init__(self, entry: Entry | Path, *, template: str = DEFAULT_TEMPLATE):
        self._entry = entry if isinstance(entry, Entry) else Entry(Path(entry))
        self.directory = self._entry.path
        self.template = template
        self._info: dict[str, Any] = json.loads((self.directory / INFO_FILE).read_text(encoding="utf-8"))
        self._table = pa.ipc.open_stream(pa.memory_map(str(self.directory / ARROW_FILE))).read_all()
        self._batches = self._table.to_batches()
        self._starts = [0, *np.cumsum([batch.num_rows for batch in self._batches]).tolist()]
        self._hashes: NDArray[np.uint64] = np.asarray(np.load(self.directory / HASHES_FILE, mmap_mode="r"))
        self._rows: NDArray[Any] = np.asarray(np.load(self.directory / ROWS_FILE, mmap_mode="r"))

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Any] | Mapping[Any, Any],
        *,
        on_empty: str = "keep",
        template: str = DEFAULT_TEMPLATE,
    ) -> Corpus:
        """A corpus from Python values, in a temporary Arrow file that goes with the object.

        Args:
            documents: an iterable of `Document`, `{"_id" or "id": …, "title": …, "text": …}` or `(id, text)`; or a
                mapping from id to a text, a dictionary or a Document.
            on_empty: `keep`, `skip` or `error` for documents with neither title nor text.
            template: how title and text are joined by `texts`.

        Raises:
            DataError: an item of another shape, an empty or repeated id, named with its position.
        """
        return cls(
            temporary_directory(lambda path: write_store(path, _numbered(documents), source="item", on_empty=on_empty)),
            template=template,
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[Document]:
        return self._documents(0, len(self))

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self.position(id) is not None

    def __getitem__(self, id: str) -> Document:
        if not isinstance(id, str):
            raise DataError(
                f"document id {id!r} is a {type(id).__name__}; ids are strings (`row(i)` takes a position)."
            )
        row = self.position(id)
        if row is None:
            raise DataError(
                f"no document {id!r} among the {len(self)} of this corpus (its first is {self.ids[0]!r}); "
                "check that ids and corpus belong together."
            )
        return self.row(row)

    def __repr__(self) -> str:
        return f"Corpus({len(self)} documents)"

    def __reduce__(self) -> Any:
        # Worker processes map the same file; the temporary one of `from_documents` stays with its first owner.
        return (_reopen, (str(self.directory), self.template))

    def get(self, id: str, default: Document | None = None) -> Document | None:
        """The document with this id, or `default`."""
        row = self.position(id)
        return default if row is None else self.row(row)

    def position(self, id: str) -> int | None:
        """Row of the document with this id, None if there is none."""
        wanted = hash_ids([id])[0]
        start = int(np.searchsorted(self._hashes, wanted))
        while start < len(self) and self._hashes[start] == wanted:  # equal hashes stand side by side
            row = int(self._rows[start])
            if self._id(row) == id:
                return row
            start += 1
        return None

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Rows of many ids at once, −1 where an id is unknown."""
        found = np.full(len(ids), -1, np.int64)
        wanted = hash_ids(ids)
        at = np.searchsorted(self._hashes, wanted, side="left")
        rest = np.arange(len(ids))
        while len(rest):
            # Equal hashes stand side by side; the id itself decides.
            rest = rest[at[rest] < len(self)]
            rest = rest[self._hashes[at[rest]] == wanted[rest]]
            rows = self._rows[at[rest]].astype(np.int64)
            pairs = zip(rest.tolist(), self.column("id", rows), strict=True)
            same = np.fromiter((ids[index] == id for index, id in pairs), bool, len(rest))
            found[rest[same]] = rows[same]
            rest = rest[~same]
            at[rest] += 1
        return found

    def row(self, index: int) -> Document:
        """The document at a position from 0; DataError outside the corpus."""
        if not 0 <= index < len(self):
            raise DataError(f"row {index} is outside the corpus, which has rows 0 to {len(self) - 1}.")
        number = bisect.bisect_right(self._starts, index) - 1
        batch, local = self._batches[number], index - self._starts[number]
        id, title, text, metadata = (column[local].as_py() for column in batch.columns)
        return Document(id, title, text, None if metadata is None else json.loads(metadata))

    def slice(self, start: int, stop: int | None = None) -> list[Document]:
        """The documents of rows `start` to `stop` (not included) as a list."""
        return list(self._documents(start, len(self) if stop is None else stop))

    @property
    def ids(self) -> Ids:
        """All document ids in row order, read from disk as they are used."""
        return Ids(self)

    def texts(self, template: str | None = None, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Title and text of each row through `template` (default: the corpus's own), without outer blanks."""
        template = self.template if template is None else template
        for titles, texts in self._columns(start, len(self) if stop is None else stop, ("title", "text")):
            for title, text in zip(titles, texts, strict=True):
                yield join(title, text, template)

    def column(self, name: str, rows: NDArray[np.int64] | Sequence[int]) -> list[Any]:
        """Values of one stored column (`id`, `title`, `text`) at `rows`, in their order, read batch by batch."""
        positions = np.asarray(rows, np.int64)
        values: list[Any] = [None] * len(positions)
        order = np.argsort(positions, kind="stable")
        bounds = np.searchsorted(positions[order], self._starts)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            part = order[bounds[number] : bounds[number + 1]]
            # Not pa.array(…), which imports pandas.
            offsets = pa.py_buffer(positions[part] - self._starts[number])
            local = pa.Array.from_buffers(pa.int64(), len(part), [None, offsets])
            taken = self._batches[number].column(name).take(local).to_pylist()
            for position, value in zip(part.tolist(), taken, strict=True):
                values[position] = value
        return values

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all ids, titles, texts and metadata in order: equal fingerprints, equal documents."""
        return str(self._info["fingerprint"])

    @property
    def counts(self) -> dict[str, int]:
        """What reading met: documents, without_title, without_text, empty, skipped_empty, skipped_lines, repeated."""
        return dict(self._info["counts"])

    @property
    def notes(self) -> list[str]:
        """Sentences about what was odd in the files and how it was treated, with counts and examples."""
        return list(self._info["notes"])

    @property
    def dataset(self) -> datasets.Dataset:
        """The same rows as a Hugging Face data set (id, title, text, metadata as JSON), memory-mapped."""
        from datasets import Dataset

        return Dataset.from_file(str(self.directory / ARROW_FILE))

    def _documents(self, start: int, stop: int) -> Iterator[Document]:
        for rows in self._columns(start, stop, ("id", "title", "text", "metadata")):
            for id, title, text, metadata in zip(*rows, strict=True):
                yield Document(id, title, text, None if metadata is None else json.loads(metadata))

    def _columns(self, start: int, stop: int, names: Sequence[str]) -> Iterator[list[list[Any]]]:
        start, stop = max(start, 0), min(stop, len(self))
        while start < stop:
            number = bisect.bisect_right(self._starts, start) - 1
            first = self._starts[number]
            size = min(stop, start + _STEP, self._starts[number + 1]) - start
            part = self._batches[number].slice(start - first, size)
            yield [part.column(name).to_pylist() for name in names]
            start += size

    def _id(self, row: int) -> str:
        number = bisect.bisect_right(self._starts, row) - 1
        return self._batches[number].column("id")[row - self._starts[number]].as_py()


class Ids(Sequence[str]):
    """The ids of a corpus as a sequence that reads from disk; compares equal to a list with the same ids."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self._corpus._id(row) for row in range(start, stop, step)]
            return [id for (ids,) in self._corpus._columns(start, stop, ("id",)) for id in ids]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)} ids")
        return self._corpus._id(row)

    def __iter__(self) -> Iterator[str]:
        for (ids,) in self._corpus._columns(0, len(self), ("id",)):
            yield from ids

    def __contains__(self, id: object) -> bool:
        return id in self._corpus

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Row of an id, by the look-up; ValueError if it is not there."""
        row = self._corpus.position(value)
        if row is None or row < start or (stop is not None and row >= stop):
            raise ValueError(f"{value!r} is not among the ids")
        return row

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids) and other._corpus is self._corpus:
            return True
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(other) == len(self) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ids({len(self)} ids)"


def _reopen(directory: str, template: str) -> Corpus:
    return Corpus(Path(directory), template=template)


def _numbered(documents: Iterable[Any] | Mapping[Any, Any]) -> Iterator[tuple[int, Document]]:
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        raise DataError(
            f"a corpus is made from an iterable of documents or a mapping id → text, not from a "
            f"{type(documents).__name__}."
        )
    pairs: Iterable[Any] = documents
    if isinstance(documents, Mapping):
        pairs = (
            {**value, "_id": key} if isinstance(value, Mapping)
            else value if isinstance(value, Document)
            else (key, value)
            for key, value in documents.items()
        )  # fmt: skip
    for number, value in enumerate(pairs, 1):
        yield number, make_document(value, f"item {number}")

"""Texts of a corpus by row, and which rows hold the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shortlist.data.documents import join
from shortlist.training.ragged import Rows


class DocumentSource(Protocol):
    """What training reads of a corpus (shortlist.data.Corpus is one)."""

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in row order."""
        ...

    def __len__(self) -> int: ...

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Rows of many ids, -1 where an id is unknown."""
        ...

    def row(self, index: int) -> Any:
        """The document at a row, with `.id`, `.title` and `.text`."""
        ...

    def column(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """The values of `id`, `title` or `text` at `rows`, in their order."""
        ...

    def texts(self, template: str | None = None) -> Iterator[str]:
        """Title and text of every row through the template, in order."""
        ...


class Documents:
    """Texts of a corpus by row. Documents with equal text are one document: the first row that holds it.

    Args:
        corpus: the collection's documents.
        template: how title and text become the text that is read.
        by_row: every row is a document of its own whatever its text (a free vector a document, as in one-vs-all heads).
    """

    def __init__(self, corpus: DocumentSource, *, template: str = "{title} {text}", by_row: bool = False):
        self.corpus = corpus
        self.template = template
        self.by_row = by_row

    def __len__(self) -> int:
        return len(self.corpus)

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Id → row of those ids that are in the corpus."""
        distinct = list(dict.fromkeys(ids))
        rows = self.corpus.positions(distinct).tolist() if distinct else []
        return {document: row for document, row in zip(distinct, rows, strict=True) if row >= 0}

    def ids(self, rows: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """Ids of the documents at `rows`."""
        return self.corpus.column("id", np.asarray(rows, np.int64))

    def texts(self, rows: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """Title and text of the documents at `rows` through the template, as the encoder will read them."""
        wanted = np.asarray(rows, np.int64)
        titles, texts = self.corpus.column("title", wanted), self.corpus.column("text", wanted)
        return [join(title, text, self.template) for title, text in zip(titles, texts, strict=True)]

    def all_texts(self) -> Iterator[str]:
        """Every text in row order."""
        return self.corpus.texts(self.template)

    @cached_property
    def first_rows(self) -> Rows:
        """For each row the first row that holds the same text, `(docs,)`: equal numbers, equal documents.

        One pass over the corpus when it is first asked for.
        """
        if self.by_row:
            return np.arange(len(self), dtype=np.int32)
        keys = np.fromiter((text_key(text) for text in self.all_texts()), np.uint64, len(self))
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return first.astype(np.int32)[inverse.reshape(-1)]

    def unique_rows(self) -> Rows:
        """Rows with a text of their own: the first row of each distinct text, ascending."""
        return np.flatnonzero(self.first_rows == np.arange(len(self))).astype(np.int32)


def text_key(text: str) -> int:
    """A 64-bit number that equal texts share (blank space at the ends ignored)."""
    return int.from_bytes(blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

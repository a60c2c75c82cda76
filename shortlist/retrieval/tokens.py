"""Token ids of many texts in one flat array, the form in which towers take texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tokens:
    """Token ids of `len(lengths)` texts, end to end, with the length of each before and after truncation.

    `ids` is int64 `(tokens,)`, `lengths` and `full_lengths` are int64 `(texts,)`, counted in tokens
    with the special ones. `rows` int64 `(texts,)` says which document of a model with document vectors each text is
    (−1: one without); None for texts that are only texts.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    full_lengths: NDArray[np.int64]
    rows: NDArray[np.int64] | None = None

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], full_lengths: Sequence[int] | None = None) -> Tokens:
        """Pack one list of ids a text; `full_lengths` default to the lengths of the lists."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        full = lengths if full_lengths is None else np.asarray(full_lengths, np.int64)
        return cls(ids, lengths, full)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Position in `ids` where each text begins, `(texts,)`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)[:-1]]) if len(self) else self.lengths

    def truncate(self, max_length: int | None) -> Tokens:
        """The first `max_length` tokens of each text; the object itself where nothing is longer."""
        if max_length is None or not len(self) or int(self.lengths.max()) <= max_length:
            return self
        position = np.arange(len(self.ids)) - np.repeat(self.starts, self.lengths)
        return replace(self, ids=self.ids[position < max_length], lengths=np.minimum(self.lengths, max_length))

    def at_rows(self, rows: Iterable[int] | NDArray[np.int64]) -> Tokens:
        """The same texts, as the documents at `rows` of a model with document vectors."""
        return replace(self, rows=np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), np.int64))

    def take(self, rows: Iterable[int] | NDArray[np.int64]) -> Tokens:
        """The texts at `rows`, in that order."""
        chosen = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), np.int64)
        lengths = self.lengths[chosen]
        documents = None if self.rows is None else self.rows[chosen]
        return Tokens(self.ids[ranges(self.starts[chosen], lengths)], lengths, self.full_lengths[chosen], documents)

    def padded(self, pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Ids `(texts, longest)` padded on the right, and their mask; None for the mask if nothing is padded."""
        width = int(self.lengths.max()) if len(self) else 0
        if len(self.ids) == width * len(self):
            return self.ids.reshape(len(self), width), None
        mask = np.arange(width) < self.lengths[:, None]
        padded = np.full(mask.shape, pad_id, np.int64)
        padded[mask] = self.ids
        return padded, mask.astype(np.int64)


def concatenate(parts: Sequence[Tokens]) -> Tokens:
    """The texts of all `parts`, in order, without rows."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Tokens.from_lists([])
    columns = zip(*((part.ids, part.lengths, part.full_lengths) for part in parts), strict=True)
    return Tokens(*(np.concatenate(column) for column in columns))


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers starts[i] … starts[i] + lengths[i] − 1 for every i, end to end."""
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)

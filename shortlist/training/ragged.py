"""Lists of different lengths in flat arrays, and draws from them that are functions of numbers, not of a stream.

A list of known positives for each of millions of queries costs a few bytes an entry here and would cost a hundred as a
dictionary. A draw hashes (seed, epoch, query, entry): every process makes the same one without being told, a
resumed run makes it again, and thousands of queries are drawn in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """List `i` is `items[starts[i]:starts[i + 1]]`; `values` runs along `items`, None where all are 1."""

    starts: Positions
    items: Rows
    values: NDArray[np.float32] | None = None

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], values: Sequence[Sequence[float]] | None = None) -> Ragged:
        """Pack one sequence a list."""
        items = np.fromiter((item for part in lists for item in part), np.int32)
        flat = None if values is None else np.fromiter((value for part in values for value in part), np.float32)
        return cls(starts_of(np.fromiter(map(len, lists), np.int64, len(lists))), items, flat)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Positions:
        """Entries of each list, `(lists,)`."""
        return np.diff(self.starts)

    def row(self, index: int) -> Rows:
        """The items of one list, a view."""
        return self.items[self.starts[index] : self.starts[index + 1]]

    def weights(self, index: int) -> NDArray[np.float32]:
        """The values of one list."""
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        return np.ones(stop - start, np.float32) if self.values is None else self.values[start:stop]

    def entries(self, lists: NDArray[np.integer]) -> tuple[Positions, Positions]:
        """Positions in `items` of all entries of `lists`, in their order, and for each the position in `lists`."""
        starts, lengths = self.starts[lists], self.starts[lists + 1] - self.starts[lists]
        return ranges(starts, lengths), np.repeat(np.arange(len(lists)), lengths)

    def values_at(self, positions: Positions) -> NDArray[np.float32]:
        """The values of entries given by position."""
        return np.ones(len(positions), np.float32) if self.values is None else self.values[positions]


def starts_of(lengths: NDArray[np.integer]) -> Positions:
    """Where lists of these lengths begin when they stand end to end, and where the last ends: `(lists + 1,)`."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Positions:
    """The numbers starts[i] … starts[i] + lengths[i] − 1 for every i, end to end."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(offsets[-1] + lengths[-1])) + np.repeat(np.asarray(starts, np.int64) - offsets, lengths)


def unite(
    owners: NDArray[np.integer], items: NDArray[np.integer], values: NDArray[np.float32] | None, *, lists: int
) -> Ragged:
    """Lists of distinct items in ascending order from (owner, item, value) entries; equal items keep the largest value.

    What is in order already, as label matrices are, is not sorted again.
    """
    width = int(items.max()) + 1 if len(items) else 1
    keys = owners.astype(np.int64) * width + items
    if values is not None and bool((values == 1).all()):
        values = None
    if len(keys) and not bool((np.diff(keys) > 0).all()):
        if values is None:
            keys = np.unique(keys)
        else:
            order = np.lexsort((-values, keys))
            keys, values = keys[order], values[order]
            first = np.concatenate([[True], keys[1:] != keys[:-1]])
            keys, values = keys[first], values[first]
    own, kept = np.divmod(keys, width)
    return Ragged(starts_of(np.bincount(own, minlength=lists)), kept.astype(np.int32), values)


def hashed(*numbers: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """A 64-bit hash of whole numbers, element by element (SplitMix64's finaliser, Steele et al. 2014)."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = state + np.atleast_1d(np.asarray(number)).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def draw(
    owners: Positions, counts: int, random: NDArray[np.uint64], weights: NDArray[np.float32] | None = None
) -> NDArray[np.bool_]:
    """True at `counts` entries of each owner (at all where it has fewer), drawn without replacement.

    With `weights`, one after the other in proportion to them (Efraimidis and Spirakis 2006): the smallest of
    −ln(u) / weight win. A weight of 0 is drawn last.

    Args:
        owners: ascending numbers, `(entries,)`.
        counts: entries to keep of each owner.
        random: one hash an entry; equal hashes give equal draws.
        weights: of the entries, at least 0.
    """
    sizes = np.bincount(owners) if len(owners) else np.zeros(0, np.int64)
    chosen = np.ones(len(owners), bool)
    crowded = np.flatnonzero((sizes > counts)[owners]) if len(owners) else np.zeros(0, np.int64)
    if not len(crowded):
        return chosen
    owners, random = owners[crowded], random[crowded]
    if weights is None:
        ranks = random
    else:
        uniform = ((random >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):
            # Positive floats order as their bits do.
            ranks = (-np.log(uniform) / weights[crowded].astype(np.float64)).view(np.uint64)
    # One sort over (owner, rank): the owner above, the 40 leading bits of the rank below.
    order = np.argsort((owners.astype(np.uint64) << np.uint64(40)) | (ranks >> np.uint64(24)), kind="stable")
    lengths = sizes[sizes > counts]
    place = np.arange(len(order)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    chosen[crowded] = False
    chosen[crowded[order[place < counts]]] = True
    return chosen

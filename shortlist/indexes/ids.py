"""String ids of an index: a table from position to id and back, compact and memory-mapped for millions.

On disk the ids are one UTF-8 blob (`ids.utf8`) and an int64 array of `count + 1` offsets (`ids.offsets.npy`),
so that ids may hold spaces and line breaks and any id is read without reading the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

BLOB, OFFSETS = "ids.utf8", "ids.offsets.npy"
_SLICE = 65_536


def check_ids(ids: Iterable[Any] | str, expected: int) -> list[str]:
    """`ids` as a list of `expected` distinct, non-empty strings.

    Raises:
        DataError: wrong number, an empty id, one that is not valid Unicode, or one given twice; the id is named.
    """
    checked = [ids] if isinstance(ids, str) else [value if type(value) is str else str(value) for value in ids]
    if len(checked) != expected:
        raise DataError(f"{len(checked)} ids for {expected} vectors; one id a vector is expected.")
    if "" in checked:
        raise DataError(f"the id at position {checked.index('')} is empty; every document needs a non-empty id.")
    if len(set(checked)) != len(checked):
        seen: set[str] = set()
        repeated = next(value for value in checked if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise DataError(f"id {repeated!r} is given twice in one call; ids must be distinct.")
    for value in checked:
        if not value.isascii():
            _encode(value)
    return checked


def _encode(value: str) -> bytes:
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"id {value!r} holds a lone surrogate and cannot be written as UTF-8; clean it first."
        ) from None


class IdTable:
    """Ids by position, positions by id, and which positions were removed.

    Positions are stable: a removed one is marked, never reused, until the index is saved anew.
    """

    def __init__(
        self,
        blob: NDArray[np.uint8] | None = None,
        offsets: NDArray[np.int64] | None = None,
        removed: NDArray[np.int64] | None = None,
    ):
        self._blob = memoryview(blob) if blob is not None and len(blob) else memoryview(b"")  # type: ignore[arg-type]
        self._offsets = offsets if offsets is not None else np.zeros(1, np.int64)
        self._mapped = len(self._offsets) - 1
        self._tail: list[str] = []
        self._tail_positions: dict[str, int] = {}
        self._hashes: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._dead: NDArray[np.bool_] | None = None
        self.num_removed = 0
        if removed is not None and len(removed):
            self._mark(removed)

    @classmethod
    def open(cls, directory: Path, removed: NDArray[np.int64] | None = None) -> IdTable:
        """The table stored in an index directory, memory-mapped."""
        offsets = np.load(directory / OFFSETS, mmap_mode="r", allow_pickle=False)
        file = directory / BLOB
        blob = np.memmap(file, np.uint8, "r") if file.stat().st_size else None
        if int(offsets[-1]) != (0 if blob is None else len(blob)):
            raise DataError(f"{file} has {file.stat().st_size} bytes but {OFFSETS} ends at {offsets[-1]}; rebuild it.")
        return cls(blob, offsets, removed)

    def __len__(self) -> int:
        """Number of positions, removed ones included."""
        return self._mapped + len(self._tail)

    @property
    def num_present(self) -> int:
        """Number of ids that are there."""
        return len(self) - self.num_removed

    def __iter__(self) -> Iterator[str]:
        """The ids that are there, by position."""
        for start in range(0, len(self), _SLICE):
            yield from self.take(self.present(start, min(start + _SLICE, len(self))))

    def present(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions from `start` to `stop` that were not removed."""
        dead = self.removed_mask(start, stop)
        return np.arange(start, stop) if dead is None else start + np.flatnonzero(~dead)

    def removed_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """True where a position from `start` to `stop` was removed; None if none was."""
        if self._dead is None:
            return None
        mask = self._dead[start:stop]
        if not mask.any():
            return None
        # Positions appended since the last removal lie beyond the mask.
        return np.pad(mask, (0, stop - start - len(mask)))

    def removed_positions(self) -> NDArray[np.int64]:
        """All removed positions, ascending."""
        return np.zeros(0, np.int64) if self._dead is None else np.flatnonzero(self._dead[: len(self)])

    def take(self, positions: NDArray[np.int64]) -> list[str]:
        """The ids at `positions`."""
        if not self._mapped:
            tail = self._tail
            return [tail[position] for position in positions.tolist()]
        blob, tail, mapped = self._blob, self._tail, self._mapped
        inside = np.minimum(positions, mapped - 1)
        starts, stops = self._offsets[inside].tolist(), self._offsets[inside + 1].tolist()
        return [
            str(blob[start:stop], "utf-8") if position < mapped else tail[position - mapped]
            for position, start, stop in zip(positions.tolist(), starts, stops, strict=True)
        ]

    def find(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Position of each of `ids`, −1 where it is not there."""
        known = self._tail_positions
        found = np.fromiter((known.get(value, -1) for value in ids), np.int64, len(ids))
        if self._mapped and len(ids):
            keys, positions = self._hash_table()
            wanted = np.fromiter((hash(_encode(value)) for value in ids), np.int64, len(ids))
            slots = np.searchsorted(keys, wanted)
            hits = (slots < len(keys)) & (keys[np.minimum(slots, len(keys) - 1)] == wanted) & (found < 0)
            for index in np.flatnonzero(hits).tolist():
                slot = int(slots[index])
                while slot < len(keys) and keys[slot] == wanted[index]:
                    position = positions[slot : slot + 1]
                    alive = self._dead is None or not self._dead[position[0]]
                    if alive and self.take(position)[0] == ids[index]:
                        found[index] = position[0]
                        break
                    slot += 1
        return found

    def append(self, ids: Sequence[str]) -> None:
        """Add `ids` at the next positions; the caller has checked that none of them is there."""
        first = len(self)
        self._tail.extend(ids)
        self._tail_positions.update(zip(ids, range(first, first + len(ids)), strict=True))

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Mark `positions`, which must be there, as removed."""
        for position in positions[positions >= self._mapped].tolist():
            del self._tail_positions[self._tail[position - self._mapped]]
        self._mark(positions)

    def _mark(self, positions: NDArray[np.int64]) -> None:
        if self._dead is None or len(self._dead) < len(self):
            grown = np.zeros(max(len(self), 2 * (0 if self._dead is None else len(self._dead))), bool)
            if self._dead is not None:
                grown[: len(self._dead)] = self._dead
            self._dead = grown
        self._dead[positions] = True
        self.num_removed += len(positions)

    def _hash_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sorted 64-bit hashes of the mapped ids with their positions: 16 bytes an id, built on first use."""
        if self._hashes is None:
            hashes = np.empty(self._mapped, np.int64)
            for start in range(0, self._mapped, _SLICE):
                bounds = self._offsets[start : min(start + _SLICE, self._mapped) + 1].tolist()
                for row in range(len(bounds) - 1):
                    hashes[start + row] = hash(bytes(self._blob[bounds[row] : bounds[row + 1]]))
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order], order
        return self._hashes


class IdWriter:
    """Writes ids to an index directory as they come, holding 16 bytes an id."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._blob: IO[bytes] = open(directory / BLOB, "wb")
        self._offsets = array("q", [0])
        self._hashes = array("q")

    def __len__(self) -> int:
        return len(self._hashes)

    def append(self, ids: Iterable[str]) -> None:
        """Write `ids` at the next positions."""
        end = self._offsets[-1]
        encoded = [_encode(value) for value in ids]
        for value in encoded:
            end += len(value)
            self._offsets.append(end)
            self._hashes.append(hash(value))
        self._blob.write(b"".join(encoded))

    def close(self, *, distinct: bool = True) -> None:
        """Finish both files. Raises DataError naming an id that was written twice, if they must be `distinct`."""
        self._blob.close()
        np.save(self._directory / OFFSETS, np.frombuffer(self._offsets, np.int64))
        if not distinct:
            return
        hashes = np.sort(np.frombuffer(self._hashes, np.int64))
        repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        if repeated:
            suspects = np.flatnonzero(np.isin(np.frombuffer(self._hashes, np.int64), list(repeated)))
            # Equal hashes of different ids are possible; check_ids compares the ids themselves.
            check_ids(IdTable.open(self._directory).take(suspects), len(suspects))

    def abort(self) -> None:
        """Close the file handles without finishing."""
        self._blob.close()

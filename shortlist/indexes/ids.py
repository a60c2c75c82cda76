"""String ids of an index: a table from position to id and back, memory-mapped, look-up in constant time both ways.

In each directory the ids are one UTF-8 blob (`ids.utf8`) and an int64 array of `count + 1` offsets (`ids.offsets.npy`),
so that ids may hold spaces and line breaks and any id is read without reading the others; and a hash table
(`ids.buckets.npy`, `ids.order.npy`, see `hashing.py`), so that opening a hundred million ids reads none of them.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError, MissingInputError
from shortlist.indexes.arrays import ArrayWriter, map_array
from shortlist.indexes.hashing import Encoded, Hashes, bucket_bits, encode, hash_encoded, ragged
from shortlist.types import string_id

if TYPE_CHECKING:
    import pyarrow as pa

BLOB, OFFSETS = "ids.utf8", "ids.offsets.npy"
BUCKETS, ORDER = "ids.buckets.npy", "ids.order.npy"
_HASHES = "ids.hashes.tmp"  # while writing

_SLICE = 65_536
_FEW = 64  # ids up to which a loop is faster than Arrow
_CANDIDATES = 1 << 21  # candidates of a look-up that are compared together
_SORTED = 4 << 20  # hashes that are sorted together while writing: about 130 MB

Positions = NDArray[np.int64]


def check_ids(ids: Iterable[Any] | str, expected: int) -> list[str]:
    """`ids` as a list of `expected` distinct, non-empty strings.

    Raises:
        DataError: wrong number, an empty id, one that is not valid Unicode, or one given twice; the id is named.
    """
    if not isinstance(ids, Iterable):
        raise DataError(f"ids are a {type(ids).__name__}; expected a list of strings.")
    checked = [ids] if isinstance(ids, str) else [v if type(v) is str else string_id(v, "document") for v in ids]
    if len(checked) != expected:
        raise DataError(f"{len(checked)} ids for {expected} vectors; one id a vector is expected.")
    if "" in checked:
        raise DataError(f"the id at position {checked.index('')} is empty; every document needs a non-empty id.")
    if len(set(checked)) != len(checked):
        seen: set[str] = set()
        repeated = next(value for value in checked if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise DataError(f"id {repeated!r} is given twice in one call; ids must be distinct.")
    if not "".join(checked).isascii():
        for value in checked:
            encode(value)
    return checked


class _Part:
    """The ids of one directory, memory-mapped; positions count from 0."""

    def __init__(self, directory: Path):
        self.directory = directory
        offsets, blob = directory / OFFSETS, directory / BLOB
        self.offsets: Positions = map_array(offsets)
        self.count = len(self.offsets) - 1
        size = blob.stat().st_size
        if self.count < 0 or int(self.offsets[-1]) != size:
            raise DataError(f"{blob} has {size} bytes, which is not what {OFFSETS} ends at; build it again.")
        with open(blob, "rb") as handle:
            self._blob: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._bounds = memoryview(self.offsets)  # type: ignore[arg-type]
        self.buckets: NDArray[Any] | None = None
        if (directory / BUCKETS).is_file() and (directory / ORDER).is_file():
            self.buckets, self.order = map_array(directory / BUCKETS), map_array(directory / ORDER)
            if len(self.order) != self.count or len(self.buckets) != (1 << bucket_bits(self.count)) + 1:
                raise DataError(f"{directory / ORDER} is the hash table of other ids than {OFFSETS}; build it again.")

    def few(self, positions: Iterable[int]) -> list[str]:
        """The ids at some positions, in the way that is fastest for few."""
        blob, bounds = self._blob, self._bounds
        return [blob[bounds[position] : bounds[position + 1]].decode() for position in positions]

    def many(self, positions: Positions) -> list[str]:
        """The ids at many positions."""
        import pyarrow as pa

        # pa.array and to_numpy would import pandas, which takes longer than most searches.
        places = np.ascontiguousarray(positions, np.int64)
        wanted = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])
        strings: list[str] = self.array().take(wanted).to_pylist()
        return strings

    def take(self, positions: Positions) -> list[str]:
        """The ids at `positions`."""
        return self.few(positions.tolist()) if len(positions) <= _FEW else self.many(positions)

    def array(self) -> pa.LargeStringArray:
        """All ids as an Arrow array over the mapped files."""
        import pyarrow as pa

        return pa.LargeStringArray.from_buffers(self.count, pa.py_buffer(self.offsets), pa.py_buffer(self._blob))

    def find(self, wanted: Encoded, hashes: Hashes, rows: Positions, alive: NDArray[np.bool_] | None) -> Any:
        """Rows of `wanted` (out of `rows`) that are here, and the position of each."""
        if self.buckets is None:
            raise MissingInputError(
                f"{self.directory / BUCKETS} is missing, so no id can be looked up; build it again."
            )
        bits = np.uint64(64 - bucket_bits(self.count))
        bucket = (hashes[rows] >> bits).astype(np.int64)
        first = self.buckets[bucket].astype(np.int64)
        counts = self.buckets[bucket + 1].astype(np.int64) - first
        if len(rows) > 1 and int(counts.sum()) > _CANDIDATES:
            half = len(rows) // 2
            parts = [self.find(wanted, hashes, some, alive) for some in (rows[:half], rows[half:])]
            return tuple(np.concatenate(pair) for pair in zip(*parts, strict=True))
        rows = np.repeat(rows, counts)
        places = self.order[ragged(first, counts)].astype(np.int64)
        likely = self.offsets[places + 1] - self.offsets[places] == wanted.lengths[rows]
        if alive is not None:
            likely &= alive[places]
        rows, places = rows[likely], places[likely]
        ours = self.take(places)
        equal = [row for row, value in enumerate(map(wanted.ids.__getitem__, rows.tolist())) if value == ours[row]]
        return rows[equal], places[equal]


class IdTable:
    """Ids by position, positions by id, and which positions were removed.

    Positions are stable: a removed one is marked, never reused, until the index is compacted. `version` changes with
    every change of the table.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._starts: list[int] = []
        self._mapped = 0
        self._tail: NDArray[np.object_] = np.empty(0, object)  # with room to grow
        self._used = 0
        self._tail_positions: dict[str, int] = {}
        self._alive: NDArray[np.bool_] | None = None  # with room to grow
        self.num_removed = 0
        self.version = 0

    @classmethod
    def open(cls, directories: Path | Sequence[Path], removed: NDArray[np.bool_] | None = None) -> IdTable:
        """The table stored in one directory or in several, whose positions follow one another.

        `removed` is True where a position was removed, `(positions,)`.

        Raises:
            DataError: files that do not belong together, or a mask of another length.
        """
        table = cls()
        for directory in [directories] if isinstance(directories, Path) else directories:
            table._starts.append(table._mapped)
            table._parts.append(_Part(directory))
            table._mapped += table._parts[-1].count
        if removed is not None:
            if len(removed) != table._mapped:
                raise DataError(f"{len(removed)} marks of removal for {table._mapped} ids; build the index again.")
            table.num_removed = int(np.count_nonzero(removed))
            table._alive = ~removed if table.num_removed else None
        return table

    def __len__(self) -> int:
        """Number of positions, removed ones included."""
        return self._mapped + self._used

    @property
    def num_present(self) -> int:
        """Number of ids that are there."""
        return len(self) - self.num_removed

    def __iter__(self) -> Iterator[str]:
        """The ids that are there, by position."""
        for start in range(0, len(self), _SLICE):
            yield from self.take(self.present(start, min(start + _SLICE, len(self))))

    def alive(self) -> NDArray[np.bool_] | None:
        """True where a position was not removed, `(positions,)`; None if nothing was removed. Not to be written to."""
        if self._alive is None:
            return None
        return self._cover(len(self))[: len(self)]

    def present(self, start: int, stop: int) -> Positions:
        """Positions from `start` to `stop` that were not removed."""
        alive = self.alive()
        return np.arange(start, stop) if alive is None else start + np.flatnonzero(alive[start:stop])

    def removed_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """True where a position from `start` to `stop` was removed; None if none was."""
        alive = self.alive()
        if alive is None or alive[start:stop].all():
            return None
        return ~alive[start:stop]

    def removed_positions(self) -> Positions:
        """All removed positions, ascending."""
        alive = self.alive()
        return np.zeros(0, np.int64) if alive is None else np.flatnonzero(~alive)

    def take(self, positions: Positions) -> list[str]:
        """The ids at `positions`."""
        if not self._mapped:
            return self._tail[positions].tolist()
        if len(self._parts) == 1 and not self._used:
            return self._parts[0].take(positions)
        if len(positions) <= _FEW:
            return self._take_few(positions.tolist())
        taken = np.empty(len(positions), object)
        # Part by part, the tail last.
        owner = np.searchsorted(self._starts, np.minimum(positions, self._mapped), side="right") - 1
        owner[positions >= self._mapped] = len(self._parts)
        for number in np.unique(owner).tolist():
            rows = np.flatnonzero(owner == number)
            if number == len(self._parts):
                taken[rows] = self._tail[positions[rows] - self._mapped]
            else:
                taken[rows] = self._parts[number].many(positions[rows] - self._starts[number])
        return taken.tolist()

    def _take_few(self, positions: list[int]) -> list[str]:
        starts, mapped, taken = self._starts, self._mapped, []
        for position in positions:
            if position >= mapped:
                taken.append(self._tail[position - mapped])
            else:
                number = bisect_right(starts, position) - 1
                taken.extend(self._parts[number].few((position - starts[number],)))
        return taken

    def column(self) -> Iterator[tuple[int, pa.LargeStringArray]]:
        """All ids as Arrow arrays, each with the position where it begins; removed ones included."""
        import pyarrow as pa

        for start, part in zip(self._starts, self._parts, strict=True):
            yield start, part.array()
        if self._used:
            yield self._mapped, pa.array(self._tail[: self._used], pa.large_string())

    def find(self, ids: Sequence[str]) -> Positions:
        """Position of each of `ids`, −1 where it is not there."""
        known = self._tail_positions
        if known:
            found = np.fromiter((known.get(value, -1) for value in ids), np.int64, len(ids))
        else:
            found = np.full(len(ids), -1, np.int64)
        if self._mapped:
            alive = self.alive()
            for start in range(0, len(ids), _SLICE):
                wanted = Encoded(ids[start : start + _SLICE])
                hashes = hash_encoded(wanted)
                part_found = found[start : start + _SLICE]
                for first, part in zip(self._starts, self._parts, strict=True):
                    missing = np.flatnonzero(part_found < 0)
                    if not len(missing):
                        break
                    mask = None if alive is None else alive[first : first + part.count]
                    rows, places = part.find(wanted, hashes, missing, mask)
                    part_found[rows] = places + first
        return found

    def append(self, ids: Sequence[str]) -> None:
        """Add `ids` at the next positions; the caller has checked that none of them is there."""
        first, used = len(self), self._used + len(ids)
        if used > len(self._tail):
            grown = np.empty(max(used, 2 * len(self._tail)), object)
            grown[: self._used] = self._tail[: self._used]
            self._tail = grown
        self._tail[self._used : used] = ids
        self._used = used
        self._tail_positions.update(zip(ids, range(first, first + len(ids)), strict=True))
        self.version += 1

    def remove(self, positions: Positions) -> None:
        """Mark `positions`, which must be there, as removed."""
        if not len(positions):
            return
        for value in self._tail[positions[positions >= self._mapped] - self._mapped].tolist():
            del self._tail_positions[value]
        self._cover(len(self))[positions] = False
        self.num_removed += len(positions)
        self.version += 1

    def _cover(self, length: int) -> NDArray[np.bool_]:
        """The mask of what is alive, made at least `length` long."""
        alive = np.ones(length, bool) if self._alive is None else self._alive
        if len(alive) < length:
            alive = np.concatenate([alive, np.ones(max(length - len(alive), len(alive)), bool)])
        self._alive = alive
        return alive


class IdWriter:
    """Writes ids to an index directory as they come, with bounded memory however many there are."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._blob: IO[bytes] = open(directory / BLOB, "wb")
        self._hashes: IO[bytes] = open(directory / _HASHES, "wb")
        self._offsets = ArrayWriter(directory / OFFSETS, np.int64)
        self._offsets.append(np.zeros(1, np.int64))
        self._end = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, ids: Iterable[str]) -> None:
        """Write `ids` at the next positions."""
        ids = list(ids)
        for start in range(0, len(ids), _SLICE):
            encoded = Encoded(ids[start : start + _SLICE])
            self._blob.write(encoded.blob)
            self._hashes.write(hash_encoded(encoded).astype("<u8", copy=False).data)
            self._offsets.append(encoded.stops + self._end)
            self._end += encoded.size

    def close(self, *, distinct: bool = True) -> None:
        """Finish all files. Raises DataError naming an id that was written twice, if they must be `distinct`."""
        for handle in (self._blob, self._hashes, self._offsets):
            handle.close()
        file, count = self._directory / _HASHES, len(self)
        hashes: Hashes = np.asarray(np.memmap(file, "<u8", "r")) if count else np.zeros(0, np.uint64)
        suspects = _write_table(self._directory, hashes)
        del hashes
        file.unlink()
        if distinct and len(suspects):
            _refuse_repeated(suspects, IdTable.open(self._directory).take(suspects))

    def abort(self) -> None:
        """Close the file handles without finishing."""
        self._blob.close()
        self._hashes.close()
        self._offsets.abort()
        (self._directory / _HASHES).unlink(missing_ok=True)


def _write_table(directory: Path, hashes: Hashes) -> Positions:
    """Write the hash table of `hashes` `(ids,)`; returns the positions whose hash is that of another one.

    Sorted range of hashes by range of hashes, each small enough for memory, reading all of them for each range.
    """
    count = len(hashes)
    bits = bucket_bits(count)
    ranges = min(bits, max(0, (count - 1) // _SORTED).bit_length())
    dtype = np.uint32 if count < 2**32 else np.int64
    buckets, order = ArrayWriter(directory / BUCKETS, dtype), ArrayWriter(directory / ORDER, dtype)
    buckets.append(np.zeros(1, dtype))
    suspects = []
    for number in range(1 << ranges):
        chosen = _in_range(hashes, number, ranges)
        values = hashes[chosen]
        ranked = np.argsort(values, kind="stable")
        values, chosen = values[ranked], chosen[ranked]
        equal = np.flatnonzero(values[1:] == values[:-1])
        suspects.append(chosen[np.union1d(equal, equal + 1)])
        local = (values >> np.uint64(64 - bits)).astype(np.int64) - (number << bits - ranges)
        sizes = np.bincount(local, minlength=1 << bits - ranges)
        buckets.append(np.cumsum(sizes) + len(order))
        order.append(chosen)
    buckets.close()
    order.close()
    return np.sort(np.concatenate(suspects))


def _in_range(hashes: Hashes, number: int, bits: int) -> Positions:
    """The positions of the hashes whose top `bits` are `number`."""
    if not bits:
        return np.arange(len(hashes))
    step = 16 * _SLICE
    return np.concatenate(
        [
            start + np.flatnonzero(hashes[start : start + step] >> np.uint64(64 - bits) == number)
            for start in range(0, len(hashes), step)
        ]
    )


def _refuse_repeated(positions: Positions, ids: list[str]) -> None:
    """DataError for the first id that comes again; equal hashes of different ids are possible and fine."""
    first: dict[str, int] = {}
    for position, value in zip(positions.tolist(), ids, strict=True):
        if value in first:
            raise DataError(
                f"id {value!r} is given twice, as document {first[value] + 1:,} and {position + 1:,}; ids must be "
                "distinct."
            )
        first[value] = position

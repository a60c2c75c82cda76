"""Float32 vectors as a list of blocks: memory-mapped shards first, then blocks with room to grow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

Vectors = NDArray[np.float32]

_ROOM = 4096  # least room of a block of added vectors


@dataclass(frozen=True)
class Block:
    """Consecutive documents of an index: positions `(docs,)`, ids, and float32 vectors `(docs, dim)`."""

    positions: NDArray[np.int64]
    ids: list[str]
    vectors: Vectors


class VectorBlocks:
    """Vectors `(n, dim)` by position that are appended to and never moved.

    Args:
        dim: length of a vector.
    """

    def __init__(self, dim: int):
        self.dim = dim
        self._blocks: list[Vectors] = []
        self._starts: list[int] = []  # position of the first row of each block
        self._size = 0
        self._growing = 0  # blocks from here on are ours to write to

    def __len__(self) -> int:
        return self._size

    def views(self) -> Iterator[Vectors]:
        """The vectors in order, as views of at most one shard or block each."""
        stops = [*self._starts[1:], self._size][: len(self._blocks)]
        for block, start, stop in zip(self._blocks, self._starts, stops, strict=True):
            yield block[: stop - start]

    def append(self, vectors: Vectors) -> None:
        """Keep a copy of `vectors` `(docs, dim)` at the next positions."""
        done = 0
        if len(self._blocks) > self._growing:
            block, used = self._blocks[-1], self._size - self._starts[-1]
            done = min(len(block) - used, len(vectors))
            block[used : used + done] = vectors[:done]
        if done < len(vectors):
            # Each new block has room for as many rows as all before it: few blocks, and no row is ever moved.
            room = max(len(vectors) - done, min(self._size, 1 << 18), _ROOM)
            block = np.empty((room, self.dim), np.float32)
            block[: len(vectors) - done] = vectors[done:]
            self._blocks.append(block)
            self._starts.append(self._size + done)
        self._size += len(vectors)

    def add_shards(self, paths: Iterable[Path]) -> None:
        """Map the `.npy` files at `paths` as the next blocks. Raises DataError for one that holds something else."""
        for path in paths:
            self._hold(map_vectors(path, self.dim))

    def extend(self, other: VectorBlocks) -> None:
        """Hold the blocks of `other` at the next positions, without copying; `other` must not be appended to."""
        for block in other.views():
            self._hold(block)

    def _hold(self, block: Vectors) -> None:
        if len(block):
            self._blocks.append(block)
            self._starts.append(self._size)
            self._size += len(block)
        self._growing = len(self._blocks)

    def at(self, positions: NDArray[np.int64]) -> Vectors:
        """A copy of the vectors `(n, dim)` at `positions`, in any order; all must be below `len`."""
        if len(self._blocks) == 1:
            return self._blocks[0][positions]
        out = np.empty((len(positions), self.dim), np.float32)
        owner = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(owner).tolist():
            mine = np.flatnonzero(owner == number)
            out[mine] = self._blocks[number][positions[mine] - self._starts[number]]
        return out

    def holding(self, positions: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.int64], Vectors]]:
        """The blocks that hold some of `positions`, with where those are and their rows in it; −1 is held by none.

        Rows are counted from the block's first; those of positions outside it mean nothing.
        """
        owner = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(owner).tolist():
            if number >= 0:
                yield owner == number, positions - self._starts[number], self._blocks[number]

    def sample(self, count: int) -> Vectors:
        """A copy of `count` vectors drawn evenly over all positions; all of them if there are fewer."""
        if count >= self._size:
            return self.at(np.arange(self._size))
        return self.at(np.linspace(0, self._size - 1, count).astype(np.int64))

    def between(self, start: int, stop: int) -> Iterator[Vectors]:
        """The vectors at positions from `start` to `stop`, as views."""
        for block, first in zip(self.views(), self._starts, strict=True):
            low, high = max(start - first, 0), min(stop - first, len(block))
            if low < high:
                yield block[low:high]


def map_vectors(path: Path, dim: int) -> Vectors:
    """The float32 vectors `(n, dim)` of a `.npy` file, memory-mapped. Raises DataError if it holds something else.

    Copy-on-write mapping: torch wants a writable array, and nothing here writes, so no page is ever copied.
    """
    try:
        shard = np.load(path, mmap_mode="c", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is not a readable .npy file ({error}); build the index again.") from None
    if shard.dtype != np.float32 or shard.ndim != 2 or shard.shape[1] != dim:
        raise DataError(
            f"{path} holds {shard.dtype} {shard.shape}, expected float32 (documents, {dim}); build the index again."
        )
    # A plain array over the mapping: slicing a memmap costs several times as much.
    return shard.view(np.ndarray)

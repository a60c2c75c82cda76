"""Segments of an index directory: writing one from a stream, and opening the vectors of several."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shortlist.errors import DataError
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.documents import DocumentWriter
from shortlist.indexes.ids import IdWriter

if TYPE_CHECKING:
    from typing_extensions import Self

SHARD_BYTES = 64 << 20
SHARDS = "vectors-"


class ShardWriter:
    """Writes vectors given in blocks of any size as `.npy` shards of equal size, holding one shard in memory."""

    def __init__(self, directory: Path, dim: int):
        self._directory = directory
        self._dim = dim
        self._buffer = np.empty((max(1, SHARD_BYTES // (4 * dim)), dim), np.float32)
        self._used = 0
        self.names: list[str] = []

    def append(self, vectors: Vectors) -> None:
        """Write `vectors` `(docs, dim)` at the next positions."""
        start = 0
        while start < len(vectors):
            take = min(len(vectors) - start, len(self._buffer) - self._used)
            self._buffer[self._used : self._used + take] = vectors[start : start + take]
            self._used += take
            start += take
            if self._used == len(self._buffer):
                self._flush()

    def adopt(self, file: Path) -> None:
        """Make the whole `.npy` file at `file` the next shard, as a hard link where possible."""
        self._flush()
        target = self._next()
        try:
            os.link(file, target)
        except OSError:
            shutil.copyfile(file, target)

    def close(self) -> list[str]:
        """Write what is left; returns the shard names in order."""
        self._flush()
        return self.names

    def _flush(self) -> None:
        if self._used:
            np.save(self._next(), self._buffer[: self._used])
            self._used = 0

    def _next(self) -> Path:
        self.names.append(f"{SHARDS}{len(self.names):05d}.npy")
        return self._directory / self.names[-1]


class SegmentWriter:
    """Writes ids, vectors and documents of a segment as they come, with bounded memory.

    Args:
        folder: empty directory of the segment.
        dim: length of a vector.
        documents: whether documents are stored.
    """

    def __init__(self, folder: Path, dim: int, *, documents: bool):
        self.folder = folder
        self._ids = IdWriter(folder)
        self.shards = ShardWriter(folder, dim)
        self.documents = DocumentWriter(folder) if documents else None

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: Sequence[str], vectors: Vectors | None = None) -> None:
        """Write `ids`, and `vectors` `(ids, dim)` unless they went to `shards`, at the next positions."""
        self._ids.append(ids)
        if vectors is not None:
            self.shards.append(vectors)

    def close(self, *, distinct: bool) -> None:
        """Finish all files. Raises DataError naming an id that came twice, if they must be `distinct`."""
        self.shards.close()
        self._ids.close(distinct=distinct)
        if self.documents is not None:
            self.documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._ids.abort()
            if self.documents is not None:
                self.documents.abort()


def open_vectors(
    directory: Path, segments: Iterable[Mapping[str, Any]], files: Iterable[str], dim: int
) -> VectorBlocks:
    """The float32 shards of `segments`, mapped. Raises DataError where they hold more or fewer than their ids."""
    blocks = VectorBlocks(dim)
    shards = sorted(name for name in files if name.partition("/")[2].startswith(SHARDS))
    for segment in segments:
        before = len(blocks)
        blocks.add_shards(directory / name for name in shards if name.startswith(f"{segment['name']}/"))
        if len(blocks) - before != segment["count"]:
            raise DataError(
                f"{directory / segment['name']} holds {len(blocks) - before} vectors for {segment['count']} ids; "
                "build the index again."
            )
    return blocks


def shards_of(folder: Path, dim: int) -> VectorBlocks:
    """The float32 shards in the directory of one segment, mapped."""
    blocks = VectorBlocks(dim)
    blocks.add_shards(sorted(folder.glob(f"{SHARDS}*.npy")))
    return blocks


def write_span(
    folder: Path,
    *,
    dim: int,
    positions: Iterable[Any],
    take_ids: Callable[[Any], list[str]],
    take_vectors: Callable[[Any], Vectors] | None,
    take_line: Callable[[int], bytes] | None,
    distinct: bool,
) -> int:
    """Write a segment of what stands at `positions`, given in slices; returns how many there are."""
    with SegmentWriter(folder, dim, documents=take_line is not None) as writer:
        for part in positions:
            writer.append(take_ids(part), take_vectors(part) if take_vectors is not None else None)
            if writer.documents is not None and take_line is not None:
                for position in part.tolist():
                    writer.documents.append_line(take_line(position))
        writer.close(distinct=distinct)
    return len(writer)

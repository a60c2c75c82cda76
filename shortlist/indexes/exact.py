"""Exact search with torch on any device: every score is computed, in chunks within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.devices import resolve_device
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.topk import TopK

_QUERIES = 1024  # queries scored together
_CPU_SCORES = 4 << 20  # scores of one chunk; 16 MB stay in cache between the product and the filter
_DEVICE_SCORES = 128 << 20
# Matrix products add up in another order in the last columns of a width that fills no whole tile. With widths of
# whole tiles equal vectors get equal scores wherever they stand, so that the tie rule can order them.
_EQUAL_WIDTH = 64


class ExactIndex(VectorIndex):
    """Exact inner-product search over float32 vectors, in memory or memory-mapped, on CPU, CUDA or MPS.

    The default kind: nothing to tune, add and remove at once, results equal to a full sort under the package's tie
    rule. Scanning costs docs × dim multiplications a query; prefer an approximate `FaissIndex` when that is too slow.

    Args:
        dim: length of a vector.
        metric: "ip", the inner product; cosine when the vectors are normalised.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
    """

    kind = "exact"
    _only_vectors = True
    metrics = ("ip",)

    def __init__(self, dim: int, *, metric: str = "ip", device: str = "auto"):
        super().__init__(dim, metric=metric)
        self.device = resolve_device(device)
        self._vectors = VectorBlocks(self.dim)
        self._base = self._vectors  # what was opened as the base: the tail is held beside it

    def vectors(self) -> Iterator[NDArray[np.float32]]:
        """The stored vectors in order, removed ones included, as views of at most one shard each."""
        return self._vectors.views()

    def _append(self, vectors: Vectors) -> None:
        self._vectors.append(vectors)

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        return self._vectors.at(positions)

    def _base_size(self) -> int:
        return len(self._base)

    def _scan(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        parts = [
            self._scan_block(queries[start : start + _QUERIES], k, allowed)
            for start in range(0, len(queries), _QUERIES)
        ]
        positions, scores, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
        return positions, scores, counts

    @torch.inference_mode()
    def _scan_block(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        left = torch.from_numpy(queries).to(self.device)
        budget = _CPU_SCORES if self.device.type == "cpu" else _DEVICE_SCORES
        room = torch.empty(max(budget, _EQUAL_WIDTH * len(queries)), dtype=torch.float32, device=self.device)
        best = TopK(len(queries), k, self._ids.take)
        for offset, chunk in self._chunks(max(_EQUAL_WIDTH, budget // len(queries) // _EQUAL_WIDTH * _EQUAL_WIDTH)):
            size = len(chunk)
            right = torch.from_numpy(chunk if not size % _EQUAL_WIDTH else _padded(chunk)).to(self.device)
            scores = room[: len(queries) * len(right)].view(len(queries), len(right))
            torch.mm(left, right.T, out=scores)
            scores[:, size:] = -torch.inf
            if allowed is not None and not (here := allowed[offset : offset + size]).all():
                scores[:, :size][:, torch.from_numpy(~here).to(self.device)] = -torch.inf
            best.add(*_candidates(scores, best, offset))
        return best.finish()

    def _chunks(self, size: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Offset and vectors of pieces of at most `size`, a multiple of _EQUAL_WIDTH but for the tail of a block."""
        offset = 0
        for vectors in self.vectors():
            even = len(vectors) // _EQUAL_WIDTH * _EQUAL_WIDTH
            for start in range(0, even, size):
                yield offset + start, vectors[start : min(start + size, even)]
            if even < len(vectors):
                yield offset + even, vectors[even:]
            offset += len(vectors)

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        if vectors is not None:
            self._base = self._vectors = vectors

    def _open_tail(self, blocks: VectorBlocks) -> None:
        vectors = VectorBlocks(self.dim)
        vectors.extend(self._base)
        vectors.extend(blocks)
        self._vectors = vectors

    def _clear(self) -> None:
        self._base = self._vectors = VectorBlocks(self.dim)

    def _build_base(self, vectors: VectorBlocks) -> None:
        self._base = self._vectors = vectors


def _padded(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tail of a block with rows of zeros up to _EQUAL_WIDTH."""
    return np.pad(vectors, ((0, _EQUAL_WIDTH - len(vectors)), (0, 0)))


def _candidates(
    scores: torch.Tensor, best: TopK, offset: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Rows, positions and scores of what may still enter the top k, from a block of scores `(queries, docs)`."""
    thresholds = torch.from_numpy(best.thresholds).to(scores.device)
    if not best.filled and scores.shape[1] > best.k:
        thresholds = torch.maximum(thresholds, _kth_bound(scores, best.k))
    if scores.device.type == "cpu":
        # numpy finds the few hits of a large comparison several times faster than torch does on a CPU.
        block = scores.numpy()
        flat = _hits(block >= thresholds.numpy()[:, None])
        values = block.reshape(-1)[flat]
    else:
        found = (scores >= thresholds[:, None]).view(-1).nonzero().view(-1)
        flat, values = found.cpu().numpy(), scores.view(-1)[found].cpu().numpy()
    rows, columns = np.divmod(flat, scores.shape[1])
    return rows, columns + offset, values


def _kth_bound(scores: torch.Tensor, k: int) -> torch.Tensor:
    """A score that at least `k` of each row reach, `(queries,)`: exact for large k, else a close lower bound.

    The k-th best of the maxima of 16 columns each costs a fraction of the k-th best of all columns.
    """
    groups = scores.view(len(scores), 16, -1).amax(dim=1)
    return (groups if groups.shape[1] >= k else scores).topk(k, dim=1, sorted=False).values.amin(dim=1)


def _hits(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Flat positions of the few True in a mask whose size is a multiple of 8, looking at 8 at a time."""
    words = np.flatnonzero(mask.reshape(-1).view(np.uint64) != 0)
    inside = np.flatnonzero(mask.reshape(-1, 8)[words])
    return words[inside >> 3] * 8 + (inside & 7)

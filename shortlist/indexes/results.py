"""Lists of results as arrays `(queries, k)`: cutting, merging, and scoring them again from the vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.scan import Found
from shortlist.indexes.topk import TakeIds, sort_rows

_GATHERED = 1 << 14  # vectors scored again at a time; 16 MB at 256 dimensions


def cut(positions: NDArray[np.int64], scores: Vectors, counts: NDArray[np.int64], k: int) -> Found:
    """The first `k` of ranked lists; −1 in the places that hold nothing."""
    positions, scores = positions[:, :k], scores[:, :k]
    if (counts < k).any():
        positions[scores == -np.inf] = -1
    return np.ascontiguousarray(positions), np.ascontiguousarray(scores), np.minimum(counts, k)


def merged(parts: list[Found], k: int, take_ids: TakeIds) -> Found:
    """The `k` best over several ranked lists of the same queries."""
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([part[0] for part in parts], axis=1)
    scores = np.concatenate([part[1] for part in parts], axis=1)
    return cut(*sort_rows(positions, scores, take_ids), k)


def to_front(scores: Vectors, positions: NDArray[np.int64], *, descending: bool) -> tuple[Vectors, NDArray[np.int64]]:
    """Results in their order with those that are not there (−1) behind them."""
    order = np.argsort(positions < 0, axis=1, kind="stable")
    scores, positions = np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)
    scores[positions < 0] = -np.inf if descending else np.inf
    return scores, positions


def rescored(queries: Vectors, found: NDArray[np.int64], vectors: VectorBlocks, *, metric: str) -> Vectors:
    """Scores of `found` `(queries, candidates)` from their float32 vectors; −inf where there is none (−1)."""
    scores = np.empty(found.shape, np.float32)
    step = max(1, _GATHERED // found.shape[1])
    for start in range(0, len(found), step):
        part = found[start : start + step]
        theirs = vectors.at(np.maximum(part, 0).reshape(-1)).reshape(*part.shape, vectors.dim)
        own = queries[start : start + step]
        if metric == "l2":
            theirs -= own[:, None]
            np.negative(np.einsum("qkd,qkd->qk", theirs, theirs), out=scores[start : start + step])
        else:
            np.einsum("qkd,qd->qk", theirs, own, out=scores[start : start + step])
    scores[found < 0] = -np.inf
    return scores

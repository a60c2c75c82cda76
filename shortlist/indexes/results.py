"""Lists of results as arrays `(queries, k)`: cutting, merging, and scoring them again from the vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.scan import Found
from shortlist.indexes.topk import TakeIds, sort_rows


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


def rescored(faiss: Any, queries: Vectors, found: NDArray[np.int64], vectors: VectorBlocks, *, metric: str) -> Vectors:
    """Scores of `found` `(queries, candidates)` from their float32 vectors; −inf where there is none (−1).

    faiss reads the vectors where they lie, with all its threads; a pair has one score whatever is beside it.
    """
    worst = np.float32(np.inf if metric == "l2" else -np.inf)
    compare = faiss.fvec_L2sqr_by_idx if metric == "l2" else faiss.fvec_inner_products_by_idx
    queries = np.ascontiguousarray(queries)
    scores, part = np.full(found.shape, worst), np.empty(found.shape, np.float32)
    for inside, rows, block in vectors.holding(found):
        places = np.where(inside, rows, -1)
        compare(*map(faiss.swig_ptr, (part, queries, block, places)), vectors.dim, len(queries), found.shape[1])
        np.copyto(scores, part, where=inside)
    return -scores if metric == "l2" else scores

"""What a search does whatever the kind: which positions it may return, and that `k` come wherever `k` may.

A kind scans in its own way. Two cases are scanned exactly instead: a filter that leaves few documents, where going
through a graph or through clusters would find too few of them; and the queries for which the kind came back with
less than it could have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.indexes.blocks import Vectors
from shortlist.indexes.filters import as_filter
from shortlist.indexes.scan import scan
from shortlist.indexes.topk import TopK

if TYPE_CHECKING:
    from shortlist.indexes.base import VectorIndex

Mask = NDArray[np.bool_]
Found = tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]

# Allowed documents up to which they are scanned one by one.
FEW, FEW_SHARE = 4096, 0.01
_SLICE = 65_536


def allowed_positions(index: VectorIndex, filter: Any) -> Mask | None:
    """Mask over all positions of what is there and passes `filter`; None if that is everything."""
    alive = index._ids.alive()
    if filter is None:
        return alive
    if isinstance(filter, np.ndarray) and filter.dtype == bool:
        if filter.shape != (len(index._ids),):
            raise ConfigError(f"the mask has shape {filter.shape}; expected one entry for each of {len(index._ids)}.")
        mask: Mask | None = filter
    else:
        chosen = as_filter(filter)
        mask = chosen.mask(index) if chosen is not None else None
    if mask is None or alive is None:
        return alive if mask is None else mask
    return mask & alive


def search_index(index: VectorIndex, queries: Vectors, k: int, allowed: Mask | None) -> Found:
    """Positions and scores `(queries, k)` of checked `queries`, ranked, and the number of entries of each query.

    `k` is at most the number of `allowed` positions; unused places hold −1 and −inf.
    """
    total = len(index._ids)
    count = total if allowed is None else int(np.count_nonzero(allowed))
    faithful = index.lossless or index._keeps_vectors
    if allowed is not None and faithful and not index._only_vectors and count <= max(FEW, int(FEW_SHARE * total)):
        return scan_exactly(index, queries, k, allowed)
    positions, scores, counts = index._scan(queries, k, allowed)
    short = np.flatnonzero(counts < k)
    if len(short):
        again = scan_exactly(index, queries[short], k, allowed)
        positions[short], scores[short], counts[short] = again
    return positions, scores, counts


def scan_exactly(
    index: VectorIndex,
    queries: Vectors,
    k: int,
    allowed: Mask | None,
    *,
    progress: Callable[[int], object] | None = None,
) -> Found:
    """The `k` best of the `allowed` positions by the scores of `index.vectors_at`, slice by slice.

    `progress` is called with the number of vectors of each slice.
    """
    everything = np.arange(len(index._ids)) if allowed is None else np.flatnonzero(allowed)
    if len(everything) <= _SLICE:
        positions, scores, counts = _scan_part(index, queries, k, everything)
        return positions, scores, counts
    best = TopK(len(queries), k, index._ids.take)
    for start in range(0, len(everything), _SLICE):
        part = everything[start : start + _SLICE]
        # The k best of every slice, by score and then id, hold the k best of all.
        positions, scores, _ = _scan_part(index, queries, min(k, len(part)), part)
        rows, columns = np.nonzero(scores > -np.inf)
        best.add(rows, positions[rows, columns], scores[rows, columns])
        if progress is not None:
            progress(len(part))
    return best.finish()


def _scan_part(index: VectorIndex, queries: Vectors, k: int, part: NDArray[np.int64]) -> Found:
    vectors = index._vectors_at(part)
    positions, scores, counts = scan(
        queries, k, [vectors], lambda found: index._ids.take(part[found]), metric=index.metric
    )
    return np.where(positions >= 0, part[positions], -1), scores, counts

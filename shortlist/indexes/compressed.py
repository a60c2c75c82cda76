"""Exact top k by way of compressed codes: a bound on their error says what must be scored again.

Let a = s·(q·c) be the score of a code and R the radius within which the float32 score of its vector lies. A document
whose a + R is below the k-th largest a − R of its query cannot be among its k best. What is left, a few more than k,
is scored from the float32 vectors by the same matrix product as an index without codes: the results are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.codes import Codes
from shortlist.indexes.scan import DeviceBlocks, Found, Mask, at_least, candidates, chunk_rows, chunks, padded
from shortlist.indexes.topk import TakeIds, TopK

_ROWS = 16_384  # vectors decoded or gathered at a time; 16 MB at 256 dimensions
_PAIRS = 1 << 14
_MAX_CANDIDATES = 8 << 20  # of one block of queries; beyond them a plain scan is cheaper
_UNIT = 2.0**-24
_SMALLEST = 2.0**-126  # normal float32: what is lost where a product or a factor below it becomes zero
# How far inputs are rounded by products at torch's reduced precisions.
_INPUT_ROUNDING = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-6}

Pairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]  # row, position, value


def slack(dim: int) -> float:
    """Relative error of a float32 inner product of `dim` terms in any order of summation, against ‖q‖·‖x‖.

    γ = d·u / (1 − d·u) with u = 2⁻²⁴ (Higham, 2002, section 3.1), and the rounding of inputs where torch was told to.
    """
    gamma = dim * _UNIT / (1 - dim * _UNIT) if dim * _UNIT < 0.5 else 1.0
    return gamma + _INPUT_ROUNDING[torch.get_float32_matmul_precision()]


@torch.inference_mode()
def scan_codes(
    queries: Vectors,
    k: int,
    codes: Codes,
    vectors: VectorBlocks,
    take_ids: TakeIds,
    *,
    allowed: Mask | None,
    held: DeviceBlocks,
) -> Found | None:
    """The results of `scan` over `vectors`, found through their `codes`; None where these cannot tell them apart.

    `held` keeps the codes on the device; vectors are read where they lie.
    """
    norms = _norms(queries)
    pairs = _bounded(queries, norms, k, codes, take_ids, allowed, held)
    if pairs is None:
        return None
    rows, positions = _sharpened(queries, norms, k, vectors, pairs)
    return _scored(queries, k, vectors, take_ids, rows, positions, held.device)


def _norms(vectors: Vectors) -> NDArray[np.float32]:
    """The lengths of `vectors`, rounded up; in float64, where no square is too small."""
    exact = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
    return np.nextafter((exact * (1 + 1e-10)).astype(np.float32), np.float32(np.inf))


def _bounded(
    queries: Vectors,
    norms: NDArray[np.float32],
    k: int,
    codes: Codes,
    take_ids: TakeIds,
    allowed: Mask | None,
    held: DeviceBlocks,
) -> Pairs | None:
    """All pairs whose upper bound reaches the k-th largest lower bound of their query; None if there are too many."""
    device = held.device
    left, left_norms = torch.from_numpy(queries).to(device), torch.from_numpy(norms).to(device)[:, None]
    size = min(chunk_rows(device, len(queries)), _ROWS)
    relative = 2 * slack(codes.dim) + 16 * _UNIT
    underflow = 4 * codes.dim * _SMALLEST
    lower = TopK(len(queries), k, take_ids)
    kept: list[Pairs] = []
    total, limit = 0, max(_MAX_CANDIDATES // 4, 4 * k * len(queries))
    for chunk, mask in chunks([len(block) for block in codes.codes], size, allowed):
        right = held.rows(2 * chunk.number, codes.codes[chunk.number], chunk.start, chunk.stop)
        bounds = held.rows(2 * chunk.number + 1, codes.bounds[chunk.number], chunk.start, chunk.stop)
        if chunk.inside is not None:
            inside = torch.from_numpy(chunk.inside).to(device)
            right, bounds = right[inside], bounds[inside]
        right, bounds = padded(codes.decoded(right)), padded(bounds)
        scale, residual, norm = bounds.unbind(dim=1)
        scores = (left @ right.T).mul_(scale)
        scores[:, chunk.size :] = -torch.inf
        if mask is not None:
            scores[:, : chunk.size][:, torch.from_numpy(~mask).to(device)] = -torch.inf
        radius = left_norms * (residual + relative * (norm + residual)) + underflow * (1 + norm)
        rows, columns, values = candidates(scores - radius, lower)
        lower.add(rows, chunk.positions(columns), values)
        rows, columns, values = at_least(scores.add_(radius), torch.from_numpy(lower.thresholds).to(device))
        kept.append((rows, chunk.positions(columns), values))
        total += len(rows)
        if total > limit:
            # Thresholds have risen since; what is below them now is dropped before more is gathered.
            kept = [_reaching(kept, lower.thresholds)]
            total = len(kept[0][0])
            if total > _MAX_CANDIDATES:
                return None
            limit = 2 * total + _MAX_CANDIDATES // 4
    lower.settle()
    return _reaching(kept, lower.thresholds)


def _reaching(kept: list[Pairs], thresholds: NDArray[np.float32]) -> Pairs:
    rows, positions, values = (np.concatenate(part) for part in zip(*kept, strict=True))
    keep = values >= thresholds[rows]
    return rows[keep], positions[keep], values[keep]


def _sharpened(
    queries: Vectors, norms: NDArray[np.float32], k: int, vectors: VectorBlocks, pairs: Pairs
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and positions of those of `pairs` that can still be among the k best once scored in float32."""
    rows, positions, _ = pairs
    scores = np.empty(len(rows), np.float32)
    radius = np.empty(len(rows), np.float32)
    relative = np.float32(2 * slack(vectors.dim) + 8 * _UNIT)
    # By position, so that vectors on disk are read in their order.
    order = np.argsort(positions, kind="stable")
    for start in range(0, len(order), _PAIRS):
        part = order[start : start + _PAIRS]
        found = vectors.at(positions[part])
        np.einsum("nd,nd->n", queries[rows[part]], found, out=scores[start : start + len(part)])
        radius[start : start + len(part)] = _norms(found)
    rows, positions = rows[order], positions[order]
    radius = norms[rows] * radius * np.float32(1.001) * relative + np.float32(4 * vectors.dim * _SMALLEST)
    lowest = scores - radius
    # The k-th largest lower bound of each row; every row has at least k pairs.
    ranked = np.lexsort((-lowest, rows))
    starts = np.searchsorted(rows[ranked], np.arange(len(queries)))
    threshold = lowest[ranked[np.minimum(starts + k - 1, len(ranked) - 1)]]
    keep = scores + radius >= threshold[rows]
    return rows[keep], positions[keep]


def _scored(
    queries: Vectors,
    k: int,
    vectors: VectorBlocks,
    take_ids: TakeIds,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    device: torch.device,
) -> Found:
    """The k best of the pairs by the scores that `scan` computes: the same queries times whole tiles of documents."""
    left = torch.from_numpy(queries).to(device)
    best = TopK(len(queries), k, take_ids)
    unique, column = np.unique(positions, return_inverse=True)
    order = np.argsort(column, kind="stable")
    bounds = np.searchsorted(column[order], np.arange(0, len(unique) + _ROWS, _ROWS))
    for number, start in enumerate(range(0, len(unique), _ROWS)):
        right = padded(torch.from_numpy(vectors.at(unique[start : start + _ROWS])).to(device))
        scores = left @ right.T
        part = order[bounds[number] : bounds[number + 1]]
        part = part[np.argsort(rows[part], kind="stable")]
        where = torch.from_numpy(rows[part]).to(device), torch.from_numpy(column[part] - start).to(device)
        best.add(rows[part], positions[part], scores[where].cpu().numpy())
    return best.finish()

"""Streaming exact top k over score blocks: bounded memory, ties at the boundary resolved by document id.

A block of scores `(queries, docs)` is first filtered against each query's k-th best score so far, which leaves
a handful of candidates after the first blocks; only those are merged. Candidates that *equal* the k-th score
are never dropped by position: they wait beside the list until the package's tie rule (`rank_order`) decides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.types import rank_order

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]
TakeIds = Callable[[Positions], list[str]]

_LOWEST = np.float32(np.finfo(np.float32).min)
_MAX_TIED = 1 << 22  # waiting ties before the tie rule is applied early; 64 MB


class TopK:
    """The `k` best positions of each query over blocks of scores given one after another.

    A score of −inf means "not a candidate" (a removed document); all others must be finite.
    """

    def __init__(self, queries: int, k: int, take_ids: TakeIds):
        self.k = k
        self._take_ids = take_ids
        self._scores = np.full((queries, k), -np.inf, np.float32)
        self._positions = np.full((queries, k), -1, np.int64)
        self._tied: list[tuple[Positions, Positions, Floats]] = []
        self._pending: list[tuple[Positions, Positions, Floats]] = []
        self._pending_size = 0

    @property
    def thresholds(self) -> Floats:
        """Per query the lowest score that can still enter, `(queries,)`; the lowest float while the list is short."""
        return np.maximum(self._scores.min(axis=1), _LOWEST)

    @property
    def filled(self) -> bool:
        """Whether every query has `k` entries, so that `thresholds` filters."""
        return bool((self._scores.min(axis=1) > -np.inf).all())

    def add(self, rows: Positions, positions: Positions, scores: Floats) -> None:
        """Offer candidates as flat arrays sorted by row; every score at or above its row's threshold must be there."""
        if len(rows):
            self._pending.append((rows, positions, scores))
            self._pending_size += len(rows)
        # A merge has a fixed cost: wait until it can raise the thresholds noticeably.
        if not self.filled or self._pending_size * 2 >= self._scores.size:
            self._merge()

    def settle(self) -> None:
        """Take in what was offered but waits, so that `thresholds` are those of everything offered."""
        self._merge()

    def finish(self) -> tuple[Positions, Floats, NDArray[np.int64]]:
        """Positions and scores `(queries, k)` in ranked order, and the number of entries of each query.

        Unused entries hold −1 and −inf; the index cuts them off before anything leaves it.
        """
        self._merge()
        self._resolve_ties()
        return sort_rows(self._positions, self._scores, self._take_ids)

    def _merge(self) -> None:
        if not self._pending:
            return
        rows, positions, scores = (np.concatenate(part) for part in zip(*self._pending, strict=True))
        if len(self._pending) > 1:
            order = np.argsort(rows, kind="stable")
            rows, positions, scores = rows[order], positions[order], scores[order]
        self._pending, self._pending_size = [], 0

        touched, first, counts = np.unique(rows, return_index=True, return_counts=True)
        local = np.repeat(np.arange(len(touched)), counts)
        column = self.k + np.arange(len(rows)) - np.repeat(first, counts)
        width = self.k + int(counts.max())
        pool = np.full((len(touched), width), -np.inf, np.float32)
        pool_positions = np.full((len(touched), width), -1, np.int64)
        pool[:, : self.k] = self._scores[touched]
        pool_positions[:, : self.k] = self._positions[touched]
        pool[local, column] = scores
        pool_positions[local, column] = positions

        # numpy's partition takes several times as long on short rows.
        best = torch.from_numpy(pool).topk(self.k, dim=1, sorted=False).indices.numpy()
        kept = np.take_along_axis(pool, best, axis=1)
        self._scores[touched] = kept
        self._positions[touched] = np.take_along_axis(pool_positions, best, axis=1)
        self._keep_tied(touched, pool, pool_positions, best, kept.min(axis=1))

    def _keep_tied(
        self, touched: Positions, pool: Floats, pool_positions: Positions, best: Positions, kth: Floats
    ) -> None:
        """Set aside what equals a k-th score but was not kept; forget waiting ties that are below it by now."""
        if self._tied:
            now = self._scores.min(axis=1)
            self._tied = [
                (rows[keep], positions[keep], scores[keep])
                for rows, positions, scores in self._tied
                if (keep := scores == now[rows]).any()
            ]
        left = pool == np.where(kth > -np.inf, kth, np.float32(np.nan))[:, None]
        np.put_along_axis(left, best, False, axis=1)
        local, column = np.nonzero(left)
        if len(local):
            self._tied.append((touched[local], pool_positions[local, column], pool[local, column]))
        if self._tied and sum(len(rows) for rows, _, _ in self._tied) > _MAX_TIED:
            self._resolve_ties()

    def _resolve_ties(self) -> None:
        """Let the tie rule choose among all documents that share a query's k-th score."""
        if not self._tied:
            return
        rows, positions = (np.concatenate(part) for part in list(zip(*self._tied, strict=True))[:2])
        self._tied = []
        affected = np.unique(rows)
        kth = self._scores[affected].min(axis=1)
        inside = self._scores[affected] == kth[:, None]
        own_row, own_column = np.nonzero(inside)
        rows = np.concatenate([rows, affected[own_row]])
        positions = np.concatenate([positions, self._positions[affected[own_row], own_column]])

        place, inverse = _places(positions, self._take_ids)
        order = np.lexsort((place[inverse], rows))
        rows, positions = rows[order], positions[order]
        starts = np.searchsorted(rows, affected)
        slots = inside.sum(axis=1)
        chosen = np.repeat(starts, slots) + np.arange(slots.sum()) - np.repeat(np.cumsum(slots) - slots, slots)
        self._positions[affected[own_row], own_column] = positions[chosen]


def sort_rows(positions: Positions, scores: Floats, take_ids: TakeIds) -> tuple[Positions, Floats, NDArray[np.int64]]:
    """Sort each row of `(queries, k)` by the tie rule; −inf entries go last and are not counted.

    Only entries that share their score with a neighbour need their ids; all of them are ordered in one pass.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    scores = np.take_along_axis(scores, order, axis=1)
    positions = np.take_along_axis(positions, order, axis=1)
    counts = (scores > -np.inf).sum(axis=1)
    ties = (scores[:, 1:] == scores[:, :-1]) & (scores[:, 1:] > -np.inf)
    if ties.any():
        tied = np.zeros(scores.shape, bool)
        tied[:, 1:] = ties
        tied[:, :-1] |= ties
        rows, columns = np.nonzero(tied)
        own = positions[rows, columns]
        place, inverse = _places(own, take_ids)
        # The places of a group of ties follow each other, so sorting within them puts each group in order.
        positions[rows, columns] = own[np.lexsort((place[inverse], -scores[rows, columns], rows))]
    return positions, scores, counts


def _places(positions: Positions, take_ids: TakeIds) -> tuple[Positions, Positions]:
    """The place of each distinct position among them by the tie rule, and which of them each of `positions` is."""
    unique, inverse = np.unique(positions, return_inverse=True)
    place = np.empty(len(unique), np.int64)
    place[rank_order(take_ids(unique), np.zeros(len(unique)))] = np.arange(len(unique))
    return place, inverse.reshape(-1)

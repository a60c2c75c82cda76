"""Hard negatives: what a search finds for each training query, known positives and doubtful candidates taken out.

A candidate is dropped for the first of these reasons that applies, and counted there: a filter file bans it for the
query; it is a known positive by id, or
by text (an equal document, or a positive of an equal query); an equal document stands above it; it is among the `skip`
best that are left; its score is below `min_score` or above `max_score`; it is above (1 − relative_margin) × the
positive score, or above the positive score − margin. The positive score of a query is the mean over its known
positives. The best `k` of the rest are its negatives.

Queries are mined in blocks and every result is written as it comes, so that memory does not grow with their number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.files import atomic_path, reserve
from shortlist.training.examples import ExampleSet

QUERIES_AT_ONCE = 4096

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


class CandidateSearch(Protocol):
    """Finds candidates for query texts: a dual encoder over an index, or BM25 (shortlist.retrieval.mining)."""

    def __call__(
        self, queries: Sequence[str], depth: int, pairs: tuple[Numbers, Numbers] | None = None
    ) -> tuple[Numbers, Floats, Floats]:
        """Corpus rows and scores of the best documents, `(queries, depth)` each, best first, -1 where there is none.

        Third come the scores of `pairs`, (query, row) given as two arrays; empty without them.
        """
        ...


@dataclass(frozen=True)
class MiningFilters:
    """Which candidates are too near to be taken for negatives; the module says in what order they apply.

    Raises:
        ConfigError: a bound that is not finite, a margin below 0, a `relative_margin` that leaves only scores below
            zero (1 or more), a `skip` below 0, or bounds that leave nothing.
    """

    skip: int = 0
    min_score: float | None = None
    max_score: float | None = None
    relative_margin: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_score", "max_score", "relative_margin", "margin"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{name} of the negatives is {value}; expected a finite number, or none at all.")
        for name in ("skip", "relative_margin", "margin"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} of the negatives is {value}; expected 0 or more.")
        if self.relative_margin is not None and self.relative_margin >= 1:
            raise ConfigError(
                f"relative_margin of the negatives is {self.relative_margin}; expected a share of the positive score, "
                "from 0 to below 1: 0.05 drops what is above 95 percent of it."
            )
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigError(
                f"min_score of the negatives is {self.min_score}, above max_score {self.max_score}: nothing would be "
                "left; exchange them."
            )

    @property
    def need_positives(self) -> bool:
        """Whether the score of the known positives must be known."""
        return self.relative_margin is not None or self.margin is not None


@dataclass(frozen=True)
class MiningCounts:
    """What became of the candidates: `candidates` is the sum of the fields from `banned` to `negatives`.

    Args:
        queries: queries that were mined for.
        candidates: documents that the search gave.
        banned: documents that must not be predicted for the query (filter files).
        known_by_id: known positives of the query.
        known_by_text: documents with the text of a known positive, and positives of a query with the same text.
        copies: documents whose text stands higher in the same list.
        skipped: the best ones passed over by `skip`.
        below_min_score: scores below `min_score`.
        above_max_score: scores above `max_score`.
        above_relative_margin: scores above (1 − relative_margin) × positive score.
        above_margin: scores above positive score − margin.
        beyond: those that passed after a query had its k.
        negatives: those that were kept.
        short: queries with fewer than k negatives, those without any included.
        without: queries without any.
    """

    queries: int = 0
    candidates: int = 0
    banned: int = 0
    known_by_id: int = 0
    known_by_text: int = 0
    copies: int = 0
    skipped: int = 0
    below_min_score: int = 0
    above_max_score: int = 0
    above_relative_margin: int = 0
    above_margin: int = 0
    beyond: int = 0
    negatives: int = 0
    short: int = 0
    without: int = 0

    def __add__(self, other: MiningCounts) -> MiningCounts:
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return MiningCounts(*(one + two for one, two in zip(ours, theirs, strict=True)))

    def __str__(self) -> str:
        reasons = {
            "banned by a filter file": self.banned,
            "known positives by id": self.known_by_id,
            "known positives by text": self.known_by_text,
            "copies of another candidate": self.copies,
            "passed over as the best": self.skipped,
            "below the lowest score": self.below_min_score,
            "above the highest score": self.above_max_score,
            "above the relative margin": self.above_relative_margin,
            "above the margin": self.above_margin,
        }
        removed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"
        return (
            f"{self.negatives:,} negatives for {self.queries:,} queries, of {self.candidates:,} candidates; removed: "
            f"{removed}; {self.without:,} queries have none"
        )


@dataclass(frozen=True)
class MinedBlock:
    """The negatives of some queries: rows and scores `(queries, k)`, best first, -1 where a list is shorter."""

    queries: Numbers
    rows: Numbers
    scores: Floats
    counts: MiningCounts


def mine(
    examples: ExampleSet,
    search: CandidateSearch,
    *,
    k: int,
    depth: int,
    filters: MiningFilters | None = None,
    queries: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[MinedBlock]:
    """Negatives of the first `queries` training queries (None: all), block by block in their order.

    Args:
        examples: the training queries with their known positives.
        search: gives candidates.
        k: negatives a query.
        depth: candidates asked for a query.
        filters: what else is dropped.
        progress: called with the number of queries of every finished block.
    """
    filters = filters or MiningFilters()
    total = len(examples) if queries is None else queries
    for start in range(0, total, QUERIES_AT_ONCE):
        numbers = np.arange(start, min(start + QUERIES_AT_ONCE, total))
        positions, owners = examples.known.entries(examples.groups[numbers])
        pairs = (owners, examples.known.items[positions].astype(np.int64)) if filters.need_positives else None
        rows, scores, known_scores = search([examples.queries[number] for number in numbers.tolist()], depth, pairs)
        positive = None
        if pairs is not None:
            sizes = np.bincount(owners, minlength=len(numbers))
            sums = np.bincount(owners, known_scores.astype(np.float64), minlength=len(numbers))
            # A query without a known positive has nothing to be near to.
            positive = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.inf)
        yield select(examples, numbers, rows, scores, k=k, filters=filters, positive_scores=positive)
        if progress is not None:
            progress(len(numbers))


def select(
    examples: ExampleSet,
    queries: Numbers,
    rows: Numbers,
    scores: Floats,
    *,
    k: int,
    filters: MiningFilters,
    positive_scores: NDArray[np.float64] | None = None,
) -> MinedBlock:
    """The negatives among candidates `(queries, depth)`, by the rules of this module, and what became of each.

    Args:
        examples: the training set.
        queries: numbers of the queries, `(queries,)`.
        rows: corpus rows of the candidates, best first, -1 for none.
        scores: their scores.
        k: negatives a query.
        filters: the bounds.
        positive_scores: mean score of the known positives of each query; only the margins need it.
    """
    owners, places = np.nonzero(rows >= 0)
    found, score = rows[owners, places], scores[owners, places].astype(np.float64)
    left = np.ones(len(found), bool)
    counts: dict[str, int] = {"queries": len(queries), "candidates": len(found)}

    def drop(reason: str, mask: NDArray[np.bool_]) -> None:
        counts[reason] = int((mask & left).sum())
        left[mask] = False

    drop("banned", examples.is_banned(queries[owners], found))
    drop("known_by_id", _judged(examples, queries, owners, found))
    drop("known_by_text", examples.is_known(queries[owners], found))
    keys = owners * len(examples.documents) + examples.documents.first_rows[found]
    first = np.zeros(len(found), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    drop("copies", ~first)
    if filters.skip:
        drop("skipped", left & (_rank(owners, left, len(queries)) < filters.skip))
    if filters.min_score is not None:
        drop("below_min_score", score < filters.min_score)
    if filters.max_score is not None:
        drop("above_max_score", score > filters.max_score)
    if positive_scores is not None:
        positive = positive_scores[owners]
        if filters.relative_margin is not None:
            # |positive|, so that the bound lies below it where scores are negative too.
            with np.errstate(invalid="ignore"):
                drop("above_relative_margin", score > positive - filters.relative_margin * np.abs(positive))
        if filters.margin is not None:
            drop("above_margin", score > positive - filters.margin)
    rank = _rank(owners, left, len(queries))
    drop("beyond", left & (rank >= k))
    kept = np.flatnonzero(left)
    out_rows = np.full((len(queries), k), -1, np.int64)
    out_scores = np.full((len(queries), k), -np.inf, np.float32)
    out_rows[owners[kept], rank[kept]] = found[kept]
    out_scores[owners[kept], rank[kept]] = scores[owners[kept], places[kept]]
    sizes = np.bincount(owners[kept], minlength=len(queries))
    counts |= {"negatives": len(kept), "short": int((sizes < k).sum()), "without": int((sizes == 0).sum())}
    return MinedBlock(queries, out_rows, out_scores, MiningCounts(**counts))


def write_shortlist(
    path: str | Path,
    examples: ExampleSet,
    search: CandidateSearch,
    *,
    depth: int,
    filters: MiningFilters | None = None,
) -> MiningCounts:
    """Mine for every training query into an int32 `.npy` of rows `(queries, depth)`, -1 where a list is shorter.

    Written block by block under a temporary name and put in place at the end.
    """
    counts = MiningCounts()
    with atomic_path(path) as temporary:
        out = np.lib.format.open_memmap(temporary, "w+", np.int32, (len(examples), depth))
        reserve(temporary, shown=path)
        for block in mine(examples, search, k=depth, depth=depth, filters=filters):
            out[block.queries] = block.rows
            counts += block.counts
        out.flush()
        del out
    return counts


def _rank(owners: Numbers, left: NDArray[np.bool_], queries: int) -> Numbers:
    """Place of each candidate among those of its query that are left, from 0 (of the others: of the next one left)."""
    before: Numbers = np.cumsum(left) - left
    sizes = np.bincount(owners, minlength=queries)
    begin = np.cumsum(sizes) - sizes
    return before - np.append(before, 0)[begin[owners]] if len(owners) else before


def _judged(examples: ExampleSet, queries: Numbers, owners: Numbers, rows: Numbers) -> NDArray[np.bool_]:
    """Whether a candidate is itself judged relevant to its query."""
    positions, at = examples.judged.entries(queries)
    width = len(examples.documents)
    return np.isin(owners * width + rows, at * width + examples.judged.items[positions])

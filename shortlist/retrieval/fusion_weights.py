"""Weights of fused runs, chosen on judged queries that are not reported.

The weights are searched on the simplex, one run's share at a time over a grid of 0.05 with the other shares kept in
proportion, until no share improves the measure: with two runs that is the whole grid. A step must reorder millions of
documents, so only what the measure looks at is computed: the rank of each judged document, by counting what scores
above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError
from shortlist.metrics import evaluate
from shortlist.metrics.core import HitTable, Values, core_measure
from shortlist.metrics.evaluation import resolve_measures
from shortlist.metrics.names import PSP, measure_object
from shortlist.retrieval.fusion import (
    RRF_K,
    Runs,
    as_runs,
    check_method,
    combine,
    contributions,
    fuse,
    scale_weights,
)
from shortlist.types import Qrels, Run, check_k

logger = logging.getLogger(__name__)

STEPS = 20  # shares of 0, 0.05, … 1
_GAIN = 1e-9  # a smaller one is rounding
_BLOCK = 1 << 20  # documents handled at once


@dataclass(frozen=True)
class Weights:
    """Weights found by `tune_weights`, and what they gave on the judged queries beside equal weights and each run.

    Attributes:
        names: of the runs; a repeated name is numbered.
        values: one weight a run, summing to 1.
        method: of the fusion.
        measure: in ir-measures notation.
        tuned: the measure with `values`; at least `equal` and every one of `single`.
        equal: the measure with equal weights.
        single: the measure of each run alone.
        queries: judged queries.
    """

    names: tuple[str, ...]
    values: tuple[float, ...]
    method: str
    measure: str
    tuned: float
    equal: float
    single: tuple[float, ...]
    queries: int

    def __str__(self) -> str:
        rows = zip(self.names, self.values, self.single, strict=True)
        shown = ", ".join(f"{name} {weight:g} (alone {value:.4f})" for name, weight, value in rows)
        return (
            f"{self.method} weights: {shown}; {self.measure} {self.tuned:.4f}, with equal weights {self.equal:.4f}, "
            f"over {self.queries} queries"
        )


def tune_weights(
    runs: Runs,
    qrels: Qrels | Mapping[Any, Mapping[Any, int]],
    *,
    measure: str = "nDCG@10",
    method: str = "min-max",
    k: float = RRF_K,
    depth: int | None = None,
) -> Weights:
    """The weights of `fuse(runs, method=method, …)` with the highest mean `measure`; the same call gives the same ones.

    Never worse than equal weights or a single run on `qrels`; where several weights are level, those nearest to equal
    ones. Few queries choose weights of their own noise: below about a hundred prefer `rrf` without weights.

    Args:
        runs: two or more, of the queries of `qrels`.
        qrels: judgements of a development split, not of the one that is reported.
        measure: any that `evaluate` knows. The core measures take seconds for 10,000 queries of 1,000 documents;
            others are measured on every fused run.
        method: as in `fuse`.
        k: as in `fuse`.
        depth: as in `fuse`.

    Raises:
        ConfigError: fewer than two runs, an unknown method or measure.
        DataError: no query of the qrels is in any run.
    """
    given = as_runs(runs)
    if len(given) < 2:
        raise ConfigError("there is one run; weights are tuned for two or more.")
    check_method(method, k)
    depth = None if depth is None else check_k(depth)
    judged = qrels if isinstance(qrels, Qrels) else Qrels(qrels)
    (name,) = resolve_measures(measure)
    if not any(query in run for query in judged for run in given):
        raise DataError(
            f"none of the {len(judged)} judged queries is in any of the {len(given)} runs; tune with runs of the "
            "queries that the qrels judge."
        )
    single = tuple(_measured(run if depth is None else run.top(depth), judged, name) for run in given)
    value_of = _objective(given, judged, name, method, k, depth)
    known: dict[tuple[float, ...], float] = {}

    def value(shares: tuple[float, ...]) -> float:
        if max(shares) == 1.0:
            return single[shares.index(1.0)]
        if shares not in known:
            known[shares] = value_of(shares)
        return known[shares]

    equal = (1.0 / len(given),) * len(given)
    best = _ascend(equal, value)
    return Weights(
        names=distinct([run.name for run in given]),
        values=best,
        method=method,
        measure=name,
        tuned=value(best),
        equal=value(equal),
        single=single,
        queries=len(judged),
    )


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """`names` with a number behind each repeated one: a, b, a-2."""
    seen: dict[str, int] = {}
    result: list[str] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(result)


def _ascend(start: tuple[float, ...], value: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
    """Coordinate ascent on the simplex: each sweep sets every run's share to the best on the grid."""
    best, highest, even = start, value(start), start[0]
    # Nearest to equal first: a later one must be better, not level.
    grid = sorted((step / STEPS for step in range(STEPS + 1)), key=lambda share: (abs(share - even), share))
    while True:
        before = highest
        for place in range(len(start)):
            origin = best
            for share in grid:
                shares = _with_share(origin, place, share)
                if (found := value(shares)) > highest + _GAIN:
                    best, highest = shares, found
        if highest <= before:
            return best


def _with_share(shares: tuple[float, ...], place: int, share: float) -> tuple[float, ...]:
    """`shares` with `share` at `place` and the others, in proportion (equal if they are all 0), what is left of 1."""
    others = sum(value for position, value in enumerate(shares) if position != place)
    return tuple(
        share
        if position == place
        else round((1 - share) * (value / others if others > 0 else 1 / (len(shares) - 1)), 6)
        for position, value in enumerate(shares)
    )


def _measured(run: Run, qrels: Qrels, measure: str) -> float:
    if not any(query in run for query in qrels):
        return 0.0
    return evaluate(qrels, run, [measure]).mean[measure]


def _objective(
    runs: Sequence[Run], qrels: Qrels, measure: str, method: str, k: float, depth: int | None
) -> Callable[[tuple[float, ...]], float]:
    """The mean measure as a function of the weights."""
    core = None if measure.startswith(PSP + "@") else core_measure(measure_object(measure))
    if core is None or measure.startswith("Judged"):  # which depends on the lengths of the lists
        return lambda shares: _measured(fuse(runs, method=method, k=k, weights=shares, depth=depth), qrels, measure)
    blocks = _blocks(runs, qrels, method, k, depth)
    empty = HitTable.build(qrels, [])

    def value(shares: tuple[float, ...]) -> float:
        found = [block.hits(np.array(scale_weights(shares, len(shares)))) for block in blocks]
        query, rank, grade = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else _NO_HITS
        order = np.lexsort((rank, query))
        table = replace(empty, hit_query=query[order], hit_rank=rank[order], hit_grade=grade[order])
        values: Values = core(table)
        return float(values.mean())

    return value


_NO_HITS = (np.zeros(0, np.int64),) * 3


@dataclass(frozen=True)
class _Block:
    """Some queries with a judged document among their candidates, those with the most judged ones first.

    Attributes:
        ids: candidates of each query.
        values: contributions `(runs, docs)`, the candidates of all queries one after another.
        present: where a run has a candidate, `(runs, docs)`.
        starts: first candidate of each query.
        sizes: candidates of each query.
        rows: position of each query in the qrels.
        judged: for n = 0, 1, …: the n-th judged candidate of each query that has so many, with its grade.
    """

    ids: list[list[str]]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    rows: NDArray[np.int64]
    judged: list[tuple[NDArray[np.int64], NDArray[np.int64]]]

    @classmethod
    def build(cls, entries: list[_Entry]) -> _Block:
        entries = sorted(entries, key=lambda entry: -len(entry.judged))
        sizes = np.array([len(entry.ids) for entry in entries], np.int64)
        starts = np.cumsum(sizes) - sizes
        judged = []
        for number in range(len(entries[0].judged)):
            pairs = [entry.judged[number] for entry in entries if len(entry.judged) > number]
            places = starts[: len(pairs)] + np.array([place for place, _ in pairs], np.int64)
            judged.append((places, np.array([grade for _, grade in pairs], np.int64)))
        return cls(
            ids=[entry.ids for entry in entries],
            values=np.concatenate([entry.values for entry in entries], axis=1),
            present=np.concatenate([entry.present for entry in entries], axis=1),
            starts=starts,
            sizes=sizes,
            rows=np.array([entry.row for entry in entries], np.int64),
            judged=judged,
        )

    def hits(self, weights: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Query, rank and grade of every judged candidate `(hits,)` that a run of positive weight has."""
        used = weights > 0
        scores = combine(self.values[used], weights[used])
        if not used.all():
            scores[~self.present[used].any(axis=0)] = -np.inf
        queries, ranks, grades = [], [], []
        for places, judged in self.judged:
            count = len(places)
            own = scores[places]
            part = scores[: int(self.starts[count - 1] + self.sizes[count - 1])]
            limits = np.repeat(own, self.sizes[:count])
            rank = 1 + np.add.reduceat(part > limits, self.starts[:count], dtype=np.int64)
            level = np.add.reduceat(part == limits, self.starts[:count], dtype=np.int64)
            there = own > -np.inf
            for row in np.flatnonzero((level > 1) & there).tolist():
                rank[row] += self._before(row, int(places[row]), scores)
            queries.append(self.rows[:count][there])
            ranks.append(rank[there])
            grades.append(judged[there])
        return np.concatenate(queries), np.concatenate(ranks), np.concatenate(grades)

    def _before(self, row: int, place: int, scores: NDArray[np.float32]) -> int:
        """How many candidates of query `row` have the score of the one at `place` and come first by id."""
        start, names = int(self.starts[row]), self.ids[row]
        level = np.flatnonzero(scores[start : start + len(names)] == scores[place])
        return sum(names[other] > names[place - start] for other in level.tolist())


@dataclass(frozen=True)
class _Entry:
    row: int
    ids: list[str]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]
    judged: list[tuple[int, int]]


def _blocks(runs: Sequence[Run], qrels: Qrels, method: str, k: float, depth: int | None) -> list[_Block]:
    blocks: list[_Block] = []
    waiting: list[_Entry] = []
    size = 0
    for row, (query, grades) in enumerate(qrels.items()):
        ids, values, present = contributions([run.ranking(query) for run in runs], method, k, depth)
        if grades.keys().isdisjoint(ids):
            continue
        judged = [(place, max(grades[id], 0)) for place, id in enumerate(ids) if id in grades]
        waiting.append(_Entry(row, ids, values, present, judged))
        size += len(ids)
        if size >= _BLOCK:
            blocks.append(_Block.build(waiting))
            waiting, size = [], 0
    return [*blocks, _Block.build(waiting)] if waiting else blocks

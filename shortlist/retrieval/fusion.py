"""Fusion: several runs for the same queries become one, by ranks or by normalised scores.

Scores of different systems have no common scale. `rrf` looks at ranks alone (Cormack, Clarke and Büttcher, SIGIR 2009):
a document gets the sum of w / (k + rank) over the runs that have it. `min-max` and `z-score` bring the scores of each
query and run to one scale and add them, weighted (Lee, SIGIR 1997: CombSUM). Nothing else in the package normalises
scores: the best of a bad list gets 1 under `min-max`, which means something only beside another list.

What one list of one query gives (scores s, z their distance from the mean in standard deviations):

| | its documents | documents that it lacks | its documents if all scores are equal, or there is one |
| --- | --- | --- | --- |
| rrf | 1 / (k + rank), rank from 1 | 0 | the same: ranks never tie |
| min-max | (s - min) / (max - min) | 0, as its last document | 1 |
| z-score | z | its lowest z | 0, and -1 for those that it lacks |

An empty list gives 0 to all. A document that a list lacks would have come after its last one, so it never gets more
than that one. The 0 that other tools add under z-score is the mean of the list: more than half of what was found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain, count
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.types import Run, check_k, strictly_decreasing

logger = logging.getLogger(__name__)

METHODS = ("rrf", "min-max", "z-score")
RRF_K = 60
Runs = Sequence[Run | Mapping[Any, Mapping[Any, float]]]


def fuse(
    runs: Runs,
    *,
    method: str = "rrf",
    k: float = RRF_K,
    weights: Sequence[float] | None = None,
    depth: int | None = None,
    name: str = "fused",
) -> Run:
    """One run out of several: every document that a run of positive weight has, best first.

    A query that some runs lack is fused from those that have it. Ties go by the package's rule. One run alone keeps its
    order; the order of the runs changes no list.

    Args:
        runs: at least one; `Run` or query id → {document id: score}.
        method: "rrf", "min-max" or "z-score"; see the table above.
        k: the constant of "rrf", at least 0; larger ones flatten the difference between first and tenth.
        weights: one number a run, at least 0. Only their ratios count: they are scaled to a mean of 1. A run of
            weight 0 is left out, with the documents that no other run has.
        depth: how many documents of each list are taken, before normalising; None for all.
        name: name of the fused run.

    Raises:
        ConfigError: no run, an unknown method, a wrong number of weights or one that is negative or not finite.
        DataError: a run with a non-finite score or with an id twice.
    """
    given = as_runs(runs)
    check_method(method, k)
    scaled = scale_weights(weights, len(given))
    depth = None if depth is None else check_k(depth)
    used = [(run, weight) for run, weight in zip(given, scaled, strict=True) if weight > 0]
    queries = list(dict.fromkeys(query for run, _ in used for query in run))
    partial = sum(any(query not in run for run, _ in used) for query in queries)
    if partial:
        logger.info("%d of %d queries are not in every run; they are fused from those that have them", partial,
                    len(queries))  # fmt: skip
    active = np.array([weight for _, weight in used])
    fused = Run(name=name)
    for query in queries:
        lists = [run.ranking(query) for run, _ in used]
        ids, values, _ = contributions(lists, method, k, depth)
        scores = combine(values, active)
        filled = [scored for _, scored in lists if len(scored)]
        if len(filled) == 1:
            scores = _in_order(scores, filled[0][: len(scores)])
        fused.add(query, ids, scores)
    return fused


def contributions(
    lists: Sequence[tuple[Sequence[str], NDArray[np.float32]]], method: str, k: float, depth: int | None
) -> tuple[list[str], NDArray[np.float64], NDArray[np.bool_]]:
    """What each list of one query gives to each document, before weights.

    Returns the documents of all lists in order of first appearance, the values `(lists, docs)`, and where a list has
    a document, `(lists, docs)`.
    """
    lists = [(ids[:depth], scores[:depth]) for ids, scores in lists]
    place = dict(zip(dict.fromkeys(chain.from_iterable(ids for ids, _ in lists)), count(), strict=False))
    values = np.zeros((len(lists), len(place)))
    present = np.zeros((len(lists), len(place)), bool)
    for row, (ids, scores) in enumerate(lists):
        if len(ids):
            columns = list(map(place.__getitem__, ids))
            own, lacking = normalised(scores, method, k)
            values[row] = lacking
            values[row, columns] = own
            present[row, columns] = True
    return list(place), values, present


def normalised(scores: NDArray[np.float32], method: str, k: float = RRF_K) -> tuple[NDArray[np.float64], float]:
    """Values of one list, best first, that is not empty; and the value of a document that it lacks."""
    if method == "rrf":
        return 1.0 / (k + np.arange(1.0, len(scores) + 1)), 0.0
    exact = scores.astype(np.float64)
    highest, lowest = exact[0], exact[-1]
    if highest == lowest:
        return (np.ones(len(exact)), 0.0) if method == "min-max" else (np.zeros(len(exact)), -1.0)
    if method == "min-max":
        return (exact - lowest) / (highest - lowest), 0.0
    own = (exact - exact.mean()) / exact.std()
    return own, float(own[-1])


def combine(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """Weighted sum `(docs,)` of `values` `(lists, docs)`, the same whatever the order of the lists."""
    products = values * weights[:, None]
    if len(products) > 2:
        products.sort(axis=0)  # a sum of three depends on the order in its last bit
    return products.sum(axis=0).astype(np.float32)


def _in_order(scores: NDArray[np.float32], own: NDArray[np.float32]) -> NDArray[np.float32]:
    """`scores` that float32 made equal where the list's `own` scores differ, nudged apart: the order stays."""
    if bool(((scores[1:] >= scores[:-1]) & (own[1:] < own[:-1])).any()):
        return strictly_decreasing(scores)[0]
    return scores


def as_runs(runs: Runs) -> list[Run]:
    """`runs` as a list of `Run`, at least one."""
    if isinstance(runs, (Run, Mapping, str)) or not isinstance(runs, Sequence):
        raise ConfigError(f"runs is a {type(runs).__name__}; expected a list of runs, such as fuse([first, second]).")
    if not runs:
        raise ConfigError("there is no run to fuse; pass at least one.")
    return [run if isinstance(run, Run) else Run(run) for run in runs]


def check_method(method: str, k: float) -> None:
    """Refuse an unknown method, and a constant of rrf that gives no finite score."""
    if method not in METHODS:
        raise ConfigError(f"fusion method is {method!r}; expected one of {', '.join(METHODS)}.")
    if isinstance(k, bool) or not isinstance(k, Real) or not 0 <= k < 1e30:
        raise ConfigError(f"k of reciprocal rank fusion is {k!r}; expected a number of at least 0, usually {RRF_K}.")


def scale_weights(weights: Sequence[float] | None, runs: int) -> list[float]:
    """`weights` scaled to a mean of 1; equal ones for None. Raises ConfigError for what cannot weigh `runs` runs."""
    if weights is None:
        return [1.0] * runs
    values = list(weights)
    if len(values) != runs:
        raise ConfigError(f"{len(values)} weights for {runs} runs; expected one weight a run, in the same order.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"weight {value!r}: expected a finite number of at least 0 (0 leaves the run out).")
    largest = max(map(float, values))
    if largest == 0:
        raise ConfigError("all weights are 0; at least one run must count.")
    parts = [float(value) / largest for value in values]
    mean = math.fsum(parts) / runs
    return [part / mean for part in parts]

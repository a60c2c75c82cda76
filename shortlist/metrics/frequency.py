"""Measures by training frequency: what a run finds among frequent, rare and never trained labels.

The labels that have a training point are put in order of their training counts, most frequent first (equal counts in
the order of `train_counts`), and cut into ten parts of equal numbers of labels, the deciles. Head is the first decile,
torso the second to the fifth, tail the last five. Labels without any training point are no decile's: they are the
zero-shot labels. A run is measured as a whole; nothing is ranked again.

R@k of a part is R@k with the judgements cut to its labels: the mean over the queries that have one of them. P@k,
nDCG@k and PSP@k are sums over queries, so each part gets its summand, and the deciles and the zero-shot labels add up
to the measure of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.metrics.core import HitTable, ndcg_parts
from shortlist.metrics.xc import LabelWeights

DECILES = 10
_ZERO_SHOT = DECILES
# The deciles (from 0) of each named group.
_GROUPS: dict[str, Sequence[int]] = {
    **{f"decile {number + 1}": (number,) for number in range(DECILES)},
    "head": (0,),
    "torso": range(1, 5),
    "tail": range(5, 10),
    "zero-shot": (_ZERO_SHOT,),
}
_SPLIT = re.compile(r"(P|R|nDCG|PSP)@(\d+)")


@dataclass(frozen=True)
class FrequencyGroup:
    """The labels of one range of training counts, and what the run finds of them.

    Attributes:
        name: `decile 1` (most frequent) to `decile 10`, `head`, `torso`, `tail`, `zero-shot`.
        labels: number of labels.
        training_points: lowest and highest training count of a label; (0, 0) where there is no label.
        training_positives: sum of the training counts.
        test_positives: judgements of the run's split with a grade of at least 1 on these labels.
        test_queries: queries with such a judgement.
        values: measure → value: R@k over `test_queries` (None if there is none), the group's summand of P@k, nDCG@k
            and PSP@k.
    """

    name: str
    labels: int
    training_points: tuple[int, int]
    training_positives: int
    test_positives: int
    test_queries: int
    values: dict[str, float | None]


def frequency_groups(
    table: HitTable, measures: Sequence[str], train_counts: Mapping[str, int], weights: LabelWeights | None
) -> tuple[FrequencyGroup, ...]:
    """One FrequencyGroup a decile, then head, torso, tail and zero-shot; measures that cannot be split are left out.

    Raises:
        ConfigError: none of `measures` can be split.
    """
    split = {name: match for name in measures if (match := _SPLIT.fullmatch(name))}
    if not split:
        raise ConfigError(
            f"by_frequency splits P@k, R@k, nDCG@k and PSP@k, and {', '.join(measures)} holds none of these; add one, "
            "such as R@100."
        )
    decile = _deciles(train_counts)
    known = dict(decile)
    for label in table.ideal_document:
        known.setdefault(label, _ZERO_SHOT)
    labels: NDArray[np.int64] = np.fromiter(known.values(), np.int64, len(known))
    counts = np.array([train_counts.get(label, 0) for label in known], np.int64)
    ideal = np.array([known[label] for label in table.ideal_document], np.int64)
    hits = np.array([known.get(label, _ZERO_SHOT) for label in table.hit_document], np.int64)
    groups = []
    for name, codes in _GROUPS.items():
        ours = counts[np.isin(labels, codes)]
        wanted, found = np.isin(ideal, codes), np.isin(hits, codes) & (table.hit_grade >= 1)
        groups.append(
            FrequencyGroup(
                name=name,
                labels=len(ours),
                training_points=(int(ours.min()), int(ours.max())) if len(ours) else (0, 0),
                training_positives=int(ours.sum()),
                test_positives=int(wanted.sum()),
                test_queries=len(np.unique(table.ideal_query[wanted])),
                values={
                    measure: _value(table, match[1], int(match[2]), wanted, found, weights)
                    for measure, match in split.items()
                },
            )
        )
    return tuple(groups)


def format_groups(groups: Sequence[FrequencyGroup]) -> list[tuple[str, ...]]:
    """A heading and one row a group, as strings for a table."""
    measures = list(groups[0].values)
    rows = [("labels by training frequency", "labels", "training points", "test positives", *measures)]
    for group in groups:
        low, high = group.training_points
        counts = f"{low:,}" if low == high else f"{low:,}-{high:,}"
        values = (group.values[measure] for measure in measures)
        rows.append(
            (
                group.name,
                f"{group.labels:,}",
                counts if group.labels else "",
                f"{group.test_positives:,}",
                *("" if value is None else f"{value:.4f}" for value in values),
            )
        )
    return rows


def _deciles(train_counts: Mapping[str, int]) -> dict[str, int]:
    """Label → decile from 0 (most frequent); labels without training points get the number of zero-shot labels.

    Equal counts are ordered by id, so that the deciles do not depend on the order of the counts.
    """
    trained = [label for label, count in train_counts.items() if count > 0]
    order = sorted(trained, key=lambda label: (-train_counts[label], label))
    bounds = [round(part / DECILES * len(order)) for part in range(DECILES + 1)]
    decile = {label: part for part in range(DECILES) for label in order[bounds[part] : bounds[part + 1]]}
    return decile | {label: _ZERO_SHOT for label, count in train_counts.items() if count <= 0}


def _value(
    table: HitTable,
    base: str,
    k: int,
    wanted: NDArray[np.bool_],
    found: NDArray[np.bool_],
    weights: LabelWeights | None,
) -> float | None:
    """One measure of the labels that are `wanted` `(relevant,)` among the judgements and `found` `(hits,)`."""
    queries = len(table.queries)
    found = found & (table.hit_rank <= k)
    if base == "R":
        positives = np.bincount(table.ideal_query[wanted], minlength=queries)
        hits = np.bincount(table.hit_query[found], minlength=queries)
        asked = positives > 0
        return float((hits[asked] / positives[asked]).mean()) if asked.any() else None
    if base == "P":
        return float(found.sum() / k / queries)
    if base == "PSP" and weights is not None:
        ideal = weights.ideal(k)
        return float(weights.hits[found].sum() / ideal) if ideal else 0.0
    return float(ndcg_parts(table, k)[found].sum() / queries)

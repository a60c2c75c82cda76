"""Propensity-scored precision for extreme classification (Jain et al. 2016; the XML repository's definition).

Symbols: N_l training count of label l, n training points, A and B the data family's constants.
C = (ln n - 1)(B + 1)^A and 1/p_l = 1 + C (N_l + B)^(-A): rare labels weigh more, because a missing rare label is
more likely an unmade judgement. P@k, R@k and nDCG@k of XC are the ordinary ones: nDCG's ideal is cut at
min(k, number of labels), as everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.metrics.core import HitTable, Values, count_within

DEFAULT_PROPENSITY = (0.55, 1.5)
# Far around every published pair of constants, and no 1/p in them overflows float32.
LARGEST_A, B_BOUNDS = 5.0, (0.001, 1000.0)
# The constants (A, B) that published figures use, by family of label set.
PROPENSITY_FAMILIES = {"other": DEFAULT_PROPENSITY, "amazon": (0.6, 2.6), "wikipedia": (0.5, 0.4)}


def count_labels(qrels: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Training count of each label: the number of training points (queries) that have it."""
    return dict(Counter(label for labels in qrels.values() for label, grade in labels.items() if grade >= 1))


def parse_propensity(text: str) -> tuple[float, float]:
    """(A, B) of a family's name (`other`, `amazon`, `wikipedia`) or of two numbers, as in `0.6,2.6`.

    Raises:
        ConfigError: neither; or numbers for which there is no sensible propensity (see `LARGEST_A` and `B_BOUNDS`).
    """
    name = text.strip().lower()
    if name in PROPENSITY_FAMILIES:
        return PROPENSITY_FAMILIES[name]
    try:
        a, b = (float(number) for number in name.split(","))
    except ValueError:
        a, b = math.nan, math.nan
    _check_propensity(text, a, b)
    return a, b


def _check_propensity(shown: object, a: float, b: float) -> None:
    if not (0 <= a <= LARGEST_A and B_BOUNDS[0] <= b <= B_BOUNDS[1]):
        raise ConfigError(
            f"propensity is {shown!r}; expected {', '.join(PROPENSITY_FAMILIES)}, or two numbers A,B such as 0.55,1.5 "
            f"with A from 0 to {LARGEST_A:g} and B from {B_BOUNDS[0]:g} to {B_BOUNDS[1]:g}."
        )


def propensity_name(propensity: tuple[float, float]) -> str:
    """The family that has these constants, or `own` for any others."""
    return next((name for name, constants in PROPENSITY_FAMILIES.items() if constants == tuple(propensity)), "own")


def inverse_propensities(
    labels: Iterable[str], train_counts: Mapping[str, int], *, num_train: int, propensity: tuple[float, float]
) -> dict[str, float]:
    """1/p of each label from its training count (0 if it has none), with constants `propensity` = (A, B).

    Raises:
        ConfigError: `num_train` is below 3, where ln n - 1 is not positive; constants as in `parse_propensity`.
    """
    a, b = propensity
    _check_propensity(propensity, a, b)
    if num_train < 3:
        raise ConfigError(
            f"PSP needs the number of training points; {num_train} is too few for a propensity (3 or more)."
        )
    scale = (math.log(num_train) - 1) * (b + 1) ** a
    return {label: 1 + scale * (train_counts.get(label, 0) + b) ** -a for label in labels}


@dataclass(frozen=True, slots=True)
class LabelWeights:
    """1/p along the columns of a HitTable: `hits` `(hits,)`, and `best` `(relevant,)`, largest first in each query."""

    hits: Values
    best: Values = field(repr=False)
    best_rank: NDArray[np.int64] = field(repr=False)

    @classmethod
    def of(
        cls, table: HitTable, train_counts: Mapping[str, int], *, num_train: int, propensity: tuple[float, float]
    ) -> LabelWeights:
        """The weights of one table, for every cut-off. Raises ConfigError as `inverse_propensities` does."""
        labels = {*table.hit_document, *table.ideal_document}
        weights = inverse_propensities(labels, train_counts, num_train=num_train, propensity=propensity)
        ideal = np.array([weights[label] for label in table.ideal_document], np.float64)
        best = ideal[np.lexsort((-ideal, table.ideal_query))]
        hits = np.array([weights[label] for label in table.hit_document], np.float64)
        return cls(hits, best, count_within(table.ideal_query))

    def ideal(self, k: int) -> float:
        """Σ over all queries of the k largest 1/p of the query's labels."""
        return float(self.best[self.best_rank <= k].sum())


def propensity_scored_precision(table: HitTable, weights: LabelWeights, k: int) -> Values:
    """PSP@k `(queries,)`: what each query adds to the ratio of two means, so that their mean is PSP@k.

    PSP@k = mean(Σ_{hits in top k} 1/p) / mean(Σ of the k largest 1/p of the query's labels). One query's value is its
    own numerator over the mean denominator; it may exceed 1. A query without labels adds 0 to both.
    """
    kept = (table.hit_rank <= k) & (table.hit_grade >= 1)
    gained = np.bincount(table.hit_query[kept], weights.hits[kept], minlength=len(table.queries))
    ideal = weights.ideal(k)
    return np.asarray(gained * (len(table.queries) / ideal if ideal else 0.0), np.float64)

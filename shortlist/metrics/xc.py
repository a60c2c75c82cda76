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

import numpy as np

from shortlist.errors import ConfigError
from shortlist.metrics.core import HitTable, Values

DEFAULT_PROPENSITY = (0.55, 1.5)


def count_labels(qrels: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Training count of each label: the number of training points (queries) that have it."""
    return dict(Counter(label for labels in qrels.values() for label, grade in labels.items() if grade >= 1))


def inverse_propensities(
    labels: Iterable[str], train_counts: Mapping[str, int], *, num_train: int, propensity: tuple[float, float]
) -> dict[str, float]:
    """1/p of each label from its training count (0 if it has none), with constants `propensity` = (A, B).

    Raises:
        ConfigError: `num_train` is below 3, where ln n - 1 is not positive.
    """
    a, b = propensity
    if num_train < 3:
        raise ConfigError(
            f"PSP needs the number of training points; {num_train} is too few for a propensity (3 or more)."
        )
    scale = (math.log(num_train) - 1) * (b + 1) ** a
    return {label: 1 + scale * (train_counts.get(label, 0) + b) ** -a for label in labels}


def propensity_scored_precision(
    table: HitTable, qrels: Mapping[str, Mapping[str, int]], weights: Mapping[str, float], k: int
) -> Values:
    """PSP@k `(queries,)`: what each query adds to the ratio of two means, so that their mean is PSP@k.

    PSP@k = mean(Σ_{hits in top k} 1/p) / mean(Σ of the k largest 1/p of the query's labels). One query's value is its
    own numerator over the mean denominator; it may exceed 1.
    """
    weight = np.array([weights[document] for document in table.hit_document])
    kept = (table.hit_rank <= k) & (table.hit_grade >= 1)
    gained = np.bincount(table.hit_query[kept], weight[kept], minlength=len(table.queries))
    ideal = sum(
        sum(sorted((weights[label] for label, grade in labels.items() if grade >= 1), reverse=True)[:k])
        for labels in qrels.values()
    )
    return np.asarray(gained * (len(table.queries) / ideal if ideal else 0.0), np.float64)

"""What follows from how often each document is a positive: weights of positives, and the prior of documents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.metrics import inverse_propensities
from shortlist.training.examples import ExampleSet


def propensity_weights(examples: ExampleSet, *, propensity: tuple[float, float]) -> NDArray[np.float32]:
    """1/p of each document (Jain et al. 2016), `(docs,)`, scaled so that the training positives weigh 1 in the mean.

    Rare labels weigh more: they are missing from the judgements more often. `propensity` are the constants (A, B) of
    the data family, as for PSP@k. Raises ConfigError for fewer than three training queries.
    """
    if len(examples) < 3:
        raise ConfigError(
            f"data.propensity_weights needs at least 3 training queries to weigh labels by, and there are "
            f"{len(examples)}; leave it out, or look at data.split and data.max_queries."
        )
    counts = examples.document_counts()
    # The propensity depends on the count alone, and there are few distinct counts.
    distinct, inverse = np.unique(counts, return_inverse=True)
    by_count = {str(count): count for count in distinct.tolist()}
    weighed = inverse_propensities(by_count, by_count, num_train=len(examples), propensity=propensity)
    weights = np.fromiter(weighed.values(), np.float64, len(distinct))[inverse.reshape(-1)]
    return (weights * counts.sum() / (weights * counts).sum()).astype(np.float32)


def log_prior(examples: ExampleSet) -> NDArray[np.float32]:
    """log pi of each document, its share of the training positives, `(docs,)` (Menon et al. 2021).

    pi_l = (n_l + 1) / (sum of n + documents): a document without a positive has a finite prior, below all others. The
    same as the frequency prior of an index (shortlist.indexes.frequency), so that what training adds search can take
    away.
    """
    counts = examples.document_counts().astype(np.float64)
    return np.log((counts + 1) / (counts.sum() + len(counts))).astype(np.float32)

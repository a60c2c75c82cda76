"""The frequency prior: one more coordinate a document, so that search can weigh how frequent it is, with any strength.

A model trained at temperature T scores s = <q, d>, and its logits are s / T. Logit adjustment (Menon et al. 2021)
moves the logit of document l by tau * log pi_l, pi_l its share of the training positives. With x_l = T * log pi_l as
the last coordinate of the document and tau as that of the query, the inner product is

    <(q, tau), (d, x_l)> = T * (s / T + tau * log pi_l)

so that one index serves every tau: 0 is the plain ranking, -1 the post-hoc form of the paper, and positive values put
back what frequency-sampled negatives took away (Yi et al. 2019). The coordinate is added after normalisation, so that
only indexes of plain inner products can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError

if TYPE_CHECKING:
    from shortlist.indexes.base import VectorIndex

# faiss transforms that leave inner products as they are: rotations, and moving coordinates.
_PRESERVING = ("OPQMatrix", "RandomRotationMatrix", "RemapDimensionsTransform")


@dataclass(frozen=True)
class FrequencyPrior:
    """log pi_l of each document times the temperature, from training counts.

    pi_l = (n_l + 1) / (sum of n + documents): add-one smoothing, so that a document without a training positive has a
    finite prior, below that of all others.

    Args:
        counts: document id → training positives n_l.
        documents: number of documents in the index.
        temperature: T, what the model's scores are divided by in training.
        source: where the counts come from, for the manifest: {"split": …, "queries": …}.

    Raises:
        ConfigError: a temperature that is not a number above 0.
    """

    counts: Mapping[str, int]
    documents: int
    temperature: float
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"the temperature of a frequency prior is {self.temperature!r}; expected a number above 0."
            )

    def coordinate(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """T * log pi of each document, `(docs,)`."""
        counts = np.fromiter((self.counts.get(id, 0) for id in ids), np.float64, len(ids))
        return (self.temperature * np.log((counts + 1) / (self.positives + self.documents))).astype(np.float32)

    @cached_property
    def positives(self) -> int:
        """Training positives in all."""
        return sum(self.counts.values())

    def extend(
        self, blocks: Iterable[tuple[Sequence[str], Any]]
    ) -> Iterator[tuple[Sequence[str], NDArray[np.float32]]]:
        """Ids and vectors `(docs, dim + 1)` of blocks of ids and vectors `(docs, dim)`."""
        for ids, vectors in blocks:
            block = np.asarray(vectors, np.float32)
            yield ids, np.concatenate([block, self.coordinate(ids)[:, None]], axis=1)

    def record(self) -> dict[str, Any]:
        """What the manifest of an index says of the prior in it."""
        return {
            **self.source,
            "positives": self.positives,
            "seen": sum(count > 0 for count in self.counts.values()),
            "smoothing": 1,
            "temperature": self.temperature,
        }


def check_inner_product(index: VectorIndex) -> None:
    """Refuse an index whose scores are not the inner products of the vectors it is given.

    Raises:
        ConfigError: a metric other than "ip", or a faiss factory that normalises, centres or drops dimensions.
    """
    if index.metric != "ip":
        raise ConfigError(
            f"the metric of the index is {index.metric!r}; a frequency prior is a term of the inner product: use ip."
        )
    for name in index.transforms():
        if name not in _PRESERVING:
            raise ConfigError(
                f"factory {index.manifest.get('factory')!r} has a {name} inside, which normalises, centres or shortens "
                "vectors and would distort the coordinate of the frequency prior; use a factory of plain inner "
                "products, such as Flat, HNSW32 or IVF64,Flat."
            )


def with_bias(queries: NDArray[np.float32], bias: float) -> NDArray[np.float32]:
    """Query vectors `(queries, dim + 1)` that ask an index with a frequency prior for strength `bias` (tau)."""
    return np.concatenate([queries, np.full((len(queries), 1), bias, np.float32)], axis=1)

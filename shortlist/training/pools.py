"""Which documents each query brings into a step's pool, drawn by (seed, epoch, query).

Sources of data.negatives: `in_batch`, the positives of all queries of the batch, is always there; `given`, `bm25` and
`mined` add documents listed with each query; `sampled(n)` adds n documents of the whole corpus to the batch; `all` is
every document and draws nothing. Documents are rows that stand for their text (Documents.first_rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.settings import NegativeSource
from shortlist.training.examples import ExampleSet
from shortlist.training.ragged import Positions, Rows, draw, hashed

LISTED = ("given", "bm25")
# Numbers that keep the draws of the sources apart.
_STREAMS = {"positives": 0, "given": 1, "bm25": 2, "mined": 3, "sampled": 4}


@dataclass(frozen=True)
class Drawn:
    """(query of the batch, row) entries of one step.

    Args:
        owners: for each row the query that brings it, as its position in the batch.
        rows: the documents brought, positives and negatives.
        shared: documents that no query brings.
        scored: keys (query, row) of the drawn positives that the loss counts, ascending; None if all are.
    """

    owners: Positions
    rows: NDArray[np.integer]
    shared: Rows
    scored: NDArray[np.int64] | None


class PoolDraws:
    """Draws what the queries of a batch bring; the same call gives the same answer on every process.

    Args:
        examples: the training set.
        sources: of negatives.
        max_positives: positives a query brings; None: all, or the scored ones where `sample_positives` is set.
        sample_positives: positives a query is scored on, in proportion to their grades; None: all.
        seed: of the draws.

    Raises:
        ConfigError: a source of lists is named and no query has any.
    """

    def __init__(
        self,
        examples: ExampleSet,
        sources: Sequence[NegativeSource],
        *,
        max_positives: int | None,
        sample_positives: int | None,
        seed: int,
    ):
        self.examples = examples
        self.sources = {source.name: source.count for source in sources}
        self.max_positives = max_positives
        self.sample_positives = sample_positives
        self.seed = seed
        # (queries, depth) rows, -1 where a list is shorter; set when an epoch begins (shortlist.training.mining).
        self.mined: Rows | None = None
        for name in LISTED:
            listed = examples.negatives.get(name)
            if name in self.sources and (listed is None or not len(listed.items)):
                raise ConfigError(
                    f"data.negatives has {name!r} but no training query has a negative of its own; "
                    "set data.negatives to in_batch, all or mined."
                )

    @property
    def everything(self) -> bool:
        """Whether the pool is the whole corpus."""
        return "all" in self.sources

    def key(self, owners: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """One number for a (query of the batch, row) pair, ascending by query, then row."""
        return np.asarray(owners, np.int64) * len(self.examples.documents) + rows

    def __call__(self, epochs: NDArray[np.integer], queries: NDArray[np.integer]) -> Drawn:
        """What the batch of these queries brings in these epochs, both `(batch,)`."""
        owners, rows, scored = self._positives(epochs, queries)
        parts = [(owners, rows)]
        for name in LISTED:
            if name in self.sources:
                listed = self.examples.negatives[name]
                positions, owners = listed.entries(queries)
                parts.append(self._keep(name, epochs, queries, owners, listed.items[positions]))
        if "mined" in self.sources and self.mined is not None:
            found = np.asarray(self.mined[queries])
            owners, places = np.nonzero(found >= 0)
            parts.append(self._keep("mined", epochs, queries, owners, found[owners, places]))
        return Drawn(
            np.concatenate([owners for owners, _ in parts]),
            np.concatenate([rows for _, rows in parts]),
            self._shared(epochs, queries),
            scored,
        )

    def _positives(
        self, epochs: NDArray[np.integer], queries: NDArray[np.integer]
    ) -> tuple[Positions, Rows, NDArray[np.int64] | None]:
        examples, sampled = self.examples, self.sample_positives
        # A pool of everything holds the positives of equal queries too: all that count are drawn from.
        lists, numbers = (
            (examples.known, examples.groups[queries]) if self.everything else (examples.positives, queries)
        )
        if self.everything and sampled is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int32), None
        positions, owners = lists.entries(numbers)
        rows = lists.items[positions]
        random = self._random("positives", epochs, queries, owners, rows)
        weights = lists.values_at(positions) if sampled is not None and lists.values is not None else None
        scored = None
        if sampled is not None:
            kept = draw(owners, sampled, random, weights)
            scored = np.sort(self.key(owners[kept], rows[kept]))
        # The same order of the draw: those that are scored are among those that are brought.
        limit = max((count for count in (self.max_positives, sampled) if count is not None), default=None)
        if limit is not None:
            kept = draw(owners, limit, random, weights)
            owners, rows = owners[kept], rows[kept]
        return owners, rows, scored

    def _keep(
        self,
        name: str,
        epochs: NDArray[np.integer],
        queries: NDArray[np.integer],
        owners: Positions,
        rows: Rows,
    ) -> tuple[Positions, Rows]:
        count = self.sources[name]
        if count is None:
            return owners, rows
        kept = draw(owners, count, self._random(name, epochs, queries, owners, rows))
        return owners[kept], rows[kept]

    def _random(
        self,
        name: str,
        epochs: NDArray[np.integer],
        queries: NDArray[np.integer],
        owners: Positions,
        rows: NDArray[np.integer],
    ) -> NDArray[np.uint64]:
        return hashed(hashed(self.seed, _STREAMS[name], epochs, queries)[owners], rows)

    def _shared(self, epochs: NDArray[np.integer], queries: NDArray[np.integer]) -> Rows:
        count = self.sources.get("sampled")
        if count is None or not len(queries):
            return np.zeros(0, np.int32)
        distinct = self._distinct()
        random = np.random.default_rng((self.seed, _STREAMS["sampled"], int(epochs[0]), int(queries[0])))
        return distinct[random.choice(len(distinct), min(count, len(distinct)), replace=False, shuffle=False)]

    def _distinct(self) -> Rows:
        if not hasattr(self, "_unique"):
            self._unique = self.examples.documents.unique_rows()
        return self._unique

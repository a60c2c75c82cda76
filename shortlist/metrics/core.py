"""The core measures over all queries at once: nDCG, P, R, RR, AP, Success and Judged, with trec_eval's definitions.

A run meets its qrels once, in `HitTable`: only judged documents can change these measures, so a run of millions of
documents shrinks to its judged ones, and each measure is a few NumPy lines over that table. Every measure of one
evaluation therefore describes one ranking. Values equal pytrec_eval's; the tests hold them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitTable:
    """Where the judged documents of each query stand in its ranking, and what an ideal ranking would hold.

    The hit columns `(hits,)` are sorted by query and rank, the ideal columns `(relevant,)` by query and grade
    descending; both hold query positions. Grades are at least 0: a negative grade counts as 0.
    """

    queries: list[str]
    lengths: NDArray[np.int64]
    hit_query: NDArray[np.int64]
    hit_rank: NDArray[np.int64]
    hit_grade: NDArray[np.int64]
    hit_document: list[str]
    ideal_query: NDArray[np.int64]
    ideal_rank: NDArray[np.int64]
    ideal_grade: NDArray[np.int64]
    ideal_document: list[str]

    @classmethod
    def build(cls, qrels: Mapping[str, Mapping[str, int]], rankings: Iterable[tuple[str, Sequence[str]]]) -> HitTable:
        """Read `(query, document ids best first)` once; unjudged queries are left out, missing ones are empty."""
        rows = {query: row for row, query in enumerate(qrels)}
        lengths = np.zeros(len(rows), np.int64)
        found: list[tuple[int, list[int], list[int], list[str]]] = []
        for query, documents in rankings:
            row = rows.get(query)
            if row is None:
                continue
            judged = qrels[query]
            lengths[row] = len(documents)
            # The one loop over every ranked document; in C, for a run may have millions.
            ranks = list(compress(count(1), map(judged.__contains__, documents)))
            hits = [documents[rank - 1] for rank in ranks]
            if hits:
                found.append((row, ranks, [judged[document] for document in hits], hits))
        found.sort(key=lambda entry: entry[0])

        sizes = np.zeros(len(rows), np.int64)
        ideal: list[int] = []
        ideal_document: list[str] = []
        for row, documents_of in enumerate(qrels.values()):
            relevant = [document for document, grade in documents_of.items() if grade > 0]
            grades = [documents_of[document] for document in relevant]
            if len(set(grades)) > 1:
                relevant.sort(key=documents_of.__getitem__, reverse=True)
                grades.sort(reverse=True)
            sizes[row] = len(grades)
            ideal.extend(grades)
            ideal_document.extend(relevant)
        ideal_query = np.repeat(np.arange(len(rows)), sizes)
        return cls(
            queries=list(rows),
            lengths=lengths,
            hit_query=np.repeat([row for row, *_ in found], [len(ranks) for _, ranks, *_ in found]).astype(np.int64),
            hit_rank=np.array([rank for _, ranks, *_ in found for rank in ranks], np.int64),
            hit_grade=np.maximum(np.array([grade for *_, grades, _ in found for grade in grades], np.int64), 0),
            hit_document=[document for *_, hits in found for document in hits],
            ideal_query=ideal_query,
            ideal_rank=count_within(ideal_query),
            ideal_grade=np.array(ideal, np.int64),
            ideal_document=ideal_document,
        )

    def binary(self) -> HitTable:
        """The same table with every grade above 1 as 1; ideal ranks need not change, since all gains are equal."""
        return replace(self, hit_grade=np.minimum(self.hit_grade, 1), ideal_grade=np.minimum(self.ideal_grade, 1))

    def relevant(self, rel: int = 1) -> Values:
        """Number of documents with a grade of at least `rel`, per query `(queries,)`."""
        return self._sum(self.ideal_query[self.ideal_grade >= rel])

    def hits(self, k: int | None = None, rel: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Query position and rank of every retrieved document with a grade of at least `rel` in the top `k`."""
        kept = self.hit_grade >= rel
        if k is not None:
            kept &= self.hit_rank <= k
        return self.hit_query[kept], self.hit_rank[kept]

    def _sum(self, query: NDArray[np.int64], weights: Values | None = None) -> Values:
        return np.bincount(query, weights, minlength=len(self.queries)).astype(np.float64)

    def _discounted(
        self, query: NDArray[np.int64], rank: NDArray[np.int64], grade: NDArray[np.int64], k: int | None
    ) -> Values:
        kept = slice(None) if k is None else rank <= k
        return self._sum(query[kept], grade[kept] / np.log2(rank[kept] + 1.0))


def ndcg(table: HitTable, k: int | None = None) -> Values:
    """nDCG@k `(queries,)`: gain is the grade, discount log2(rank + 1), ideal from the qrels (not from the run)."""
    gained = table._discounted(table.hit_query, table.hit_rank, table.hit_grade, k)
    return _ratio(gained, table._discounted(table.ideal_query, table.ideal_rank, table.ideal_grade, k))


def ndcg_parts(table: HitTable, k: int) -> Values:
    """What each hit `(hits,)` adds to its query's nDCG@k: its discounted gain over the query's ideal; 0 below k."""
    ideal = table._discounted(table.ideal_query, table.ideal_rank, table.ideal_grade, k)[table.hit_query]
    gained = np.where(table.hit_rank <= k, table.hit_grade / np.log2(table.hit_rank + 1.0), 0.0)
    return _ratio(gained, ideal)


def precision(table: HitTable, k: int, rel: int = 1) -> Values:
    """P@k `(queries,)`: relevant documents in the top k, over k, however short the list is."""
    return table._sum(table.hits(k, rel)[0]) / k


def recall(table: HitTable, k: int, rel: int = 1) -> Values:
    """R@k `(queries,)`: relevant documents in the top k, over all relevant ones; 0 where there are none."""
    return _ratio(table._sum(table.hits(k, rel)[0]), table.relevant(rel))


def reciprocal_rank(table: HitTable, k: int | None = None, rel: int = 1) -> Values:
    """RR@k `(queries,)`: 1 over the rank of the first relevant document, 0 if the top k has none."""
    query, rank = table.hits(k, rel)
    first, position = np.unique(query, return_index=True)
    values = np.zeros(len(table.queries))
    values[first] = 1.0 / rank[position]
    return values


def average_precision(table: HitTable, k: int | None = None, rel: int = 1) -> Values:
    """AP@k `(queries,)`: precision at each relevant document of the top k, summed, over all relevant ones."""
    query, rank = table.hits(k, rel)
    return _ratio(table._sum(query, count_within(query) / rank), table.relevant(rel))


def success(table: HitTable, k: int, rel: int = 1) -> Values:
    """Success@k `(queries,)`: 1 where the top k holds a relevant document."""
    return (table._sum(table.hits(k, rel)[0]) > 0).astype(np.float64)


def judged(table: HitTable, k: int | None = None) -> Values:
    """Judged@k `(queries,)`: share of the top k (or of a shorter list) that has a judgement; 0 for an empty list."""
    depth = table.lengths if k is None else np.minimum(table.lengths, k)
    return _ratio(table._sum(table.hits(k, rel=0)[0]), depth.astype(np.float64))


# name: function, parameters that it takes, whether it needs a cut-off
_CORE: dict[str, tuple[Callable[..., Values], frozenset[str], bool]] = {
    "nDCG": (ndcg, frozenset({"cutoff"}), False),
    "P": (precision, frozenset({"cutoff", "rel"}), True),
    "R": (recall, frozenset({"cutoff", "rel"}), True),
    "RR": (reciprocal_rank, frozenset({"cutoff", "rel"}), False),
    "AP": (average_precision, frozenset({"cutoff", "rel"}), False),
    "Success": (success, frozenset({"cutoff", "rel"}), True),
    "Judged": (judged, frozenset({"cutoff"}), False),
}


def core_measure(measure: Any) -> Callable[[HitTable], Values] | None:
    """The function of an ir-measures object if it is one of the core measures with plain parameters, else None."""
    entry = _CORE.get(measure.NAME)
    if entry is None:
        return None
    function, takes, needs_cutoff = entry
    given = {key: value for key, value in measure.params.items() if value != measure.SUPPORTED_PARAMS[key].default}
    if not given.keys() <= takes or given.get("rel", 1) < 1 or (needs_cutoff and "cutoff" not in given):
        return None
    cutoff, rel = given.get("cutoff"), given.get("rel", 1)
    if "rel" in takes:
        return lambda table: function(table, cutoff, rel)
    return lambda table: function(table, cutoff)


def _ratio(numerator: Values, denominator: Values) -> Values:
    """Quotient with 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def count_within(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """1, 2, 3 … restarting at each new value of a sorted array."""
    if not len(group):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    sizes = np.diff(np.concatenate([starts, [len(group)]]))
    return np.arange(len(group)) - np.repeat(starts, sizes) + 1

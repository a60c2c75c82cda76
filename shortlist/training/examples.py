"""Training examples: each query with all its positives in one row, its own negatives, and the documents by row.

Documents are numbered by their row in the corpus. Two documents with equal text are one document here (the first of
them): whichever is judged, the other counts as a positive too, and queries with equal text share their positives. So
an equal document can never act as a negative (shortlist.training.batches builds its masks from this).

Everything a query has is kept in flat arrays (shortlist.training.ragged), so that millions of queries with dozens of
positives each take a few bytes a positive.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data.label_qrels import LabelQrels
from shortlist.errors import DataError
from shortlist.training.documents import Documents, text_key
from shortlist.training.ragged import Positions, Ragged, Rows, unite

logger = logging.getLogger(__name__)

TITLE_PREFIX = "title:"


@dataclass(frozen=True)
class Example:
    """One training query as a value: its text, its known positives with their grades, its own negatives by source.

    `teacher` maps rows to the score a teacher gave them, where lists carry scores.
    """

    query_id: str
    query: str
    positives: Rows
    grades: NDArray[np.float32]
    negatives: Mapping[str, Rows]
    teacher: Mapping[int, float] | None = None


@dataclass(frozen=True)
class ExampleSet:
    """The training queries in flat arrays; rows are first rows of their text (`Documents.first_rows`).

    Args:
        query_ids: one a query; those of queries made from titles begin with `title:`.
        queries: their texts.
        documents: the corpus.
        groups: a number for each query that queries of equal text share, `(queries,)`.
        judged: each query's own judged positives, as they stand in the corpus, copies included.
        positives: the same without copies, with their grades.
        known: the positives of all queries of a group together, one list a group.
        negatives: name of a source ("given", "bm25") → documents listed with each query, known positives left out.
        teacher: documents with a teacher's scores, one list a query.
        banned: documents that must never be predicted for a query (filter files), one list a query.
    """

    query_ids: Sequence[str]
    queries: Sequence[str]
    documents: Documents
    groups: Rows
    judged: Ragged
    positives: Ragged
    known: Ragged
    negatives: Mapping[str, Ragged] = field(default_factory=dict)
    teacher: Ragged | None = None
    banned: Ragged | None = None

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, index: int) -> Example:
        taught = self.teacher
        scores = dict(zip(taught.row(index).tolist(), taught.weights(index).tolist(), strict=True)) if taught else {}
        return Example(
            self.query_ids[index],
            self.queries[index],
            self.positives.row(index),
            self.positives.weights(index),
            {name: listed.row(index) for name, listed in self.negatives.items()},
            scores or None,
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @property
    def num_titles(self) -> int:
        """Queries made from titles; they stand at the end."""
        count = 0
        while count < len(self) and self.query_ids[len(self) - 1 - count].startswith(TITLE_PREFIX):
            count += 1
        return count

    def is_known(self, queries: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each of `rows` is a known positive of the query beside it, by id or by text."""
        return self._listed(self.known, self.groups, queries, rows)

    def is_banned(self, queries: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each of `rows` must not be predicted for the query beside it, by id or by text."""
        if self.banned is None:
            return np.zeros(len(rows), bool)
        return self._listed(self.banned, np.arange(len(self)), queries, rows)

    def _listed(
        self, lists: Ragged, list_of: NDArray[np.integer], queries: NDArray[np.integer], rows: NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Whether each of `rows`, as the first of its text, is in the list of the query beside it."""
        distinct, local = np.unique(queries, return_inverse=True)
        positions, at = lists.entries(list_of[distinct])
        width = len(self.documents) + 1
        keys = at * width + lists.items[positions]
        wanted = local.reshape(-1) * width + self.documents.first_rows[rows]
        spot = np.searchsorted(keys, wanted)
        found = spot < len(keys)
        found[found] = keys[spot[found]] == wanted[found]
        return found

    def document_counts(self) -> Positions:
        """Training queries each row is a positive of, `(docs,)`; 0 for all but the first of equal texts."""
        return np.bincount(self.positives.items, minlength=len(self.documents))

    def with_banned(self, filters: Mapping[str, Collection[str]]) -> ExampleSet:
        """The same with documents that must never be predicted for a query: they are neither negative nor positive.

        Args:
            filters: query id → document ids, as a collection's `filters(split)` gives them; others are ignored.
        """
        if not filters:
            return self
        owners, rows = _listed(filters, self.query_ids, self.documents, what="filtered documents")
        return replace(self, banned=unite(owners, self.documents.first_rows[rows], None, lists=len(self)))

    def with_known(self, qrels: Mapping[str, Mapping[str, int]]) -> ExampleSet:
        """The same with the relevant documents of `qrels` among the known positives of the queries they judge.

        They are never negatives, and count as positives wherever they are in a pool; what a query brings into it by
        itself stays the same.
        """
        judged = {query: qrels[query] for query in dict.fromkeys(self.query_ids) if query in qrels}
        ids, owners, rows, grades, positive = _from_mapping(judged, self.documents)
        there = positive & (rows >= 0)
        group_of = dict(zip(self.query_ids, self.groups.tolist(), strict=True))
        groups = np.fromiter((group_of[query] for query in ids), np.int64, len(ids))[owners[there]]
        positions, own = self.known.entries(np.arange(len(self.known)))
        known = unite(
            np.concatenate([own, groups]),
            np.concatenate([self.known.items, self.documents.first_rows[rows[there]]]),
            np.concatenate([self.known.values_at(positions), grades[there]]),
            lists=len(self.known),
        )
        return replace(self, known=known)

    def with_negatives(self, source: str, queries: NDArray[np.integer], rows: NDArray[np.integer]) -> ExampleSet:
        """The same with (query, row) entries as the negatives of a source, known positives and copies left out."""
        known = self.is_known(queries, rows)
        if known.any():
            logger.info("%d %s negatives are known positives (by id or by text) and were removed.", known.sum(), source)
        kept = self.documents.first_rows[rows[~known]]
        listed = unite(queries[~known], kept, None, lists=len(self))
        return replace(self, negatives={**self.negatives, source: listed})


def build_examples(
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
    documents: Documents,
    *,
    negatives: Mapping[str, Sequence[str]] | None = None,
    title_queries: bool = False,
    limit: int | None = None,
) -> ExampleSet:
    """One example a judged query, with every positive of it.

    Args:
        queries: query id → text.
        qrels: query id → {document id: grade}; grades below 1 are given negatives. Of a `LabelQrels` the matrix is
            taken as it is, real-valued relevance included.
        documents: the corpus; judged documents that are not in it are counted, reported and left out.
        negatives: query id → document ids (mined or given); known positives among them are removed by id and by text.
        title_queries: add each document's title as a query whose positive is that document.
        limit: keep the first so many queries.

    Raises:
        DataError: no query has a positive in the corpus.
    """
    judged = _from_matrix(qrels, documents) if isinstance(qrels, LabelQrels) else _from_mapping(qrels, documents)
    ids, owners, rows, grades, positive = judged
    usable = np.zeros(len(ids), bool)
    usable[owners[positive & (rows >= 0)]] = True
    usable &= np.fromiter((query in queries for query in ids), bool, len(ids))
    if not usable.all():
        logger.warning(
            "%d judged queries have no text or no positive in the corpus and are left out.", int((~usable).sum())
        )
    if not usable.any():
        raise DataError(
            "no training query has a positive document: the judgements of this split do not meet the queries and the "
            "corpus; look at them with `shortlist data info`, or choose another data.split."
        )
    kept = np.flatnonzero(usable)[:limit]
    number = np.full(len(ids), -1, np.int32)
    number[kept] = np.arange(len(kept))
    absent = np.flatnonzero(rows < 0)
    if len(absent):
        logger.warning("%d judged documents are not in the corpus and are left out.", len(absent))
    there = (rows >= 0) & (number[owners] >= 0)
    rows, grades, positive = rows[there], grades[there], positive[there]
    owners = number[owners[there]].astype(np.int64)
    query_ids = [ids[index] for index in kept.tolist()]
    texts = [queries[query] for query in query_ids]
    own = [(owners[~positive], rows[~positive])]
    if negatives:
        own.append(_listed(negatives, query_ids, documents))
    owners, rows, grades = owners[positive], rows[positive], grades[positive]
    if title_queries:
        titled, titles, title_ids = _titles(documents)
        owners = np.concatenate([owners, np.arange(len(titled)) + len(query_ids)])
        rows, grades = np.concatenate([rows, titled]), np.concatenate([grades, np.ones(len(titled), np.float32)])
        query_ids, texts = query_ids + title_ids, texts + titles
    examples = _example_set(query_ids, texts, documents, owners, rows, grades)
    if any(len(part) for _, part in own):
        examples = examples.with_negatives(
            "given", np.concatenate([part for part, _ in own]), np.concatenate([part for _, part in own])
        )
    return examples


_Judged = tuple[Sequence[str], Positions, NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]


def _from_matrix(qrels: LabelQrels, documents: Documents) -> _Judged:
    """Query ids, and of every judgement: query number, row (-1: not in the corpus), relevance, whether positive."""
    label_rows = documents.corpus.positions(qrels.label_ids)
    matrix = qrels.matrix
    owners = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    values = matrix.data.astype(np.float32, copy=False)
    return qrels.point_ids, owners, label_rows[matrix.indices], values, qrels.grades > 0


def _from_mapping(qrels: Mapping[str, Mapping[str, int]], documents: Documents) -> _Judged:
    lengths, grades = array("q"), array("f")
    listed: list[str] = []
    for judged in qrels.values():
        lengths.append(len(judged))
        listed.extend(judged)
        grades.extend(judged.values())
    owners = np.repeat(np.arange(len(qrels)), np.array(lengths))
    values = np.array(grades, np.float32)
    return list(qrels), owners, _rows(listed, documents), values, values >= 1


def _rows(ids: list[str], documents: Documents) -> NDArray[np.int64]:
    """Rows of ids that may repeat, -1 where one is unknown."""
    return documents.corpus.positions(ids) if ids else np.zeros(0, np.int64)


def _listed(
    lists: Mapping[str, Collection[str]],
    query_ids: Sequence[str],
    documents: Documents,
    *,
    what: str = "given negatives",
) -> tuple[Positions, NDArray[np.int64]]:
    """(query number, row) entries of lists of document ids; unknown documents are counted and left out."""
    lengths = np.array([len(lists.get(query, ())) for query in query_ids])
    rows = _rows([document for query in query_ids for document in lists.get(query, ())], documents)
    if (rows < 0).any():
        logger.warning("%d %s are not in the corpus and are left out.", int((rows < 0).sum()), what)
    return np.repeat(np.arange(len(query_ids)), lengths)[rows >= 0], rows[rows >= 0]


def _titles(documents: Documents) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Rows, titles and query ids of the documents with both title and text."""
    rows, titles, ids = [], [], []
    for row in range(len(documents)):
        document = documents.corpus.row(row)
        if document.title.strip() and document.text.strip():
            rows.append(row)
            titles.append(document.title)
            ids.append(f"{TITLE_PREFIX}{document.id}")
    return np.array(rows, np.int64), titles, ids


def examples_from_lists(
    lists: Iterable[Any],
    documents: Documents,
    *,
    qrels: Mapping[str, Mapping[str, int]] | None = None,
    limit: int | None = None,
    teacher: bool = False,
) -> ExampleSet:
    """Examples from ranked lists: graded documents are positives and negatives; scores are the teacher's.

    With `teacher`, ungraded documents belong to the list too, and a list without scores is refused. The lists are
    streamed; what is kept of a document is its row, its grade and its score.

    What `qrels` judge relevant is a known positive as well: lists of mined negatives are older than the judgements, or
    know a part of them. A negative among them is removed, by id and by text; the lists of a teacher keep theirs, for
    the scores.

    Raises:
        DataError: a document of a list is not in the corpus, or there is no teacher score where one is needed.
    """
    query_ids: list[str] = []
    texts: list[str] = []
    owners, rows, grades = array("q"), array("q"), array("f")  # grade 0: a negative
    taught, taught_rows, scores = array("q"), array("q"), array("f")
    for ranked in lists:
        if limit is not None and len(query_ids) >= limit:
            break
        rows_of = documents.rows_of(document.id for document in ranked.documents)
        for document in ranked.documents:
            if document.id not in rows_of:
                raise DataError(
                    f"the list of query {ranked.query_id!r} names document {document.id!r}, which is not in the corpus."
                )
        own = [rows_of[document.id] for document in ranked.documents]
        scored = [(row, float(score)) for row, score in zip(own, ranked.scores, strict=True) if score is not None]
        if teacher and len(scored) < 2:
            raise DataError(
                f"the list of query {ranked.query_id!r} has {len(scored)} teacher scores; this loss learns from the "
                "scores of a stronger model: give lists with scores, or choose a loss that needs judgements only."
            )
        if not teacher and not any(grade is not None and grade > 0 for grade in ranked.grades):
            continue
        number = len(query_ids)
        query_ids.append(ranked.query_id)
        texts.append(ranked.query)
        for row, grade in zip(own, ranked.grades, strict=True):
            if grade is not None or teacher:
                owners.append(number)
                rows.append(row)
                grades.append(max(0.0, float(grade or 0.0)))
        for row, score in scored:
            taught.append(number)
            taught_rows.append(row)
            scores.append(score)
    if not query_ids:
        raise DataError(
            "the collection has no list with a positive document; set data.negatives to bm25, in_batch or all to train "
            "from judgements, or give lists with data.lists."
        )
    every, places, values = np.array(owners), np.array(rows), np.array(grades, np.float32)
    positive = values > 0
    examples = _example_set(query_ids, texts, documents, every[positive], places[positive], values[positive])
    if qrels is not None and not teacher:
        examples = examples.with_known(qrels)
    examples = examples.with_negatives("given", every[~positive], places[~positive])
    if qrels is not None and teacher:
        examples = examples.with_known(qrels)
    if len(taught):
        first = documents.first_rows[np.array(taught_rows)]
        examples = replace(
            examples, teacher=unite(np.array(taught), first, np.array(scores, np.float32), lists=len(query_ids))
        )
    return examples


def _example_set(
    query_ids: Sequence[str],
    texts: Sequence[str],
    documents: Documents,
    owners: NDArray[np.integer],
    rows: NDArray[np.integer],
    grades: NDArray[np.float32],
) -> ExampleSet:
    """Unite copies of documents, and the positives of equal queries; lists with nothing to unite are shared."""
    size = len(query_ids)
    judged = unite(owners, rows, grades, lists=size)
    first = documents.first_rows[rows]
    positives = judged if np.array_equal(first, rows) else unite(owners, first, grades, lists=size)
    keys = np.fromiter((text_key(text) for text in texts), np.uint64, size)
    distinct, inverse = np.unique(keys, return_inverse=True)
    if len(distinct) == size:
        return ExampleSet(query_ids, texts, documents, np.arange(size, dtype=np.int32), judged, positives, positives)
    groups: Rows = inverse.reshape(-1).astype(np.int32)
    known = unite(groups[owners], first, grades, lists=len(distinct))
    return ExampleSet(query_ids, texts, documents, groups, judged, positives, known)

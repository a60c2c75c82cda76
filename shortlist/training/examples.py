"""Training examples: each query with all its positives in one row, its own negatives, and the documents by row.

Documents are numbered by their row in the corpus. Two documents with equal text are one document here: whichever
of them is judged, the other counts as a positive too, and queries with equal text share their positives. So an
equal document can never act as a negative (shortlist.training.batches builds its masks from this).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

logger = logging.getLogger(__name__)

Rows = NDArray[np.int32]


# Up to this many documents the text keys of all are made in one pass; beyond, as they are needed.
STREAMED_DOCUMENTS = 300_000


class DocumentSource(Protocol):
    """What training reads of a corpus (shortlist.data.Corpus is one)."""

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in row order."""
        ...

    def __len__(self) -> int: ...

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Rows of many ids, -1 where an id is unknown."""
        ...

    def row(self, index: int) -> Any:
        """The document at a row, with `.id`, `.title`, `.text` and `.joined(template)`."""
        ...

    def texts(self, template: str | None = None) -> Iterator[str]:
        """Title and text of every row through the template, in order."""
        ...


class Documents:
    """Texts of a corpus by row, and which rows hold the same text."""

    def __init__(self, corpus: DocumentSource, *, template: str = "{title} {text}"):
        self.corpus = corpus
        self.template = template
        self._keys: dict[int, int] | NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.corpus)

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Id → row of those ids that are in the corpus."""
        distinct = list(dict.fromkeys(ids))
        rows = self.corpus.positions(distinct).tolist() if distinct else []
        return {document: row for document, row in zip(distinct, rows, strict=True) if row >= 0}

    def ids(self, rows: Iterable[int]) -> list[str]:
        """Ids of the documents at `rows`."""
        return [self.corpus.ids[int(row)] for row in rows]

    def text(self, row: int) -> str:
        """Title and text through the template, as the encoder will read it."""
        return str(self.corpus.row(row).joined(self.template))

    def all_texts(self) -> Iterator[str]:
        """Every text in row order."""
        return self.corpus.texts(self.template)

    def key(self, row: int) -> int:
        """A 64-bit number that equal texts share."""
        if self._keys is None:
            self._keys = {}
            if len(self) <= STREAMED_DOCUMENTS:
                self._keys = np.fromiter((text_key(text) for text in self.all_texts()), np.uint64, len(self))
        if isinstance(self._keys, dict) and row not in self._keys:
            self._keys[row] = text_key(self.text(row))
        return int(self._keys[row])

    def unique_rows(self) -> Rows:
        """Rows with a text of their own: the first row of each distinct text, ascending."""
        first: dict[int, int] = {}
        for row in range(len(self)):
            first.setdefault(self.key(row), row)
        return np.fromiter(first.values(), dtype=np.int32, count=len(first))


def text_key(text: str) -> int:
    """A 64-bit number that equal texts share (blank space at the ends ignored)."""
    return int.from_bytes(blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Example:
    """One training query: its text, all known positives, and the documents given as its negatives.

    `teacher` maps rows to the score a teacher gave them, where lists carry scores.
    """

    query_id: str
    query: str
    positives: Rows
    grades: NDArray[np.float32]
    negatives: Rows = field(default_factory=lambda: np.zeros(0, np.int32))
    teacher: Mapping[int, float] | None = None


@dataclass(frozen=True)
class ExampleSet:
    """The training queries, and the known positives of each as text keys (queries of equal text united)."""

    examples: list[Example]
    documents: Documents
    known: Sequence[Mapping[int, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


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
        qrels: query id → {document id: grade}; grades below 1 are given negatives.
        documents: the corpus; judged documents that are not in it are counted, reported and left out.
        negatives: query id → document ids (mined or given); known positives among them are removed by id and by text.
        title_queries: add each document's title as a query whose positive is that document.
        limit: keep the first so many queries.

    Raises:
        DataError: no query has a positive in the corpus.
    """
    examples: list[Example] = []
    absent: list[str] = []
    without = 0
    given = negatives or {}
    rows_of = documents.rows_of(
        document for query_id, judged in qrels.items() for document in (*judged, *given.get(query_id, ()))
    )
    for query_id, judged in qrels.items():
        if limit is not None and len(examples) >= limit:
            break
        text = queries.get(query_id)
        listed = [*judged, *given.get(query_id, ())]
        absent += [document for document in listed if document not in rows_of]
        positives = {rows_of[document]: float(grade) for document, grade in judged.items()
                     if grade >= 1 and document in rows_of}  # fmt: skip
        own = dict.fromkeys(rows_of[document] for document in listed if document in rows_of)
        if text is None or not positives:
            without += 1
            continue
        examples.append(
            Example(
                query_id,
                text,
                np.array(list(positives), np.int32),
                np.array(list(positives.values()), np.float32),
                np.array([row for row in own if row not in positives], np.int32),
            )
        )
    if absent:
        logger.warning(
            "%d judged or given documents are not in the corpus and are left out, such as %s.",
            len(absent), ", ".join(dict.fromkeys(absent[:3])),
        )  # fmt: skip
    if without:
        logger.warning("%d judged queries have no text or no positive in the corpus and are left out.", without)
    if not examples:
        raise DataError(
            "no training query has a positive document: the judgements of this split do not meet the queries and the "
            "corpus; look at them with `shortlist data info`, or choose another data.split."
        )
    if title_queries:
        examples += title_examples(documents)
    return finish_examples(examples, documents)


def title_examples(documents: Documents) -> list[Example]:
    """Each document's title as a query for it (documents with both title and text)."""
    found = []
    for row in range(len(documents)):
        document = documents.corpus.row(row)
        if document.title.strip() and document.text.strip():
            found.append(
                Example(f"title:{document.id}", document.title, np.array([row], np.int32), np.ones(1, np.float32))
            )
    return found


def examples_from_lists(
    lists: Iterable[Any], documents: Documents, *, limit: int | None = None, teacher: bool = False
) -> ExampleSet:
    """Examples from ranked lists: graded documents are positives and negatives; scores are the teacher's.

    With `teacher`, ungraded documents belong to the list too, and a list without scores is refused.

    Raises:
        DataError: a document of a list is not in the corpus, or there is no teacher score where one is needed.
    """
    examples: list[Example] = []
    for ranked in lists:
        if limit is not None and len(examples) >= limit:
            break
        rows_of = documents.rows_of(document.id for document in ranked.documents)
        for document in ranked.documents:
            if document.id not in rows_of:
                raise DataError(
                    f"the list of query {ranked.query_id!r} names document {document.id!r}, which is not in the corpus."
                )
        rows = [rows_of[document.id] for document in ranked.documents]
        grades = [-1.0 if grade is None else float(grade) for grade in ranked.grades]
        known = [(row, grade) for row, grade in zip(rows, grades, strict=True) if grade > 0]
        others = [
            row for row, grade, judged in zip(rows, grades, ranked.grades, strict=True)
            if grade <= 0 and (judged is not None or teacher)
        ]  # fmt: skip
        scores = {row: float(score) for row, score in zip(rows, ranked.scores, strict=True) if score is not None}
        if teacher and len(scores) < 2:
            raise DataError(
                f"the list of query {ranked.query_id!r} has {len(scores)} teacher scores; this loss learns from the "
                "scores of a stronger model: give lists with scores, or choose a loss that needs judgements only."
            )
        if not known and not teacher:
            continue
        examples.append(
            Example(
                ranked.query_id,
                ranked.query,
                np.array([row for row, _ in known], np.int32),
                np.array([grade for _, grade in known], np.float32),
                np.array(list(dict.fromkeys(others)), np.int32),
                scores or None,
            )
        )
    if not examples:
        raise DataError(
            "the collection has no list with a positive document; set data.negatives to bm25, in_batch or all to train "
            "from judgements, or give lists with data.lists."
        )
    return finish_examples(examples, documents)


def finish_examples(examples: list[Example], documents: Documents) -> ExampleSet:
    """Unite the positives of equal queries, and drop given negatives that are a known positive by id or text."""
    groups: dict[int, dict[int, float]] = {}
    known: list[Mapping[int, float]] = []
    for example in examples:
        group = groups.setdefault(text_key(example.query), {})
        for row, grade in zip(example.positives.tolist(), example.grades.tolist(), strict=True):
            key = documents.key(row)
            group[key] = max(grade, group.get(key, 0.0))
        known.append(group)
    dropped = 0
    cleaned = []
    for example, positives in zip(examples, known, strict=True):
        keep = [row for row in example.negatives.tolist() if documents.key(row) not in positives]
        if len(keep) < len(example.negatives):
            dropped += len(example.negatives) - len(keep)
            example = replace(example, negatives=np.array(keep, np.int32))
        cleaned.append(example)
    if dropped:
        logger.info("%d given negatives are known positives (by id or by text) and were removed.", dropped)
    return ExampleSet(cleaned, documents, known)

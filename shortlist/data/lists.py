"""Lists of documents for one query, one JSON value a line: training examples with hard negatives, candidates to rank.

Shapes read, told apart line by line (names as their tools write them):

- `{"query", "pos": [text], "neg": [text], "pos_scores", "neg_scores"}` (FlagEmbedding);
- `{"query_id", "query", "positive_passages": [{"docid", "title", "text"}], "negative_passages": […]}` (Tevatron 1), or
  `"positive_document_ids"`, `"negative_document_ids"` with a corpus beside it (Tevatron 2);
- `{"qid", "pos": [id], "neg": {"system": [id]}}` (msmarco-hard-negatives), ids plain or `{"pid", "ce-score"}`;
- `[qid, pid, pid, …]` or `[qid, [pid, score], …]`, the first document positive (ColBERT);
- `{"query_id", "query", "documents": [{"doc_id", "title", "text"}], "answer_ids": [id]}` (BlockRank; also what
  `write_lists` writes, with a `grade` and a `score` in each document);
- `{"query": {"text", "qid"}, "candidates": [{"docid", "score", "doc": {…}}]}` (rank_llm);
- columns `query`/`anchor`, `positive`, `negative`, `negative_1` …, `score`/`label` (sentence-transformers).

A document without an id gets one from its text, so that equal texts are one document; likewise a query.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shortlist.data.corpus import Corpus
from shortlist.data.documents import Document, RankedList
from shortlist.data.lines import LineErrors, examples, read_json_lines
from shortlist.data.list_shapes import Item, parse_list
from shortlist.errors import DataError
from shortlist.files import atomic_open

logger = logging.getLogger(__name__)

LIST_LINE = 'one list a line, such as {"query": "…", "pos": ["…"], "neg": ["…"]} or {"query": …, "documents": […]}'


def read_lists(
    path: str | Path,
    *,
    corpus: Corpus | None = None,
    queries: Mapping[str, str] | None = None,
    on_error: str = "fail",
) -> Iterator[RankedList]:
    """Stream the lists of a JSON-lines file in any shape of this module; nothing is held in memory.

    Lines with ids only are completed from `corpus` and `queries`: documents and queries these do not have are left
    out and counted. A negative that is also a positive of its list is left out and counted.

    Raises:
        DataError: a line of no known shape (file, line, the keys found), or ids without a corpus or queries.
        MissingInputError: no such file.
    """
    errors = LineErrors(on_error)
    records = (
        (f"{path}, line {number}", value) for number, value in read_json_lines(path, expected=LIST_LINE, errors=errors)
    )
    return complete_lists(records, str(path), errors=errors, corpus=corpus, queries=queries)


def complete_lists(
    records: Iterable[tuple[str, Any]],
    source: str,
    *,
    errors: LineErrors,
    corpus: Corpus | None = None,
    queries: Mapping[str, str] | None = None,
) -> Iterator[RankedList]:
    """Lists from `(where, parsed value)` pairs; see `read_lists`. What was left out is told at the end of the pass."""
    tally = _Tally()
    for where, value in records:
        try:
            query_id, query, items = parse_list(value, where)
            ranked = _complete(query_id, query, items, where, corpus, queries, tally)
        except DataError as error:
            errors.handle(error)
            continue
        if ranked is not None:
            yield ranked
    tally.report(source, errors)


def write_lists(lists: Iterable[RankedList], path: str | Path) -> int:
    """Write lists as JSON lines, atomically and streaming; `.gz` is compressed. Returns how many were written.

    One object a line: `query_id`, `query`, `documents` (`doc_id`, `title`, `text`, and `grade`, `score` where known),
    `answer_ids` (grades above 0).
    """
    count = 0
    with atomic_open(path) as handle:
        for ranked in lists:
            documents = []
            for document, grade, score in zip(ranked.documents, ranked.grades, ranked.scores, strict=True):
                record: dict[str, Any] = {"doc_id": document.id, "title": document.title, "text": document.text}
                if grade is not None:
                    record["grade"] = int(grade) if float(grade).is_integer() else grade
                if score is not None:
                    record["score"] = _finite(score, document.id, ranked.query_id)
                if document.metadata:
                    record["metadata"] = document.metadata
                documents.append(record)
            value = {"query_id": ranked.query_id, "query": ranked.query, "documents": documents}
            if any(grade is not None for grade in ranked.grades):
                value["answer_ids"] = [document.id for document in ranked.positives]
            handle.write(json_line(value))
            count += 1
    return count


def json_line(value: Any) -> str:
    """`value` as one line of JSON with its newline; line separators inside strings are escaped for other readers."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise DataError(f"{str(value)[:80]!r} holds NaN or an infinity, which JSON cannot; remove it.") from None
    for separator, escape in (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085")):
        text = text.replace(separator, escape)
    return text + "\n"


def content_id(*texts: str) -> str:
    """An id made from content: 20 hex digits, equal for equal texts."""
    return hashlib.blake2b("\x1f".join(texts).encode("utf-8"), digest_size=10).hexdigest()


class _Tally:
    """Counts of what a pass over lists left out."""

    def __init__(self) -> None:
        self.lists = self.reappearing = self.repeated = self.without_positive = 0
        self.documents: list[str] = []
        self.queries: list[str] = []
        self.num_documents = self.num_queries = 0

    def missing_document(self, id: str) -> None:
        self.num_documents += 1
        if len(self.documents) < 4:
            self.documents.append(id)

    def missing_query(self, id: str) -> None:
        self.num_queries += 1
        if len(self.queries) < 4:
            self.queries.append(id)

    def report(self, source: str, errors: LineErrors) -> None:
        if errors.count:
            logger.warning(
                "%s: %d lines skipped because they could not be used: %s",
                source, errors.count, " ".join(errors.examples),
            )  # fmt: skip
        if self.num_documents:
            logger.warning("%s: %d documents are not in the corpus and are left out of their lists: %s",
                           source, self.num_documents, examples(self.documents))  # fmt: skip
        if self.num_queries:
            logger.warning("%s: %d lists left out because their query has no text: %s",
                           source, self.num_queries, examples(self.queries))  # fmt: skip
        if self.reappearing:
            logger.info(
                "%s: %d negatives left out because they are positives of the same list.", source, self.reappearing
            )
        if self.repeated:
            logger.info("%s: %d documents that are twice in a list were taken once.", source, self.repeated)
        if not self.lists:
            reason = f": {errors.examples[0]}" if errors.count else ""
            raise DataError(f"{source} holds no usable list{reason}; expected {LIST_LINE}.")


def _complete(
    query_id: str | None,
    query: str | None,
    items: list[Item],
    where: str,
    corpus: Corpus | None,
    queries: Mapping[str, str] | None,
    tally: _Tally,
) -> RankedList | None:
    if query is None:
        assert query_id is not None
        if queries is None:
            raise DataError(
                f"{where}: the query is given by its id {query_id!r} only; pass queries=, or put queries.jsonl and "
                "corpus.jsonl into the same folder."
            )
        query = queries.get(query_id)
        if query is None:
            tally.missing_query(query_id)
            return None
    known = _look_up([item.id for item in items if item.text is None and item.id is not None], where, corpus)
    documents: list[Document] = []
    grades: list[float | None] = []
    scores: list[float | None] = []
    positions: dict[str, int] = {}
    for item in items:  # positives stand first, so a negative that reappears meets its positive
        if item.text is not None:
            document = Document(item.id or content_id(item.title, item.text), item.title, item.text, item.metadata)
        else:
            found = known[str(item.id)]
            if found is None:
                tally.missing_document(str(item.id))
                continue
            document = found
        earlier = positions.get(document.id)
        if earlier is not None:
            if item.grade is not None and item.grade <= 0 and (grades[earlier] or 0) > 0:
                tally.reappearing += 1
            else:
                tally.repeated += 1
            continue
        positions[document.id] = len(documents)
        documents.append(document)
        grades.append(item.grade)
        scores.append(item.score)
    tally.lists += 1
    return RankedList(query_id or content_id(query), query, documents, grades, scores)


def _look_up(ids: list[str], where: str, corpus: Corpus | None) -> dict[str, Document | None]:
    if not ids:
        return {}
    if corpus is None:
        raise DataError(
            f"{where}: documents are given by ids only, such as {ids[0]!r}; pass corpus=, or put corpus.jsonl and "
            "queries.jsonl into the same folder."
        )
    rows = corpus.positions(ids).tolist()
    return {id: corpus.row(row) if row >= 0 else None for id, row in zip(ids, rows, strict=True)}


def _finite(score: float, document: str, query: str) -> float:
    if not math.isfinite(score):
        raise DataError(f"the score of document {document!r} for query {query!r} is {score}; expected a finite number.")
    return float(score)

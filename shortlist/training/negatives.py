"""Negatives that a first stage finds for each training query: mined once, kept in a file beside the output."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from shortlist.errors import DataError
from shortlist.files import atomic_open
from shortlist.training.examples import Documents, ExampleSet, Rows, finish_examples
from shortlist.types import Run

logger = logging.getLogger(__name__)

NEGATIVES_FILE = "negatives.jsonl.gz"
QUERIES_AT_ONCE = 4096


def mine_negatives(
    path: str | Path,
    examples: ExampleSet,
    search: Callable[[Mapping[str, str], int], Run],
    *,
    depth: int = 100,
    system: str = "bm25",
) -> None:
    """Write the `depth` best documents of each query minus its known positives, by id and by text, best first.

    One JSON object a query, {"qid": …, "pos": [ids], "neg": {system: [ids]}}, a shape that `data.lists` reads too;
    written as the search goes, atomically. Queries made from titles get none.

    Args:
        path: the file, `.jsonl.gz`.
        examples: the training queries with their known positives.
        search: query id → text and a depth → run.
        depth: documents asked for a query.
        system: name of the first stage.
    """
    documents = examples.documents
    mined = removed = without = queries = 0
    pairs = ((e, k) for e, k in zip(examples, examples.known, strict=True) if not e.query_id.startswith("title:"))
    with atomic_open(path) as handle:
        while part := list(islice(pairs, QUERIES_AT_ONCE)):
            run = search({example.query_id: example.query for example, _ in part}, depth)
            rows = documents.rows_of(document for example, _ in part for document in run.ranking(example.query_id)[0])
            for example, known in part:
                ids, _ = run.ranking(example.query_id)
                kept = [document for document in ids if documents.key(rows[document]) not in known]
                positives = documents.ids(example.positives.tolist())
                line = {"qid": example.query_id, "pos": positives, "neg": {system: kept}}
                handle.write(json.dumps(line, ensure_ascii=False) + "\n")
                queries, mined = queries + 1, mined + len(kept)
                removed, without = removed + len(ids) - len(kept), without + (not kept)
    logger.info(
        "Mined %d negatives for %d queries with %s; %d known positives (by id or by text) were removed, %d queries "
        "have none.",
        mined, queries, system, removed, without,
    )  # fmt: skip


def read_negatives(path: str | Path, documents: Documents) -> dict[str, Rows]:
    """Query id → rows of its negatives, from a file that `mine_negatives` wrote.

    Raises:
        DataError: a document is not in the corpus (the file belongs to another collection), or a broken line.
    """
    negatives: dict[str, Rows] = {}
    lines = _lines(path)
    while part := list(islice(lines, QUERIES_AT_ONCE)):
        rows = documents.rows_of(document for _, _, ids in part for document in ids)
        for number, query, ids in part:
            unknown = next((document for document in ids if document not in rows), None)
            if unknown is not None:
                raise DataError(
                    f"{path}, line {number}: document {unknown!r} is not in the corpus; the file was mined from "
                    "another collection: delete it to mine again."
                )
            negatives[query] = np.array([rows[document] for document in ids], np.int32)
    return negatives


def with_negatives(examples: ExampleSet, negatives: Mapping[str, Rows]) -> ExampleSet:
    """The same examples with more documents of their own, known positives left out."""
    extended = [
        replace(example, negatives=_union(example.negatives, negatives[example.query_id]))
        if example.query_id in negatives
        else example
        for example in examples
    ]
    return finish_examples(extended, examples.documents)


def _union(first: Rows, second: Rows) -> Rows:
    return np.fromiter(dict.fromkeys([*first.tolist(), *second.tolist()]), np.int32)


def _lines(path: str | Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, query id and negatives of each line."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as handle:
        for number, text in enumerate(handle, 1):
            try:
                line = json.loads(text)
                yield number, str(line["qid"]), [document for ids in line["neg"].values() for document in ids]
            except (ValueError, KeyError, AttributeError, TypeError):
                raise DataError(
                    f'{path}, line {number}: expected {{"qid": …, "pos": […], "neg": {{…}}}}; delete it to mine again.'
                ) from None

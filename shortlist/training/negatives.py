"""Negatives that a first stage finds for each training query: mined once, kept in a file beside the output."""

from __future__ import annotations

import gzip
import json
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.files import atomic_open
from shortlist.training.examples import ExampleSet
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
    total = len(examples) - examples.num_titles
    with atomic_open(path) as handle:
        for start in range(0, total, QUERIES_AT_ONCE):
            part = range(start, min(start + QUERIES_AT_ONCE, total))
            run = search({examples.query_ids[index]: examples.queries[index] for index in part}, depth)
            for index in part:
                ids, _ = run.ranking(examples.query_ids[index])
                rows = documents.corpus.positions(ids)
                known = examples.is_known(np.full(len(rows), index), rows)
                kept = [document for document, drop in zip(ids, known.tolist(), strict=True) if not drop]
                positives = documents.ids(examples.judged.row(index).tolist())
                line = {"qid": examples.query_ids[index], "pos": positives, "neg": {system: kept}}
                handle.write(json.dumps(line, ensure_ascii=False) + "\n")
                queries, mined = queries + 1, mined + len(kept)
                removed, without = removed + len(ids) - len(kept), without + (not kept)
    logger.info(
        "Mined %d negatives for %d queries with %s; %d known positives (by id or by text) were removed, %d queries "
        "have none.",
        mined, queries, system, removed, without,
    )  # fmt: skip


def read_negatives(path: str | Path, examples: ExampleSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query numbers and rows of the negatives in a file that `mine_negatives` wrote, one entry a negative.

    Raises:
        DataError: a document is not in the corpus (the file belongs to another collection), or a broken line.
    """
    number = {query: index for index, query in enumerate(examples.query_ids)}
    owners, rows = array("q"), array("q")
    lines = _lines(path)
    while part := list(islice(lines, QUERIES_AT_ONCE)):
        rows_of = examples.documents.rows_of(document for _, _, ids in part for document in ids)
        for line, query, ids in part:
            unknown = next((document for document in ids if document not in rows_of), None)
            if unknown is not None:
                raise DataError(
                    f"{path}, line {line}: document {unknown!r} is not in the corpus; the file was mined from "
                    "another collection: delete it to mine again."
                )
            if query in number:
                owners.extend([number[query]] * len(ids))
                rows.extend(rows_of[document] for document in ids)
    return np.array(owners, np.int64), np.array(rows, np.int64)


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

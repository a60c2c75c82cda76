"""Files of hard negatives, one JSON object a query: written as the search goes, read into a training set."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shortlist.data.lists import json_line
from shortlist.errors import DataError
from shortlist.files import atomic_open
from shortlist.training.examples import ExampleSet
from shortlist.training.mining import QUERIES_AT_ONCE, CandidateSearch, MiningCounts, MiningFilters, mine

NEGATIVES_FILE = "negatives.jsonl.gz"


def write_negatives(
    path: str | Path,
    examples: ExampleSet,
    search: CandidateSearch,
    *,
    system: str,
    k: int,
    depth: int,
    filters: MiningFilters | None = None,
    progress: Callable[[int], object] | None = None,
) -> MiningCounts:
    """Mine for every training query that is not made from a title, and write what was found, best first.

    A line is {"qid": …, "pos": [ids], "neg": {system: [ids]}, "scores": {system: [scores]}}, a shape that `data.lists`
    reads. Written block by block, atomically.

    Args:
        path: the file; `.gz` is compressed.
        examples: the training queries with their known positives.
        search: gives candidates.
        system: name of what searched.
        k: negatives a query.
        depth: candidates asked for a query.
        filters: what is dropped beside known positives (shortlist.training.mining).
        progress: called with the number of queries of every finished block.
    """
    documents = examples.documents
    counts = MiningCounts()
    judged_queries = len(examples) - examples.num_titles
    blocks = mine(examples, search, k=k, depth=depth, filters=filters, queries=judged_queries, progress=progress)
    with atomic_open(path) as handle:
        for block in blocks:
            # Ids are looked up once a block.
            there = block.rows >= 0
            negatives, sizes = iter(documents.ids(block.rows[there])), there.sum(axis=1).tolist()
            positions, _ = examples.judged.entries(block.queries)
            positives, judged = iter(documents.ids(examples.judged.items[positions])), examples.judged.lengths
            for number, size, scores in zip(block.queries.tolist(), sizes, block.scores, strict=True):
                line = {
                    "qid": examples.query_ids[number],
                    "pos": list(islice(positives, int(judged[number]))),
                    "neg": {system: list(islice(negatives, size))},
                    # The shortest decimal that is this float32 again.
                    "scores": {system: [float(str(score)) for score in scores[:size]]},
                }
                handle.write(json_line(line))
            counts += block.counts
    return counts


def read_negatives(path: str | Path, examples: ExampleSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query numbers and rows of the negatives in a file of `write_negatives`, one entry a negative.

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

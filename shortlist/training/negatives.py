"""Negatives that a first stage finds for each training query: mined once, kept in a file beside the output."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from shortlist.errors import DataError
from shortlist.files import atomic_open
from shortlist.training.examples import ExampleSet, finish_examples
from shortlist.types import Run

logger = logging.getLogger(__name__)

NEGATIVES_FILE = "negatives.jsonl.gz"


def mine_negatives(
    examples: ExampleSet, search: Callable[[Mapping[str, str], int], Run], *, depth: int = 100
) -> dict[str, list[str]]:
    """The `depth` best documents of each query minus its known positives, by id and by text, best first.

    `search` takes query id → text and a depth. Queries made from titles get none.
    """
    wanted = {e.query_id: e.query for e in examples if not e.query_id.startswith("title:")}
    run = search(wanted, depth)
    documents = examples.documents
    mined: dict[str, list[str]] = {}
    removed = 0
    for example, known in zip(examples, examples.known, strict=True):
        if example.query_id not in wanted:
            continue
        ids, _ = run.ranking(example.query_id)
        rows = documents.rows_of(ids)
        kept = [document for document in ids if documents.key(rows[document]) not in known]
        removed += len(ids) - len(kept)
        mined[example.query_id] = kept
    short = sum(1 for kept in mined.values() if not kept)
    logger.info(
        "Mined %d negatives for %d queries; %d known positives (by id or by text) were removed, %d queries have none.",
        sum(map(len, mined.values())), len(mined), removed, short,
    )  # fmt: skip
    return mined


def write_negatives(path: str | Path, examples: ExampleSet, mined: Mapping[str, list[str]], *, system: str) -> None:
    """Write hard negatives, one JSON object a query: {"qid", "pos": [ids], "neg": {system: [ids]}}; atomic."""
    corpus = examples.documents.corpus
    with atomic_open(path) as handle:
        for example in examples:
            if example.query_id in mined:
                positives = [corpus.row(row).id for row in example.positives.tolist()]
                line = {"qid": example.query_id, "pos": positives, "neg": {system: mined[example.query_id]}}
                handle.write(json.dumps(line, ensure_ascii=False) + "\n")


def with_negatives(examples: ExampleSet, mined: Mapping[str, list[str]]) -> ExampleSet:
    """The same examples with the mined documents added to their own negatives.

    Raises:
        DataError: a mined document is not in the corpus (the file belongs to another collection).
    """
    rows_of = examples.documents.rows_of(document for ids in mined.values() for document in ids)
    extended = []
    for example in examples:
        ids = mined.get(example.query_id, [])
        unknown = [document for document in ids if document not in rows_of]
        if unknown:
            raise DataError(
                f"the negatives of query {example.query_id!r} name document {unknown[0]!r}, which is not in the "
                f"corpus; delete {NEGATIVES_FILE} if it was mined from another collection."
            )
        rows = dict.fromkeys([*example.negatives.tolist(), *(rows_of[document] for document in ids)])
        extended.append(replace(example, negatives=np.array(list(rows), np.int32)))
    return finish_examples(extended, examples.documents)

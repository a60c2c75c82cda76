"""Write a collection in another format: BEIR folder, qrels, lists, or label matrices with one text a line."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import scipy.sparse

from shortlist.data.beir import write_beir
from shortlist.data.collection import Collection
from shortlist.data.documents import RankedList
from shortlist.data.label_qrels import LabelQrels
from shortlist.data.lines import examples
from shortlist.data.lists import write_lists
from shortlist.data.matrices import matrix_from_lists, write_label_matrix
from shortlist.data.trec import write_qrels
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import atomic_directory, atomic_open, refuse_existing
from shortlist.types import Qrels

logger = logging.getLogger(__name__)

FORMATS = ("beir", "qrels", "lists", "npz")
_STEMS = {"train": "trn", "test": "tst"}


def convert(
    collection: Collection,
    output: str | os.PathLike[str],
    *,
    to: str = "beir",
    split: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write `collection` to `output` and return its path; nothing is written half.

    `to` is one of:

    - `beir`: a folder with corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv and, for lists, lists/SPLIT.jsonl;
    - `qrels`: one file with the judgements of `split`, BEIR's three columns if its name ends in `.tsv`, else TREC's;
    - `lists`: one JSON-lines file with the lists of `split`, or, where it has none, its relevant documents as
      positives;
    - `npz`: the extreme-classification layout, a folder with `trn_X.txt`, `tst_X.txt`, `Y.txt` (one text a line),
      the ids in the same order (`trn_ids.txt`, …), `Y.trn.npz`, `Y.tst.npz` of shape (queries, documents), and filter
      files. An `output` that ends in `.npz` gets the one matrix of `split`.

    `split` is by default every split for a folder, and the collection's default one (lists: train) for a file.

    Raises:
        ConfigError: no such format.
        OutputExistsError: `output` is there and `overwrite` is false.
        MissingInputError, DataError: the collection has no such split, or ids the format cannot carry.
    """
    output = Path(output)
    if to not in FORMATS:
        raise ConfigError(f"cannot convert to {to!r}; expected one of {', '.join(FORMATS)}.")
    refuse_existing(output, overwrite=overwrite)
    if collection.path is not None and output.resolve() in (source := collection.path.resolve(), *source.parents):
        raise ConfigError(f"{output} is or holds the collection itself; choose another output.")
    if collection.subsets:
        if to == "qrels" or to == "lists" or output.suffix == ".npz":
            _ = collection.corpus  # says which collections there are
        with atomic_directory(output, overwrite=overwrite) as temporary:
            for name, subset in collection.subsets.items():
                convert(subset, temporary / name, to=to, split=split)
        return output
    if to == "beir":
        _write_beir(collection, output, split, overwrite)
    elif to == "qrels":
        _say_what_is_lost(collection.qrels(split))
        beir_columns = output.name.removesuffix(".gz").endswith(".tsv")
        write_qrels(collection.qrels(split), output, format="beir" if beir_columns else "trec")
    elif to == "lists":
        write_lists(_lists(collection, split), output)
    elif output.suffix == ".npz":
        write_label_matrix(output, label_matrix(collection, split)[1])
    else:
        _write_matrices(collection, output, split, overwrite)
    return output


def label_matrix(collection: Collection, split: str | None = None) -> tuple[list[str], scipy.sparse.csr_matrix]:
    """Query ids of a split and its relevance `(queries, documents)`, float32, columns in corpus order.

    Fractional relevance of an XC collection is kept; elsewhere the value is the grade, and grades below 1 are left
    out. Judged documents that are not in the corpus have no column and are counted in a warning.
    """
    qrels = collection.qrels(split)
    corpus = collection.corpus
    if isinstance(qrels, LabelQrels) and len(qrels.label_ids) == len(corpus):
        return list(qrels.point_ids), qrels.matrix
    documents = list({document for query in qrels for document in qrels.relevant(query)})
    columns = dict(zip(documents, corpus.positions(documents).tolist(), strict=True))
    absent = sorted(document for document, column in columns.items() if column < 0)
    if absent:
        logger.warning(
            "%d relevant documents are not in the corpus and have no column: %s", len(absent), examples(absent)
        )
    counts, indices, values = array("q"), array("i"), array("f")
    for query in qrels:
        pairs = [(columns[document], grade) for document, grade in qrels.relevant(query).items()]
        pairs = [(column, grade) for column, grade in pairs if column >= 0]
        counts.append(len(pairs))
        indices.extend(column for column, _ in pairs)
        values.extend(grade for _, grade in pairs)
    return list(qrels), matrix_from_lists(counts, indices, values, len(corpus), collection.name)


def _write_beir(collection: Collection, output: Path, split: str | None, overwrite: bool) -> None:
    judged = collection.judged_splits if split is None else [_judged(collection, split)]
    lists = [name for name in collection.list_splits if split is None or name == split]
    for name in judged:
        _say_what_is_lost(collection.qrels(name))
    with atomic_directory(output, overwrite=overwrite) as temporary:
        write_beir(collection, temporary, splits=judged)
        for name in lists:
            (temporary / "lists").mkdir(exist_ok=True)
            write_lists(collection.lists(name), temporary / "lists" / f"{name}.jsonl")


def _say_what_is_lost(qrels: Qrels) -> None:
    """Warn of points without labels: a file of judgements has no line for them, so measures no longer count them."""
    empty = int((np.diff(qrels.matrix.indptr) == 0).sum()) if isinstance(qrels, LabelQrels) else 0
    if empty:
        logger.warning(
            "%d of %d queries of %s have no label and so no line among the judgements; they count as 0 in measures of "
            "this collection, and not at all in those of the converted one.",
            empty, len(qrels), qrels.name or "the split",
        )  # fmt: skip


def _judged(collection: Collection, split: str) -> str:
    if split not in collection.judged_splits:
        raise MissingInputError(
            f"{collection.name} has no judgements for split {split!r}; judged are: "
            f"{', '.join(collection.judged_splits) or 'none'}."
        )
    return split


def _lists(collection: Collection, split: str | None) -> Iterator[RankedList]:
    if split is None:
        split = "train" if "train" in collection.splits else collection.default_split
    if split in collection.list_splits:
        yield from collection.lists(split)
        return
    qrels, corpus = collection.qrels(split), collection.corpus
    for query, text in collection.queries(split).items():
        found = [(corpus.get(document), grade) for document, grade in qrels[query].items()]
        documents = [(document, float(grade)) for document, grade in found if document is not None]
        if documents:
            yield RankedList(query, text, [d for d, _ in documents], [grade for _, grade in documents])


def _write_matrices(collection: Collection, output: Path, split: str | None, overwrite: bool) -> None:
    splits = collection.judged_splits if split is None else [_judged(collection, split)]
    if not splits:
        raise DataError(f"{collection.name} has no judgements; a label matrix is made from them.")
    corpus = collection.corpus
    with atomic_directory(output, overwrite=overwrite) as temporary:
        broken = _write_lines(temporary / "Y.txt", corpus.texts())
        _write_lines(temporary / "Y_ids.txt", corpus.ids)
        columns: dict[str, int] | None = None
        for name in splits:
            stem = _STEMS.get(name, name)
            ids, matrix = label_matrix(collection, name)
            texts = collection.queries(name)
            broken += _write_lines(temporary / f"{stem}_X.txt", (texts.get(query, "") for query in ids))
            _write_lines(temporary / f"{stem}_ids.txt", ids)
            write_label_matrix(temporary / f"Y.{stem}.npz", matrix)
            filters = collection.filters(name)
            if filters:
                if columns is None:
                    columns = {document: column for column, document in enumerate(corpus.ids)}
                rows = {query: row for row, query in enumerate(ids)}
                pairs = sorted((rows[q], columns[label]) for q, labels in filters.items() for label in labels)
                _write_lines(temporary / f"filter_labels_{name}.txt", (f"{row} {column}" for row, column in pairs))
        if broken:
            logger.warning("%d texts had line breaks, written as blanks: this format has one text a line.", broken)


def _write_lines(path: Path, texts: Iterable[str]) -> int:
    """Write one text a line; returns how many had line breaks, which become blanks."""
    broken = 0
    with atomic_open(path) as handle:
        for text in texts:
            if "\n" in text or "\r" in text:
                broken += 1
                text = text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
            handle.write(text + "\n")
    return broken

"""ir_datasets ids, such as `beir/scifact/test` (extra `irds`); the first use of one needs a network."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from shortlist.data.collection import SPLIT_ORDER, Collection
from shortlist.data.documents import Document, string_id
from shortlist.data.options import ReadOptions
from shortlist.errors import DataError, MissingExtraError, MissingInputError
from shortlist.types import Qrels


def is_installed() -> bool:
    """Whether the package ir_datasets is there; it is not imported."""
    return importlib.util.find_spec("ir_datasets") is not None


def looks_like_id(text: str) -> bool:
    """Whether a text could be an ir_datasets id: lower-case words, digits and dashes, joined by slashes."""
    return re.fullmatch(r"[a-z0-9][a-z0-9-]*(/[a-z0-9][a-z0-9.-]*)*", text) is not None


def knows(text: str) -> bool:
    """Whether ir_datasets is installed and has a data set of this id."""
    if not looks_like_id(text) or not is_installed():
        return False
    import ir_datasets

    try:
        ir_datasets.load(text)
    except KeyError:
        return False
    return True


def read(id: str, options: ReadOptions) -> Collection:
    """Open a data set of ir_datasets; its documents go to a temporary Arrow file.

    The one split is named after the last part of the id if that is train, dev, validation or test, else "test".

    Raises:
        MissingExtraError: ir_datasets is not installed.
        MissingInputError: no data set of this id, or it cannot be fetched.
        DataError: it has no documents.
    """
    if not is_installed():
        raise MissingExtraError(f"{id} is an ir_datasets id; install the extra: pip install 'shortlist[irds]'.")
    import ir_datasets

    try:
        dataset = ir_datasets.load(id)
    except KeyError:
        raise MissingInputError(f"ir_datasets has no data set {id!r}; see its list of ids.") from None
    if not dataset.has_docs():
        raise DataError(f"{id} has no documents in ir_datasets; open an id that has.")
    try:
        corpus = options.open_corpus(
            [], lambda errors: _documents(dataset, id), source=f"irds:{id}", reader_name="irds"
        )
    except (OSError, RuntimeError) as error:
        raise MissingInputError(
            f"ir_datasets could not fetch {id} ({error}); it needs a network on first use, or the files in place."
        ) from error
    split = next((part for part in reversed(id.split("/")) if part in SPLIT_ORDER), "test")
    return Collection(
        name=id,
        kind="irds",
        corpus=corpus,
        queries=lambda _: _queries(dataset, id),
        qrels={split: lambda: _qrels(dataset, f"{id}/{split}")} if dataset.has_qrels() else {},
        default_split=split,
    )


def _documents(dataset: Any, id: str) -> Iterator[tuple[int, Document]]:
    for number, record in enumerate(dataset.docs_iter(), 1):
        title = getattr(record, "title", "") or ""
        text = getattr(record, "text", None)
        if text is None:
            text = record.default_text().removeprefix(title).strip()
        yield number, Document(string_id(record.doc_id, f"irds:{id}, document {number}"), title, text)


def _queries(dataset: Any, id: str) -> dict[str, str]:
    if not dataset.has_queries():
        raise DataError(f"{id} has no queries in ir_datasets; open an id that has, such as {id}/test.")
    texts = {}
    for query in dataset.queries_iter():
        text = getattr(query, "text", None)
        texts[str(query.query_id)] = query.default_text() if text is None else text
    return texts


def _qrels(dataset: Any, name: str) -> Qrels:
    judgements: dict[str, dict[str, int]] = {}
    for judgement in dataset.qrels_iter():
        judgements.setdefault(str(judgement.query_id), {})[str(judgement.doc_id)] = int(judgement.relevance)
    return Qrels(judgements, name=name)

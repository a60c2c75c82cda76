"""What `shortlist search` asks: an index on disk, or a collection itself. Only what is needed is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shortlist.data import Collection
from shortlist.errors import ConfigError, MissingInputError
from shortlist.types import Run, Texts

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]


class Searcher(Protocol):
    """What both `Retriever` and `LexicalRetriever` are."""

    def search(
        self,
        queries: Texts,
        k: int = 100,
        *,
        filter: Any = None,
        exclude_self: bool = False,
        filters: Mapping[str, set[str]] | None = None,
        name: str = ...,
    ) -> Run:
        """The run of `queries`."""
        ...

    def document(self, id: str) -> Any:
        """The document of `id`, None if it is not known."""
        ...


@dataclass(frozen=True)
class Source:
    """One thing that is searched, and its name in logs, weights and JSON."""

    name: str
    searcher: Searcher


def open_sources(
    indexes: Sequence[AnyPath],
    *,
    model: AnyPath | None,
    collection: Collection | None,
    bm25: bool,
    device: str,
    dtype: str,
    bias: float | None,
    prior: str | None,
    filtered: bool = False,
    opener: Callable[[AnyPath], Any] | None = None,
) -> list[Source]:
    """The indexes in the order given; then the collection itself, by BM25 and by encoding it with a model.

    `filtered` says that a filter may ask for the fields of the documents.
    """
    corpus = collection.corpus if collection is not None else None
    sources = [
        Source(
            Path(index).resolve().name,
            open_searcher(index, model=model, corpus=corpus, device=device, dtype=dtype, bias=bias, opener=opener),
        )
        for index in indexes
    ]
    if bm25 and collection is not None:
        from shortlist.retrieval.lexical import LexicalRetriever

        sources.append(Source("bm25", LexicalRetriever.build(collection.corpus)))
    if not indexes and collection is not None and (model is not None or not bm25):
        retriever = _encoded(collection, model, device=device, dtype=dtype, bias=bias, prior=prior)
        if filtered:
            from shortlist.indexes.documents import DocumentStore

            retriever.index.documents = DocumentStore()
            retriever.index.documents.append(collection.corpus)
        sources.append(Source("dense", retriever))
    return sources


def open_searcher(
    index: AnyPath,
    *,
    model: AnyPath | None = None,
    corpus: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    bias: float | None = None,
    opener: Callable[[AnyPath], Any] | None = None,
) -> Searcher:
    """The searcher of an index directory of any kind, with the model that built it.

    Args:
        index: directory made by `shortlist index`.
        model: the encoder of the queries; by default what the index records.
        corpus: documents to show, for an index of vectors that stores none.
        device: of model and index.
        dtype: of the model's computation.
        bias: strength of the frequency prior.
        opener: opens an index of vectors in place of `open_index`, as for a cluster.

    Raises:
        ConfigError: a model for BM25, or none for an index that does not know its own.
        MissingInputError: the index or its model is not there.
        IndexMismatchError: `model` is not the one of the index.
    """
    from shortlist.retrieval.lexical_files import is_bm25

    if is_bm25(index):
        from shortlist.retrieval.lexical import LexicalRetriever

        if model is not None:
            raise ConfigError(f"{index} is a BM25 index; leave out --model.")
        return LexicalRetriever.open(index)

    from shortlist.indexes import open_index
    from shortlist.retrieval.search import Retriever

    opened = open_index(index, device=device) if opener is None else opener(index)
    encoder = encoder_of(Path(index), opened.model, model, device, dtype)
    # The index's own store shows what was indexed; the collection is for indexes without one.
    return Retriever(encoder, opened, corpus=None if opened.documents is not None else corpus, frequency_bias=bias)


def _encoded(
    collection: Collection, model: AnyPath | None, *, device: str, dtype: str, bias: float | None, prior: str | None
) -> Any:
    """The collection, encoded now."""
    from shortlist.indexes import ExactIndex
    from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
    from shortlist.retrieval.search import Retriever

    encoder = DualEncoder.from_pretrained(model or DEFAULT_MODEL, device=device, dtype=dtype)
    counted = None
    if prior is not None:
        from shortlist.commands.index import count_prior

        counted = count_prior(collection, prior, encoder.temperature)
    built = ExactIndex.build(encoder, collection.corpus, device=device, frequency_prior=counted)
    return Retriever(encoder, built, corpus=collection.corpus, frequency_bias=bias)


def encoder_of(index: Path, record: Mapping[str, Any], model: Any, device: str, dtype: str) -> Any:
    """The encoder for the queries of an index: `model` if given, else what its manifest points at."""
    from shortlist.retrieval.dual_encoder import DualEncoder

    if model is not None:
        return DualEncoder.from_pretrained(model, device=device, dtype=dtype)
    name, path = record.get("name"), record.get("path")
    if name is None:
        raise ConfigError(f"{index} does not say which model built it; pass --model MODEL.")
    beside = (index.resolve() / path).resolve() if path else None
    try:
        return DualEncoder.from_pretrained(
            beside if beside is not None and beside.is_dir() else name, device=device, dtype=dtype
        )
    except MissingInputError as error:
        raise MissingInputError(
            f"the model {name!r} (fingerprint {record.get('fingerprint')}) that built {index} was not found: {error} "
            "Pass --model with where it is."
        ) from None


def log_settings(source: Source) -> None:
    """What can move a score without being seen in the run: model, prompts, lengths, norm, dtype, BM25, prior."""
    searcher = source.searcher
    prior = getattr(searcher, "frequency_prior", None)
    if prior is not None:
        facts = ", ".join(f"{name} {value!r}" for name, value in prior.items())
        logger.info("frequency bias %s of the prior with %s", getattr(searcher, "frequency_bias", 0.0), facts)
    encoder = getattr(searcher, "encoder", None)
    if encoder is not None:
        settings = ", ".join(f"{name} {value!r}" for name, value in encoder.settings().items())
        logger.info("%s: encoded with fingerprint %s: %s", source.name, encoder.fingerprint, settings)
    elif hasattr(searcher, "settings"):
        settings = ", ".join(
            f"{name} {'a list' if isinstance(value, list) else repr(value)}"
            for name, value in searcher.settings().items()
        )
        logger.info("%s: BM25 with %s", source.name, settings)

"""Search with a model: queries are encoded, looked up in an index, and come back as a run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data.documents import Document
from shortlist.errors import ConfigError, DataError, IndexMismatchError
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.filters import Filter, as_filter
from shortlist.indexes.frequency import with_bias
from shortlist.retrieval.dual_encoder import DualEncoder, as_texts
from shortlist.retrieval.encode import encode_stream
from shortlist.types import Encoder, Index, Ranked, Run, Texts, check_k, left_out

logger = logging.getLogger(__name__)

LARGEST_BIAS = 1e30  # times a coordinate of the prior it is still a float32
_SLICE = 4096  # queries encoded together
_RESULTS = 4 << 20  # results held at once: 64 MB as arrays


class Retriever:
    """An encoder and the index of its document vectors; `search` gives a `Run`, `rank` one query's documents.

    Args:
        encoder: a `DualEncoder`, or anything with its `dim`, `fingerprint` and `encode_queries`.
        index: an index of vectors that this encoder made.
        corpus: where `rank` takes documents from; by default the document store of the index, if it has one.
        frequency_bias: strength tau of the frequency prior in the index: every score is <q, d> + tau * temperature *
            log pi of the document. None or 0: the plain scores. See `shortlist.indexes.FrequencyPrior`.

    Raises:
        IndexMismatchError: the index records the fingerprint of another model, or has another dimension.
        ConfigError: a frequency bias that is not a number up to `LARGEST_BIAS`, or for an index without a prior.
    """

    def __init__(self, encoder: Encoder, index: Index, *, corpus: Any = None, frequency_bias: float | None = None):
        self.encoder = encoder
        self.index = index
        self.corpus = corpus
        self.frequency_prior: dict[str, Any] | None = getattr(index, "frequency_prior", None)
        _check_model(encoder, index)
        if frequency_bias is not None and not abs(frequency_bias) <= LARGEST_BIAS:
            raise ConfigError(
                f"frequency_bias is {frequency_bias}; expected a number such as -0.5, and at most {LARGEST_BIAS:g} in "
                "size, so that scores stay finite."
            )
        if frequency_bias is not None and self.frequency_prior is None:
            raise ConfigError(
                "a frequency bias needs an index with a frequency prior, and this one has none; build it again with "
                "`shortlist index --frequency-prior train` (a split whose labels are counted)."
            )
        self.frequency_bias = frequency_bias or 0.0

    def search(
        self,
        queries: Texts,
        k: int | None = 100,
        *,
        filter: Any = None,
        exclude_self: bool = False,
        filters: Mapping[str, Collection[str]] | None = None,
        name: str = "dense",
    ) -> Run:
        """The `k` best documents of each query, in input order; fewer where fewer are there or pass the filter.

        Args:
            queries: mapping id → text; or a list of texts, or one text, whose ids are then "0", "1", ….
            k: documents a query, at least 1; None for all.
            filter: which documents may be returned to any query: an expression such as "year >= 2010", a
                `shortlist.indexes.Filter`, or a set of ids; None: all.
            exclude_self: leave out the document that has the query's own id (ArguAna, Quora).
            filters: query id → document ids to leave out (filter files of extreme classification). What is left out
                is replaced by the next best, so that every list has `k` documents.
            name: name of the run.

        Raises:
            ConfigError: k below 1, or a filter that does not fit the fields of the index.
            DataError: a query that is not a text, named.
        """
        filter = self._filter(filter)
        k = max(len(self.index), 1) if k is None else check_k(k)
        ids, texts = as_texts(queries)
        if ids is None:
            ids = [str(position) for position in range(len(texts))]
        run = Run(name=name)
        most = k + int(exclude_self) + max(map(len, (filters or {}).values()), default=0)
        rows = max(1, _RESULTS // max(1, min(most, len(self.index))))
        for part, vectors in self._encoded(ids, texts):
            for start in range(0, len(part), rows):
                names = part[start : start + rows]
                banned = [left_out(query, exclude_self, filters) for query in names]
                # More than k, since the documents to leave out may be among them.
                found = self._lookup(vectors[start : start + rows], k + max(map(len, banned)), filter)
                for query, out, (documents, scores) in zip(names, banned, found, strict=True):
                    if not out.isdisjoint(documents):
                        kept = [position for position, document in enumerate(documents) if document not in out]
                        documents, scores = [documents[position] for position in kept], scores[kept]
                    run.add(query, documents[:k], scores[:k])
        return run

    def rank(self, query: str, k: int = 10, *, filter: Any = None) -> list[Ranked]:
        """The `k` best documents of one query text that pass `filter`, best first, with what is stored of them.

        Documents come from the corpus, else from the document store of the index, else they are None.
        """
        check_k(k)
        if not isinstance(query, str):
            raise DataError(f"query is {type(query).__name__}; rank takes one text, search takes many.")
        filter = self._filter(filter)
        (vectors,) = [vectors for _, vectors in self._encoded(["0"], as_texts(query)[1])]
        if not isinstance(self.index, VectorIndex):
            found = _search(self.index, vectors, k, filter)[0]
            return [Ranked(id, score, rank, self._document(id)) for rank, (id, score) in enumerate(found, 1)]
        positions, scores, counts = self.index.search_arrays(vectors, k, filter)
        places = positions[0, : counts[0]].tolist()
        rows = zip(self.index.ids_at(places), scores[0].tolist(), places, strict=False)
        return [Ranked(id, score, rank, self._document(id, place)) for rank, (id, score, place) in enumerate(rows, 1)]

    def _filter(self, filter: Any) -> Filter | None:
        """What a `filter=` argument means; one that the index refuses fails here, before anything is encoded."""
        chosen = as_filter(filter)
        if chosen is not None and isinstance(self.index, VectorIndex):
            chosen.mask(self.index)  # kept by the index for the search
        return chosen

    def document(self, id: str) -> Document | None:
        """The document of `id`, from the corpus or the stored documents; None if it is in neither."""
        if self.corpus is not None or not isinstance(self.index, VectorIndex):
            return self._document(id)
        position = int(self.index._ids.find([id])[0])
        return self._document(id, position) if position >= 0 else None

    def _document(self, id: str, position: int | None = None) -> Document | None:
        if self.corpus is not None:
            return self.corpus.get(id)
        store = self.index.documents if isinstance(self.index, VectorIndex) else None
        stored = store.get(position) if store is not None and position is not None else None
        if stored is None:
            return None
        return Document(stored["id"], stored["title"], stored["text"], stored.get("metadata"))

    def _encoded(self, ids: list[str], texts: list[str]) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        pairs = zip(ids, texts, strict=True)
        if isinstance(self.encoder, DualEncoder):
            # One pass, so that truncated queries are counted and reported once.
            blocks = encode_stream(self.encoder, pairs, side="query", total=len(texts))
        else:
            blocks = self._slices(pairs)
        for part, vectors in blocks:
            yield part, vectors if self.frequency_prior is None else with_bias(vectors, self.frequency_bias)

    def _slices(self, pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        while part := list(islice(pairs, _SLICE)):
            yield [id for id, _ in part], self.encoder.encode_queries([text for _, text in part])

    def _lookup(
        self, vectors: NDArray[np.float32], k: int, filter: Filter | None
    ) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        if isinstance(self.index, VectorIndex):
            positions, scores, counts = self.index.search_arrays(vectors, k, filter)
            # All ids at once: many are read several times faster together.
            ids = self.index.ids_at(positions[np.arange(positions.shape[1]) < counts[:, None]])
            start = 0
            for row, count in enumerate(counts.tolist()):
                yield ids[start : start + count], scores[row, :count]
                start += count
            return
        for results in _search(self.index, vectors, k, filter):
            yield [id for id, _ in results], np.array([score for _, score in results], np.float32)


def _search(index: Index, vectors: NDArray[np.float32], k: int, filter: Filter | None) -> list[list[tuple[str, float]]]:
    # An index of the user's own need not know filters.
    return index.search(vectors, k) if filter is None else index.search(vectors, k, filter)


def _check_model(encoder: Encoder, index: Index) -> None:
    """Refuse an index of another model; note settings that differ and may matter."""
    model: dict[str, Any] = getattr(index, "model", {})
    settings = encoder.settings() if hasattr(encoder, "settings") else {}
    ours = f"{getattr(encoder, 'source', None) or type(encoder).__name__} (fingerprint {encoder.fingerprint})"
    built = f"{model.get('name') or 'a model'} (fingerprint {model.get('fingerprint', 'not recorded')})"
    dim = index.dim - (getattr(index, "frequency_prior", None) is not None)
    if encoder.dim != dim:
        raise IndexMismatchError(
            f"the model {ours} makes vectors of {encoder.dim} dimensions, the index has {dim} and was built with "
            f"{built}; search with that model, or build the index again."
        )
    recorded = model.get("fingerprint")
    if recorded and recorded != encoder.fingerprint:
        raise IndexMismatchError(
            f"the index was built with {built}, the queries would be encoded by {ours}: their vectors cannot be "
            "compared; search with the model of the index, or build the index again."
        )
    differing = [
        f"{key} was {model[key]!r}, is {settings[key]!r}"
        for key in ("dtype", "query_max_length", "doc_max_length", "template")
        if key in model and key in settings and model[key] != settings[key]
    ]
    if differing:
        logger.info("the model's settings differ from when the index was built: %s", "; ".join(differing))

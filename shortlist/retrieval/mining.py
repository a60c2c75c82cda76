"""Hard negatives from a dual encoder or from BM25, for any qrels and corpus; and the searches training mines with."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data.corpus import Corpus
from shortlist.errors import ConfigError
from shortlist.files import refuse_directory, refuse_existing
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.build import encode_slices
from shortlist.indexes.exact import ExactIndex
from shortlist.indexes.kinds import new_index
from shortlist.indexes.specs import parse_spec
from shortlist.indexes.topk import sort_rows
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DEFAULT_TEMPLATE, DualEncoder
from shortlist.retrieval.engine import Forward, progress_bar
from shortlist.retrieval.lexical import LexicalRetriever
from shortlist.training.documents import Documents
from shortlist.training.examples import build_examples
from shortlist.training.mining import Floats, MiningCounts, MiningFilters, Numbers
from shortlist.training.negatives import write_negatives
from shortlist.types import Qrels, check_k

logger = logging.getLogger(__name__)

# Further candidates that an index is asked for: scores are computed again, which may exchange near ties at the end.
_SPARE = 16
_PAIRS = 1 << 14  # pairs of vectors multiplied together


class DenseCandidates:
    """Searches a corpus with the encoder's weights of the moment, by an exact or a FAISS index.

    Scores are inner products of the encoder's own vectors (normalised where its similarity is cosine), computed pair by
    pair whatever index found the documents: kinds of index that find the same documents give the same bytes.

    Args:
        encoder: a dual encoder; its vectors are made anew for this object.
        corpus: the documents; found rows are rows of it.
        index: what searches, such as "exact", "hnsw" or a FAISS factory string (see `shortlist.indexes.specs`).
        device: of the exact index.
        vectors: ids and vectors of the corpus in its order, in blocks; None encodes it.
    """

    def __init__(
        self,
        encoder: Any,
        corpus: Corpus,
        *,
        index: str = "exact",
        device: str = "auto",
        vectors: Iterable[tuple[Sequence[str], Floats]] | None = None,
    ):
        self.encoder = encoder
        self.vectors = np.empty((len(corpus), encoder.dim), np.float32)
        exact = parse_spec(index, dim=encoder.dim).kind == "exact"
        self.index: VectorIndex = new_index(index, encoder.dim, device=device if exact else "auto", count=len(corpus))
        ids: list[str] = []
        for part, block in encode_slices(encoder, corpus) if vectors is None else vectors:
            self.vectors[len(ids) : len(ids) + len(part)] = block
            ids += part
        # In one piece: a kind that clusters learns from all of them.
        self.index.add(ids, self.vectors)
        if isinstance(self.index, ExactIndex):
            (self.vectors,) = self.index.vectors()  # one copy is enough

    def __call__(
        self, queries: Sequence[str], depth: int, pairs: tuple[Numbers, Numbers] | None = None
    ) -> tuple[Numbers, Floats, Floats]:
        """Rows and scores `(queries, depth)`, best first, -1 for none; and the scores of `pairs` (query, row)."""
        left = self._encode(queries)
        found, _, counts = self.index.search_arrays(left, depth + _SPARE)
        there = np.arange(found.shape[1]) < counts[:, None]
        scores = np.full(found.shape, -np.inf, np.float32)
        owners, places = np.nonzero(there)
        scores[owners, places] = self._scores(left, owners, found[owners, places])
        rows, scores, counts = sort_rows(np.where(there, found, -1), scores, self.index.ids_at)
        rows[np.arange(rows.shape[1]) >= counts[:, None]] = -1
        asked = self._scores(left, *pairs) if pairs is not None else np.zeros(0, np.float32)
        return rows[:, :depth], scores[:, :depth], asked

    def _encode(self, queries: Sequence[str]) -> Floats:
        if not isinstance(self.encoder, DualEncoder):
            return np.asarray(self.encoder.encode_queries(list(queries)), np.float32)
        # Not encode_queries, which would tell of truncated queries once a block.
        forward = Forward(self.encoder, "query")
        vectors = np.zeros((len(queries), self.encoder.dim), np.float32)
        forward.vectors(forward.tokens(list(queries)), vectors)
        return vectors

    def _scores(self, left: Floats, owners: Numbers, rows: Numbers) -> Floats:
        """Inner products of pairs, each a sum in one order that does not depend on its neighbours."""
        scores = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _PAIRS):
            part = slice(start, start + _PAIRS)
            np.einsum("nd,nd->n", left[owners[part]], self.vectors[rows[part]], out=scores[part])
        return scores


class LexicalCandidates:
    """Searches a corpus with BM25.

    Args:
        corpus: the documents; found rows are rows of it.
        retriever: BM25 over them; None builds it.
    """

    def __init__(self, corpus: Corpus, retriever: LexicalRetriever | None = None):
        self.corpus = corpus
        self.retriever = retriever or LexicalRetriever.build(corpus)

    def __call__(
        self, queries: Sequence[str], depth: int, pairs: tuple[Numbers, Numbers] | None = None
    ) -> tuple[Numbers, Floats, Floats]:
        """Rows and scores `(queries, depth)`, best first, -1 for none; and the scores of `pairs` (query, row)."""
        run = self.retriever.search(list(queries), depth)
        lists = [run.ranking(str(number)) for number in range(len(queries))]
        lengths = np.array([len(ids) for ids, _ in lists], np.int64)
        there = np.arange(depth) < lengths[:, None]
        rows = np.full((len(queries), depth), -1, np.int64)
        scores = np.full((len(queries), depth), -np.inf, np.float32)
        flat = [id for ids, _ in lists for id in ids]
        if flat:
            rows[there] = self.corpus.positions(flat)
            scores[there] = np.concatenate([values for _, values in lists])
        return rows, scores, self._scores(queries, *pairs) if pairs is not None else np.zeros(0, np.float32)

    def _scores(self, queries: Sequence[str], owners: Numbers, rows: Numbers) -> Floats:
        scores = np.zeros(len(rows), np.float32)
        ids = self.corpus.column("id", rows)
        for owner in np.unique(owners).tolist():
            own = np.flatnonzero(owners == owner)
            scores[own] = self.retriever.score(queries[owner], [ids[entry] for entry in own.tolist()])
        return scores


def mine_hard_negatives(
    qrels: Mapping[str, Mapping[str, int]],
    corpus: Corpus | Mapping[str, str] | Iterable[Any],
    *,
    queries: Mapping[str, str],
    output: str | os.PathLike[str],
    model: Any = None,
    bm25: bool = False,
    k: int = 50,
    depth: int | None = None,
    skip: int = 0,
    min_score: float | None = None,
    max_score: float | None = None,
    relative_margin: float | None = None,
    margin: float | None = None,
    index: str = "exact",
    banned: Mapping[str, Collection[str]] | None = None,
    system: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
) -> MiningCounts:
    """Write the `k` best documents of each judged query that are not relevant to it; returns what became of all.

    All positives of a query are known at once, whatever their number. What is dropped and in which order:
    shortlist.training.mining. The file has one line a query, {"qid", "pos": [ids], "neg": {system: [ids]}, "scores":
    {system: [scores]}}; train from it with data.negatives=given data.lists=FILE. Queries are searched and written in
    blocks; memory holds the vectors of the documents and one block.

    Args:
        qrels: query id → {document id: grade}; grades from 1 are relevant.
        corpus: a Corpus, a mapping id → text, or a list of documents.
        queries: query id → text.
        output: file to write, `.jsonl` or `.jsonl.gz`.
        model: a dual encoder, or its folder or name (default: the embedded one).
        bm25: search with BM25 instead.
        k: negatives a query.
        depth: candidates asked for a query; None: 2 × k + skip + 100.
        skip: how many of the best candidates to pass over.
        min_score: lowest score of a negative.
        max_score: highest score of a negative.
        relative_margin: a negative's score is at most (1 − relative_margin) × the query's positive score.
        margin: a negative's score is at most the positive score − margin.
        index: what searches, such as "exact", "hnsw" or a FAISS factory string.
        banned: query id → documents that must never be predicted for it (a collection's `filters`).
        system: name of the search in the file (default: "bm25", or the model's name).
        device: of the model.
        dtype: of the model's computation.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: settings that exclude each other or lie outside their range.
        DataError: no judged query has a text and a relevant document.
        OutputExistsError: `output` is there and `overwrite` is false.
    """
    target = Path(output)
    refuse_directory(target)
    refuse_existing(target, overwrite=overwrite)
    filters = MiningFilters(skip, min_score, max_score, relative_margin, margin)
    depth = 2 * check_k(k) + skip + 100 if depth is None else check_k(depth)
    if depth < k + skip:
        raise ConfigError(f"depth is {depth}, but k={k} after skip={skip} needs at least {k + skip}; raise it.")
    if bm25 and (model is not None or index != "exact"):
        raise ConfigError("BM25 takes neither a model nor an index; leave them out, or mine without BM25.")
    encoder = None
    if not bm25:
        loaded = isinstance(model, (str, os.PathLike)) or model is None
        encoder = DualEncoder.from_pretrained(model or DEFAULT_MODEL, device=device, dtype=dtype) if loaded else model
    opened = corpus if isinstance(corpus, Corpus) else Corpus.from_documents(corpus)
    by_row = bool(getattr(getattr(encoder, "document_tower", None), "by_row", False))
    documents = Documents(opened, template=getattr(encoder, "template", DEFAULT_TEMPLATE), by_row=by_row)
    judged = qrels if isinstance(qrels, Qrels) else Qrels(qrels)
    examples = build_examples(queries, judged, documents).with_banned(banned or {})
    search = (
        LexicalCandidates(opened) if encoder is None else DenseCandidates(encoder, opened, index=index, device=device)
    )
    name = system or ("bm25" if encoder is None else _name(model))
    with progress_bar(len(examples), "queries") as bar:
        counts = write_negatives(
            target, examples, search, system=name, k=k, depth=depth, filters=filters, progress=bar.update
        )
    logger.info("%s: %s", target, counts)
    if counts.short:
        logger.info(
            "%d of %d queries have fewer than %d negatives; a larger depth (now %d) or wider filters may give more.",
            counts.short, counts.queries, k, depth,
        )  # fmt: skip
    return counts


def _name(model: Any) -> str:
    if model is None:
        return DEFAULT_MODEL
    if isinstance(model, (str, os.PathLike)):
        return Path(model).name if Path(model).is_dir() else str(model)
    return str(getattr(model, "source", None) or type(model).__name__)

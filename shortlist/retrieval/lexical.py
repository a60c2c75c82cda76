"""BM25: the lexical first stage, through bm25s, with the same calls as the dense retriever.

Lucene's BM25 with the constants usual for short documents (k1 0.9, b 0.4); stems and stop words by language. Queries
are plain text: no character in them is an operator. A document without any term of the query is not ranked at all
(bm25s alone would pad the list with zero scores), and ties at the cut are resolved exactly, by the package's one rule.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from shortlist.data import Corpus
from shortlist.data.documents import Document
from shortlist.errors import ConfigError, DataError
from shortlist.indexes.documents import DocumentStore
from shortlist.indexes.fields import FieldStore
from shortlist.indexes.filters import as_filter
from shortlist.indexes.ids import IdTable
from shortlist.retrieval import lexical_files
from shortlist.retrieval.analysis import BY_LANGUAGE, Analyzer
from shortlist.types import Ranked, Run, Texts, check_k, left_out, named_queries, rank_order

logger = logging.getLogger(__name__)
# bm25s sets its own logger to DEBUG at import, which would pass every handler of the application.
logging.getLogger("bm25s").setLevel(logging.WARNING)


class LexicalRetriever:
    """BM25 over a corpus. Build it, search it, save it; an opened one is memory-mapped.

    Prefer it as the baseline of every table, as the source of hard negatives, and where queries hold names and codes.

    Documents can be removed, not added: the weight of a term depends on all documents, and bm25s stores it multiplied
    out in every posting. A removed document is never returned; the weights of the others stay as they were built.

    Attributes:
        analyzer: turns texts into terms.
        template: how title and text were joined.
        documents: the stored documents of an opened index, None if it has none.
        corpus: the documents it was built from, None for an opened index.
    """

    def __init__(
        self,
        scorer: bm25s.BM25,
        ids: IdTable,
        analyzer: Analyzer,
        *,
        template: str | None = None,
        documents: DocumentStore | None = None,
    ):
        self._scorer, self._ids, self.analyzer, self.template = scorer, ids, analyzer, template
        self.documents = documents
        self.corpus: Corpus | None = None
        self._corpus_fields: FieldStore | None = None
        self._home: lexical_files.Home | None = None

    @classmethod
    def build(
        cls,
        corpus: Corpus | Mapping[str, Any] | Iterable[Any],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        language: str | None = "english",
        stemmer: str | None = BY_LANGUAGE,
        stopwords: str | Sequence[str] | None = BY_LANGUAGE,
        template: str | None = None,
    ) -> LexicalRetriever:
        """Index a corpus; texts are streamed and only their term numbers kept (4 bytes a word, then 8 a posting).

        Args:
            corpus: a Corpus; a mapping id → text, dictionary or Document; or a list of Documents, dictionaries,
                (id, text) pairs or plain texts, whose ids are then their positions.
            k1: saturation of term frequency, at least 0.
            b: length normalisation, 0 (none) to 1.
            language: sets stemmer and stop words: a name such as "german", or a code ("de"); None for neither.
            stemmer: Snowball algorithm in place of the language's, or None.
            stopwords: a list of words, or the code of another language, in place of the language's, or None.
            template: how title and text are joined; the corpus's own by default, title first.

        Raises:
            ConfigError: constants out of range, unknown language, stemmer or stop words.
            DataError: an empty corpus, one without any word, a repeated id.
        """
        if not (isinstance(k1, Real) and 0 <= k1 < math.inf and isinstance(b, Real) and 0 <= b <= 1):
            raise ConfigError(f"BM25 with k1={k1!r} and b={b!r}; expected a finite k1 of at least 0 and b from 0 to 1.")
        analyzer = Analyzer(language=language, stemmer=stemmer, stopwords=stopwords)
        if not isinstance(corpus, Corpus):
            corpus = Corpus.from_documents(corpus if isinstance(corpus, Mapping) else _with_ids(corpus))
        template = corpus.template if template is None else template
        postings, ids = _TermLists(analyzer), IdTable()
        for start in range(0, len(corpus), 65_536):
            ids.append(list(corpus.ids[start : start + 65_536]))
        texts = tqdm(
            corpus.texts(template), "BM25", len(corpus), leave=False, unit=" docs", mininterval=0.5,
            disable=True if os.environ.get("SHORTLIST_QUIET") == "1" else None,
        )  # fmt: skip
        for text in texts:
            postings.append(text)
        if not postings.vocab:
            raise DataError(f"none of the {len(corpus)} documents holds a word to index; is the text field filled?")
        scorer = bm25s.BM25(k1=k1, b=b, method="lucene", csc_backend="scipy")
        scorer.index(postings, create_empty_token=False, show_progress=False)
        retriever = cls(scorer, ids, analyzer, template=template)
        retriever.corpus = corpus
        return retriever

    @property
    def fields(self) -> FieldStore | None:
        """The fields of the documents as columns, for filters; None where only ids are known."""
        if self.documents is not None:
            return self.documents.fields
        if self.corpus is not None and self._corpus_fields is None:
            # Only now: the metadata of a corpus is read document by document.
            self._corpus_fields = FieldStore()
            self._corpus_fields.append(document.metadata for document in self.corpus)
        return self._corpus_fields

    def __len__(self) -> int:
        """Number of documents, without the removed ones."""
        return self._ids.num_present

    def __repr__(self) -> str:
        return f"LexicalRetriever({len(self)} documents, k1={self.k1}, b={self.b})"

    @property
    def k1(self) -> float:
        """Saturation of term frequency."""
        return float(self._scorer.k1)

    @property
    def b(self) -> float:
        """Length normalisation."""
        return float(self._scorer.b)

    def search(
        self,
        queries: Texts,
        k: int = 100,
        *,
        filter: Any = None,
        exclude_self: bool = False,
        filters: Mapping[str, Collection[str]] | None = None,
        name: str = "bm25",
    ) -> Run:
        """The `k` best documents of each query, in input order; fewer where fewer hold a term of the query.

        A query without a known term (empty, stop words only) gets an empty list, and those are counted in one warning.

        Args:
            queries: mapping id → text; or a text or list of texts, whose ids are then "0", "1", ….
            k: documents a query, at least 1; more than the corpus holds gives fewer.
            filter: which documents may be returned to any query: an expression such as "year >= 2010", a
                `shortlist.indexes.Filter`, or a set of ids; None: all.
            exclude_self: leave out the document with the query's own id.
            filters: query id → document ids to leave out, replaced by the next best.
            name: name of the run.

        Raises:
            ConfigError: k below 1, or a filter that does not fit the fields of the documents.
        """
        check_k(k)
        mask = self._allowed(filter)
        run, unanswered = Run(name=name), []
        vocab = self._scorer.vocab_dict
        for query, text in named_queries(queries).items():
            terms = [vocab[term] for term in self.analyzer(text) if term in vocab]
            if not terms:
                unanswered.append(query)
                run.add(query, [], np.zeros(0, np.float32))
                continue
            scores = self._scorer.get_scores_from_ids(terms)
            if mask is not None:
                scores = np.where(mask, scores, 0)
            out = left_out(query, exclude_self, filters)
            # More than k, since the documents to leave out may be among them.
            positions = _best(scores, k + len(out))
            ids, values = self._ids.take(positions), scores[positions]
            order = [position for position in rank_order(ids, values) if ids[position] not in out]
            run.add(query, [ids[position] for position in order[:k]], values[order[:k]])
        if unanswered:
            logger.warning(
                "%d of %d queries hold no word of the corpus and get an empty list: %s",
                len(unanswered), len(run), ", ".join(map(repr, unanswered[:3])),
            )  # fmt: skip
        return run

    def rank(self, query: str, k: int = 10, *, filter: Any = None) -> list[Ranked]:
        """The `k` best documents of one query text, best first, with the documents where they are known."""
        if not isinstance(query, str):
            raise DataError(f"query is {type(query).__name__}; rank takes one text, search takes many.")
        ids, scores = self.search(query, k, filter=filter).ranking("0")
        return [
            Ranked(id, score, rank, self.document(id))
            for rank, (id, score) in enumerate(zip(ids, scores.tolist(), strict=True), 1)
        ]

    def document(self, id: str) -> Document | None:
        """The document of `id`, from the corpus or the stored documents; None if it is in neither."""
        if self.documents is None:
            return self.corpus.get(id) if self.corpus is not None else None
        position = int(self._ids.find([id])[0])
        stored = self.documents.get(position) if position >= 0 else None
        return (
            None if stored is None else Document(stored["id"], stored["title"], stored["text"], stored.get("metadata"))
        )

    def score(self, query: str, ids: Sequence[str]) -> NDArray[np.float32]:
        """BM25 scores `(docs,)` of one query text for the documents of `ids`; 0 where they share no term.

        Raises:
            DataError: an id that is not in the index.
        """
        positions = self._ids.find(ids)
        if (positions < 0).any():
            unknown = ids[int(np.flatnonzero(positions < 0)[0])]
            raise DataError(f"document {unknown!r} is not among the {len(self)} of this BM25 index.")
        terms = [self._scorer.vocab_dict[term] for term in self.analyzer(query) if term in self._scorer.vocab_dict]
        if not terms:
            return np.zeros(len(ids), np.float32)
        return np.asarray(self._scorer.get_scores_from_ids(terms), np.float32)[positions]

    def remove(self, ids: Iterable[str] | str) -> int:
        """Remove what is there of `ids`; returns how many were. On disk it is removed by `commit`."""
        found = np.unique(self._ids.find([ids] if isinstance(ids, str) else list(ids)))
        found = found[found >= 0]
        self._ids.remove(found)
        return len(found)

    def add(self, ids: Any, documents: Any = None) -> None:
        """Always refused (ConfigError): see the class."""
        raise ConfigError(
            "documents cannot be added to a BM25 index: the weight of every term depends on all documents. Build it "
            "again with the new ones (`shortlist index --index bm25 --overwrite`)."
        )

    def stats(self) -> dict[str, Any]:
        """What the index is: kind, documents, removed, terms, postings, bytes of the postings, and its settings."""
        arrays = [self._scorer.scores[name] for name in ("data", "indices", "indptr")]
        return {
            "spec": "bm25",
            "kind": "bm25",
            "count": len(self),
            "removed": self._ids.num_removed,
            "terms": len(self._scorer.vocab_dict),
            "postings": len(arrays[0]),
            "bytes": sum(array.nbytes for array in arrays),
            "generation": self._home.generation if self._home is not None else None,
            "documents": self.documents is not None or self.corpus is not None,
            **self.settings(),
        }

    def settings(self) -> dict[str, Any]:
        """What can move a score: k1, b, language, stemmer, stop words, template."""
        return {"k1": self.k1, "b": self.b, **self.analyzer.settings(), "template": self.template}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, documents: bool = True) -> None:
        """Write the index as a directory, whole or not at all; titles, texts and fields with it if they are known.

        Raises:
            OutputExistsError: `path` exists and `overwrite` is false.
        """
        self._home = lexical_files.write(self, path, overwrite=overwrite, documents=documents)

    def commit(self) -> int:
        """Write removals durably into the directory that was opened or saved to; returns the new generation.

        Raises:
            ConfigError: the index was never saved.
            ShortlistError: another process is writing there, or has written since.
        """
        if self._home is None:
            raise ConfigError("this BM25 index is not on disk yet; save it first.")
        self._home = lexical_files.commit(self._home, self._ids)
        return self._home.generation

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LexicalRetriever:
        """Open a saved index, memory-mapped.

        Raises:
            MissingInputError: no such directory.
            DataError: not a BM25 index, of another format version, or a file is missing, cut or changed (it is named).
        """
        home, manifest, scorer, ids, documents = lexical_files.open_parts(path)
        analyzer = Analyzer(language=manifest["language"], stemmer=manifest["stemmer"], stopwords=manifest["stopwords"])
        retriever = cls(scorer, ids, analyzer, template=manifest["template"], documents=documents)
        retriever._home = home
        return retriever

    def _allowed(self, filter: Any) -> NDArray[np.bool_] | None:
        """True where a position may be returned, `(positions,)`; None for all."""
        chosen, alive = as_filter(filter), self._ids.alive()
        if chosen is None:
            return alive
        mask = chosen.mask(self)
        return mask if alive is None else mask & alive


class _TermNumbers(dict[str, int]):
    """Word → number of its term, -1 for a stop word; a new word is analysed once, which is most of the speed."""

    def __init__(self, analyzer: Analyzer, vocab: dict[str, int]):
        super().__init__()
        self._analyzer, self._vocab = analyzer, vocab

    def __missing__(self, word: str) -> int:
        term = self._analyzer.term(word)
        number = -1 if term is None else self._vocab.setdefault(term, len(self._vocab))
        self[word] = number
        return number


class _TermLists:
    """Term numbers of each document in one flat array; bm25s reads them as lists, one at a time."""

    def __init__(self, analyzer: Analyzer) -> None:
        self.vocab: dict[str, int] = {}
        self._analyzer, self._numbers = analyzer, _TermNumbers(analyzer, self.vocab)
        self._terms, self._ends = array("i"), array("q", [0])

    def append(self, text: str) -> None:
        numbers = map(self._numbers.__getitem__, self._analyzer.words(text))
        self._terms.extend([number for number in numbers if number >= 0])
        self._ends.append(len(self._terms))

    @property
    def ids(self) -> _TermLists:
        """What bm25s asks an object with a vocabulary for."""
        return self

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for row in range(len(self)):
            yield self._terms[self._ends[row] : self._ends[row + 1]].tolist()


def _best(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Positions of the k best positive scores and of all that tie with the last of them, in no order."""
    positions = np.flatnonzero(scores > 0)
    if len(positions) <= k:
        return positions
    values = scores[positions]
    return positions[values >= np.partition(values, len(values) - k)[len(values) - k]]


def _with_ids(documents: Iterable[Any]) -> Iterator[Any]:
    if isinstance(documents, (str, bytes)):
        raise DataError("a corpus is a list of documents, not one string; wrap it in a list.")
    if not isinstance(documents, Iterable):
        raise DataError(f"a corpus is a Corpus, a mapping or a list of documents, not a {type(documents).__name__}.")
    for position, document in enumerate(documents):
        yield (str(position), document) if isinstance(document, str) else document

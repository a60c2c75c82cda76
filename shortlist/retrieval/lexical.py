"""BM25: the lexical first stage, through bm25s, with the same interface as the dense retriever.

Lucene's BM25 with the constants usual for short documents (k1 0.9, b 0.4), Snowball stems and stop words. Queries are
plain text: no character in them is an operator. A document without any term of the query is not ranked at all (bm25s
alone would pad the list with zero scores), and ties at the cut are resolved exactly, by the package's one rule.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import Stemmer
from numpy.typing import NDArray
from tqdm.auto import tqdm

from shortlist.data import Corpus
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import atomic_directory, write_json
from shortlist.indexes.ids import IdTable, IdWriter
from shortlist.types import Run, Texts, check_k, left_out, named_queries, rank_order

logger = logging.getLogger(__name__)
# bm25s sets its own logger to DEBUG at import, which would pass every handler of the application.
logging.getLogger("bm25s").setLevel(logging.WARNING)

FORMAT, FORMAT_VERSION = "shortlist-bm25", 1
# As in Lucene-like tokenisers of bm25s and scikit-learn: runs of two or more letters, digits or underscores.
_WORD = re.compile(r"\b\w\w+\b")


class Analyzer:
    """Text → terms: lower case, words of two or more characters, stop words out, Snowball stems.

    Args:
        stemmer: a Snowball algorithm name (`english`, `german`, …) or None.
        stopwords: a language that bm25s has a list for (`en`, `de`, …), a list of words, or None.

    Raises:
        ConfigError: an unknown stemmer or stop word list.
    """

    def __init__(self, *, stemmer: str | None = "english", stopwords: str | Sequence[str] | None = "en"):
        self.stemmer, self.stopwords = stemmer, stopwords
        if stemmer is not None and stemmer not in Stemmer.algorithms():
            raise ConfigError(
                f"stemmer is {stemmer!r}; expected null or one of {', '.join(sorted(Stemmer.algorithms()))}."
            )
        self._stem = str if stemmer is None else Stemmer.Stemmer(stemmer).stemWord
        try:
            words = bm25s.tokenization.Tokenizer(stopwords=stopwords).stopwords  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(
                f"stopwords is {stopwords!r}; expected null, a list of words or one of en, en_plus, da, de, es, fr, "
                "it, ko, nl, no, pt, ru, sv, tr, zh."
            ) from None
        self._stopwords = frozenset(words)

    def __call__(self, text: str) -> list[str]:
        """The terms of `text` in order, repeated ones included."""
        return [term for term in map(self.term, self.words(text)) if term is not None]

    def words(self, text: str) -> list[str]:
        """The lower-case words of `text`, stop words included."""
        return _WORD.findall(text.lower())

    def term(self, word: str) -> str | None:
        """The term that a word is indexed under, None for a stop word."""
        return None if word in self._stopwords else self._stem(word)


class LexicalRetriever:
    """BM25 over a corpus. Build it, search it, save it; an opened one is memory-mapped.

    Prefer it as the baseline of every table, as the source of hard negatives, and where queries hold names and codes.
    """

    def __init__(self, scorer: bm25s.BM25, ids: IdTable, analyzer: Analyzer, *, template: str | None = None):
        self._scorer, self._ids, self.analyzer, self.template = scorer, ids, analyzer, template

    @classmethod
    def build(
        cls,
        corpus: Corpus | Mapping[str, Any] | Iterable[Any],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: str | Sequence[str] | None = "en",
        template: str | None = None,
    ) -> LexicalRetriever:
        """Index a corpus; texts are streamed and only their term numbers kept (4 bytes a word, then 8 a posting).

        Args:
            corpus: a Corpus; a mapping id → text, dictionary or Document; or a list of Documents, dictionaries,
                (id, text) pairs or plain texts, whose ids are then their positions.
            k1: saturation of term frequency, at least 0.
            b: length normalisation, 0 (none) to 1.
            stemmer: Snowball algorithm, or None.
            stopwords: language, list of words, or None.
            template: how title and text are joined; the corpus's own by default, title first.

        Raises:
            ConfigError: constants out of range, unknown stemmer or stop words.
            DataError: an empty corpus, one without any word, a repeated id.
        """
        if not (isinstance(k1, Real) and 0 <= k1 < math.inf and isinstance(b, Real) and 0 <= b <= 1):
            raise ConfigError(f"BM25 with k1={k1!r} and b={b!r}; expected a finite k1 of at least 0 and b from 0 to 1.")
        analyzer = Analyzer(stemmer=stemmer, stopwords=stopwords)
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
        return cls(scorer, ids, analyzer, template=template)

    def __len__(self) -> int:
        return len(self._ids)

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
        exclude_self: bool = False,
        filters: Mapping[str, Collection[str]] | None = None,
        name: str = "bm25",
    ) -> Run:
        """The `k` best documents of each query, in input order; fewer where fewer hold a term of the query.

        A query without a known term (empty, stop words only) gets an empty list, and those are counted in one warning.

        Args:
            queries: mapping id → text; or a text or list of texts, whose ids are then "0", "1", ….
            k: documents a query, at least 1; more than the corpus holds gives fewer.
            exclude_self: leave out the document with the query's own id.
            filters: query id → document ids to leave out, replaced by the next best.
            name: name of the run.
        """
        check_k(k)
        run, unanswered = Run(name=name), []
        vocab = self._scorer.vocab_dict
        for query, text in named_queries(queries).items():
            terms = [vocab[term] for term in self.analyzer(text) if term in vocab]
            if not terms:
                unanswered.append(query)
                run.add(query, [], np.zeros(0, np.float32))
                continue
            scores = self._scorer.get_scores_from_ids(terms)
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

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the index as a directory, whole or not at all: bm25s's arrays, the ids and a manifest.

        Raises:
            OutputExistsError: `path` exists and `overwrite` is false.
        """
        with atomic_directory(path, overwrite=overwrite) as directory:
            self._scorer.save(directory, show_progress=False)
            writer = IdWriter(directory)
            writer.append(self._ids)
            writer.close()
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "kind": "bm25",
                "count": len(self),
                "k1": self.k1,
                "b": self.b,
                "stemmer": self.analyzer.stemmer,
                "stopwords": self.analyzer.stopwords
                if self.analyzer.stopwords is None or isinstance(self.analyzer.stopwords, str)
                else list(self.analyzer.stopwords),
                "template": self.template,
                "bm25s": bm25s.__version__,
                "files": {file.name: file.stat().st_size for file in sorted(directory.iterdir())},
            }
            write_json(directory / "manifest.json", manifest)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LexicalRetriever:
        """Open a saved index, memory-mapped.

        Raises:
            MissingInputError: no such directory.
            DataError: not a BM25 index, written by a newer version, or a file is missing or cut short (it is named).
        """
        directory = Path(path)
        if not directory.is_dir():
            raise MissingInputError(f"no BM25 index at {directory}: there is no such directory.")
        try:
            manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{directory} is not a BM25 index (its manifest.json does not say {FORMAT!r}).")
        if manifest["format_version"] > FORMAT_VERSION:
            raise DataError(
                f"{directory} has format version {manifest['format_version']}, this shortlist reads up to "
                f"{FORMAT_VERSION}; upgrade shortlist or build the index again."
            )
        for name, size in manifest["files"].items():
            file = directory / name
            if not file.is_file() or file.stat().st_size != size:
                found = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
                raise DataError(f"{file} {found}, the manifest says {size}; build the index again.")
        analyzer = Analyzer(stemmer=manifest["stemmer"], stopwords=manifest["stopwords"])
        scorer = bm25s.BM25.load(directory, mmap=True, show_progress=False)
        return cls(scorer, IdTable.open(directory), analyzer, template=manifest["template"])


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

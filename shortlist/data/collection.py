"""One internal shape for every data set: a corpus, queries, judgements by split, and lists of documents by split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from shortlist.data.cache import cached_checksum
from shortlist.data.corpus import Corpus
from shortlist.data.documents import DEFAULT_TEMPLATE, RankedList, string_id
from shortlist.data.lines import examples
from shortlist.data.splits import split_off_dev
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.types import Qrels

logger = logging.getLogger(__name__)

Queries = Mapping[str, str] | Callable[[str | None], Mapping[str, str]]
SPLIT_ORDER = ("train", "dev", "validation", "test")
DEFAULT_MEASURES = {
    "beir": ("nDCG@10", "R@100"),
    "msmarco": ("RR@10", "R@1000"),
    "xc": ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100"),
}


class Collection:
    """A corpus with queries and judgements; splits are read when they are first asked for.

    Attributes:
        name: for tables and run tags.
        path: where it was opened, None for one made in Python.
        kind: `beir`, `msmarco`, `xc`, `lists`, `irds`, `hf` or `memory`.
        corpus: the documents (XC: the labels).
        exclude_self: whether a document with the query's own id is taken out of its results (ArguAna, Quora).
        measures: what `evaluate` reports unless told otherwise.
        propensity: (A, B) of the XC propensity model, None where it does not apply.
        subsets: the collections of a folder that holds several (CQADupStack); such a folder has no corpus of its own.
    """

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        corpus: Corpus | None,
        queries: Queries,
        qrels: Mapping[str, Qrels | Callable[[], Qrels]],
        lists: Mapping[str, Callable[[], Iterable[RankedList]]] | None = None,
        path: Path | None = None,
        files: Sequence[Path] = (),
        groups: Callable[[], Mapping[str, str]] | None = None,
        filters: Callable[[str], dict[str, set[str]]] | None = None,
        default_split: str | None = None,
        exclude_self: bool = False,
        measures: Sequence[str] | None = None,
        propensity: tuple[float, float] | None = None,
        subsets: Mapping[str, Collection] | None = None,
    ):
        """Called by the readers; see `from_parts` for data made in Python.

        Args:
            name: see the class.
            kind: see the class.
            corpus: the documents; None only with `subsets`.
            queries: all queries, or a function of a split (None: all) that reads at least the queries of it.
            qrels: the judgements of each split, or a function that reads them once.
            lists: for each split that has lists, a function that starts a new pass over them.
            path: where it was opened.
            files: every file the collection was read from, for checksums.
            groups: query id → page or group, where the queries file has a `group` or `page` field.
            filters: split → query id → documents never to be predicted.
            default_split: the one to report; otherwise test, then dev, then the last.
            exclude_self: see the class.
            measures: see the class; the default depends on `kind`.
            propensity: see the class.
            subsets: see the class.
        """
        self.name, self.path, self.kind = name, path, kind
        self._corpus = corpus
        self.exclude_self, self.propensity = exclude_self, propensity
        self.measures = list(measures or DEFAULT_MEASURES.get(kind, DEFAULT_MEASURES["beir"]))
        self.subsets = dict(subsets or {})
        self.files = list(files)
        self._read_queries: Callable[[str | None], Mapping[str, str]] = (
            queries if callable(queries) else lambda split: queries
        )
        self._qrels, self._lists = dict(qrels), dict(lists or {})
        self._groups, self._filters, self._default = groups, filters, default_split
        self._query_cache: dict[str | None, dict[str, str]] = {}
        self._checked: set[str] = set()

    @classmethod
    def from_parts(
        cls,
        corpus: Corpus | Iterable[Any] | Mapping[Any, Any],
        queries: Mapping[Any, str],
        *,
        qrels: Mapping[str, Mapping[Any, Mapping[Any, Any]]] | Mapping[Any, Mapping[Any, Any]] | None = None,
        lists: Mapping[str, Sequence[RankedList]] | None = None,
        name: str = "collection",
        on_empty: str = "keep",
        template: str = DEFAULT_TEMPLATE,
    ) -> Collection:
        """A collection from Python values.

        Args:
            corpus: a Corpus, or what `Corpus.from_documents` takes.
            queries: query id → text.
            qrels: split → query id → document id → grade; without the split level it becomes the split "test".
            lists: split → lists.
            name: for tables and run tags.
            on_empty: as in `Corpus.from_documents`.
            template: as in `Corpus.from_documents`.

        Raises:
            DataError: a part of another shape, named with what was expected.
        """
        if not isinstance(corpus, Corpus):
            corpus = Corpus.from_documents(corpus, on_empty=on_empty, template=template)
        if not isinstance(queries, Mapping):
            raise DataError(f"queries are a mapping of id to text; found {type(queries).__name__}.")
        texts = {string_id(id, "queries", "query"): _text(id, text) for id, text in queries.items()}
        if qrels is not None and not isinstance(qrels, Mapping):
            raise DataError(f"qrels are a mapping of split to judgements; found {type(qrels).__name__}.")
        by_split: Mapping[Any, Any] = qrels or {}
        if isinstance(qrels, Qrels) or _is_one_split(by_split):
            by_split = {"test": by_split}
        return cls(
            name=name,
            kind="memory",
            corpus=corpus,
            queries=texts,
            qrels={str(s): q if isinstance(q, Qrels) else Qrels(q, name=f"{name}/{s}") for s, q in by_split.items()},
            lists={split: (lambda values=values: values) for split, values in (lists or {}).items()},  # type: ignore[misc]
        )

    def __repr__(self) -> str:
        if self.subsets:
            return f"Collection({self.name!r}, {self.kind}, subsets {', '.join(self.subsets)})"
        return f"Collection({self.name!r}, {self.kind}, {len(self.corpus)} documents, splits {', '.join(self.splits)})"

    def apply_defaults(
        self,
        *,
        default_split: str | None,
        exclude_self: bool,
        measures: Sequence[str],
        propensity: tuple[float, float] | None,
    ) -> None:
        """Take over the rules of a registered data set (shortlist.data.registry)."""
        self._default = default_split or self._default
        self.exclude_self = exclude_self
        self.measures = list(measures) or self.measures
        self.propensity = propensity or self.propensity

    @property
    def corpus(self) -> Corpus:
        """The documents. Raises DataError for a folder of several collections, naming them."""
        if self._corpus is None:
            first = next(iter(self.subsets))
            raise DataError(
                f"{self.path} holds {len(self.subsets)} collections ({', '.join(self.subsets)}), each searched on its "
                f"own; name one of them, such as {Path(str(self.path)) / first}, or go through `collection.subsets`."
            )
        return self._corpus

    @property
    def splits(self) -> list[str]:
        """Names of the splits with judgements or lists: train, dev, validation, test, then others by name."""
        names = {*self._qrels, *self._lists}
        if self.subsets:
            names = set.intersection(*(set(subset.splits) for subset in self.subsets.values()))
        known = [name for name in SPLIT_ORDER if name in names]
        return known + sorted(names.difference(known))

    @property
    def judged_splits(self) -> list[str]:
        """The splits that have judgements."""
        return [split for split in self.splits if split in self._qrels]

    @property
    def default_split(self) -> str:
        """The split that is reported: the data set's own rule, else test, dev, validation, or the last judged one."""
        splits = self.judged_splits or self.splits
        for name in (self._default, "test", "dev", "validation"):
            if name in splits:
                return str(name)
        if splits:
            return splits[-1]
        raise MissingInputError(f"{self._place} has no judgements (qrels); there is no split to report.")

    def qrels(self, split: str | None = None) -> Qrels:
        """Judgements of `split` (default: `default_split`), read once.

        Documents that are judged and not in the corpus stay, since they count in the ideal ranking; they are counted
        in a warning. Raises MissingInputError for an unknown split, naming those there are.
        """
        split = self._check(split)
        if split not in self._qrels:
            raise MissingInputError(
                f"split {split!r} of {self._place} has lists but no judgements; judged are: {', '.join(self._qrels)}."
            )
        value = self._qrels[split]
        if not isinstance(value, Qrels):
            self._qrels[split] = value = value()
        if split not in self._checked:
            self._checked.add(split)
            self._report_absent(split, value)
        return value

    def queries(self, split: str | None = None) -> dict[str, str]:
        """Query id → text of the queries judged in `split` (default: `default_split`), in the order of the file.

        Without any split all queries. Judged queries that have no text are listed in a warning and left out; DataError
        if that leaves none.
        """
        if split is None and not self.splits and not self.subsets:
            return self.all_queries()
        split = self._check(split)
        if split not in self._query_cache:
            self._query_cache[split] = self._judged_queries(split)
        return dict(self._query_cache[split])

    def all_queries(self) -> dict[str, str]:
        """Query id → text of every query of the collection, judged or not."""
        self._refuse_subsets()
        if None not in self._query_cache:
            self._query_cache[None] = dict(self._read_queries(None))
        return dict(self._query_cache[None])

    def lists(self, split: str | None = None) -> Iterator[RankedList]:
        """A new pass over the lists of `split` (default: train if there is one); nothing if it has none."""
        if split is None:
            split = "train" if "train" in self.splits or not self.splits else self.default_split
        self._check(split)
        reader = self._lists.get(split)
        return iter(reader() if reader else ())

    @property
    def list_splits(self) -> list[str]:
        """The splits that have lists."""
        return [split for split in self.splits if split in self._lists]

    def filters(self, split: str | None = None) -> dict[str, set[str]]:
        """Query id → documents that must never be predicted for it; empty where the data set has no such rule."""
        split = self._check(split)
        return self._filters(split) if self._filters else {}

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every source file, by its path inside the collection; remembered until a file changes."""
        return {self._inside(file): cached_checksum(file) for file in self.files}

    def dev_split(
        self, *, train: str = "train", reserve: Iterable[str] | None = None, fraction: float = 0.1
    ) -> tuple[Qrels, Qrels]:
        """(training part, development part) for choosing checkpoints, never from a split that is reported.

        If there is a "dev" or "validation" split that is not in `reserve` (default: the `default_split`), it is the
        development part and `train` the training part. Otherwise about `fraction` of the train queries are split off
        by hash, whole groups at a time (`splits.split_off_dev`): by the `group` or `page` of the query where the
        file has one, else so that queries with a common relevant document, or relevant documents of one title (the
        parts of a page), stay together; in XC collections by query alone.
        """
        kept = {self.default_split} if reserve is None else set(reserve)
        judged = self.qrels(train)
        for name in ("dev", "validation"):
            if name in self._qrels and name not in kept and name != train:
                return judged, self.qrels(name)
        groups = self._groups() if self._groups else {}
        return split_off_dev(
            judged, fraction=fraction, groups=groups, corpus=None if self.kind == "xc" else self.corpus
        )

    def _judged_queries(self, split: str) -> dict[str, str]:
        texts = self._read_queries(split)
        if split not in self._qrels:
            return dict(texts)
        judged = self.qrels(split)
        found = {id: text for id, text in texts.items() if id in judged}
        absent = [id for id in judged if id not in texts]
        if not found:
            raise DataError(
                f"no query of {self._place} is judged in split {split!r}: the queries have ids such as "
                f"{examples(list(texts), 2) or 'none'}, the qrels {examples(absent, 2)}; use the files that "
                "belong together."
            )
        if absent:
            logger.warning(
                "%s, split %s: %d judged queries are not in the queries file and are left out: %s",
                self.name, split, len(absent), examples(absent),
            )  # fmt: skip
        return found

    def _report_absent(self, split: str, qrels: Qrels) -> None:
        if self._corpus is None or self.kind == "xc":  # a label matrix cannot point outside its labels
            return
        documents = list({document for judgements in qrels.values() for document in judgements})
        rows = self._corpus.positions(documents)
        absent = sorted(document for document, row in zip(documents, rows.tolist(), strict=True) if row < 0)
        if absent:
            logger.warning(
                "%s, split %s: %d judged documents are not in the corpus; they stay in the ideal ranking: %s",
                self.name, split, len(absent), examples(absent),
            )  # fmt: skip

    def _check(self, split: str | None) -> str:
        self._refuse_subsets()
        if split is None:
            return self.default_split
        if not isinstance(split, str):
            raise ConfigError(f"split is {split!r}; expected a name such as 'test'.")
        if split not in self.splits:
            raise MissingInputError(f"{self._place} has no split {split!r}; it has {', '.join(self.splits) or 'none'}.")
        return split

    def _refuse_subsets(self) -> None:
        if self.subsets:
            _ = self.corpus

    def _inside(self, file: Path) -> str:
        if self.path is not None and self.path.is_dir() and file.is_relative_to(self.path):
            return file.relative_to(self.path).as_posix()
        return file.name

    @property
    def _place(self) -> str:
        return str(self.path) if self.path is not None else f"collection {self.name!r}"


def _is_one_split(qrels: Mapping[Any, Any]) -> bool:
    """Whether a nested mapping is query → document → grade rather than split → query → document → grade."""
    first = next((value for value in qrels.values() if isinstance(value, Mapping) and value), None)
    return first is not None and isinstance(next(iter(first.values())), Number)


def _text(id: Any, text: Any) -> str:
    if not isinstance(text, str):
        raise DataError(f"the text of query {id!r} is a {type(text).__name__}; expected a string.")
    return text

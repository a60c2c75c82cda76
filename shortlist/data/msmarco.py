"""MS MARCO's tab-separated files: collection, queries, qrels, top1000, triples. No quoting: a quote is a character."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from shortlist.data.beir import read_queries
from shortlist.data.collection import Collection
from shortlist.data.corpus import Corpus
from shortlist.data.documents import Document, RankedList, string_id
from shortlist.data.lines import LineErrors, bare_name, examples, first_line, read_tab_separated
from shortlist.data.list_collection import collection_of_lists, find_list_files
from shortlist.data.lists import content_id, read_lists
from shortlist.data.options import ReadOptions
from shortlist.data.trec import read_qrels
from shortlist.errors import DataError
from shortlist.types import Qrels

logger = logging.getLogger(__name__)

_QUERIES = re.compile(r"(?:msmarco-\w+-?)?queries\.?(.*?)\.?tsv")
_QRELS = re.compile(r"qrels\.?(.*?)\.?(?:tsv|txt)|(\d{4})qrels.*\.(?:txt|tsv)")
_TOP = re.compile(r"top1000\.?(.*?)(?:\.tsv|\.txt)?")
_TRIPLES = re.compile(r"(qidpid)?triples\.?.*\.(?:tsv|txt)")
_COLLECTION = ("collection.tsv", "corpus.tsv")


def is_msmarco(folder: Path) -> bool:
    """Whether a folder has a collection.tsv, or triples or top1000 files that bring their own texts."""
    names = [bare_name(path) for path in folder.iterdir() if path.is_file()]
    return any(name in _COLLECTION or _TRIPLES.fullmatch(name) or _TOP.fullmatch(name) for name in names)


def is_msmarco_file(path: Path) -> bool:
    """Whether a single file has tabs in its first line and two to four fields."""
    return first_line(path).count("\t") in (1, 2, 3)


def read_msmarco(path: Path, options: ReadOptions) -> Collection:
    """Open a folder of MS MARCO files, or one file: a collection (2 columns), triples of texts (3), top1000 (4).

    Splits are named as the files are (`queries.dev.small.tsv` belongs to "dev.small", called "dev" where that is the
    only one). Lists come from top1000 of the split, from triples for "train", or from JSON lines in the folder.
    """
    files = _Files(path)
    if files.collection is not None:
        file = files.collection
        corpus = options.open_corpus(
            [file], lambda errors: _read_collection(file, errors), source=str(file), reader_name="msmarco"
        )
    elif files.top:
        # The candidates of all splits are the corpus; a document stands in many of them.
        corpus = options.open_corpus(
            list(files.top.values()),
            lambda errors: (pair for file in files.top.values() for pair in _top_documents(file, errors)),
            source=str(path),
            reader_name="msmarco top1000",
            on_duplicate="first",
        )
    elif files.triples is not None:
        if _width(files.triples) != 3 or not _holds_texts(files.triples):
            raise DataError(
                f"{files.triples} holds ids (query, positive, negative) and no texts; put collection.tsv and "
                "queries.train.tsv into the same folder and open the folder."
            )
        readers = {"train": partial(_text_triples, files.triples, options.on_error)}
        return collection_of_lists(
            readers, options, name=path.name.split(".")[0], path=path, files=[files.triples], kind="lists"
        )
    else:
        raise DataError(f"{path} has no collection.tsv, triples or top1000 file; expected at least one of them.")
    return _collection(files, corpus, options)


def _collection(files: _Files, corpus: Corpus, options: ReadOptions) -> Collection:
    queries = _SplitQueries(files, options.on_error)
    name = files.path.resolve().name if files.path.is_dir() else files.path.name.split(".")[0]
    qrels: dict[str, Callable[[], Qrels]] = {
        split: partial(read_qrels, file, name=f"{name}/{split}") for split, file in files.qrels.items()
    }
    lists: dict[str, Callable[[], Iterable[RankedList]]] = {}
    for split, file in files.top.items():
        lists[split] = partial(_top_lists, file, corpus, queries, qrels.get(split), options.on_error)
    if files.triples is not None:
        if _holds_texts(files.triples):
            lists["train"] = partial(_text_triples, files.triples, options.on_error)
        else:
            lists["train"] = partial(_id_triples, files.triples, corpus, queries, options.on_error)
    for split, file in files.json.items():
        lists[split] = lambda file=file, split=split: read_lists(  # type: ignore[misc]
            file, corpus=corpus, queries=queries.texts(split), on_error=options.on_error
        )
    return Collection(
        name=name,
        kind="msmarco",
        path=files.path,
        corpus=corpus,
        queries=queries.texts,
        qrels=qrels,
        lists=lists,
        files=files.all,
        default_split="dev",
    )


class _Files:
    """Which file of a folder plays which part, told from names and, for one file alone, from its columns."""

    def __init__(self, path: Path):
        self.path = path
        self.collection: Path | None = None
        self.triples: Path | None = None
        self.queries: dict[str, Path] = {}
        self.qrels: dict[str, Path] = {}
        self.top: dict[str, Path] = {}
        self.json: dict[str, Path] = {}
        if path.is_file():
            self._single(path)
        else:
            self._folder(path)
        self.all: list[Path] = [self.collection] if self.collection else []
        self.all += [self.triples] if self.triples else []
        self.all += [*self.queries.values(), *self.qrels.values(), *self.top.values(), *self.json.values()]

    def _single(self, path: Path) -> None:
        width = _width(path)
        if width == 2:
            self.collection = path
        elif width == 3:
            self.triples = path
        else:
            match = _TOP.fullmatch(bare_name(path))
            self.top[(match and match[1]) or "test"] = path

    def _folder(self, path: Path) -> None:
        for file in sorted(path.iterdir()):
            name = bare_name(file)
            if not file.is_file() or name.startswith("."):
                continue
            if name in _COLLECTION:
                self.collection = file
            elif match := _QUERIES.fullmatch(name):
                self.queries[match[1] or "all"] = file
            elif match := _QRELS.fullmatch(name):
                self.qrels[match[1] or match[2] or "test"] = file
            elif match := _TOP.fullmatch(name):
                self.top[match[1] or "test"] = file
            elif _TRIPLES.fullmatch(name):
                self.triples = self.triples or file
        for named in (self.queries, self.qrels, self.top):
            if "dev.small" in named and "dev" not in named:
                named["dev"] = named.pop("dev.small")
        if self.collection is not None:
            self.json = find_list_files(path)


class _SplitQueries:
    """Query texts by split: the file of that name, or of the split it is a part of, else all files together."""

    def __init__(self, files: _Files, on_error: str):
        self._files, self._on_error = files, on_error
        self._read: dict[str, dict[str, str]] = {}

    def texts(self, split: str | None) -> dict[str, str]:
        names, top = self._files.queries, self._files.top
        if split is not None:
            for name in (split, split.split(".")[0]):
                if name in names:
                    return self._file(name)
        texts = {id: text for name in names for id, text in self._file(name).items()}
        # top1000 files carry the query texts themselves.
        for file in top.values() if split is None else [top[split]] if split in top else []:
            for _, (query, _, text, _) in _top_rows(file, LineErrors(self._on_error)):
                texts.setdefault(query, text)
        return texts

    def _file(self, name: str) -> dict[str, str]:
        if name not in self._read:
            self._read[name] = read_queries(self._files.queries[name], on_error=self._on_error)
        return self._read[name]


def _read_collection(path: Path, errors: LineErrors) -> Iterator[tuple[int, Document]]:
    """Documents of `id<TAB>text`, `id<TAB>title<TAB>text` or `id<TAB>url<TAB>title<TAB>body` (MS MARCO documents)."""
    width = _width(path)
    expected = "id<TAB>text (or id, title, text; or id, url, title, body), the same in every line"
    if width not in (2, 3, 4):
        raise DataError(f"{path}, line 1: {width} tab-separated fields; expected {expected}.")
    for number, fields in read_tab_separated(path, (width,), expected=expected, errors=errors):
        if number == 1 and fields[0].lower() in ("id", "pid", "docid", "doc_id"):
            continue
        try:
            id = string_id(fields[0], f"{path}, line {number}")
        except DataError as error:
            errors.handle(error)
            continue
        title = "" if width == 2 else fields[-2]
        yield number, Document(id, title, fields[-1], {"url": fields[1]} if width == 4 else None)


def _top_rows(path: Path, errors: LineErrors) -> Iterator[tuple[int, list[str]]]:
    return read_tab_separated(path, (4,), expected="query id, document id, query, document text", errors=errors)


def _top_documents(path: Path, errors: LineErrors) -> Iterator[tuple[int, Document]]:
    for number, (_, document, _, text) in _top_rows(path, errors):
        yield number, Document(string_id(document, f"{path}, line {number}"), "", text)


def _top_lists(
    path: Path, corpus: Corpus, queries: _SplitQueries, qrels: Callable[[], Qrels] | None, on_error: str
) -> Iterator[RankedList]:
    """One list a query from lines in any order; only row numbers of the corpus are held."""
    errors = LineErrors(on_error)
    rows: dict[str, array[int]] = {}
    texts: dict[str, str] = {}
    absent: list[str] = []
    batch: list[tuple[str, str]] = []

    def place() -> None:
        found = corpus.positions([document for _, document in batch]).tolist()
        for (query, document), row in zip(batch, found, strict=True):
            if row < 0:
                absent.append(document)
            else:
                rows.setdefault(query, array("q")).append(row)
        batch.clear()

    for _, (query, document, text, _) in _top_rows(path, errors):
        texts[query] = text
        batch.append((query, document))
        if len(batch) == 10_000:
            place()
    place()
    if absent:
        logger.warning(
            "%s: %d candidates are not in the corpus and are left out: %s", path, len(absent), examples(absent)
        )
    if errors.count:
        logger.warning("%s: %d lines skipped: %s", path, errors.count, " ".join(errors.examples))
    judged = qrels() if qrels is not None else None
    for query, positions in rows.items():
        documents = [corpus.row(row) for row in positions]
        grades: list[float | None] = [None] * len(documents)
        if judged is not None and query in judged:
            grades = [float(judged[query].get(document.id, 0)) for document in documents]
        yield RankedList(query, texts[query], documents, grades)


def _text_triples(path: Path, on_error: str) -> Iterator[RankedList]:
    errors = LineErrors(on_error)
    expected = "query, positive text, negative text"
    for _, (query, positive, negative) in read_tab_separated(path, (3,), expected=expected, errors=errors):
        documents = [Document(content_id("", text), "", text) for text in (positive, negative)]
        yield RankedList(content_id(query), query, documents, [1.0, 0.0])
    if errors.count:
        logger.warning("%s: %d lines skipped: %s", path, errors.count, " ".join(errors.examples))


def _id_triples(path: Path, corpus: Corpus, queries: _SplitQueries, on_error: str) -> Iterator[RankedList]:
    from shortlist.data.lists import complete_lists

    errors = LineErrors(on_error)
    records = (
        (f"{path}, line {number}", fields)
        for number, fields in read_tab_separated(
            path, (3,), expected="query id, positive id, negative id", errors=errors
        )
    )
    return complete_lists(records, str(path), errors=errors, corpus=corpus, queries=queries.texts("train"))


def _width(path: Path) -> int:
    return first_line(path).count("\t") + 1


def _holds_texts(path: Path) -> bool:
    """Texts have blanks; ids have none."""
    return any(" " in field.strip() for field in first_line(path).split("\t"))

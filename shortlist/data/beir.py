"""The BEIR folder: corpus.jsonl, queries.jsonl, qrels/<split>.tsv; also CQADupStack, a folder of such folders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shortlist.data.collection import SPLIT_ORDER, Collection
from shortlist.data.corpus import Corpus
from shortlist.data.documents import ID_KEYS, Document, RankedList, make_document, string_id
from shortlist.data.lines import LineErrors, bare_name, find_file, parse_json, read_json_lines, read_lines
from shortlist.data.lists import json_line, read_lists
from shortlist.data.options import ReadOptions
from shortlist.data.trec import read_qrels, write_qrels
from shortlist.errors import DataError, MissingInputError
from shortlist.files import atomic_directory, atomic_open

logger = logging.getLogger(__name__)

_QRELS_SUFFIXES = (".tsv", ".txt", ".qrels", ".trec")

CORPUS_LINE = 'one JSON object a line, such as {"_id": "d1", "title": "…", "text": "…"}'
QUERY_LINE = 'one JSON object a line, such as {"_id": "q1", "text": "…"}'


def is_beir(folder: Path) -> bool:
    """Whether a folder has a corpus in JSON lines."""
    return find_file(folder, "corpus.jsonl") is not None


def subset_folders(folder: Path) -> dict[str, Path]:
    """The BEIR folders directly inside `folder` (CQADupStack), by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and is_beir(path)}


def read_beir(folder: Path, options: ReadOptions) -> Collection:
    """Open a BEIR folder; queries and judgements are optional (a corpus alone can be indexed).

    Lists are read from `lists/<split>.jsonl`, or from `train.jsonl`, `dev.jsonl` … beside the corpus.
    """
    corpus_file = find_file(folder, "corpus.jsonl")
    if corpus_file is None:
        raise MissingInputError(f"{folder} has no corpus.jsonl.")
    queries_file = find_file(folder, "queries.jsonl") or find_file(folder, "queries.tsv")
    qrels_files = find_qrels(folder)
    beside = {split: find_file(folder, f"{split}.jsonl") for split in SPLIT_ORDER}
    list_files = _by_split(folder / "lists", ".jsonl") or {split: file for split, file in beside.items() if file}
    corpus = open_corpus_file(corpus_file, options)
    name = folder.resolve().name
    queries = _Queries(queries_file, options.on_error)
    if qrels_files and queries_file is None:
        logger.warning("%s has judgements and no queries.jsonl; it can be indexed, not searched.", folder)
    return Collection(
        name=name,
        kind="beir",
        path=folder,
        corpus=corpus,
        queries=queries.texts,
        groups=queries.groups,
        qrels={split: partial(read_qrels, file, name=f"{name}/{split}") for split, file in qrels_files.items()},
        lists={split: partial(_lists, file, corpus, queries, options.on_error) for split, file in list_files.items()},
        files=[corpus_file, *([queries_file] if queries_file else []), *qrels_files.values(), *list_files.values()],
    )


def open_corpus_file(file: Path, options: ReadOptions) -> Corpus:
    """The corpus of one JSON-lines file of documents."""
    return options.open_corpus(
        [file], lambda errors: read_corpus_lines(file, errors=errors), source=str(file), reader_name="beir"
    )


def read_corpus_lines(path: Path, *, errors: LineErrors) -> Iterator[tuple[int, Document]]:
    """(line number, Document) of a corpus.jsonl; lines that cannot be used go to `errors`."""
    for number, value in read_json_lines(path, expected=CORPUS_LINE, errors=errors):
        try:
            if not isinstance(value, dict):
                raise DataError(f"{path}, line {number}: a JSON {type(value).__name__}; expected {CORPUS_LINE}.")
            document = make_document(value, f"{path}, line {number}")
        except DataError as error:
            errors.handle(error)
            continue
        yield number, document


def read_queries(path: str | Path, *, on_error: str = "fail") -> dict[str, str]:
    """Query id → text from JSON lines (`_id`, `text`) or tab-separated `id<TAB>text`, compressed or not, or `-`.

    Raises:
        DataError: a broken line, an id that occurs twice (both lines named), a file without queries.
        MissingInputError: no such file.
    """
    return read_queries_and_groups(path, on_error=on_error)[0]


def read_queries_and_groups(path: str | Path, *, on_error: str = "fail") -> tuple[dict[str, str], dict[str, str]]:
    """Queries, and query id → `group` or `page` for the queries that have such a field (top level or metadata)."""
    errors = LineErrors(on_error)
    texts: dict[str, str] = {}
    groups: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, value in _query_records(path, errors):
        try:
            where = f"{path}, line {number}"
            id, text, group = _query(value, where)
            if id in texts:
                raise _RepeatedId(
                    f"{path}: query id {id!r} occurs twice, in lines {lines[id]} and {number}; ids must be unique."
                )
        except _RepeatedId:
            raise
        except DataError as error:
            errors.handle(error)
            continue
        texts[id], lines[id] = text, number
        if group is not None:
            groups[id] = group
    if errors.count:
        logger.warning(
            "%s: %d lines skipped because they could not be used: %s", path, errors.count, " ".join(errors.examples)
        )
    if not texts:
        raise DataError(f"{path} holds no query; expected {QUERY_LINE}, or id<TAB>text.")
    empty = sum(not text or text.isspace() for text in texts.values())
    if empty:
        logger.warning("%s: %d queries have no text and are kept.", path, empty)
    return texts, groups


def find_qrels(folder: Path) -> dict[str, Path]:
    """Judgement files by split: `qrels/<split>.tsv`, else `qrels.<split>.tsv`, or `qrels.tsv` for the split "test"."""
    found = _by_split(folder / "qrels", *_QRELS_SUFFIXES)
    if not found:
        beside = _by_split(folder, *_QRELS_SUFFIXES)
        found = {
            name.partition(".")[2] or "test": file for name, file in beside.items() if name.split(".")[0] == "qrels"
        }
    return found


def write_beir(
    collection: Collection, path: str | Path, *, splits: Iterable[str] | None = None, overwrite: bool = False
) -> Path:
    """Write a collection as a BEIR folder, atomically: all documents and queries, the judgements of `splits` (all).

    Metadata of documents is kept. Raises OutputExistsError if `path` exists and `overwrite` is false.
    """
    with atomic_directory(path, overwrite=overwrite) as temporary:
        with atomic_open(temporary / "corpus.jsonl") as handle:
            for document in collection.corpus:
                record: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
                if document.metadata:
                    record["metadata"] = document.metadata
                handle.write(json_line(record))
        with atomic_open(temporary / "queries.jsonl") as handle:
            for id, text in collection.all_queries().items():
                handle.write(json_line({"_id": id, "text": text}))
        for split in collection.judged_splits if splits is None else splits:
            write_qrels(collection.qrels(split), temporary / "qrels" / f"{split}.tsv", format="beir")
    return Path(path)


class _Queries:
    """The queries file, read when first needed, for texts and groups together."""

    def __init__(self, file: Path | None, on_error: str):
        self._file, self._on_error = file, on_error
        self._read: tuple[dict[str, str], dict[str, str]] | None = None

    def texts(self, split: str | None = None) -> dict[str, str]:
        return self._both()[0]

    def groups(self) -> dict[str, str]:
        return self._both()[1]

    def _both(self) -> tuple[dict[str, str], dict[str, str]]:
        if self._read is None:
            self._read = read_queries_and_groups(self._file, on_error=self._on_error) if self._file else ({}, {})
        return self._read


class _RepeatedId(DataError):
    """An id that occurs twice: never skipped, since either line could be the right one."""


def _query_records(path: str | Path, errors: LineErrors) -> Iterator[tuple[int, Any]]:
    """(line number, parsed record or [id, text]) of a queries file; its first character tells which kind it is."""
    as_json: bool | None = None
    for number, text in read_lines(path, errors=errors):
        if not text or text.isspace():
            continue
        if as_json is None:
            as_json = text.lstrip().startswith("{")
        try:
            yield number, parse_json(path, number, text, QUERY_LINE) if as_json else text.split("\t")
        except DataError as error:
            errors.handle(error)


def _query(value: Any, where: str) -> tuple[str, str, str | None]:
    if isinstance(value, list):
        if len(value) != 2:
            raise DataError(f"{where}: {len(value)} tab-separated fields; expected id<TAB>text, or {QUERY_LINE}.")
        return string_id(value[0], where, "query"), value[1], None
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON {type(value).__name__}; expected {QUERY_LINE}.")
    id_key = next((key for key in (*ID_KEYS, "query_id", "qid") if key in value), None)
    text_key = next((key for key in ("text", "query") if key in value), None)
    if id_key is None or text_key is None:
        found = ", ".join(map(repr, value)) or "no fields"
        raise DataError(f"{where}: a query has {found}; expected {QUERY_LINE}.")
    text = value[text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f'{where}: "{text_key}" is a {type(text).__name__}; expected a string.')
    metadata = value.get("metadata")
    both = {**(metadata if isinstance(metadata, dict) else {}), **value}
    group = next((both[key] for key in ("group", "page") if both.get(key) is not None), None)
    return string_id(value[id_key], where, "query"), text or "", None if group is None else str(group)


def _lists(file: Path, corpus: Corpus, queries: _Queries, on_error: str) -> Iterator[RankedList]:
    return read_lists(file, corpus=corpus, queries=queries.texts(), on_error=on_error)


def _by_split(folder: Path, *suffixes: str) -> dict[str, Path]:
    """Files of a folder by their name without suffix; none if there is no such folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = bare_name(path)
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix and path.is_file() and not name.startswith("."):
            split = name.removesuffix(suffix)
            if split in found:
                raise DataError(f"{folder} has {found[split].name} and {path.name} for one split; remove one of them.")
            found[split] = path
    return found

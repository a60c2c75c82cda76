"""Files of lists as a Collection: the corpus is every document of the lists, each once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from shortlist.data.collection import SPLIT_ORDER, Collection
from shortlist.data.corpus import Corpus
from shortlist.data.documents import ID_KEYS, TEXT_KEYS, Document, RankedList
from shortlist.data.lines import bare_name, first_line
from shortlist.data.list_shapes import PAIR_KEYS, POSITIVE_KEYS, QUERY_KEYS, parse_list
from shortlist.data.lists import read_lists
from shortlist.data.options import ReadOptions
from shortlist.errors import DataError
from shortlist.types import Qrels

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".triples")

ListReader = Callable[[], Iterable[RankedList]]


def kind_of_file(path: Path) -> str:
    """`lists`, `corpus` (documents, a JSON object a line), or a description of the first line."""
    line = first_line(path)
    if not line:
        return "the file is empty"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return f"its first line is {line[:60]!r}"
    if isinstance(value, dict):
        keys = set(value)
        if keys & {"pos", "positive_passages", "positive_document_ids", "documents", "candidates", *POSITIVE_KEYS}:
            return "lists"
        if keys & set(QUERY_KEYS) and keys & set(PAIR_KEYS):
            return "lists"
        if keys & set(ID_KEYS) and keys & set(TEXT_KEYS):
            return "corpus"
        return f"its first line has {', '.join(map(repr, value)) or 'no fields'}"
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], (str, int)):
        return "lists"
    return f"its first line is a JSON {type(value).__name__}"


def find_list_files(path: Path) -> dict[str, Path]:
    """List files by split: the names train, dev, validation and test are splits, any other name is train."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found: dict[str, Path] = {}
    for file in files:
        if not file.is_file() or file.name.startswith("."):
            continue
        if path.is_dir() and not bare_name(file).endswith(_SUFFIXES):
            continue
        if kind_of_file(file) != "lists":
            continue
        stem = bare_name(file).rsplit(".", 1)[0]
        split = stem if stem in SPLIT_ORDER else "train"
        if split in found:
            raise DataError(
                f"{path} has two list files for the split {split!r}, {found[split].name} and {file.name}; name them "
                "train.jsonl, dev.jsonl and test.jsonl, or open one file alone."
            )
        found[split] = file
    return found


def read_list_folder(path: Path, options: ReadOptions) -> Collection:
    """Open a list file, or a folder of list files named by split."""
    files = find_list_files(path)
    for file in files.values():
        _refuse_bare_ids(file)
    readers: dict[str, ListReader] = {
        split: partial(read_lists, file, on_error=options.on_error) for split, file in files.items()
    }
    name = path.resolve().name if path.is_dir() else bare_name(path).rsplit(".", 1)[0]
    return collection_of_lists(readers, options, name=name, path=path, files=list(files.values()), kind="lists")


def collection_of_lists(
    readers: Mapping[str, ListReader],
    options: ReadOptions,
    *,
    name: str,
    path: Path | None,
    files: list[Path],
    kind: str,
    corpus: Corpus | None = None,
) -> Collection:
    """A collection from a re-startable pass over the lists of each split.

    The corpus is built from the lists unless it is given; equal ids are one document, the first text counts. A split
    is judged if its first list has a grade.
    """
    if corpus is None:
        corpus = options.open_corpus(
            files,
            lambda errors: _documents(readers.values()),
            source=str(path or name),
            reader_name=f"{kind} lists",
            on_duplicate="first",
        )
    queries = _ListQueries(readers)
    return Collection(
        name=name,
        kind=kind,
        path=path,
        corpus=corpus,
        queries=queries.texts,
        qrels={
            split: partial(_qrels, reader, f"{name}/{split}") for split, reader in readers.items() if _is_judged(reader)
        },
        lists=readers,
        files=files,
    )


class _ListQueries:
    """The queries of the lists, collected in one pass a split when first needed."""

    def __init__(self, readers: Mapping[str, ListReader]):
        self._readers = readers
        self._texts: dict[str, dict[str, str]] = {}

    def texts(self, split: str | None) -> dict[str, str]:
        if split is None:
            return {id: text for each in self._readers for id, text in self.texts(each).items()}
        if split not in self._texts:
            self._texts[split] = {ranked.query_id: ranked.query for ranked in self._readers[split]()}
        return self._texts[split]


def _documents(readers: Iterable[ListReader]) -> Iterator[tuple[int, Document]]:
    number = 0
    for reader in readers:
        for ranked in reader():
            for document in ranked.documents:
                number += 1
                yield number, document


def _qrels(reader: ListReader, name: str) -> Qrels:
    """Grades of the lists; of a document judged in several lists of one query the highest counts."""
    judgements: dict[str, dict[str, float]] = {}
    for ranked in reader():
        documents = judgements.setdefault(ranked.query_id, {})
        for document, grade in zip(ranked.documents, ranked.grades, strict=True):
            if grade is not None:
                documents[document.id] = max(grade, documents.get(document.id, grade))
    return Qrels({query: documents for query, documents in judgements.items() if documents}, name=name)


def _is_judged(reader: ListReader) -> bool:
    first = next(iter(reader()), None)
    return first is not None and any(grade is not None for grade in first.grades)


def _refuse_bare_ids(file: Path) -> None:
    """Say before anything is built that lists of ids need a corpus beside them."""
    query_id, query, items = parse_list(json.loads(first_line(file)), f"{file}, line 1")
    if query is None or items[0].text is None:
        shown = query_id if query is None else items[0].id
        raise DataError(
            f"{file}: the lists hold ids only, such as {shown!r}; put corpus.jsonl and queries.jsonl (or "
            "collection.tsv and queries.train.tsv) into the same folder and open that, or use read_lists(path, "
            "corpus=…, queries=…)."
        )

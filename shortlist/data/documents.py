"""The two records of the data layer: a document, and a list of documents that belongs to one query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from shortlist.errors import DataError

DEFAULT_TEMPLATE = "{title} {text}"


@dataclass(frozen=True, slots=True)
class Document:
    """One document: string id, title and text (never None), and whatever else the file said about it."""

    id: str
    title: str = ""
    text: str = ""
    metadata: Mapping[str, Any] | None = None

    def joined(self, template: str = DEFAULT_TEMPLATE) -> str:
        """Title and text through `template`, stripped: a document without a title starts with its text."""
        return join(self.title, self.text, template)


@dataclass(frozen=True, slots=True)
class RankedList:
    """Documents that belong to one query: training examples, or candidates to be ranked.

    `grades[i]` is the judgement of `documents[i]` (at least 1 relevant, 0 or less a negative, None unjudged) and
    `scores[i]` the score of a teacher or a first stage; the three have the same length.
    """

    query_id: str
    query: str
    documents: list[Document]
    grades: list[float | None] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("grades", "scores"):
            if not getattr(self, name):
                object.__setattr__(self, name, [None] * len(self.documents))

    @property
    def positives(self) -> list[Document]:
        """The documents with a grade above 0, in list order."""
        return [document for document, grade in self._graded() if grade > 0]

    @property
    def negatives(self) -> list[Document]:
        """The documents with a grade of 0 or less, in list order; unjudged ones are neither."""
        return [document for document, grade in self._graded() if grade <= 0]

    def _graded(self) -> list[tuple[Document, float]]:
        return [(d, g) for d, g in zip(self.documents, self.grades, strict=True) if g is not None]


def join(title: str, text: str, template: str = DEFAULT_TEMPLATE) -> str:
    """`title` and `text` through `template`, stripped at both ends."""
    if template == DEFAULT_TEMPLATE:
        return f"{title} {text}".strip()
    parts = {"{title}": title, "{text}": text}
    return re.sub(r"\{title\}|\{text\}", lambda match: parts[match[0]], template).strip()


ID_KEYS = ("_id", "id", "doc_id", "docid")
TEXT_KEYS = ("text", "contents")


def make_document(value: Any, where: str, *, known: tuple[str, ...] = ()) -> Document:
    """A Document from a Document, a dictionary of a corpus file, or an `(id, text)` pair.

    Null title and text become "", integer ids strings; other fields are kept as metadata, those of `known` are not.
    `where` starts the sentence about a value of another shape (DataError).
    """
    if isinstance(value, Document):
        return Document(string_id(value.id, where), _string(value.title, "title", where),
                        _string(value.text, "text", where), value.metadata)  # fmt: skip
    if type(value) is dict and len(value) == 3:  # the plain line of a BEIR corpus, millions of times
        id, title, text = value.get("_id"), value.get("title"), value.get("text")
        if type(id) is str and type(title) is str and type(text) is str and id.isprintable() and id.strip():
            return Document(id, title, text)
    if isinstance(value, Mapping):
        id_key = next((key for key in ID_KEYS if key in value), None)
        text_key = next((key for key in TEXT_KEYS if key in value), None)
        if id_key is None or text_key is None:
            missing = '"_id"' if id_key is None else '"text"'
            raise DataError(
                f"{where}: a document without {missing}; it has {', '.join(map(repr, value)) or 'no fields'}, expected "
                '{"_id": …, "title": … (optional), "text": …}.'
            )
        metadata = value.get("metadata")
        extra = {k: v for k, v in value.items() if k not in (id_key, text_key, "title", "metadata", *known)}
        if isinstance(metadata, Mapping):
            extra = {**metadata, **extra}
        elif metadata is not None:
            extra["metadata"] = metadata
        return Document(string_id(value[id_key], where), _string(value.get("title"), "title", where),
                        _string(value[text_key], text_key, where), extra or None)  # fmt: skip
    if isinstance(value, tuple) and len(value) == 2:
        return Document(string_id(value[0], where), "", _string(value[1], "text", where))
    raise DataError(
        f'{where}: a document is a Document, {{"_id": …, "title": …, "text": …}} or (id, text); found '
        f"{type(value).__name__} {str(value)[:60]!r}."
    )


def string_id(value: Any, where: str, what: str = "document") -> str:
    """An id as a string; refuses what cannot be one (empty, null, fractional, with a tab or a line break)."""
    if isinstance(value, str):
        if not value or value.isspace():
            raise DataError(f"{where}: the {what} id is empty; every {what} needs one.")
        if "\n" in value or "\t" in value or "\r" in value:
            raise DataError(f"{where}: {what} id {value!r} holds a tab or a line break; no file format can carry it.")
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    raise DataError(f"{where}: {what} id {value!r} is a {type(value).__name__}; expected a string or an integer.")


def _string(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise DataError(f'{where}: "{name}" is a {type(value).__name__}; expected a string.')

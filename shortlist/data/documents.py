"""The two records of the data layer: a document, and a list of documents that belongs to one query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    return template.replace("{title}", title).replace("{text}", text).strip()

"""How `shortlist search` shows the results of one query: a table, or JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shortlist.types import Ranked

logger = logging.getLogger(__name__)

SNIPPET = 160  # characters


def print_json(query: str, results: Sequence[Ranked], details: Mapping[str, Mapping[str, Any]]) -> None:
    """One JSON object: the query, and each result with what `details` says about its id."""
    rows = [
        {
            "rank": result.rank,
            "id": result.id,
            "score": result.score,
            "title": result.document.title if result.document is not None else None,
            "text": result.document.text if result.document is not None else None,
            "fields": dict(result.document.metadata or {}) if result.document is not None else {},
            **details.get(result.id, {}),
        }
        for result in results
    ]
    sys.stdout.write(json.dumps({"query": query, "results": rows}, ensure_ascii=False) + "\n")


def print_table(results: Sequence[Ranked]) -> None:
    """A table of rank, id, score, and the beginning of title, text and fields."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("id", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("title and text", ratio=1)
    for result in results:
        document = result.document
        title, text = (document.title, document.text) if document is not None else ("", "")
        # Text, not str: brackets in a document are no markup.
        content = Text(" ".join(title.split()), style="bold")
        content.append(("\n" if content and text else "") + snippet(text), style="not bold")
        fields = snippet(_fields(document.metadata or {}) if document is not None else "")
        content.append(("\n" if content and fields else "") + fields, style="not bold dim")
        table.add_row(str(result.rank), Text(result.id), f"{result.score:.4f}", content)
    console = Console(file=sys.stdout)
    console.print(table)
    if not results:
        logger.info("nothing was found")


def _fields(metadata: Mapping[str, Any]) -> str:
    """The fields of a document that have a value, on one line."""
    known = {name: value for name, value in metadata.items() if value not in (None, "", [])}
    return " · ".join(
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in known.items()
    )


def snippet(text: str, length: int = SNIPPET) -> str:
    """The beginning of `text` on one line, cut at a word, at most `length` characters and an ellipsis."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    return (line[:length].rpartition(" ")[0] or line[:length]) + "…"

"""How a collection is read: the settings that every reader takes from `load_collection`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shortlist.data.cache import cached_directory, source_key, temporary_directory
from shortlist.data.corpus import Corpus
from shortlist.data.documents import DEFAULT_TEMPLATE, Document
from shortlist.data.lines import LineErrors
from shortlist.data.store import STORE_VERSION, write_store
from shortlist.errors import ConfigError

logger = logging.getLogger(__name__)

DocumentReader = Callable[[LineErrors], Iterable[tuple[int, Document]]]


@dataclass(frozen=True)
class ReadOptions:
    """Settings of `load_collection`, checked.

    Attributes:
        on_empty: documents with neither title nor text: `keep`, `skip` or `error`.
        on_error: lines that cannot be used: `fail` or `skip`, counted.
        template: how title and text are joined.
        cache_dir: where Arrow files are kept; None for $SHORTLIST_CACHE or ~/.cache/shortlist.
    """

    on_empty: str = "keep"
    on_error: str = "fail"
    template: str = DEFAULT_TEMPLATE
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.on_empty not in ("keep", "skip", "error"):
            raise ConfigError(f"on_empty is {self.on_empty!r}; expected 'keep', 'skip' or 'error'.")
        LineErrors(self.on_error)
        if not isinstance(self.template, str) or "{text}" not in self.template and "{title}" not in self.template:
            raise ConfigError(
                f"template {self.template!r} has neither {{title}} nor {{text}}; it would drop the documents."
            )

    def open_corpus(
        self,
        files: Sequence[Path],
        reader: DocumentReader,
        *,
        source: str,
        reader_name: str,
        on_duplicate: str = "error",
    ) -> Corpus:
        """The Arrow corpus of `files`, built by `reader` unless the cache has it for exactly these files and settings.

        Args:
            files: every file the documents depend on; none means that it cannot be cached.
            reader: yields (line number, Document), giving lines it cannot use to the LineErrors it gets.
            source: what the line numbers belong to, for messages.
            reader_name: tells readers of the same files apart in the cache.
            on_duplicate: `error`, or `first` where documents are repeated by design.
        """

        def build(path: Path) -> None:
            errors = LineErrors(self.on_error)
            write_store(
                path, reader(errors), source=source, on_empty=self.on_empty, on_duplicate=on_duplicate, errors=errors
            )

        if files:
            key = source_key(
                files, version=STORE_VERSION, reader=reader_name, on_empty=self.on_empty, on_error=self.on_error
            )
            corpus = Corpus(cached_directory(key, build, cache_dir=self.cache_dir), template=self.template)
        else:
            corpus = Corpus(temporary_directory(build), template=self.template)
        for note in corpus.notes:
            logger.warning("%s: %s", source, note)
        return corpus

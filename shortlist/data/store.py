"""Writing a corpus to disk: one pass over the documents, in batches, with bounded memory."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shortlist.data.documents import Document
from shortlist.data.lines import LineErrors, examples
from shortlist.errors import ConfigError, DataError

ARROW_FILE, HASHES_FILE, ROWS_FILE, INFO_FILE = "corpus.arrow", "id_hashes.npy", "id_rows.npy", "corpus.json"
STORE_VERSION = 1  # part of the cache key: raise it when the files or the normalisation of documents change
SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("metadata", pa.string())])

_BATCH_ROWS, _BATCH_CHARACTERS = 10_000, 16_000_000


def hash_ids(ids: Sequence[str]) -> NDArray[np.uint64]:
    """A stable 64-bit hash of each id (BLAKE2b)."""
    blake2b = hashlib.blake2b
    digests = b"".join([blake2b(id.encode("utf-8"), digest_size=8).digest() for id in ids])
    return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False)


def write_store(
    directory: Path,
    documents: Iterable[tuple[int, Document]],
    *,
    source: str,
    on_empty: str = "keep",
    on_duplicate: str = "error",
    errors: LineErrors | None = None,
) -> None:
    """Write `(line number, document)` pairs as an Arrow stream with an id look-up and counts into `directory`.

    Args:
        directory: exists and is empty; a half-written one is the caller's to remove.
        documents: in corpus order.
        source: what the line numbers count, for messages: a path, or `item` for Python values.
        on_empty: documents with neither title nor text: `keep` them, `skip` them (counted), or raise an `error`.
        on_duplicate: `error` names the id and both lines; `first` keeps the first of equal ids (for documents that
            are repeated by design, as in training lists) at the price of a set of hashes in memory.
        errors: the reader's skipped lines, to be told in the notes.
    """
    if on_empty not in ("keep", "skip", "error"):
        raise ConfigError(f"on_empty is {on_empty!r}; expected 'keep', 'skip' or 'error'.")
    writer = _Writer(directory, source, on_empty, on_duplicate)
    try:
        for number, document in documents:
            writer.add(number, document)
        writer.finish(errors)
    finally:
        writer.close()


class _Writer:
    def __init__(self, directory: Path, source: str, on_empty: str, on_duplicate: str):
        self.directory, self.source, self.on_empty = directory, source, on_empty
        self.seen: set[int] | None = set() if on_duplicate == "first" else None
        self.sink = pa.OSFile(str(directory / ARROW_FILE), "wb")
        self.stream = pa.ipc.new_stream(self.sink, SCHEMA)
        self.digest = hashlib.sha256()
        self.hashes = array("Q")
        self.jumps: list[tuple[int, int]] = []  # (row, line − row) wherever the difference changes
        self.empty: list[str] = []
        self.num_empty = self.num_skipped = self.num_repeated = self.without_title = self.without_text = 0
        self.rows = self.characters = 0
        self.columns: tuple[list[str], list[str], list[str], list[str | None]] = ([], [], [], [])

    def add(self, line: int, document: Document) -> None:
        id, title, text = document.id, document.title, document.text
        if not text or text.isspace():
            self.without_text += 1
            if not title or title.isspace():
                self._met_empty(line, id)
                if self.on_empty == "skip":
                    self.num_skipped += 1
                    return
        if not title or title.isspace():
            self.without_title += 1
        row = self.rows + len(self.columns[0])
        if not self.jumps or self.jumps[-1][1] != line - row:
            self.jumps.append((row, line - row))
        extra = document.metadata
        metadata = None if extra is None else json.dumps(extra, ensure_ascii=False, default=_plain)
        ids, titles, texts, metadatas = self.columns
        ids.append(id)
        titles.append(title)
        texts.append(text)
        metadatas.append(metadata)
        self.characters += len(title) + len(text) + (len(metadata) if metadata else 0)
        if len(ids) >= _BATCH_ROWS or self.characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        ids, titles, texts, metadatas = self.columns
        if not ids:
            return
        try:
            hashes = hash_ids(ids)
            if self.seen is not None:
                keep = self._first_of_equals(hashes)
                if len(keep) < len(ids):
                    ids, titles, texts = ([c[i] for i in keep] for c in (ids, titles, texts))  # type: ignore[assignment]
                    metadatas, hashes = [metadatas[i] for i in keep], hashes[keep]
            self._hash_content(ids, titles, texts, metadatas)
            arrays = [pa.array(column, pa.string()) for column in (ids, titles, texts, metadatas)]
        except UnicodeEncodeError:
            raise self._surrogate() from None
        self.stream.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self.hashes.frombytes(hashes.tobytes())
        self.rows += len(ids)
        self.columns, self.characters = ([], [], [], []), 0

    def finish(self, errors: LineErrors | None) -> None:
        self.flush()
        self.close()
        if not self.rows:
            reason = (
                f" ({errors.count} lines could not be used: {errors.examples[0]})" if errors and errors.count else ""
            )
            skipped = f" ({self.num_skipped} empty ones were skipped)" if self.num_skipped else ""
            raise DataError(f"{_where(self.source)} no document was found{reason}{skipped}; expected at least one.")
        hashes = np.frombuffer(self.hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        self._refuse_duplicates(ordered, order)
        np.save(self.directory / HASHES_FILE, ordered)
        np.save(self.directory / ROWS_FILE, order.astype(np.uint32 if self.rows < 2**32 else np.int64))
        info = {
            "version": STORE_VERSION,
            "fingerprint": self.digest.hexdigest(),
            "counts": {
                "documents": self.rows,
                "without_title": self.without_title,
                "without_text": self.without_text,
                "empty": self.num_empty - self.num_skipped,
                "skipped_empty": self.num_skipped,
                "skipped_lines": errors.count if errors else 0,
                "repeated": self.num_repeated,
            },
            "notes": self._notes(errors),
        }
        (self.directory / INFO_FILE).write_text(json.dumps(info, ensure_ascii=False, indent=1), encoding="utf-8")

    def close(self) -> None:
        if not self.sink.closed:
            self.stream.close()
            self.sink.close()

    def _met_empty(self, line: int, id: str) -> None:
        if self.on_empty == "error":
            raise DataError(
                f"{self._at(line)}: document {id!r} has neither title nor text; give it one, or choose "
                "on_empty keep or skip."
            )
        self.num_empty += 1
        if len(self.empty) < 4:
            self.empty.append(id)

    def _first_of_equals(self, hashes: NDArray[np.uint64]) -> list[int]:
        seen = self.seen
        assert seen is not None
        keep = []
        for index, value in enumerate(hashes.tolist()):
            if value in seen:
                self.num_repeated += 1
            else:
                seen.add(value)
                keep.append(index)
        return keep

    def _hash_content(self, *columns: Sequence[str | None]) -> None:
        for column in columns:
            present = [value or "" for value in column]
            self.digest.update(np.fromiter(map(len, present), "<u4", len(present)).tobytes())
            self.digest.update("".join(present).encode("utf-8"))

    def _refuse_duplicates(self, ordered: NDArray[np.uint64], order: NDArray[Any]) -> None:
        suspects = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not len(suspects):
            return
        table = pa.ipc.open_stream(pa.memory_map(str(self.directory / ARROW_FILE))).read_all()
        ids = table.column("id")
        pairs = []
        for position in suspects.tolist():
            first, second = sorted((int(order[position]), int(order[position + 1])))
            if ids[first].as_py() == ids[second].as_py():
                pairs.append((second, first))
        if pairs:
            second, first = min(pairs)
            more = f" ({len(pairs)} such ids)" if len(pairs) > 1 else ""
            raise DataError(
                f"{_where(self.source)} document id {ids[first].as_py()!r} occurs twice: {self._unit()} "
                f"{self._line(first)} and {self._unit()} {self._line(second)}{more}; ids must be unique."
            )

    def _notes(self, errors: LineErrors | None) -> list[str]:
        notes = []
        if errors and errors.count:
            notes.append(f"{errors.count} lines skipped because they could not be used: {' '.join(errors.examples)}")
        if self.num_empty:
            done = "were skipped" if self.on_empty == "skip" else "are kept"
            notes.append(f"{self.num_empty} documents have neither title nor text and {done}: {examples(self.empty)}")
        return notes

    def _surrogate(self) -> DataError:
        for column in self.columns:
            for offset, value in enumerate(column):
                try:
                    (value or "").encode("utf-8")
                except UnicodeEncodeError:
                    row = self.rows + offset
                    return DataError(
                        f"{self._at(self._line(row))}: document {self.columns[0][offset]!r} holds half of a surrogate "
                        "pair, which is no character; write it again with whole characters."
                    )
        raise DataError(f"{self.source}: a document holds half of a surrogate pair, which is no character.")

    def _line(self, row: int) -> int:
        return row + next(difference for start, difference in reversed(self.jumps) if start <= row)

    def _unit(self) -> str:
        return "item" if self.source == "item" else "line"

    def _at(self, line: int) -> str:
        return f"item {line}" if self.source == "item" else f"{self.source}, line {line}"


def _plain(value: Any) -> Any:
    """What JSON does not know: numbers and arrays of numpy as numbers, the rest (such as a date) as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _where(source: str) -> str:
    return "in the documents given," if source == "item" else f"{source}:"

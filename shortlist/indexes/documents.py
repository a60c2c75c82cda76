"""The document store beside the vectors: ids, titles and texts by position, for showing what was found.

One JSON object a line (`docs.jsonl`) and the byte offset of each line (`docs.offsets.npy`): any document is read
without reading the others, and the file stays readable with ordinary tools.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

DOCUMENTS, OFFSETS = "docs.jsonl", "docs.offsets.npy"


class DocumentStore:
    """Documents of an index by position, read from disk one at a time."""

    def __init__(self, directory: Path):
        self._offsets: NDArray[np.int64] = np.load(directory / OFFSETS, mmap_mode="r", allow_pickle=False)
        file = directory / DOCUMENTS
        size = file.stat().st_size
        if int(self._offsets[-1]) != size:
            raise DataError(
                f"{file} has {size} bytes but {OFFSETS} ends at {self._offsets[-1]}; build the index again."
            )
        self._lines = memoryview(np.memmap(file, np.uint8, "r")) if size else memoryview(b"")  # type: ignore[arg-type]

    @classmethod
    def open(cls, directory: Path) -> DocumentStore | None:
        """The store of an index directory, None if it has none."""
        return cls(directory) if (directory / OFFSETS).is_file() else None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def line(self, position: int) -> bytes:
        """The stored line at `position`, line break included; empty for a document that was added without text."""
        if position >= len(self):
            return b""
        return bytes(self._lines[int(self._offsets[position]) : int(self._offsets[position + 1])])

    def get(self, position: int) -> dict[str, Any] | None:
        """`{"id", "title", "text"}` of the document at `position`, None if its text was not stored."""
        line = self.line(position)
        return json.loads(line) if line else None


class DocumentWriter:
    """Writes documents to an index directory as they come, in the order of the vectors."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: IO[bytes] = open(directory / DOCUMENTS, "wb")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, documents: Iterable[Any]) -> None:
        """Write records with `id`, `title`, `text` and optionally `metadata` (as `data.Document` has)."""
        for document in documents:
            record = {"id": document.id, "title": document.title, "text": document.text}
            if document.metadata:
                record["metadata"] = document.metadata
            self.append_line((json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace"))

    def append_line(self, line: bytes) -> None:
        """Write one stored line as it is; empty for a document without text."""
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        np.save(self._directory / OFFSETS, np.frombuffer(self._offsets, np.int64))

    def abort(self) -> None:
        """Close the file handle without finishing."""
        self._file.close()

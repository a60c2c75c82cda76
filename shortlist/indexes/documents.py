"""The document store beside the vectors: ids, titles, texts and fields by position, for showing and filtering.

In each segment one JSON object a line (`docs.jsonl`) and the byte offset of each line (`docs.offsets.npy`): any
document is read without reading the others, and the file stays readable with ordinary tools. The fields of all
documents lie once more as columns in `fields.arrow`, if there are any (see `fields.py`).
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.indexes.arrays import ArrayWriter, map_array
from shortlist.indexes.fields import FIELDS, FieldStore, FieldTypes, plain, write_fields
from shortlist.indexes.ids import OFFSETS as IDS_OFFSETS

DOCUMENTS, OFFSETS = "docs.jsonl", "docs.offsets.npy"
_SLICE = 65_536
_JSON = json.JSONEncoder(ensure_ascii=False)


class DocumentStore:
    """Documents of an index by position: those of its segments read from disk, those added since from memory.

    Attributes:
        fields: the fields of the documents as columns.
    """

    def __init__(self, directories: Sequence[Path] = ()):
        self._parts: list[_Part | None] = []
        self._starts: list[int] = []
        counts: list[int] = []
        for directory in directories:
            part = _Part(directory) if (directory / OFFSETS).is_file() else None
            self._parts.append(part)
            self._starts.append(sum(counts))
            counts.append(len(map_array(directory / IDS_OFFSETS)) - 1 if part is None else part.count)
        self._stored = sum(counts)
        self._tail: list[bytes] = []
        self.fields = FieldStore(directories, counts)

    @classmethod
    def open(cls, directories: Path | Sequence[Path]) -> DocumentStore | None:
        """The store of one segment or of several, whose positions follow one another; None if none has documents.

        Raises:
            DataError: files that are cut or do not belong together.
        """
        directories = [directories] if isinstance(directories, Path) else directories
        return cls(directories) if any((directory / OFFSETS).is_file() for directory in directories) else None

    def __len__(self) -> int:
        """Number of positions, those without a document included."""
        return self._stored + len(self._tail)

    def append(self, documents: Iterable[Any]) -> None:
        """Hold the documents at the next positions: records with `id`, `title`, `text` and `metadata`."""
        lines, metadata = [], []
        for document in documents:
            line, fields = _line(document)
            lines.append(line)
            metadata.append(fields)
        self._tail += lines
        self.fields.append(metadata)

    def skip(self, count: int) -> None:
        """Leave the next `count` positions without a document."""
        self._tail += [b""] * count
        self.fields.append([None] * count)

    def line(self, position: int) -> bytes:
        """The stored line at `position`, line break included; empty for a document that was added without text."""
        if position >= self._stored:
            return self._tail[position - self._stored] if position < len(self) else b""
        number = bisect_right(self._starts, position) - 1
        part = self._parts[number]
        return b"" if part is None else part.line(position - self._starts[number])

    def get(self, position: int) -> dict[str, Any] | None:
        """`{"id", "title", "text"}` and "metadata" where there is any; None if the document was not stored."""
        line = self.line(position)
        return json.loads(line) if line else None


class _Part:
    """The stored lines of one segment."""

    def __init__(self, directory: Path):
        self._offsets: NDArray[np.int64] = map_array(directory / OFFSETS)
        self.count = len(self._offsets) - 1
        file = directory / DOCUMENTS
        size = file.stat().st_size
        if self.count < 0 or int(self._offsets[-1]) != size:
            raise DataError(f"{file} has {size} bytes, which is not what {OFFSETS} ends at; build the index again.")
        self._lines = memoryview(np.memmap(file, np.uint8, "r")) if size else memoryview(b"")  # type: ignore[arg-type]

    def line(self, position: int) -> bytes:
        return bytes(self._lines[int(self._offsets[position]) : int(self._offsets[position + 1])])


class DocumentWriter:
    """Writes documents to a segment as they come, in the order of the vectors, with bounded memory."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: IO[bytes] = open(directory / DOCUMENTS, "wb")
        self._offsets = ArrayWriter(directory / OFFSETS, np.int64)
        self._ends = array("q", [0])  # not yet written
        self._types = FieldTypes()

    def __len__(self) -> int:
        return len(self._offsets) + len(self._ends) - 1

    def append(self, documents: Iterable[Any]) -> None:
        """Write records with `id`, `title`, `text` and optionally `metadata` (as `data.Document` has).

        Raises:
            DataError: metadata that JSON cannot hold, naming the document.
        """
        for document in documents:
            line, fields = _line(document)
            self._write(line, fields)

    def append_line(self, line: bytes) -> None:
        """Write one stored line as it is; empty for a document without text."""
        self._write(line, _metadata(line))

    def _write(self, line: bytes, fields: Mapping[str, Any] | None) -> None:
        self._file.write(line)
        end = self._ends[-1] + len(line)
        if len(self._ends) == _SLICE:
            self._offsets.append(np.frombuffer(self._ends, np.int64))
            self._ends = array("q")
        self._ends.append(end)
        if fields:
            self._types.observe(fields)

    def close(self) -> None:
        """Finish the files: the columns are made from the lines, now that the types of all fields are known."""
        self._file.close()
        self._offsets.append(np.frombuffer(self._ends, np.int64))
        self._ends = array("q")
        self._offsets.close()
        if self._types.kinds:
            write_fields(self._directory / FIELDS, self._stored_metadata(), self._types.kinds)

    def abort(self) -> None:
        """Close the file handles without finishing."""
        self._file.close()
        self._offsets.abort()

    def _stored_metadata(self) -> Iterator[Mapping[str, Any] | None]:
        offsets = map_array(self._directory / OFFSETS)
        with open(self._directory / DOCUMENTS, "rb") as lines:
            # By length, not line by line: a document without text has an empty line without a line break.
            for start in range(0, len(self), _SLICE):
                for length in np.diff(offsets[start : start + _SLICE + 1]).tolist():
                    yield _metadata(lines.read(length)) if length else None


def _line(document: Any) -> tuple[bytes, Mapping[str, Any] | None]:
    """The line of a document and its metadata as JSON holds it."""
    record = {"id": document.id, "title": document.title, "text": document.text}
    metadata = getattr(document, "metadata", None)
    try:
        fields = plain(metadata) if metadata else None
        if fields:
            record["metadata"] = fields
        return (_JSON.encode(record) + "\n").encode("utf-8", "replace"), fields
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"document {document.id!r}: its metadata cannot be stored as JSON ({error}).") from None


def _metadata(line: bytes) -> Mapping[str, Any] | None:
    """The metadata of a stored line."""
    if b'"metadata"' not in line:
        return None
    metadata = json.loads(line).get("metadata")
    return metadata if isinstance(metadata, dict) else None

"""Sparse label matrices: rows are points, columns are labels, values are relevance.

Three files hold one, told apart by content, and every header is checked before anything is built on it:

- scipy `.npz` (`Y.trn.npz`), opened as plain arrays only;
- split text (`trn_X_Y.txt`): a header `rows columns`, then per row `index:value` pairs, an empty line for an empty row;
- combined text: a header `points features labels`, then per point `l1,l2 f:v f:v`; a line that starts with a space
  has no labels.

Indices start at 0. To make a matrix from JSON lines, see `shortlist data convert FOLDER OUT --to npz`.
"""

from __future__ import annotations

import logging
import os
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import scipy.sparse

from shortlist.data.lines import open_binary
from shortlist.errors import DataError, MissingInputError
from shortlist.files import atomic_path

logger = logging.getLogger(__name__)

# A relevance becomes a grade, a whole number; nothing that is meant as one is larger.
MAX_RELEVANCE = 2**31 - 1

_CHUNK = 20_000
_SHAPES = "two whole numbers 'rows columns' (split file) or three 'points features labels' (combined file)"


def read_label_matrix(path: str | os.PathLike[str]) -> scipy.sparse.csr_matrix:
    """Label matrix `(points, labels)`, float32, of an `.npz`, split or combined text file.

    Raises:
        MissingInputError: there is no such file.
        DataError: header, row count, an index or a value is wrong; names line, expected and found shape.
    """
    path = Path(path)
    if is_npz(path):
        matrix = _read_npz(path)
    elif len(read_header(path)) == 3:
        matrix = read_combined(path)[1]
    else:
        matrix = read_sparse_text(path)
    large = np.flatnonzero(np.abs(matrix.data) > np.float32(MAX_RELEVANCE))
    if len(large):
        row = int(np.searchsorted(matrix.indptr, large[0], side="right")) - 1
        raise DataError(
            f"{path}: row {row} (from 0), label {matrix.indices[large[0]]} has relevance {matrix.data[large[0]]:g}; "
            f"expected at most {MAX_RELEVANCE}."
        )
    return matrix


def matrix_shape(path: str | os.PathLike[str]) -> tuple[int, int]:
    """`(points, labels)` from the header of a label matrix file, without reading its content."""
    path = Path(path)
    if is_npz(path):
        try:
            with np.load(path, allow_pickle=False) as archive:
                rows, columns = (int(size) for size in archive["shape"])
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise _not_a_matrix(path, error) from error
        return rows, columns
    header = read_header(path)
    return header[0], header[-1]


def is_npz(path: Path) -> bool:
    """Whether the content of `path` is a zip archive, as `.npz` is. Raises MissingInputError if it is not there."""
    if not path.is_file():
        raise MissingInputError(f"{path} does not exist; expected a label matrix (.npz or text with a header).")
    with open(path, "rb") as handle:
        return handle.read(4) == b"PK\x03\x04"


def read_header(path: Path) -> tuple[int, ...]:
    """The two or three sizes on the first line of a sparse text file.

    Raises DataError when the line is anything else; the sentence proposes the header that fits the content.
    """
    with open_binary(path) as handle:
        line = handle.readline()
    fields = line.removeprefix(b"\xef\xbb\xbf").split()
    if len(fields) in (2, 3) and all(field.isdigit() for field in fields):
        return tuple(int(field) for field in fields)
    shown = line[:60].decode("utf-8", "replace").rstrip("\r\n")
    raise DataError(f"{path}, line 1: expected a header of {_SHAPES}, found {shown!r}. {_proposal(path)}")


def read_sparse_text(path: str | os.PathLike[str]) -> scipy.sparse.csr_matrix:
    """Split text file as a float32 matrix of the shape its header gives."""
    path = Path(path)
    header = read_header(path)
    if len(header) != 2:
        raise DataError(f"{path}, line 1: found the header {header} of a combined file; expected 'rows columns'.")
    rows, columns = header
    builder = _Builder(path, columns)
    with open_binary(path) as handle:
        next(handle)
        for chunk in _chunks(handle):
            builder.add(chunk)
    return builder.finish(rows, f"the header says {rows} rows and {columns} columns")


def read_combined(path: str | os.PathLike[str]) -> tuple[scipy.sparse.csr_matrix, scipy.sparse.csr_matrix]:
    """Combined text file as features `(points, features)` and labels `(points, labels)`, both float32."""
    path = Path(path)
    header = read_header(path)
    if len(header) != 3:
        raise DataError(
            f"{path}, line 1: found the header {header} of a split file; expected 'points features labels'."
        )
    points, num_features, num_labels = header
    features, labels = _Builder(path, num_features, "feature"), _Builder(path, num_labels, "label")
    with open_binary(path) as handle:
        next(handle)
        for chunk in _chunks(handle):
            first = [line.split(b" ", 1)[0].strip() for line in chunk]
            # A point without labels starts with a space, or (home-made files) at once with its features.
            first = [b"" if b":" in field else field for field in first]
            labels.add([_as_pairs(field) for field in first])
            features.add([line[len(field) :] for line, field in zip(chunk, first, strict=True)])
    what = f"the header says {points} points, {num_features} features and {num_labels} labels"
    return features.finish(points, what), labels.finish(points, what)


def matrix_from_lists(
    counts: Sequence[int] | array[int], indices: array[int], values: array[float], num_columns: int, where: str
) -> scipy.sparse.csr_matrix:
    """CSR matrix from row lengths, flat column indices and values; repeated pairs are kept once and counted."""
    indptr = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])
    matrix = scipy.sparse.csr_matrix(
        (np.asarray(values, dtype=np.float32), np.asarray(indices, dtype=np.int32), indptr),
        shape=(len(counts), num_columns),
    )
    return _without_repeats(matrix, where)


def write_label_matrix(path: str | os.PathLike[str], matrix: scipy.sparse.spmatrix) -> None:
    """Write a label matrix as scipy `.npz`, atomically; equal matrices give equal bytes."""
    with atomic_path(path) as temporary:
        scipy.sparse.save_npz(temporary, scipy.sparse.csr_matrix(matrix))


def count_rows(path: Path) -> int:
    """Number of lines of a text file; a last line without a newline counts."""
    rows, last = 0, b"\n"
    with open_binary(path) as handle:
        while block := handle.read(1 << 20):
            rows += block.count(b"\n")
            last = block[-1:]
    return rows + (last != b"\n")


class _Builder:
    """Collects the rows of a sparse text file in flat arrays, a chunk of lines at a time."""

    def __init__(self, path: Path, columns: int, noun: str = "index"):
        self.path, self.columns, self.noun = path, columns, noun
        self.rows = 0
        self.counts: list[np.ndarray] = []
        self.indices: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def add(self, lines: Sequence[bytes]) -> None:
        counts = np.fromiter((line.count(b":") for line in lines), dtype=np.int64, count=len(lines))
        fields = b" ".join(lines).replace(b":", b" ").split()
        try:
            flat = np.array(fields, dtype=np.bytes_).astype(np.float64) if fields else np.zeros(0)
            if len(flat) != 2 * counts.sum():
                raise ValueError
            indices, values = flat[0::2], flat[1::2]
            good = (indices >= 0) & (indices < self.columns) & (indices == np.floor(indices)) & np.isfinite(values)
            if not good.all():
                raise ValueError
        except ValueError:
            self._locate(lines)
            raise
        self.counts.append(counts)
        self.indices.append(indices.astype(np.int64))
        self.values.append(values.astype(np.float32))
        self.rows += len(lines)

    def _locate(self, lines: Sequence[bytes]) -> None:
        """Raise the error of the first wrong pair; the header is line 1."""
        for offset, line in enumerate(lines):
            where = f"{self.path}, line {self.rows + offset + 2}"
            for field in line.split():
                index, colon, value = field.partition(b":")
                shown = field.decode("utf-8", "replace")
                try:
                    number, finite = int(index), bool(colon) and bool(np.isfinite(float(value)))
                except ValueError:
                    finite = False
                if not finite:
                    raise DataError(f"{where}: found {shown!r}; expected pairs 'index:value' with a finite value.")
                if not 0 <= number < self.columns:
                    raise DataError(
                        f"{where}: {self.noun} {number}, but the header says {self.columns} columns, so indices run "
                        f"from 0 to {self.columns - 1}. Correct the header, or subtract 1 if the file counts from 1."
                    )
        raise DataError(f"{self.path}, lines from {self.rows + 2}: expected pairs 'index:value'.")

    def finish(self, rows: int, what: str) -> scipy.sparse.csr_matrix:
        if self.rows != rows:
            raise DataError(
                f"{self.path}: {what}, but {self.rows} rows follow it; the file is cut short or its header is wrong."
            )
        counts = np.concatenate(self.counts) if self.counts else np.zeros(0, np.int64)
        matrix = scipy.sparse.csr_matrix(
            (
                np.concatenate(self.values) if self.values else np.zeros(0, np.float32),
                np.concatenate(self.indices) if self.indices else np.zeros(0, np.int64),
                np.concatenate([[0], np.cumsum(counts)]),
            ),
            shape=(rows, self.columns),
        )
        return _without_repeats(matrix, str(self.path))


def _as_pairs(labels: bytes) -> bytes:
    return b" ".join(label + b":1" for label in labels.split(b",") if label)


def _chunks(handle: Iterator[bytes]) -> Iterator[list[bytes]]:
    while chunk := [line.rstrip(b"\r\n") for line in islice(handle, _CHUNK)]:
        yield chunk


def _without_repeats(matrix: scipy.sparse.csr_matrix, where: str) -> scipy.sparse.csr_matrix:
    """`matrix` with sorted rows and each (row, column) once: the first value stands, and the rest is counted."""
    matrix.sort_indices()
    repeated = np.zeros(matrix.nnz, dtype=bool)
    repeated[1:] = matrix.indices[1:] == matrix.indices[:-1]
    repeated[matrix.indptr[:-1][np.diff(matrix.indptr) > 0]] = False  # a row's first label has no predecessor
    if not repeated.any():
        return matrix
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    first = int(np.flatnonzero(repeated)[0])
    logger.warning(
        "%s: %d labels stand twice in their row (first: row %d, label %d); each counts once.",
        where, int(repeated.sum()), int(rows[first]), int(matrix.indices[first]),
    )  # fmt: skip
    keep = ~repeated
    return scipy.sparse.csr_matrix((matrix.data[keep], (rows[keep], matrix.indices[keep])), shape=matrix.shape)


def _read_npz(path: Path) -> scipy.sparse.csr_matrix:
    try:
        # scipy opens the archive with allow_pickle=False.
        matrix = scipy.sparse.csr_matrix(scipy.sparse.load_npz(path)).astype(np.float32)
        matrix.check_format(full_check=True)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise _not_a_matrix(path, error) from error
    if not np.isfinite(matrix.data).all():
        raise DataError(f"{path}: the matrix holds NaN or infinity; relevance must be a finite number.")
    return _without_repeats(matrix, str(path))


def _not_a_matrix(path: Path, error: Exception) -> DataError:
    if "Object arrays" in str(error):
        return DataError(f"{path} holds Python objects, which are never opened; save it with scipy.sparse.save_npz.")
    return DataError(f"{path} is not a sparse matrix written by scipy.sparse.save_npz, or is damaged ({error}).")


def _proposal(path: Path) -> str:
    """What the first line of a headerless split file should be, from its content."""
    largest = -1
    rows = 0
    with open_binary(path) as handle:
        for line in handle:
            rows += 1
            for field in line.split():
                index, colon, _ = field.partition(b":")
                if not colon or not index.isdigit():
                    return "Write the header as the first line."
                largest = max(largest, int(index))
    return f"Without a header the file reads as {rows} rows with indices up to {largest}: if that is all, write "\
        f"'{rows} {largest + 1}' as the first line."  # fmt: skip

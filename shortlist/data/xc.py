"""Extreme-classification folders: texts with many labels, where the labels have text and are the documents.

Labels are the corpus, the points of `trn` and `tst` the queries of the splits "train" and "test", the label matrix
the judgements. Recognised layouts, each also inside a sub-folder `raw/` and with `.gz`:

- JSON lines: `trn.json`, `tst.json` with `uid`, `title`, `content`, `target_ind` (line numbers of the label file from
  0), `target_rel`; labels in `lbl.json`, or one a line in `Yf.txt` (the text after the last `->`). The Wikipedia
  archive calls them `trn.raw.json`, `tst.raw.json`.
- plain text: `trn_X.txt`, `tst_X.txt`, `Y.txt`, one text a line, beside label matrices of shape (points, labels):
  `Y.trn.npz` or `trn_X_Y.txt` (shortlist.data.matrices);
- PECOS text: `train.txt`, `test.txt` with `label,label<TAB>text` a line, label texts in `output-labels.txt`.

`filter_labels_train.txt` and `filter_labels_test.txt` hold pairs "point label" (line numbers from 0) that must never
be predicted. Layouts: docs of the Extreme Classification Repository, Bhatia et al. 2016.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from shortlist.data.documents import DEFAULT_TEMPLATE, Document, string_id
from shortlist.data.label_qrels import LabelQrels
from shortlist.data.lines import LineErrors, bare_name, open_binary, parse_json, read_lines, shown
from shortlist.data.matrices import MAX_RELEVANCE, count_rows, matrix_from_lists, matrix_shape, read_label_matrix
from shortlist.data.registry import DataSetInfo, lookup, xc_defaults
from shortlist.data.xc_layout import LABEL_NAMES, STEMS, Layout, find_layout
from shortlist.errors import DataError, MissingInputError

logger = logging.getLogger(__name__)

_RECORD = '{"uid": …, "title": …, "content": …, "target_ind": [label lines], "target_rel": [relevances]}'


@dataclass(frozen=True)
class _Points:
    """What one pass over a split's file gives: point ids, their line numbers from 0, and the label matrix."""

    ids: list[str]
    rows: np.ndarray
    relevance: scipy.sparse.csr_matrix


def detect(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder in one of the extreme-classification layouts."""
    return find_layout(Path(path)) is not None


def read(path: str | os.PathLike[str], *, on_error: str = "fail", titles_only: bool | None = None) -> XCParts:
    """Open an extreme-classification folder; sizes of all its files are compared before anything is read.

    Args:
        path: the folder.
        on_error: `fail`, or `skip` broken lines of a point file, counted; a broken line of the label file always
            raises, because a label's number is its line.
        titles_only: leave out `content`; by default as the registry says (the `Titles` data sets).

    Raises:
        MissingInputError: no such folder, or a file that belongs to it is not there.
        DataError: a header or the number of rows of a matrix does not fit the text files.
    """
    path = Path(path)
    layout = find_layout(path)
    if layout is None:
        raise MissingInputError(
            f"{path} holds no extreme-classification data; expected trn.json.gz and lbl.json.gz, or trn_X.txt, Y.txt "
            "and Y.trn.npz, or train.txt with 'label,label<TAB>text' lines and output-labels.txt."
        )
    LineErrors(on_error)  # refuses another word at once
    return XCParts(path, layout, on_error, titles_only)


class XCParts:
    """One extreme-classification folder: label documents, points, relevance, filters; each read when asked for.

    Relevance above 0 is a positive. `qrels` gives whole numbers as they are, and grade 1 for every positive when a
    split has fractional relevance; `relevance` always keeps the real values.
    """

    def __init__(self, path: Path, layout: Layout, on_error: str, titles_only: bool | None):
        self.path = path
        self.name = path.resolve().parent.name if path.resolve().name == "raw" else path.resolve().name
        self.info: DataSetInfo = xc_defaults(self.name)
        registered = lookup(self.name)
        self.titles_only = bool(registered and registered.titles_only) if titles_only is None else titles_only
        self._layout = layout
        self._on_error = on_error
        self._points: dict[str, _Points] = {}
        if layout.labels is None:
            expected = LABEL_NAMES[layout.kind]
            raise MissingInputError(f"{path} has points but no label texts; expected one of {', '.join(expected)}.")
        self._label_file = layout.labels
        self.num_labels = _count_json(layout.labels) if _holds_json(layout.labels) else count_rows(layout.labels)
        if self.num_labels == 0:
            raise DataError(f"{layout.labels} is empty; expected one label a line.")
        self._check_shapes()
        missing = [name for name in self.info.filters if name not in map(bare_name, layout.filters.values())]
        if missing:
            logger.warning(
                "%s: %s not found beside the data; results are not comparable to published ones without these filters.",
                path, " and ".join(missing),
            )  # fmt: skip

    @property
    def splits(self) -> list[str]:
        """Names of the splits that are there, of "train" and "test"."""
        return list(self._layout.points)

    @property
    def files(self) -> list[Path]:
        """Every file the parts are read from."""
        return self._layout.files

    @property
    def label_file(self) -> Path:
        """The file with one label a line."""
        return self._label_file

    @property
    def propensity(self) -> tuple[float, float]:
        """Propensity parameters (A, B) of the data set's family, for PSP@k."""
        return self.info.propensity or (0.55, 1.5)

    def numbered_labels(self) -> Iterator[tuple[int, Document]]:
        """(line number from 1, label as a document) in file order, streamed; the id is `uid`, else the line from 0."""
        path = self._label_file
        as_json = _holds_json(path)
        for number, text in read_lines(path):
            if number > self.num_labels:
                break  # blank lines at the end
            if as_json:
                title, content, uid = self._fields(_record(path, number, text), path, number, str(number - 1))
            else:
                title, content, uid = "", text.rsplit("->", 1)[-1].strip(), str(number - 1)
            yield number, Document(uid, title, content)

    def labels(self) -> Iterator[Document]:
        """The labels as documents, in line order, streamed."""
        return (document for _, document in self.numbered_labels())

    @cached_property
    def label_ids(self) -> list[str]:
        """Label ids in line order: column `j` of every matrix is `label_ids[j]`. DataError for a repeated id."""
        ids = [document.id for document in self.labels()]
        _refuse_repeats(ids, range(len(ids)), self._label_file, "label")
        return ids

    def numbered_points(self, split: str) -> Iterator[tuple[int, Document]]:
        """(line number from 1, point as a document) of a split in file order, streamed."""
        for number, document, _, _ in self._read_points(split, LineErrors(self._on_error)):
            yield number, document

    def points(self, split: str) -> Iterator[Document]:
        """The points of a split as documents: id is `uid`, else `train-0`, `train-1`, … from the line number."""
        return (document for _, document in self.numbered_points(split))

    def queries(self, split: str, *, template: str = DEFAULT_TEMPLATE) -> dict[str, str]:
        """Point id → text of a split, in file order, held in memory; `points` streams."""
        if split in self._points:
            return {document.id: document.joined(template) for document in self.points(split)}
        texts: list[str] = []
        ids = self._scanned(split, lambda document: texts.append(document.joined(template))).ids
        return dict(zip(ids, texts, strict=True))

    def all_queries(self, *, template: str = DEFAULT_TEMPLATE) -> dict[str, str]:
        """Point id → text of all splits. DataError when one id stands for different texts in two of them."""
        merged: dict[str, str] = {}
        for split in self.splits:
            for id, text in self.queries(split, template=template).items():
                if merged.setdefault(id, text) != text:
                    raise DataError(
                        f"{self.path}: point {id!r} of split {split!r} is another text in an earlier split; give the "
                        "points uids that are unique over all files, or use one split at a time."
                    )
        return merged

    def point_ids(self, split: str) -> list[str]:
        """Ids of a split's points: row `i` of `relevance(split)` is `point_ids(split)[i]`."""
        return self._scanned(split).ids

    def relevance(self, split: str) -> scipy.sparse.csr_matrix:
        """Relevance `(points, labels)` of a split, float32, real values kept."""
        return self._scanned(split).relevance

    def qrels(self, split: str) -> LabelQrels:
        """Judgements of a split, made on demand from the sparse matrix; a point without labels has none."""
        scanned = self._scanned(split)
        return LabelQrels(scanned.ids, self.label_ids, scanned.relevance, name=f"{self.name}/{split}")

    def num_points(self, split: str) -> int:
        """Number of points of a split."""
        return len(self._scanned(split).ids)

    @cached_property
    def train_counts(self) -> dict[str, int]:
        """Label id → number of training points that have it, labels without any included; {} without a train split."""
        if "train" not in self.splits:
            return {}
        positive = (self.relevance("train") > 0).sum(axis=0)
        return dict(zip(self.label_ids, np.asarray(positive).ravel().astype(int).tolist(), strict=True))

    def filters(self, split: str) -> dict[str, set[str]]:
        """Point id → label ids that must never be predicted for it; {} when the split has no filter file.

        Raises DataError for a line that is not two numbers of an existing point and label.
        """
        path = self._layout.filters.get(split)
        if path is None:
            return {}
        scanned = self._scanned(split)
        position = {row: index for index, row in enumerate(scanned.rows.tolist())}
        total = count_rows(self._layout.points[split])
        pairs: dict[str, set[str]] = {}
        for number, text in read_lines(path):
            fields = text.split()
            if not fields:
                continue
            if len(fields) != 2 or not all(f.isdigit() for f in fields):
                raise DataError(
                    f"{path}, line {number}: found {text[:60]!r}; expected two line numbers from 0, 'point label'."
                )
            row, label = int(fields[0]), int(fields[1])
            if row >= total or label >= self.num_labels:
                raise DataError(
                    f"{path}, line {number}: pair ({row}, {label}) is outside the {total} points and "
                    f"{self.num_labels} labels (numbers start at 0); this filter file belongs to other data."
                )
            if row in position:
                pairs.setdefault(scanned.ids[position[row]], set()).add(self.label_ids[label])
        return pairs

    def _check_shapes(self) -> None:
        """Refuse matrices whose header disagrees with the number of text lines, before anything is read."""
        if self._layout.kind != "text":
            return
        for split, points in self._layout.points.items():
            matrix = self._layout.matrices.get(split)
            if matrix is None:
                short = STEMS[split][0]
                raise MissingInputError(
                    f"{points} has no label matrix beside it; expected Y.{short}.npz or {short}_X_Y.txt with one row "
                    f"a line of {points.name} and {self.num_labels} columns."
                )
            rows, columns = matrix_shape(matrix)
            lines = count_rows(points)
            if (rows, columns) != (lines, self.num_labels):
                raise DataError(
                    f"{matrix} has shape ({rows}, {columns}), but {points.name} has {lines} lines (points) and "
                    f"{self._label_file.name} {self.num_labels} (labels): expected shape ({lines}, {self.num_labels})."
                )

    def _scanned(self, split: str, keep: Callable[[Document], None] | None = None) -> _Points:
        """Ids and relevance of a split, read once; `keep` is shown each point if this is the reading."""
        if split not in self._points:
            ids: list[str] = []
            rows, counts, indices, values = array("q"), array("q"), array("i"), array("f")
            errors = LineErrors(self._on_error)
            for number, document, targets, relevances in self._read_points(split, errors):
                ids.append(document.id)
                if keep is not None:
                    keep(document)
                rows.append(number - 1)
                counts.append(len(targets))
                indices.extend(targets)
                values.extend(relevances)
            path = self._layout.points[split]
            if errors.count:
                logger.warning("%s: %d lines skipped: %s", path, errors.count, " ".join(errors.examples))
            if not ids:
                raise DataError(
                    f"{path} holds no point; expected {_RECORD if self._layout.kind == 'json' else 'texts'}."
                )
            _refuse_repeats(ids, rows, path, "point")
            if split in self._layout.matrices:
                relevance = read_label_matrix(self._layout.matrices[split])[np.array(rows)]
            else:
                relevance = matrix_from_lists(counts, indices, values, self.num_labels, str(path))
            self._points[split] = _Points(ids, np.array(rows), relevance)
        return self._points[split]

    def _read_points(self, split: str, errors: LineErrors) -> Iterator[tuple[int, Document, list[int], list[float]]]:
        """(line number, document, label numbers, relevances) a point; lines that cannot be used go to `errors`."""
        path = self._layout.points.get(split)
        if path is None:
            raise MissingInputError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits) or 'none'}.")
        kind = self._layout.kind
        for number, text in read_lines(path, errors=errors):
            if kind == "json" and not text.strip():
                continue
            targets: list[int] = []
            relevances: list[float] = []
            uid, title, content = f"{split}-{number - 1}", "", text.strip()
            try:
                if kind == "json":
                    record = _record(path, number, text)
                    title, content, uid = self._fields(record, path, number, uid)
                    targets, relevances = _targets(record, path, number)
                elif kind == "pecos":
                    names, tab, content = text.partition("\t")
                    if not tab:
                        raise DataError(f"{path}, line {number}: no tab; expected 'label,label<TAB>text'.")
                    targets = _label_numbers(names, path, number)
                    relevances = [1.0] * len(targets)
                    content = content.strip()
                self._check_targets(targets, path, number)
            except DataError as error:
                errors.handle(error)
                continue
            yield number, Document(uid, title, content), targets, relevances

    def _check_targets(self, targets: list[int], path: Path, number: int) -> None:
        if targets and not (0 <= min(targets) and max(targets) < self.num_labels):
            wrong = next(target for target in targets if not 0 <= target < self.num_labels)
            raise DataError(
                f"{path}, line {number}: label number {wrong}, but {self._label_file.name} has {self.num_labels} "
                f"labels (numbers 0 to {self.num_labels - 1}); the two files do not belong together."
            )

    def _fields(self, record: dict[str, Any], path: Path, number: int, default: str) -> tuple[str, str, str]:
        """Title, content and id of a JSON record; null becomes "", a missing uid the line number."""
        where = f"{path}, line {number}"
        uid = record.get("uid")
        if uid is None:
            uid = default
        texts = []
        for name in ("title", "content"):
            value = record.get(name)
            if value is not None and not isinstance(value, str):
                raise DataError(f'{where}: "{name}" is a {type(value).__name__}; expected a string.')
            texts.append(value or "")
        if "title" not in record and "content" not in record:
            raise DataError(f"{where}: neither title nor content; expected {_RECORD}.")
        return texts[0], "" if self.titles_only else texts[1], string_id(uid, where, "label or point")


def _holds_json(path: Path) -> bool:
    return ".json" in path.name


def _count_json(path: Path) -> int:
    """Line number of the last line that is not blank."""
    last = 0
    with open_binary(path) as handle:
        for number, line in enumerate(handle, 1):
            if not line.isspace():
                last = number
    return last


def _record(path: Path, number: int, text: str) -> dict[str, Any]:
    record = parse_json(path, number, text, _RECORD)
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number}: found a {type(record).__name__}; expected {_RECORD}.")
    return record


def _targets(record: dict[str, Any], path: Path, number: int) -> tuple[list[int], list[float]]:
    targets, relevances = record.get("target_ind"), record.get("target_rel")
    if not isinstance(targets, list):
        found = f"is {shown(targets)}" if "target_ind" in record else "is not there"
        raise DataError(f'{path}, line {number}: "target_ind" {found}; expected {_RECORD}.')
    wrong = [target for target in targets if type(target) is not int]
    if wrong:
        raise DataError(
            f'{path}, line {number}: "target_ind" holds {shown(wrong[0])}; expected label line numbers from 0, whole '
            "numbers such as 2 (not 2.0, no string)."
        )
    if relevances is None:
        return targets, [1.0] * len(targets)
    if not isinstance(relevances, list) or len(relevances) != len(targets):
        found = f"{len(relevances)} values" if isinstance(relevances, list) else repr(relevances)
        raise DataError(f'{path}, line {number}: "target_rel" has {found} for {len(targets)} labels in "target_ind".')
    for relevance in relevances:
        if isinstance(relevance, bool) or not isinstance(relevance, (int, float)) or not math.isfinite(relevance):
            raise DataError(f"{path}, line {number}: relevance {relevance!r}; expected a finite number.")
        if abs(relevance) > MAX_RELEVANCE:
            raise DataError(f"{path}, line {number}: relevance {relevance!r}; expected at most {MAX_RELEVANCE}.")
    return targets, relevances


def _label_numbers(names: str, path: Path, number: int) -> list[int]:
    try:
        return [int(name) for name in names.split(",") if name.strip()]
    except ValueError:
        raise DataError(
            f"{path}, line {number}: labels {names[:60]!r}; expected line numbers of the label file, 'label,label'."
        ) from None


def _refuse_repeats(ids: list[str], rows: Any, path: Path, noun: str) -> None:
    if len(set(ids)) == len(ids):
        return
    first: dict[str, int] = {}
    for id, row in zip(ids, rows, strict=True):
        if id in first:
            raise DataError(
                f"{path}: {noun} id {id!r} is on line {first[id] + 1} and again on line {row + 1}; ids must be unique."
            )
        first[id] = row

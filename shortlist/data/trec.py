"""Judgements and runs as files: TREC qrels and BEIR's three columns, TREC runs and MS MARCO's three or four columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data.lines import bare_name, read_lines
from shortlist.errors import ConfigError, DataError
from shortlist.files import atomic_open
from shortlist.types import Qrels, Run, strictly_decreasing

logger = logging.getLogger(__name__)

_QRELS_SHAPES = "`query iteration document grade` (TREC) or `query document grade` (BEIR)"
_RUN_SHAPES = "`query Q0 document rank score tag` (TREC), or MS MARCO's `query document rank` with or without a score"


def read_qrels(path: str | Path, *, name: str | None = None) -> Qrels:
    """Judgements from a file of TREC's four or BEIR's three columns, with or without a header line.

    `path` may be compressed, or `-` for standard input. Grades may be negative or written as 1.0; the iteration column
    is ignored. A judgement repeated with the same grade is counted once.

    Raises:
        DataError: an empty file, another number of columns, a grade that is no whole number, one pair with two grades.
        MissingInputError: no such file.
    """
    judgements: dict[str, dict[str, int]] = {}
    repeated = width = 0
    for number, fields in _rows(path):
        if not width:
            if _is_header(fields):
                continue
            width = len(fields)
        if len(fields) != width or width not in (3, 4):
            raise DataError(
                f"{path}, line {number}: {len(fields)} columns; expected {_QRELS_SHAPES}"
                + (f", and {width} as in the lines before." if width in (3, 4) else ".")
            )
        query, document, grade = fields[0], fields[-2], _grade(fields[-1], path, number)
        documents = judgements.setdefault(query, {})
        if document in documents:
            if documents[document] != grade:
                raise DataError(
                    f"{path}: document {document!r} is judged twice for query {query!r}: {documents[document]} in line "
                    f"{_first_line_of(path, width, query, document, number)} and {grade} in line {number}; keep one."
                )
            repeated += 1
        documents[document] = grade
    if not judgements:
        raise DataError(f"{path} holds no judgement; expected lines of {_QRELS_SHAPES}.")
    if repeated:
        logger.warning("%s: %d judgements are repeated with the same grade; each counts once.", path, repeated)
    return Qrels(judgements, name=name or Path(path).name)


def write_qrels(qrels: Mapping[str, Mapping[str, int]], path: str | Path, *, format: str = "trec") -> None:
    """Write judgements atomically: `trec` (`query 0 document grade`) or `beir` (tab-separated with a header).

    `.gz` is compressed. Raises DataError for an id the format cannot carry, before anything is written.
    """
    if format not in ("trec", "beir"):
        raise ConfigError(f"format is {format!r}; expected 'trec' or 'beir'.")
    qrels = qrels if isinstance(qrels, Qrels) else Qrels(qrels)
    if format == "trec":
        for query, documents in qrels.items():
            _refuse_blanks(query, "query", path)
            for document in documents:
                _refuse_blanks(document, "document", path)
    with atomic_open(path) as handle:
        if format == "beir":
            handle.write("query-id\tcorpus-id\tscore\n")
        for query, documents in qrels.items():
            for document, grade in documents.items():
                handle.write(
                    f"{query} 0 {document} {grade}\n" if format == "trec" else f"{query}\t{document}\t{grade}\n"
                )


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """A ranking file as a Run: TREC's six columns, or MS MARCO's `query document rank [score]`.

    `path` may be compressed, or `-` for standard input. In the TREC form the rank is ignored and the score decides, as
    trec_eval does. A third and last column of whole numbers from 1 is a rank (score = −rank); otherwise it is a score.
    `name` is by default the tag of the first TREC line, in the other shapes the file's name without suffixes.

    Raises:
        DataError: an empty file, another number of columns, a score that is not finite, a document ranked twice for a
            query; each with file and line.
        MissingInputError: no such file.
    """
    scores: dict[str, dict[str, float]] = {}
    width = 0
    ranks_only = True
    for number, fields in _rows(path):
        if not width:
            width = len(fields)
            name = name or (fields[5] if width == 6 else None)
        if len(fields) != width or width not in (3, 4, 6):
            raise DataError(
                f"{path}, line {number}: {len(fields)} columns; expected {_RUN_SHAPES}"
                + (f", and {width} as in the lines before." if width in (3, 4, 6) else ".")
                + " Ids and tags cannot hold blanks."
            )
        query, document = fields[0], fields[2 if width == 6 else 1]
        value = fields[4 if width == 6 else width - 1]
        score = _score(value, path, number)
        if width == 3 and ranks_only:
            ranks_only = value.isdecimal() and score >= 1
        ranked = scores.setdefault(query, {})
        if document in ranked:
            first = _first_line_of(path, width, query, document, number)
            raise DataError(
                f"{path}: document {document!r} is ranked twice for query {query!r}, in lines {first} and {number}; "
                "keep one of them."
            )
        ranked[document] = score
    if not scores:
        raise DataError(f"{path} holds no ranking; expected lines of {_RUN_SHAPES}.")
    run = Run(name=name or _run_name(path))
    for query in list(scores):
        ranked = scores.pop(query)
        values = np.fromiter(ranked.values(), np.float64, len(ranked))
        run.add(query, list(ranked), -values if width == 3 and ranks_only else values)
    return run


def write_run(run: Run | Mapping[str, Any], path: str | Path, *, tag: str | None = None, format: str = "trec") -> None:
    """Write a run atomically, queries in the order of the run, ranks from 1; `.gz` is compressed.

    Scores are written with nine digits, enough for every float32, and strictly decreasing: ties are put in the
    package's order (document id descending) and the lower one is moved to the next smaller float32, so that every
    reader sees the same ranking. `format` is `trec` (six columns) or `msmarco` (query, document, rank).

    Raises:
        DataError: an id with a blank in it, which no reader could take apart; nothing is written.
        ConfigError: an unknown format, or a tag with a blank.
    """
    if format not in ("trec", "msmarco"):
        raise ConfigError(f"format is {format!r}; expected 'trec' or 'msmarco'.")
    run = run if isinstance(run, Run) else Run(run)
    if tag is not None and (not tag or len(tag.split()) != 1 or tag != tag.strip()):
        raise ConfigError(f"tag {tag!r} is empty or holds a blank; a run file's tag is one word.")
    label = tag or "_".join(run.name.split()) or "shortlist"
    for query in run:
        _refuse_blanks(query, "query", path)
        for document in run.ranking(query)[0]:
            _refuse_blanks(document, "document", path)
    nudged = 0
    with atomic_open(path) as handle:
        for query in run:
            ids, scores = run.ranking(query)
            if format == "msmarco":
                handle.writelines(f"{query}\t{document}\t{rank}\n" for rank, document in enumerate(ids, 1))
                continue
            values, moved = strictly_decreasing(scores)
            nudged += moved
            handle.writelines(
                f"{query} Q0 {document} {rank} {score:.9g} {label}\n"
                for rank, (document, score) in enumerate(zip(ids, values.tolist(), strict=True), 1)
            )
    if nudged:
        logger.info("%s: %d tied scores were moved to the next smaller float32 to keep the order.", path, nudged)


def _rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Fields of each non-blank line: by tabs if that gives three or more, so that BEIR ids may hold a blank."""
    for number, text in read_lines(path):
        fields = text.split("\t") if text.count("\t") >= 2 else text.split()
        if len(fields) > 1 or (fields and fields[0].strip()):
            yield number, [field.strip() for field in fields]


def _is_header(fields: list[str]) -> bool:
    """A first line whose last column is a word and whose first names the query, as in BEIR files."""
    try:
        float(fields[-1])
        return False
    except ValueError:
        return fields[0].lower().lstrip("#").replace("_", "-") in ("query-id", "queryid", "qid", "query", "q-id")


def _grade(text: str, path: str | Path, number: int) -> int:
    try:
        return int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value != int(value):
            raise DataError(f"{path}, line {number}: grade {text!r}; expected a whole number.") from None
        return int(value)


def _score(text: str, path: str | Path, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{path}, line {number}: score {text!r} is not a number; expected {_RUN_SHAPES}.") from None
    if not math.isfinite(value) or abs(value) > 3.4e38:
        raise DataError(
            f"{path}, line {number}: score {text!r} is not a finite float32; find out where it was computed."
        )
    return value


def _first_line_of(path: str | Path, width: int, query: str, document: str, last: int) -> int | str:
    """Line of the first record of a pair, found by reading the file again; '?' for standard input."""
    if str(path) == "-":
        return "?"
    column = {3: 1, 4: 2, 6: 2}[width]
    for number, fields in _rows(path):
        columns = (column, 1) if width == 4 else (column,)
        if number < last and len(fields) == width and fields[0] == query and document in [fields[c] for c in columns]:
            return number
    return "?"


def _refuse_blanks(id: str, what: str, path: str | Path) -> None:
    if not id or len(id.split()) != 1 or id != id.strip():
        raise DataError(
            f"{path}: {what} id {id!r} is empty or holds a blank, which separates columns in this format; nothing was "
            "written. Rename the ids (a blank is legal in corpus and index only)."
        )


def _run_name(path: str | Path) -> str:
    name = bare_name(Path(path))
    for suffix in (".run", ".trec", ".txt", ".res", ".tsv"):
        name = name.removesuffix(suffix)
    return "stdin" if name == "-" else name or Path(path).name

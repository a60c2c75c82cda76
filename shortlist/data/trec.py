"""Judgements and runs as files: TREC qrels and BEIR's three columns, TREC runs and MS MARCO's three or four columns."""

from __future__ import annotations

import io
import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shortlist.data.lines import bare_name, decode_lines, read_blocks, read_lines
from shortlist.errors import ConfigError, DataError
from shortlist.files import atomic_open
from shortlist.types import MAX_GRADE, Qrels, Run, strictly_decreasing

logger = logging.getLogger(__name__)

_QRELS_SHAPES = "`query iteration document grade` (TREC) or `query document grade` (BEIR)"
_DOCUMENT = {3: 1, 4: 1, 6: 2}  # columns of a run: which of them is the document
_NUMBER = re.compile(r"[0-9.eE+-]+")  # float() takes 1_0 and other digits too, which no other reader does
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
    for number, fields in _rows(read_lines(path)):
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
        _refuse_empty(path, number, query, document)
        documents = judgements.setdefault(query, {})
        if document in documents:
            if documents[document] != grade:
                lines = _lines_of(path, query, document, -2)
                raise DataError(
                    f"{path}: document {document!r} is judged twice for query {query!r}: {documents[document]} in line "
                    f"{lines[0] if lines else '?'} and {grade} in line {number}; keep one."
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
    check = _refuse_blanks if format == "trec" else _refuse_tabs
    for query, documents in qrels.items():
        check(query, "query", path)
        for document in documents:
            check(document, "document", path)
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
    trec_eval does. A third and last column of whole numbers, none twice in a query, is a rank (score = −rank) if it
    starts at 1, or is 0 to n−1 in each query; otherwise it is a score.
    `name` is by default the tag of the first TREC line, in the other shapes the file's name without suffixes.

    Raises:
        DataError: an empty file, another number of columns, a score that is not finite, a document ranked twice for a
            query; each with file and line.
        MissingInputError: no such file.
    """
    rankings: dict[str, tuple[list[str], array[float]]] = {}
    width, whole = 0, True
    for number, block in read_blocks(path):
        part = _even_part(block, width) or _careful_part(path, number, block, width)
        width, whole = part.width, whole and part.whole
        name = name or part.tag
        queries, documents, scores = part.queries, part.documents, part.scores
        stop = 0
        for query, group in groupby(queries):
            start, stop = stop, stop + len(list(group))
            ids, values = rankings.setdefault(query, ([], array("d")))
            ids.extend(documents[start:stop])
            values.frombytes(scores[start:stop].tobytes())
    if not rankings:
        raise DataError(f"{path} holds no ranking; expected lines of {_RUN_SHAPES}.")
    sign = -1 if whole and _are_ranks([values for _, values in rankings.values()]) else 1
    run = Run(name=name or _run_name(path))
    for query in list(rankings):
        ids, values = rankings.pop(query)
        try:
            run.add(query, ids, sign * np.frombuffer(values))
        except DataError:
            document = next(id for id, count in Counter(ids).items() if count > 1)
            lines = _lines_of(path, query, document, _DOCUMENT[width])
            raise DataError(
                f"{path}: document {document!r} is ranked twice for query {query!r}"
                + (f", in lines {lines[0]} and {lines[1]}" if lines else "")
                + "; keep one of them."
            ) from None
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
        logger.info("%s: tied scores moved to the next smaller float32 to keep the order: %s", path, f"{nudged:,}")


def _rows(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Fields of each non-blank line: by tabs if that gives three or more, so that BEIR ids may hold a blank."""
    for number, text in lines:
        fields = text.split("\t") if text.count("\t") >= 2 else text.split()
        if len(fields) > 1 or (fields and fields[0].strip()):
            yield number, [field.strip() for field in fields]


class _Part(NamedTuple):
    """Some lines of a run as columns; `whole`: the scores are digits only, `tag`: that of the first line."""

    width: int
    tag: str | None
    whole: bool
    queries: list[str]
    documents: list[str]
    scores: NDArray[np.float64]


def _even_part(block: bytes, width: int) -> _Part | None:
    """A block of a run parsed at once, if every line is as most runs are written; None is for `_careful_part`.

    That is: the same number of fields (`width`, or that of the first line if 0), none empty, one tab or one blank
    between them, and a finite score.
    """
    from pyarrow import csv

    first, _, _ = block.partition(b"\n")
    blank = b"\t" if b"\t" in first else b" "
    count = first.count(blank) + 1
    if count not in _DOCUMENT or width not in (0, count):
        return None
    data = np.frombuffer(block, np.uint8)
    at = np.flatnonzero(data <= 32)  # blanks, line ends and every control character
    if len(at) % count or (np.diff(at, prepend=-1) < 2).any():
        return None
    if (data[at].reshape(-1, count) != np.frombuffer(blank * (count - 1) + b"\n", np.uint8)).any():
        return None
    names = ["f0", f"f{_DOCUMENT[count]}", f"f{_score_column(count)}"]
    try:
        if not block.isascii() and re.search(r"[^\S \t\n]", block.decode("utf-8")):
            return None
        table = csv.read_csv(
            io.BytesIO(block),
            csv.ReadOptions(use_threads=False, autogenerate_column_names=True, block_size=len(block) + 1),
            csv.ParseOptions(delimiter=blank.decode(), quote_char=False),
            csv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, "string")),
        )
        queries, documents, values = (table[name].to_numpy() for name in names)
        scores = table[names[2]].cast("float64").to_numpy()
    except ValueError:  # bytes that are not UTF-8, or no number
        return None
    if len(scores) != len(at) // count or not _finite(scores):
        return None
    whole = count == 3 and "".join(values).isdecimal()
    tag = first.decode().split(blank.decode())[5] if count == 6 else None
    return _Part(count, tag, whole, queries.tolist(), documents.tolist(), scores)


def _careful_part(path: str | Path, number: int, block: bytes, width: int) -> _Part:
    """The same line by line: whatever else is legal, and a sentence with the line about what is not."""
    rows, scores = [], []
    for line, fields in _rows(decode_lines(path, io.BytesIO(block), first=number)):
        width = width or len(fields)
        if len(fields) != width or width not in _DOCUMENT:
            raise DataError(
                f"{path}, line {line}: {len(fields)} columns; expected {_RUN_SHAPES}"
                + (f", and {width} as in the lines before." if width in _DOCUMENT else ".")
                + " Ids and tags cannot hold blanks."
            )
        scores.append(_score(fields[_score_column(width)], path, line))
        _refuse_empty(path, line, fields[0], fields[_DOCUMENT[width]])
        rows.append(fields)
    queries, documents, tags = ([row[c] for row in rows] for c in (0, _DOCUMENT.get(width, 0), -1))
    return _Part(
        width,
        tags[0] if tags and width == 6 else None,
        not rows or (width == 3 and "".join(tags).isdecimal()),
        queries,
        documents,
        np.array(scores, np.float64),
    )


def _are_ranks(lists: list[array[float]]) -> bool:
    """Whether whole numbers, one array a query, can be ranks: from 1 with gaps, or from 0 without."""
    if any(len(set(values)) != len(values) for values in lists):
        return False
    return all(min(values) >= 1 for values in lists) or all(
        min(values) == 0 and max(values) == len(values) - 1 for values in lists
    )


def _score_column(width: int) -> int:
    return 4 if width == 6 else width - 1


def _finite(scores: NDArray[np.float64]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(scores.astype(np.float32)).all())


def _is_header(fields: list[str]) -> bool:
    """A first line whose last column is a word and whose first names the query, as in BEIR files."""
    try:
        float(fields[-1])
        return False
    except ValueError:
        return fields[0].lower().lstrip("#").replace("_", "-") in ("query-id", "queryid", "qid", "query", "q-id")


def _grade(text: str, path: str | Path, number: int) -> int:
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_GRADE or value != int(value):
        raise DataError(f"{path}, line {number}: grade {text[:40]!r}; expected a whole number of at most {MAX_GRADE}.")
    return int(value)


def _score(text: str, path: str | Path, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = None
    if value is None or (math.isfinite(value) and not _NUMBER.fullmatch(text)):
        raise DataError(f"{path}, line {number}: score {text!r} is not a number; expected {_RUN_SHAPES}.")
    if not _finite(np.array(value)):
        raise DataError(
            f"{path}, line {number}: score {text!r} is not a finite float32; find out where it was computed."
        )
    return value


def _lines_of(path: str | Path, query: str, document: str, column: int) -> list[int]:
    """Lines of the first two records of a pair, found by reading the file again; none for standard input."""
    if str(path) == "-":
        return []
    rows = _rows(read_lines(path))
    return list(islice((number for number, row in rows if row[0] == query and row[column] == document), 2))


def _refuse_empty(path: str | Path, number: int, *ids: str) -> None:
    if not all(ids):
        raise DataError(
            f"{path}, line {number}: an empty query or document id between two tabs; every one needs an id."
        )


def _refuse_tabs(id: str, what: str, path: str | Path) -> None:
    if not id.isprintable() and ("\t" in id or "\n" in id or not _is_text(id)) or not id or id != id.strip():
        raise DataError(
            f"{path}: {what} id {id!r} is empty, has a blank at an end, or holds a tab, a line break or half of a "
            "surrogate pair; it could not be read again, so nothing was written. Rename the ids."
        )


def _is_text(id: str) -> bool:
    try:
        return bool(id.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _refuse_blanks(id: str, what: str, path: str | Path) -> None:
    if not id.isprintable() and not _is_text(id):
        _refuse_tabs(id, what, path)
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

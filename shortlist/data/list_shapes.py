"""One parsed line of a list file, in any of the shapes of shortlist.data.lists, as query and items."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shortlist.data.documents import string_id
from shortlist.errors import DataError

QUERY_KEYS = ("query", "anchor", "question", "sentence1", "sentence_A", "premise")
QUERY_ID_KEYS = ("query_id", "qid", "query-id", "_id", "id")
POSITIVE_KEYS = ("positive", "pos", "answer", "positives")
NEGATIVE_KEYS = ("negative", "neg", "negatives")
PAIR_KEYS = ("sentence2", "sentence_B", "document", "passage", "text", "response", "hypothesis")
DOCUMENT_ID_KEYS = ("doc_id", "docid", "pid", "_id", "id", "corpus-id")
TEXT_KEYS = ("text", "contents", "content", "passage", "segment", "body")
GRADE_KEYS = ("grade", "relevance", "label", "rel")
SCORE_KEYS = ("score", "ce-score", "ce_score")
SHAPES = (
    '{"query", "pos", "neg"}, {"query_id", "query", "positive_passages", "negative_passages"}, {"qid", "pos", '
    '"neg": {system: ids}}, [qid, pid, …], {"query", "documents", "answer_ids"}, {"query", "candidates"} or '
    '{"query", "positive", "negative"}'
)


class Item(NamedTuple):
    """A document of a list before look-up: its text is None where the line has only the id."""

    id: str | None
    title: str = ""
    text: str | None = None
    grade: float | None = None
    score: float | None = None
    metadata: Mapping[str, Any] | None = None


Parsed = tuple[str | None, str | None, list[Item]]


def parse_list(value: Any, where: str) -> Parsed:
    """(query id or None, query text or None, items) of one line. DataError with the keys found for another shape."""
    if isinstance(value, list):
        return _colbert(value, where)
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a JSON {type(value).__name__} is no list; expected one of {SHAPES}.")
    for key, parse in _PARSERS:
        if key in value:
            parsed = parse(value, where)
            break
    else:
        parsed = _columns(value, where)
    if not parsed[2]:
        raise DataError(f"{where}: the list has no document; expected at least one.")
    if parsed[0] is None and parsed[1] is None:
        raise DataError(f"{where}: the list has no query; it has {_keys(value)}, expected one of {SHAPES}.")
    return parsed


def _colbert(value: list[Any], where: str) -> Parsed:
    if len(value) < 2:
        raise DataError(f"{where}: a list of {len(value)} values; expected [query id, document id, …].")
    items = []
    for position, entry in enumerate(value[1:]):
        pair = entry if isinstance(entry, list) else [entry]
        if len(pair) > 2 or not pair:
            raise DataError(f"{where}: {entry!r} is no document; expected an id or [id, score].")
        score = _number(pair[1], "score", where) if len(pair) == 2 else None
        items.append(Item(string_id(pair[0], where), grade=1.0 if position == 0 else 0.0, score=score))
    return string_id(value[0], where, "query"), None, items


def _graded_lists(positive: str, negative: str, *, ids: bool = False) -> Callable[[Mapping[str, Any], str], Parsed]:
    def parse(value: Mapping[str, Any], where: str) -> Parsed:
        items = _documents(value[positive], 1.0, where, value.get("pos_scores"), value.get("pos_id"), only_ids=ids)
        items += _documents(
            value.get(negative) or [], 0.0, where, value.get("neg_scores"), value.get("neg_id"), only_ids=ids
        )
        return *_query(value, where), items

    return parse


def _flag_embedding(value: Mapping[str, Any], where: str) -> Parsed:
    """`pos` and `neg`: texts beside a query text, ids beside a query id or where `neg` names systems."""
    query_id, query = _query(value, where)
    negative = value.get("neg")
    only_ids = isinstance(negative, Mapping) or query is None
    if isinstance(negative, Mapping):
        merged = [entry for entries in negative.values() for entry in _listed(entries)]
        negative = list({str(_plain_id(entry)): entry for entry in merged}.values())
    items = _documents(value["pos"], 1.0, where, value.get("pos_scores"), value.get("pos_id"), only_ids=only_ids)
    items += _documents(negative or [], 0.0, where, value.get("neg_scores"), value.get("neg_id"), only_ids=only_ids)
    return query_id, query, items


def _documents_and_answers(value: Mapping[str, Any], where: str) -> Parsed:
    answers = value.get("answer_ids")
    wanted = None if answers is None else {string_id(id, where) for id in _listed(answers)}
    items = []
    for entry in _listed(value["documents"]):
        item = _item(entry, None, where)
        if item.grade is None and wanted is not None:
            item = item._replace(grade=1.0 if item.id in wanted else 0.0)
        items.append(item)
    return *_query(value, where), items


def _candidates(value: Mapping[str, Any], where: str) -> Parsed:
    items = []
    for entry in _listed(value["candidates"]):
        if not isinstance(entry, Mapping):
            raise DataError(f"{where}: a candidate is a {type(entry).__name__}; expected {{docid, score, doc}}.")
        inner = entry.get("doc")
        merged = {
            **(inner if isinstance(inner, Mapping) else {"text": inner} if isinstance(inner, str) else {}),
            **entry,
        }
        merged.pop("doc", None)
        items.append(_item(merged, None, where))
    return *_query(value, where), items


def _columns(value: Mapping[str, Any], where: str) -> Parsed:
    """Columns of a data set: query, positive, negatives; or a pair with a label or score."""
    query_id, query = _query(value, where)
    label = next(
        (value[key] for key in ("label", "score", "scores", "similarity_score") if value.get(key) is not None), None
    )
    positive = next((key for key in POSITIVE_KEYS if key in value), None)
    if positive is not None:
        items = [_item(entry, 1.0, where) for entry in _listed(value[positive])]
        negatives = [key for key in value if key in NEGATIVE_KEYS or re.fullmatch(r"neg(ative)?_\d+", key)]
        for key in sorted(negatives, key=_column_number):
            items += [_item(entry, 0.0, where) for entry in _listed(value[key])]
        return query_id, query, _with_scores(items, label, where)
    pair = next((key for key in PAIR_KEYS if key in value), None)
    if pair is None or query is None:
        raise DataError(f"{where}: no list was recognised; it has {_keys(value)}, expected one of {SHAPES}.")
    item = _item(value[pair], None, where)
    if isinstance(label, int) and not isinstance(label, bool):
        return query_id, query, [item._replace(grade=float(label))]
    if label is None:
        return query_id, query, [item._replace(grade=1.0)]
    return query_id, query, [item._replace(score=_number(label, "score", where))]


def _with_scores(items: list[Item], label: Any, where: str) -> list[Item]:
    """Teacher scores of a row: one a document, or one margin positive − negative for a triplet (MarginMSE)."""
    if label is None:
        return items
    scores = [_number(entry, "score", where) for entry in _listed(label)]
    if len(scores) == 1 and len(items) == 2:
        scores = [scores[0], 0.0]
    elif len(scores) == len(items) - 1 and len(items) > 2:  # margins of the positive over each negative
        scores = [0.0, *(-margin for margin in scores)]
    if len(scores) != len(items):
        raise DataError(f"{where}: {len(scores)} scores for {len(items)} documents; expected one a document.")
    return [item._replace(score=score) for item, score in zip(items, scores, strict=True)]


def _documents(entries: Any, grade: float, where: str, scores: Any, ids: Any, *, only_ids: bool = False) -> list[Item]:
    listed = _listed(entries)
    items = [_item(entry, grade, where, only_id=only_ids) for entry in listed]
    for name, values in (("scores", scores), ("ids", ids)):
        if values is not None and len(_listed(values)) != len(listed):
            raise DataError(f"{where}: {len(_listed(values))} {name} for {len(listed)} documents; expected one each.")
    if scores is not None:
        items = [i._replace(score=_number(s, "score", where)) for i, s in zip(items, _listed(scores), strict=True)]
    if ids is not None:
        items = [i._replace(id=string_id(v, where)) for i, v in zip(items, _listed(ids), strict=True)]
    return items


def _item(entry: Any, grade: float | None, where: str, *, only_id: bool = False) -> Item:
    """A document of a list: a text, an id, or a dictionary with any of the usual names. A given grade wins."""
    if isinstance(entry, Mapping):
        id_key = next((key for key in DOCUMENT_ID_KEYS if entry.get(key) is not None), None)
        text_key = next((key for key in TEXT_KEYS if key in entry), None)
        grade_key = next((key for key in GRADE_KEYS if entry.get(key) is not None), None)
        score_key = next((key for key in SCORE_KEYS if entry.get(key) is not None), None)
        if id_key is None and text_key is None:
            raise DataError(f"{where}: a document with neither id nor text; it has {_keys(entry)}.")
        text = None if text_key is None else _text(entry[text_key], text_key, where)
        metadata = entry.get("metadata")
        return Item(
            None if id_key is None else string_id(entry[id_key], where),
            _text(entry.get("title"), "title", where),
            text,
            grade if grade is not None or grade_key is None else _number(entry[grade_key], grade_key, where),
            None if score_key is None else _number(entry[score_key], score_key, where),
            metadata if isinstance(metadata, Mapping) and metadata else None,
        )
    if only_id or (isinstance(entry, int) and not isinstance(entry, bool)):
        return Item(string_id(entry, where), grade=grade)
    return Item(None, text=_text(entry, "document", where), grade=grade)


def _query(value: Mapping[str, Any], where: str) -> tuple[str | None, str | None]:
    key = next((key for key in QUERY_KEYS if key in value), None)
    query: Any = value[key] if key is not None else None
    holder: Mapping[str, Any] = value
    if isinstance(query, Mapping):
        holder, query = {**value, **query}, query.get("text")
    id_key = next((key for key in QUERY_ID_KEYS if holder.get(key) is not None), None)
    id = None if id_key is None else string_id(holder[id_key], where, "query")
    return id, None if query is None else _text(query, "query", where)


def _text(value: Any, name: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f'{where}: "{name}" is a {type(value).__name__}; expected a string.')
    return value


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: {name} {value!r}; expected a finite number.")
    return float(value)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return [value]


def _plain_id(entry: Any) -> Any:
    return next((entry[key] for key in DOCUMENT_ID_KEYS if key in entry), None) if isinstance(entry, Mapping) else entry


def _column_number(key: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", key)
    return (int(digits.group()) if digits else -1, key)


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "no fields"


_PARSERS: tuple[tuple[str, Callable[[Mapping[str, Any], str], Parsed]], ...] = (
    ("positive_passages", _graded_lists("positive_passages", "negative_passages")),
    ("positive_document_ids", _graded_lists("positive_document_ids", "negative_document_ids", ids=True)),
    ("documents", _documents_and_answers),
    ("candidates", _candidates),
    ("pos", _flag_embedding),
)

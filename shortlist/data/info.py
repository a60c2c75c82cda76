"""What is in a collection: counts, fill rates, lengths, exact duplicates, judgements that point nowhere.

One streaming pass over the documents; what is kept per document is a 64-bit hash and two lengths, so a million
documents take about 16 MB.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from shortlist.data.collection import Collection
from shortlist.data.documents import RankedList
from shortlist.data.label_qrels import LabelQrels, positive_counts
from shortlist.data.registry import FAMILIES, lookup
from shortlist.types import Qrels

EXAMPLES = 3
_PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
_FIELDS = 20  # metadata fields listed by name
# Labels with a training point, most frequent first: the first 10 %, the next 40 %, the last 50 %, as the evaluation
# by frequency cuts them (shortlist.metrics.frequency).
_GROUPS = {"head": (0.0, 0.1), "torso": (0.1, 0.5), "tail": (0.5, 1.0)}


def collection_info(collection: Collection) -> dict[str, Any]:
    """A JSON-ready description of a collection. Lengths are in words (split at white space) and in characters.

    Keys: `name`, `kind`, `path`, `registry`; `documents` and `queries` with counts, fill rates, lengths and exact
    duplicates (equal title and text; empty ones are counted apart); `splits` with judgements, grades and what they
    point to in vain; `shared_queries` of each pair of splits, by id and by text; `labels` for XC; `lists`; `notes` of
    the reader. A folder of several collections has `subsets` instead.
    """
    info: dict[str, Any] = {
        "name": collection.name,
        "kind": collection.kind,
        "path": str(collection.path) if collection.path is not None else None,
    }
    if collection.subsets:
        info["subsets"] = {name: collection_info(subset) for name, subset in collection.subsets.items()}
        return info
    registered = lookup(collection.path.resolve()) if collection.path is not None else lookup(collection.name)
    info["registry"] = _registry(registered) if registered is not None else None
    info["default_split"] = collection.default_split if collection.splits else None
    info["exclude_self"] = collection.exclude_self
    info["documents"] = _documents(collection)
    texts = _query_texts(collection)
    qrels = {split: collection.qrels(split) for split in collection.judged_splits}
    info["queries"] = _queries(texts, qrels)
    info["splits"] = {split: _split(collection, judged, texts[split]) for split, judged in qrels.items()}
    info["shared_queries"] = _shared(qrels, texts)
    if collection.kind == "xc":
        info["labels"] = _labels(collection, qrels)
    lists = {split: _lists(collection.lists(split)) for split in collection.list_splits}
    if lists:
        info["lists"] = lists
    info["notes"] = list(collection.corpus.notes)
    return info


class _Texts:
    """Lengths and hashes of a stream of texts, and the groups of equal ones."""

    def __init__(self) -> None:
        self.words, self.characters = array("I"), array("I")
        self.hashes = array("Q")
        self.empty = 0

    def add(self, text: str) -> None:
        words = len(text.split())
        self.words.append(words)
        self.characters.append(len(text))
        self.hashes.append(_hash(text))
        self.empty += words == 0

    def lengths(self) -> dict[str, Any]:
        return {"words": _spread(self.words), "characters": _spread(self.characters)}

    def duplicates(self, ids: Sequence[str]) -> dict[str, Any]:
        """Groups of rows with one text: how many groups, rows beyond the first of each, and examples by id."""
        hashes = np.frombuffer(self.hashes, dtype=np.uint64) if self.hashes else np.zeros(0, np.uint64)
        rows = np.flatnonzero(np.frombuffer(self.words, dtype=np.uint32)) if self.words else np.zeros(0, np.int64)
        order = rows[np.argsort(hashes[rows], kind="stable")]
        ordered = hashes[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(ordered) else np.zeros(0)
        sizes = np.diff(np.concatenate([starts, [len(ordered)]])).astype(int)
        repeated = np.flatnonzero(sizes > 1)
        # Largest groups first, then by the first row, so that equal data gives equal examples.
        shown = sorted(repeated.tolist(), key=lambda g: (-sizes[g], order[int(starts[g])]))[:EXAMPLES]
        return {
            "groups": len(repeated),
            "copies": int((sizes[repeated] - 1).sum()),
            "examples": [
                [ids[int(r)] for r in order[int(starts[g]) : int(starts[g]) + min(int(sizes[g]), EXAMPLES)]]
                for g in shown
            ],
        }


def _documents(collection: Collection) -> dict[str, Any]:
    corpus = collection.corpus
    texts = _Texts()
    filled = {"title": 0, "text": 0, "metadata": 0}
    fields: Counter[str] = Counter()
    for document in corpus:
        texts.add(document.joined())
        filled["title"] += not _blank(document.title)
        filled["text"] += not _blank(document.text)
        if document.metadata:
            filled["metadata"] += 1
            fields.update(list(document.metadata))
    return {
        "count": len(corpus),
        "empty": texts.empty,
        "filled": {name: _rate(count, len(corpus)) for name, count in filled.items()},
        "metadata_fields": {name: _rate(count, len(corpus)) for name, count in fields.most_common(_FIELDS)},
        **texts.lengths(),
        "duplicates": texts.duplicates(corpus.ids),
    }


def _query_texts(collection: Collection) -> dict[str, Mapping[str, str]]:
    """The texts each split's judgements may refer to; one table for all splits, except where ids restart (XC)."""
    if collection.kind == "xc":
        return {split: collection.queries(split) for split in collection.judged_splits}
    every = collection.all_queries()
    return {split: every for split in collection.judged_splits} or {"": every}


def _queries(texts: Mapping[str, Mapping[str, str]], qrels: Mapping[str, Qrels]) -> dict[str, Any]:
    seen = _Texts()
    ids: list[str] = []
    for table in {id(table): table for table in texts.values()}.values():
        for query, text in table.items():
            seen.add(text)
            ids.append(query)
    unjudged = [query for query in ids if not any(query in judged for judged in qrels.values())]
    return {
        "count": len(ids),
        "empty": seen.empty,
        "judged_in_no_split": _named(unjudged),
        **seen.lengths(),
        "duplicates": seen.duplicates(ids),
    }


def _split(collection: Collection, qrels: Qrels, texts: Mapping[str, str]) -> dict[str, Any]:
    grades, relevant, documents = _judgements(qrels)
    rows = collection.corpus.positions(documents)
    absent = sorted(document for document, row in zip(documents, rows.tolist(), strict=True) if row < 0)
    return {
        "queries": len(qrels),
        "judgements": int(sum(grades.values())),
        "grades": {str(grade): grades[grade] for grade in sorted(grades)},
        "relevant_per_query": _spread(relevant),
        "without_relevant": _named([query for query, count in zip(qrels, relevant, strict=True) if count == 0]),
        "absent_documents": _named(absent),
        "absent_queries": _named([query for query in qrels if query not in texts]),
        "empty_queries": _named([query for query in qrels if query in texts and _blank(texts[query])]),
    }


def _judgements(qrels: Qrels) -> tuple[dict[int, int], list[int], list[str]]:
    """Grade → judgements; relevant documents of each query; ids of the judged documents, each once."""
    if isinstance(qrels, LabelQrels):
        matrix, values = qrels.matrix, qrels.grades
        found, counts = np.unique(values, return_counts=True)
        relevant = np.add.reduceat(np.append(values > 0, False).astype(np.int64), matrix.indptr[:-1]) * (
            np.diff(matrix.indptr) > 0
        )
        used = [qrels.label_ids[column] for column in np.unique(matrix.indices).tolist()]
        return dict(zip(found.tolist(), counts.tolist(), strict=True)), relevant.tolist(), used
    grades: Counter[int] = Counter()
    per_query: list[int] = []
    documents: dict[str, None] = {}
    for query in qrels:
        judged = qrels[query]
        grades.update(judged.values())
        per_query.append(sum(grade >= 1 for grade in judged.values()))
        documents.update(dict.fromkeys(judged))
    return dict(grades), per_query, list(documents)


def _shared(qrels: Mapping[str, Qrels], texts: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """For each pair of splits: queries with one id in both, and queries whose text is also in the other split."""
    hashed = {
        split: {_hash(texts[split][query].strip()): query for query in judged if query in texts[split]}
        for split, judged in qrels.items()
    }
    shared = []
    for first, second in combinations(qrels, 2):
        by_text = [hashed[second][key] for key in hashed[second] if key in hashed[first]]
        shared.append(
            {
                "splits": [first, second],
                "by_id": _named([query for query in qrels[second] if query in qrels[first]]),
                "by_text": _named([query for query in by_text if not _blank(texts[second][query])]),
            }
        )
    return shared


def _labels(collection: Collection, qrels: Mapping[str, Qrels]) -> dict[str, Any]:
    """Labels per point and points per label, by training frequency; labels without training points; filters."""
    constants = tuple(collection.propensity or ())
    result: dict[str, Any] = {"count": len(collection.corpus), "propensity": list(constants)}
    result["propensity_family"] = next((name for name, known in FAMILIES.items() if known == constants), "own")
    empty = (document.id for document in collection.corpus if _blank(document.title) and _blank(document.text))
    result["without_text"] = _named(list(empty))
    pairs = {split: sum(len(labels) for labels in collection.filters(split).values()) for split in qrels}
    result["filtered_pairs"] = pairs
    result["labels_per_point"] = {split: _spread(_judgements(judged)[1]) for split, judged in qrels.items()}
    if "train" not in qrels:
        return result
    counts = positive_counts(qrels["train"])
    order = sorted(counts, key=lambda label: -counts[label])
    result["points_per_label"] = _spread(list(counts.values()))
    unseen = [label for label in order if counts[label] == 0]
    order = order[: len(order) - len(unseen)]
    test = positive_counts(qrels["test"]) if "test" in qrels else {}
    result["without_training_points"] = _named(unseen) | {"share_of_test": _share(unseen, test)}
    result["groups"] = {}
    for name, (start, stop) in _GROUPS.items():
        members = order[round(start * len(order)) : round(stop * len(order))]
        result["groups"][name] = {
            "labels": len(members),
            "training_points": [counts[members[-1]], counts[members[0]]] if members else [0, 0],
            "share_of_train": _share(members, counts),
            "share_of_test": _share(members, test),
        }
    return result


def _lists(lists: Iterator[RankedList]) -> dict[str, Any]:
    documents, positives, negatives = array("I"), array("I"), array("I")
    for ranked in lists:
        documents.append(len(ranked.documents))
        positives.append(len(ranked.positives))
        negatives.append(len(ranked.negatives))
    return {
        "lists": len(documents),
        "documents": _spread(documents),
        "positives": _spread(positives),
        "negatives": _spread(negatives),
    }


def _registry(registered: Any) -> dict[str, Any]:
    return {
        "name": registered.name,
        "version": registered.version,
        "documents": registered.documents,
        "queries": registered.queries,
        "notes": registered.notes,
    }


def _spread(values: Iterable[int]) -> dict[str, float] | None:
    """Mean and percentiles of lengths or counts; None where there are none."""
    numbers = np.asarray(values if isinstance(values, array) else list(values), dtype=np.int64)
    if not len(numbers):
        return None
    points = np.percentile(numbers, list(_PERCENTILES.values()), method="higher")
    return {
        "mean": round(float(numbers.mean()), 2),
        **dict(zip(_PERCENTILES, points.astype(int).tolist(), strict=True)),
    }


def _share(members: Sequence[str], counts: Mapping[str, int]) -> float | None:
    total = sum(counts.values())
    return round(sum(counts.get(label, 0) for label in members) / total, 4) if total else None


def _named(ids: Sequence[str]) -> dict[str, Any]:
    return {"count": len(ids), "examples": list(ids[:EXAMPLES])}


def _rate(count: int, total: int) -> dict[str, Any]:
    return {"count": count, "rate": round(count / total, 4) if total else 0.0}


def _blank(text: str) -> bool:
    return not text or text.isspace()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")

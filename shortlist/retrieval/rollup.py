"""Roll-up: a run of passages becomes a run of the documents that they were cut from.

A document that is indexed in parts stands several times in a list, and every measure counts it several times
(precision falls, recall is of the wrong unit). Roll up before measuring, and before fusing runs whose indexes cut
documents differently. The ways are those of Dai and Callan (SIGIR 2019): MaxP, FirstP, and the mean of the best.

Parents, wherever they are asked for, are a mapping passage id → document id; a function of the passage id; or a
separator: with "#" the passage "D1#3" belongs to "D1" (the last separator counts), an id without one is a document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError
from shortlist.types import Run, Texts, check_k, left_out, named_queries, string_id

Parents = Mapping[str, str] | Callable[[str], Any] | str
WAYS = ("max", "first", "mean")
_DEEPER = 4  # times more passages where too few documents came out


class PassageSearcher(Protocol):
    """A `Retriever`, a `LexicalRetriever`, or anything that searches as they do."""

    def search(self, queries: Texts, k: int = 100, *, filter: Any = None) -> Run:
        """The `k` best passages of each query."""
        ...


def roll_up(run: Run, parents: Parents, *, how: str = "max", top: int = 3, name: str | None = None) -> Run:
    """Documents instead of passages: one score a document, ranked by the package's rule.

    Args:
        run: of passages.
        parents: mapping, function or separator; see above.
        how: "max": the best passage's score. "first": the score of the first passage, by passage id with numbers in it
            by value (D1#2 before D1#10), among those in the list. "mean": the mean of the best `top` passages in the
            list, or of all where a document has fewer.
        top: passages of "mean", at least 1.
        name: of the new run; that of `run` by default.

    Raises:
        ConfigError: an unknown way, `top` below 1, an empty separator.
        DataError: a passage without a parent, named.
    """
    check_how(how, top)
    parent = parent_of(parents)
    rolled = Run(name=name or run.name)
    for query in run:
        passages, scores = run.ranking(query)
        documents = [parent(passage) for passage in passages]
        ids, values = _ROLL[how](documents, passages, scores.astype(np.float64), top)
        rolled.add(query, ids, values)
    return rolled


def search_documents(
    searcher: PassageSearcher,
    queries: Texts,
    k: int,
    parents: Parents,
    *,
    how: str = "max",
    top: int = 3,
    depth: int | None = None,
    filter: Any = None,
    exclude_self: bool = False,
    filters: Mapping[str, Collection[str]] | None = None,
    name: str = "documents",
) -> Run:
    """The `k` best documents of each query from an index of passages; fewer only where the index has no more.

    Queries whose passages belong to too few documents are searched again, deeper and deeper. With "max" the list is the
    one that all passages would give; "first" and "mean" know the passages that were fetched.

    Args:
        searcher: of passages.
        queries: as in `Retriever.search`.
        k: documents a query.
        parents: as in `roll_up`.
        how: as in `roll_up`.
        top: as in `roll_up`.
        depth: passages fetched at first; `2 k` by default.
        filter: which passages may be found, as in `Retriever.search`.
        exclude_self: leave out the document with the query's own id; passages of it count as that document.
        filters: query id → document ids to leave out.
        name: name of the run.
    """
    check_k(k)
    check_how(how, top)
    fetched = 2 * k if depth is None else max(k, check_k(depth))
    texts = named_queries(queries)
    waiting: dict[str, str] = texts
    found: dict[str, tuple[list[str], NDArray[np.float32]]] = {}
    while waiting:
        passages = searcher.search(waiting, fetched, **({} if filter is None else {"filter": filter}))
        documents = roll_up(passages, parents, how=how, top=top)
        for query in waiting:
            ids, scores = documents.ranking(query)
            out = left_out(query, exclude_self, filters)
            kept = [place for place, id in enumerate(ids) if id not in out]
            last = passages.ranking(query)[1][-1:]
            # A passage that was not fetched may belong to a document that ties with the last one.
            complete = len(kept) >= k and scores[kept[k - 1]] > last[0]
            if complete or len(passages.ranking(query)[0]) < fetched:
                found[query] = [ids[place] for place in kept[:k]], scores[kept[:k]]
        waiting = {query: text for query, text in waiting.items() if query not in found}
        fetched *= _DEEPER
    run = Run(name=name)
    for query in texts:
        run.add(query, *found[query])
    return run


def parent_of(parents: Parents) -> Callable[[str], str]:
    """The function passage id → document id of `parents`, which refuses a passage without one by name (DataError)."""
    lookup: Callable[[str], Any]
    if isinstance(parents, str):
        if not parents:
            raise ConfigError("the separator of passage ids is empty; expected one such as '#'.")
        lookup = partial(_before, separator=parents)
    elif isinstance(parents, Mapping):
        lookup = parents.get
    elif callable(parents):
        lookup = parents
    else:
        raise ConfigError(
            f"parents are a {type(parents).__name__}; expected a mapping, a function or a separator such as '#'."
        )

    def parent(passage: str) -> str:
        document = lookup(passage)
        if type(document) is str and document:
            return document
        if document is None or document == "":
            raise DataError(f"passage {passage!r} has no parent document; every passage needs one.")
        return string_id(document, f"parent of passage {passage!r}: document")

    return parent


def _before(passage: str, *, separator: str) -> str:
    document, found, _ = passage.rpartition(separator)
    return document if found else passage


def field_parents(searcher: Any, field: str) -> Callable[[str], Any]:
    """Parents from a field of the documents that are stored with an index, such as "url" or "doc_id".

    Args:
        searcher: what has `document(id)`: a `Retriever` or a `LexicalRetriever`.
        field: a key of the documents' metadata, or "title".
    """

    @lru_cache(1 << 20)
    def lookup(passage: str) -> Any:
        document = searcher.document(passage)
        if document is None:
            raise DataError(
                f"passage {passage!r} has no stored document, so its field {field!r} is not known; build the index "
                "with its documents, or pass the collection."
            )
        if field == "title":
            return document.title
        values = document.metadata or {}
        if field not in values:
            known = ", ".join(sorted(values)) or "none"
            raise DataError(f"passage {passage!r} has no field {field!r}; its fields are: title, {known}.")
        return values[field]

    return lookup


def check_how(how: str, top: int) -> None:
    """Refuse an unknown way of rolling up."""
    if how not in WAYS:
        raise ConfigError(f"roll-up is {how!r}; expected one of {', '.join(WAYS)}.")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ConfigError(f"the mean of the top {top!r} passages; expected a whole number of at least 1.")


_Rolled = tuple[list[str], NDArray[np.float64]]


def _best(documents: Sequence[str], passages: Sequence[str], scores: NDArray[np.float64], top: int) -> _Rolled:
    places: dict[str, int] = {}
    for place, document in enumerate(documents):
        places.setdefault(document, place)  # the list is best first
    return list(places), scores[list(places.values())]


def _first(documents: Sequence[str], passages: Sequence[str], scores: NDArray[np.float64], top: int) -> _Rolled:
    places: dict[str, int] = {}
    for place in sorted(range(len(passages)), key=lambda place: _numbered(passages[place])):
        places.setdefault(documents[place], place)
    return list(places), scores[list(places.values())]


def _mean(documents: Sequence[str], passages: Sequence[str], scores: NDArray[np.float64], top: int) -> _Rolled:
    parts: dict[str, list[float]] = {}
    for document, score in zip(documents, scores.tolist(), strict=True):
        best = parts.setdefault(document, [])
        if len(best) < top:
            best.append(score)
    return list(parts), np.array([sum(best) / len(best) for best in parts.values()], np.float64)


def _numbered(passage: str) -> list[Any]:
    """A key that orders ids with their numbers by value; no `int`, since a number may have thousands of digits."""
    parts: list[Any] = re.split(r"([0-9]+)", passage)
    parts[1::2] = [(len(digits.lstrip("0")), digits.lstrip("0"), digits) for digits in parts[1::2]]
    return parts


_ROLL: dict[str, Callable[[Sequence[str], Sequence[str], NDArray[np.float64], int], _Rolled]] = {
    "max": _best,
    "first": _first,
    "mean": _mean,
}

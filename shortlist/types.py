"""The values that flow between the parts: runs, qrels, ranked documents; and the protocols at the seams.

One rule orders every ranking in the package: score descending in float32, equal scores by document id
descending, as trec_eval does (`rank_order`). Index, run files and metrics all call it.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shortlist.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

MAX_GRADE = 2**31 - 1  # the measures of ir-measures keep 32 bits
Texts = str | Sequence[str] | Mapping[str, str]


def rank_order(ids: Sequence[str], scores: ArrayLike) -> NDArray[np.int64]:
    """Positions of `ids` in ranked order: float32 score descending, ties by document id descending.

    Id order is by code point, which equals trec_eval's byte order on UTF-8. Raises DataError on a
    non-finite score, naming the document.
    """
    import numpy as np

    with np.errstate(over="ignore"):  # an overflow becomes infinite and is named below
        try:
            values = np.asarray(scores, dtype=np.float32)
        except (TypeError, ValueError):
            bad = next((value for value in scores if not isinstance(value, Real)), scores)  # type: ignore[union-attr]
            raise DataError(f"score {bad!r} is a {type(bad).__name__}; expected one number a document.") from None
    if values.shape != (len(ids),):
        raise DataError(f"{len(ids)} ids but scores of shape {values.shape}; one score a document is expected.")
    finite = np.isfinite(values)
    if not finite.all():
        bad = int(np.flatnonzero(~finite)[0])
        raise DataError(
            f"the score of document {ids[bad]!r} is {np.asarray(scores)[bad]} (not a finite float32); "
            "a ranking needs finite scores: find out where it was computed."
        )
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    ties = np.flatnonzero(ranked[1:] == ranked[:-1])
    above, below = ([ids[place] for place in order[shifted].tolist()] for shifted in (ties, ties + 1))
    if not all(map(operator.gt, above, below)):
        tied = np.zeros(len(ids), bool)
        tied[ties] = tied[ties + 1] = True
        slots = np.flatnonzero(tied)
        by_id = np.array(sorted(order[slots].tolist(), key=ids.__getitem__, reverse=True), np.int64)
        # One sort of all tied ids, then a stable one by score: thousands of small groups cost no more than one.
        order[slots] = by_id[np.argsort(-values[by_id], kind="stable")]
    return order


def strictly_decreasing(scores: ArrayLike) -> tuple[NDArray[np.float32], int]:
    """Scores of a ranked list (best first) as strictly decreasing float32, and how many were nudged.

    A nudged score is the next float32 below its predecessor, so that no reader can meet a tie.
    """
    import numpy as np

    values = np.array(scores, dtype=np.float32)
    if len(values) < 2 or bool((values[1:] < values[:-1]).all()):
        return values, 0
    nudged = 0
    lowest = np.finfo(np.float32).min
    for position in range(1, len(values)):
        if not values[position] < values[position - 1] and values[position - 1] > lowest:
            values[position] = np.nextafter(values[position - 1], lowest)
            nudged += 1
    # Many at the lowest float32, as a mask leaves them: there is no room below, so those before move up.
    for position in range(len(values) - 2, -1, -1):
        if values[position] > values[position + 1]:
            break
        values[position] = np.nextafter(values[position + 1], np.float32(0))
        nudged += 1
    return values, nudged


class Qrels(Mapping[str, Mapping[str, int]]):
    """Judgements: query id → {document id: grade}. Grades are integers; grades below 1 mean not relevant.

    Takes any nested mapping; integer ids become strings, integral floats become integer grades. Query order is kept.
    """

    def __init__(self, judgements: Mapping[Any, Mapping[Any, Any]], *, name: str | None = None):
        self.name = name
        self._judgements: dict[str, dict[str, int]] = {}
        for query, documents in judgements.items():
            if not isinstance(documents, Mapping):
                raise DataError(
                    f"qrels of query {query!r}: expected a mapping of document id to grade, found "
                    f"{type(documents).__name__}."
                )
            name_of = string_id(query, "query")
            judged = {
                string_id(document, "document"): _grade(grade, query, document) for document, grade in documents.items()
            }
            if name_of in self._judgements or len(judged) != len(documents):
                raise DataError(
                    f"qrels of query {query!r}: two ids are equal as strings (such as 1 and '1'); keep one."
                )
            self._judgements[name_of] = judged

    def __getitem__(self, query: str) -> Mapping[str, int]:
        return self._judgements[query]

    def __iter__(self) -> Iterator[str]:
        return iter(self._judgements)

    def __len__(self) -> int:
        return len(self._judgements)

    def __repr__(self) -> str:
        return f"Qrels({len(self)} queries, {self.num_judgements} judgements)"

    @property
    def num_judgements(self) -> int:
        """Number of (query, document) judgements, grades of 0 included."""
        return sum(len(documents) for documents in self._judgements.values())

    def relevant(self, query: str) -> dict[str, int]:
        """The documents of `query` with a grade of at least 1, in file order; empty for an unknown query."""
        return {document: grade for document, grade in self._judgements.get(query, {}).items() if grade >= 1}


class Run(Mapping[str, Mapping[str, float]]):
    """Ranked results: query id → {document id: score}, best first by the package's one tie rule.

    Stored as one id list and one float32 array a query; `run[query]` builds a dictionary on demand,
    `run.ranking(query)` gives the stored arrays. Takes any nested mapping; lists are put in order on
    the way in, non-finite scores are refused (DataError).
    """

    def __init__(self, results: Mapping[Any, Mapping[Any, float]] | None = None, *, name: str = "shortlist"):
        self.name = name
        self._rankings: dict[str, tuple[list[str], NDArray[np.float32]]] = {}
        for query, scored in (results or {}).items():
            pairs = list(scored.items() if isinstance(scored, Mapping) else scored)
            if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
                raise DataError(
                    f"run, query {query!r}: expected a mapping of document id to score, or (document id, score) pairs."
                )
            ids = [string_id(document, "document") for document, _ in pairs]
            self.add(string_id(query, "query"), ids, [score for _, score in pairs])

    def add(self, query: str, ids: Sequence[str], scores: ArrayLike) -> None:
        """Add the list of one query, in any order. Raises DataError for a repeated query or document id."""
        import numpy as np

        if query in self._rankings:
            raise DataError(f"query {query!r} is in the run twice; a run holds one list a query.")
        try:
            order = rank_order(ids, scores)
        except DataError as error:
            raise DataError(f"query {query!r}: {error}") from None
        ranked = [ids[position] for position in order.tolist()]
        if len(set(ranked)) != len(ranked):
            seen: set[str] = set()
            repeated = next(document for document in ranked if document in seen or seen.add(document))  # type: ignore[func-returns-value]
            raise DataError(f"document {repeated!r} is ranked twice for query {query!r}; keep one of them.")
        self._rankings[query] = (ranked, np.asarray(scores, dtype=np.float32)[order])

    def ranking(self, query: str) -> tuple[list[str], NDArray[np.float32]]:
        """Document ids best first, and their float32 scores `(docs,)`; two empties for an unknown query."""
        import numpy as np

        return self._rankings.get(query, ([], np.zeros(0, np.float32)))

    def top(self, k: int) -> Run:
        """The same run cut to `k` documents a query."""
        if k < 1:
            raise DataError(f"k is {k}; expected at least 1.")
        cut = Run(name=self.name)
        cut._rankings = {query: (ids[:k], scores[:k]) for query, (ids, scores) in self._rankings.items()}
        return cut

    def __getitem__(self, query: str) -> Mapping[str, float]:
        ids, scores = self._rankings[query]
        return dict(zip(ids, scores.tolist(), strict=True))

    def __contains__(self, query: object) -> bool:
        return query in self._rankings

    def __iter__(self) -> Iterator[str]:
        return iter(self._rankings)

    def __len__(self) -> int:
        return len(self._rankings)

    def __repr__(self) -> str:
        documents = sum(len(ids) for ids, _ in self._rankings.values())
        return f"Run({self.name!r}, {len(self)} queries, {documents} documents)"


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of a ranked list: its id, float score, rank from 1, and the document as it came in."""

    id: str
    score: float
    rank: int
    document: Any = None


@runtime_checkable
class Encoder(Protocol):
    """Turns texts into vectors; anything with these members can be indexed, searched and evaluated."""

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Short hash of weights and settings: equal fingerprints give equal vectors."""
        ...

    def encode_queries(self, texts: Texts) -> NDArray[np.float32]:
        """Float32 array `(queries, dim)` in input order."""
        ...

    def encode_documents(self, texts: Texts) -> NDArray[np.float32]:
        """Float32 array `(docs, dim)` in input order."""
        ...


class Index(Protocol):
    """A searchable set of vectors under string ids."""

    dim: int

    def __len__(self) -> int: ...

    def add(self, ids: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Add vectors `(docs, dim)` under `ids`; an id that is there is refused."""
        ...

    def remove(self, ids: Iterable[str]) -> int:
        """Remove what is there of `ids`; returns how many were."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int, filter: Any = None) -> list[list[tuple[str, float]]]:
        """The `k` best `(id, score)` of each query that pass `filter`, best first; fewer where there are fewer."""
        ...

    def merge(self, other: Any) -> int:
        """Add everything that is in `other`; returns how many vectors came in."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a directory that `open_index` opens."""
        ...

    def stats(self) -> dict[str, Any]:
        """What the index is, how much it holds and how large it is."""
        ...


class Ranker(Protocol):
    """Orders the candidates of one query."""

    def rank(self, query: str, documents: Any, *, top_k: int | None = None) -> list[Ranked]:
        """All of `documents` (list or mapping id → text), best first."""
        ...


def check_k(k: int) -> int:
    """`k` as given, if it is a whole number of at least 1; ConfigError otherwise."""
    from shortlist.errors import ConfigError

    if isinstance(k, bool) or not isinstance(k, Real) or not math.isfinite(k) or int(k) != k or k < 1:
        raise ConfigError(f"k is {k!r}; expected a whole number of at least 1.")
    return int(k)


def named_queries(queries: Texts) -> dict[str, str]:
    """Queries as id → text; a text or a list gets positions from "0" as ids. DataError for what is not text."""
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, Iterable):
        raise DataError(f"queries are a text, a list of texts or a mapping id → text; found {type(queries).__name__}.")
    pairs: Iterable[tuple[Any, Any]] = queries.items() if isinstance(queries, Mapping) else enumerate(queries)
    named: dict[str, str] = {}
    for query, text in pairs:
        if not isinstance(text, str):
            raise DataError(f"query {query!r} is a {type(text).__name__}; expected its text as a string.")
        id = string_id(query, "query")
        if id in named:
            raise DataError(f"query id {id!r} is there twice, as a string and as an integer; keep one.")
        named[id] = text
    return named


def left_out(query: str, exclude_self: bool, filters: Mapping[str, Iterable[str]] | None) -> set[str]:
    """The documents that a query's list may not hold: its filtered ones, and its own id where that is asked for."""
    out = set(filters.get(query, ())) if filters else set()
    return out | {query} if exclude_self else out


def string_id(value: Any, what: str) -> str:
    """A query or document id as a string: integers are ids too, everything else (a float from a data frame) is not."""
    if isinstance(value, str):
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    raise DataError(f"{what} id {value!r} is a {type(value).__name__}; expected a string or an integer.")


def _grade(value: Any, query: Any, document: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number != int(number) or abs(number) > MAX_GRADE:
        raise DataError(
            f"grade {str(value)[:40]!r} of document {document!r} for query {query!r}; expected a whole number of at "
            f"most {MAX_GRADE}."
        )
    return int(number)

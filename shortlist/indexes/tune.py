"""Finding the cheapest search settings that reach a recall, measured against exact search on a sample of queries.

Recall grows with the clusters visited (`nprobe`) or the candidates of a graph (`ef_search`), and with the finds that
are scored again (`fetch`). For each `fetch` the least depth that reaches the target is found by doubling and halving;
among these pairs the fastest is taken. One half of the sample chooses, the other half says what the choice is worth.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.indexes.auto import check_targets
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import Vectors
from shortlist.indexes.searching import scan_exactly
from shortlist.indexes.specs import SearchSettings

logger = logging.getLogger(__name__)

SAMPLE = 1_000  # queries at most
_FETCHES = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 14, 20, 30, 50, 100)
_DEEPEST_GRAPH = 4096
_SINGLES = 200  # queries that are timed one by one at least
_PATIENCE = 5.0  # seconds after which that many will do
_SHORTFALLS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_LOSS = 0.005  # recall given up for speed where the target is out of reach

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Tuning:
    """What was measured with the settings that were chosen.

    Attributes:
        k: results a query.
        target: recall that was asked for.
        recall: recall@k on the half of the sample that took no part in choosing.
        recall_100: recall@100 on the same half.
        p50_ms: median of single queries on one thread, in milliseconds; `p95_ms` and `p99_ms` are the tail.
        queries_per_second: of the whole sample at once on one thread, to string ids.
        bytes_per_vector: on disk, documents left out; None for an index in memory.
        memory_per_vector: of that, what a search reads besides the vectors of its finds.
        build_seconds: how long building took, if known.
        settings: the search settings.
        sample: number of queries.
        source: where they are from.
        latency_ms: median that was asked for, None if none was.
        met: whether recall and latency are as asked.
        message: what was not met and what can be done; "" if all was.
    """

    k: int
    target: float
    recall: float
    recall_100: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    queries_per_second: float
    bytes_per_vector: float | None
    memory_per_vector: float | None
    build_seconds: float | None
    settings: SearchSettings
    sample: int
    source: str
    latency_ms: float | None = None
    met: bool = True
    message: str = ""

    def record(self) -> dict[str, Any]:
        """The figures for a manifest."""
        return {**self.__dict__, "settings": self.settings.record()}


def tune(
    index: VectorIndex,
    *,
    queries: Any = None,
    recall: float = 0.95,
    k: int = 10,
    latency: float | None = None,
    source: str | None = None,
    build_seconds: float | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Set `index.settings` to the cheapest that find `recall` of the true `k` best, and measure them.

    What was measured is also put into `index.tuning`; `index.commit()` writes both to its directory. If the target is
    out of reach the settings come within half a point of the best there is; if it is too slow, `latency` is kept.
    `Tuning.message` says so.

    Args:
        index: a searchable index with at least two vectors.
        queries: vectors `(queries, dim)` of real queries, of which at most 1,000 are used; None: stored vectors, each
            searched without itself. Documents are often easier to find than queries, so real ones are better.
        recall: share of the true `k` best to be found, above 0 and at most 1.
        k: results a query.
        latency: seconds that half of the single queries may take on one thread.
        source: where the queries are from, for the record.
        build_seconds: how long building took, for the record.
        progress: called with the number of vectors of each slice that exact search has gone through.

    Raises:
        ConfigError: a target out of range, or too few vectors or queries.
        IndexMismatchError: queries of another dimension.
    """
    check_targets(recall=recall, memory=None, latency=latency, k=k)
    if len(index) < 2:
        raise ConfigError(f"the index holds {len(index)} vectors; tuning needs at least 2: there is nothing to tune.")
    exact = not _adjustable(index)
    sample = _sample(index, queries, source)
    before = index.settings
    with one_thread():
        try:
            if not exact:
                sample.find_truth(index, max(k, 100), progress)
            search = _Search(index, sample, k, single=latency is not None)
            settings, message = (before, "") if exact else _choose(search, recall, latency)
            index.settings = settings
            measured = search.measure(exact)
        except BaseException:
            index.settings = before
            raise
    if latency is not None and measured["p50_ms"] > 1000 * latency and not message:
        message = (
            f"the median of {measured['p50_ms']:.3g} ms is over the {1000 * latency:.3g} ms allowed; "
            "`shortlist tune --rebuild` may choose another kind."
        )
    disk, memory = _bytes(index)
    tuning = Tuning(
        k=k, target=recall, **measured, bytes_per_vector=disk, memory_per_vector=memory, build_seconds=build_seconds,
        settings=settings, sample=len(sample.queries), source=sample.source,
        latency_ms=None if latency is None else 1000 * latency, met=not message, message=message,
    )  # fmt: skip
    index.tuning = tuning.record()
    return tuning


def _choose(search: _Search, recall: float, latency: float | None) -> tuple[SearchSettings, str]:
    """Settings, and what is to be said about them."""
    found, message = None, ""
    target = recall
    # A choice that was lucky on its half of the sample falls short on the other: aim higher.
    for _ in range(5):
        settings = search.cheapest(target)
        if settings is None:
            break
        verified = search.recall(settings, search.kept)[0]
        found = settings
        if verified >= recall:
            break
        target = min(1.0, target + recall - verified + 0.001)
    if found is None or search.recall(found, search.kept)[0] < recall:
        most = search.deepest()
        best = search.recall(most, search.kept)[0]
        if best >= recall:
            found = most
        else:
            found = search.cheapest(best - _LOSS) or most
            message = (
                f"recall@{search.k} {recall:g} cannot be reached with {search.index.spec}: the best is {best:.4f}; "
                "`shortlist tune --rebuild` chooses a kind that can, and +rescore keeps the vectors to score with."
            )
    if latency is None or search.median(found) <= latency:
        return found, message
    needed, reached = search.median(found), search.recall(found, search.kept)[0]
    for shortfall in _SHORTFALLS:
        settings = search.cheapest(min(recall, reached) - shortfall) if shortfall < reached else None
        if settings is not None and search.median(settings) <= latency:
            kept = search.recall(settings, search.kept)[0]
            return settings, (
                f"recall and latency conflict: recall@{search.k} {reached:.4f} takes a median of {1000 * needed:.3g} "
                f"ms, {1000 * latency:.3g} ms allow {kept:.4f}; the latency was kept."
            )
    least = search.shallowest()
    return least, (
        f"a median of {1000 * latency:.3g} ms cannot be reached with {search.index.spec}: the least is "
        f"{1000 * search.median(least):.3g} ms, at recall@{search.k} {search.recall(least, search.kept)[0]:.4f}."
    )


class _Sample:
    """Queries, the positions they are stored at (if they are documents), and the true neighbours of each."""

    def __init__(self, queries: Vectors, own: NDArray[np.int64] | None, source: str):
        self.queries, self.own, self.source = queries, own, source
        self.truth = np.zeros((len(queries), 0), np.int64)

    def find_truth(self, index: VectorIndex, width: int, progress: Progress | None) -> None:
        """Exact search over the stored vectors."""
        width = min(width + (self.own is not None), len(index))
        positions = scan_exactly(index, self.queries, width, index._ids.alive(), progress=progress)[0]
        self.truth = self.without_own(positions, slice(None))

    def without_own(self, positions: NDArray[np.int64], rows: Any) -> NDArray[np.int64]:
        """`positions` `(queries, k + 1)` less the query itself, or else less the last: `(queries, k)`."""
        if self.own is None:
            return positions
        away = positions == self.own[rows][:, None]
        away[~away.any(axis=1), -1] = True
        return positions[~away].reshape(len(positions), -1)


def _sample(index: VectorIndex, queries: Any, source: str | None) -> _Sample:
    if queries is None:
        present = np.flatnonzero(alive) if (alive := index._ids.alive()) is not None else np.arange(len(index))
        own = present[np.linspace(0, len(present) - 1, min(SAMPLE, len(present))).astype(np.int64)]
        vectors = index.vectors_at(own).copy()
        if index.frequency_prior is not None:
            vectors[:, -1] = 0
        # The two halves of the sample are taken in turns: both go over the whole index.
        return _Sample(vectors, own, source or "stored vectors, each searched without itself")
    if index.frequency_prior is not None and np.ndim(queries) == 2 and np.shape(queries)[1] == index.dim - 1:
        queries = np.pad(np.asarray(queries, np.float32), ((0, 0), (0, 1)))
    vectors = index.check_vectors(queries, queries=True)
    if len(vectors) < 2:
        raise ConfigError(f"{len(vectors)} queries are too few to tune with; expected at least 2, better hundreds.")
    if len(vectors) > SAMPLE:
        vectors = vectors[np.linspace(0, len(vectors) - 1, SAMPLE).astype(np.int64)]
    return _Sample(vectors, None, source or "queries")


class _Search:
    """Recall and time of an index under settings, remembered; `chosen` and `kept` are the halves of the sample."""

    def __init__(self, index: VectorIndex, sample: _Sample, k: int, *, single: bool):
        self.index, self.sample, self.k = index, sample, k
        self.chosen, self.kept = slice(0, None, 2), slice(1, None, 2)
        self._single = single
        self._recalls: dict[Any, tuple[float, float]] = {}
        self._medians: dict[SearchSettings, float] = {}
        self._depth, self._most = _depth(index)
        self._fetches = _FETCHES if getattr(index, "rescore", False) else (1.0,)

    def settings(self, depth: int, fetch: float) -> SearchSettings:
        """Settings of this index with `depth` probes or graph candidates."""
        changes: dict[str, Any] = {self._depth: depth} if self._depth else {}
        if len(self._fetches) > 1:
            changes["fetch"] = fetch
        return replace(self.index.settings, **changes)

    def deepest(self) -> SearchSettings:
        return self.settings(self._most, self._fetches[-1])

    def shallowest(self) -> SearchSettings:
        return self.settings(1, self._fetches[0])

    def recall(self, settings: SearchSettings, half: slice) -> tuple[float, float]:
        """Mean recall@k over a half of the sample, and its standard error."""
        key = (settings, half.start)
        if key not in self._recalls:
            self.index.settings = settings
            shares = self._shares(half, self.k)
            self._recalls[key] = float(shares.mean()), float(shares.std() / math.sqrt(len(shares)))
        return self._recalls[key]

    def _shares(self, half: slice, k: int) -> NDArray[np.float64]:
        """Share of the true k best that is found, a query."""
        truth = self.sample.truth[half, :k]
        found = self._found(half, k)
        return np.array([np.isin(row, line).mean() for row, line in zip(truth, found, strict=True)])

    def _found(self, rows: Any, k: int) -> NDArray[np.int64]:
        extra = self.sample.own is not None
        return self.sample.without_own(self.index.search_arrays(self.sample.queries[rows], k + extra)[0], rows)

    def median(self, settings: SearchSettings) -> float:
        """Median seconds of single queries."""
        if settings not in self._medians:
            self.index.settings = settings
            self._medians[settings] = float(np.median(self._singles(_SINGLES)))
        return self._medians[settings]

    def _singles(self, most: int) -> NDArray[np.float64]:
        seconds: list[float] = []
        for row in range(min(most, len(self.sample.queries))):
            if len(seconds) >= _SINGLES and sum(seconds) > _PATIENCE:
                break
            start = time.perf_counter()
            self.index.search(self.sample.queries[row : row + 1], self.k)
            seconds.append(time.perf_counter() - start)
        return np.array(seconds)

    def _cost(self, settings: SearchSettings) -> float:
        if self._single:
            return self.median(settings)
        self.index.settings = settings
        # Processor time: what else runs on the machine must not decide.
        return min(_seconds(lambda: self._found(self.chosen, self.k), time.process_time) for _ in range(3))

    def cheapest(self, target: float) -> SearchSettings | None:
        """The fastest settings that reach `target` on the chosen half, half a standard error to spare, if any do."""
        tried: dict[int, tuple[float, int, SearchSettings] | None] = {}

        def attempt(place: int, start: int) -> tuple[float, int, SearchSettings] | None:
            if place not in tried:
                depth = self._least_depth(target, self._fetches[place], start)
                settings = None if depth is None else self.settings(depth, self._fetches[place])
                tried[place] = None if settings is None or depth is None else (self._cost(settings), depth, settings)
            return tried[place]

        place, start = min(range(len(self._fetches)), key=lambda i: abs(self._fetches[i] - 8)), 8
        while (best := attempt(place, start)) is None:
            place, start = place + 1, self._most
            if place == len(self._fetches):
                return None
        for step in (-1, 1):
            there = place + step
            while 0 <= there < len(self._fetches) and (other := attempt(there, best[1])) and other[0] < best[0]:
                best, place = other, there
                there += step
        return best[2]

    def _least_depth(self, target: float, fetch: float, start: int) -> int | None:
        """The least depth, to within a sixteenth, that reaches `target` with `fetch`."""

        def reaches(depth: int) -> bool:
            mean, error = self.recall(self.settings(depth, fetch), self.chosen)
            return mean - error / 2 >= target or mean == 1

        high, low = max(1, min(start, self._most)), 0
        if reaches(high):
            while high > 1 and reaches(max(1, high // 2)):
                high = max(1, high // 2)
            low = high // 2
        else:
            while not reaches(high):
                if high == self._most:
                    return None
                low, high = high, min(2 * high, self._most)
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return high

    def measure(self, exact: bool) -> dict[str, float]:
        """Recall, latency and throughput under the settings that the index has."""
        queries = self.sample.queries
        self.index.search(queries[:1], self.k)
        singles = 1000 * self._singles(len(queries))
        whole = min(_seconds(lambda: self.index.search(queries, self.k)) for _ in range(3))
        at_k, at_100 = (
            (1.0, 1.0) if exact else (float(self._shares(self.kept, width).mean()) for width in (self.k, 100))
        )
        p50, p95, p99 = np.percentile(singles, [50, 95, 99]).tolist()
        return {
            "recall": round(at_k, 4),
            "recall_100": round(at_100, 4),
            "p50_ms": round(p50, 3),
            "p95_ms": round(p95, 3),
            "p99_ms": round(p99, 3),
            "queries_per_second": round(len(queries) / whole, 1),
        }


def _adjustable(index: VectorIndex) -> bool:
    """Whether results depend on search settings or on codes: exact kinds find everything."""
    return index.kind == "faiss" and not (getattr(index, "_exhaustive", False) and not getattr(index, "rescore", False))


def _depth(index: VectorIndex) -> tuple[str, int]:
    """The setting that says how far an index looks, "" if there is none, and its largest value."""
    if clusters := int(getattr(index, "_clusters", 0)):
        return "nprobe", clusters
    if "HNSW" in str(getattr(index, "factory", "")):
        return "ef_search", min(_DEEPEST_GRAPH, max(16, len(index)))
    return "", 1


def _bytes(index: VectorIndex) -> tuple[float | None, float | None]:
    """Bytes a vector on disk, documents left out, and those that every search may read."""
    files = index._home.manifest["files"] if index._home is not None else {}
    sizes = {name: entry["bytes"] for name, entry in files.items() if not _is_document(name)}
    if not sizes:
        return None, None
    rescored = getattr(index, "rescore", False)
    read = sum(
        size
        for name, size in sizes.items()
        if not (_is_kind(name, "ids.") or (rescored and _is_kind(name, "vectors-")))
    )
    return round(sum(sizes.values()) / len(index), 1), round(read / len(index), 1)


def _is_kind(name: str, start: str) -> bool:
    return PurePosixPath(name).name.startswith(start)


def _is_document(name: str) -> bool:
    return _is_kind(name, "docs.") or _is_kind(name, "fields.") or _is_kind(name, "removed-")


def _seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and faiss compute with one thread, so that times mean the same on every machine."""
    threads = torch.get_num_threads()
    faiss = sys.modules.get("faiss")
    before = faiss.omp_get_max_threads() if faiss is not None else 0
    try:
        torch.set_num_threads(1)
        if faiss is not None:
            faiss.omp_set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
        if faiss is not None:
            faiss.omp_set_num_threads(before)

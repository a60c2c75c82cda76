"""Search with faiss behind the same protocol: string ids, complete ties, fewer results instead of −1.

An index has a base, which faiss holds, and a tail of vectors that came later (or that are too few to train on), which
are scanned exactly. With re-scoring the base only proposes candidates; their scores come from the float32 vectors.

faiss is imported on first use and after torch: on macOS the two bring an OpenMP runtime each, and loading faiss first
can abort the process. `ExactIndex` needs no faiss.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  (before faiss, see above)
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, MissingExtraError
from shortlist.indexes import faiss_factories as factories
from shortlist.indexes.base import SLICE, VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.results import cut, merged, rescored, to_front
from shortlist.indexes.scan import Found, Mask, scan
from shortlist.indexes.specs import DEFAULT_EF_SEARCH, NAMED, PER_CLUSTER, SearchSettings, default_probes, parse_spec
from shortlist.indexes.topk import sort_rows

logger = logging.getLogger(__name__)

FILE = "index.faiss"
_MAX_GPU_RESULTS = 2048  # faiss's limit for k on a GPU
_MAX_FETCH = 4096  # results up to which an approximate search is widened for ties and filters
_WIDEST = 8  # how many times more thoroughly a search under a selective filter looks
_ONE_BIT = re.compile(r"RaBitQ(fs)?(?![0-9a-z])|LSH")


class FaissIndex(VectorIndex):
    """A faiss index under string ids: "Flat" (exact) or any other factory string.

    Flat gives the results of `ExactIndex`. Other factories train once enough vectors are there (39 a cluster) and are
    exact until then. Removed and filtered vectors are passed over inside the search, so every factory can remove.
    Saved and opened memory-mapped; what is added to an opened index is searched exactly beside it until `compact`.

    Args:
        dim: length of a vector.
        factory: a faiss factory string, such as "Flat" or "HNSW32".
        metric: "ip" (cosine over normalised vectors) or "l2" (scores are negated squared distances).
        device: "auto" uses a GPU if this faiss passes a probe search on one, "cpu" never does.
        rescore: keep the float32 vectors, and score `settings.fetch` × k finds of the factory again with them.

    Raises:
        MissingExtraError: faiss is not installed.
        ConfigError: faiss does not know the factory.
    """

    kind = "faiss"
    metrics = ("ip", "l2")

    def __init__(
        self, dim: int, *, factory: str = "Flat", metric: str = "ip", device: str = "auto", rescore: bool = False
    ):
        super().__init__(dim, metric=metric)
        if device not in ("auto", "cpu"):
            raise ConfigError(f"device {device!r} is not one of auto, cpu for FaissIndex; use ExactIndex for others.")
        self.factory = factory
        self.device = device
        self.rescore = bool(rescore)
        if _ONE_BIT.search(factory):
            self.settings = SearchSettings(fetch=10.0)
        self._lock = threading.Lock()
        self._opened = False
        self._restart()

    def _restart(self) -> None:
        """An empty, untrained base and no tail."""
        self._index = self._make(self.factory)
        self._built = self.factory  # the factory with as many clusters as there were vectors for
        self._mapped = False
        self._on_gpu: Any = None
        self._stored: VectorBlocks | None = VectorBlocks(self.dim) if self.rescore else None
        self._tail = VectorBlocks(self.dim)
        self._inspect()

    def _make(self, factory: str) -> Any:
        faiss = import_faiss()
        if "IDMap" in factory:
            raise ConfigError(f"factory {factory!r} maps ids, which the index does itself; leave IDMap out.")
        if (wrong := factories.out_of_range(factory)) is not None:
            # faiss would take these, and end the process or take all memory at the first vector.
            raise ConfigError(f"factory {factory!r} asks for {wrong}.")
        try:
            return faiss.index_factory(
                self.dim, factory, faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else faiss.METRIC_L2
            )
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"faiss cannot make {factory!r} for {self.dim} dimensions: {_reason(error)}.") from None

    def _inspect(self) -> None:
        """Look once at what every search must know."""
        faiss = import_faiss()
        self._selects = factories.selects(faiss, self._index)
        self._exhaustive = factories.exhaustive(faiss, self._index)
        self._faithful = factories.lossless(faiss, self._index)
        ivf = factories.ivf_layer(faiss, self._index)
        self._clusters = 0 if ivf is None else int(ivf.nlist)
        self._direct = False  # whether an IVF kind knows where each position lies

    # What is stored.

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether `vectors_at` gives the very vectors that were added."""
        return self.rescore or self._faithful or not self._base_size()

    @property
    def _keeps_vectors(self) -> bool:  # type: ignore[override]
        return self.rescore

    def transforms(self) -> list[str]:
        """Names of faiss's vector transforms inside the factory, such as NormalizationTransform for "L2norm,Flat".

        One that gives fewer dimensions than it takes is said to be "shortening".
        """
        faiss = import_faiss()
        names: list[str] = []
        for layer in factories.layers(faiss, self._index):
            for transform in factories.transforms(faiss, layer):
                name = type(transform).__name__
                names.append(name if transform.d_out >= transform.d_in else f"shortening {name}")
        return names

    def _settings(self) -> dict[str, Any]:
        built = {} if self._built == self.factory else {"built_as": self._built}
        return {"factory": self.factory, "rescore": self.rescore, **built}

    def _restore(self, manifest: dict[str, Any]) -> None:
        self._built = manifest.get("built_as", self.factory)

    @classmethod
    def _open_options(cls, manifest: dict[str, Any]) -> dict[str, Any]:
        return {"factory": manifest["factory"], "rescore": manifest.get("rescore", False)}

    def _base_size(self) -> int:
        return int(self._index.ntotal)

    def _needs_training(self) -> int:
        return 0 if self._index.is_trained else factories.training_sample(self.factory)

    def _train(self, sample: Vectors) -> None:
        """Train on `sample`, with fewer clusters if it is small; where it is too small stay untrained, and say so."""
        if self._index.is_trained:
            return
        wanted = factories.cluster_count(self.factory)
        clusters = min(wanted, len(sample) // PER_CLUSTER)
        if len(sample) < factories.codebook(self.factory) or clusters < min(wanted, 1):
            logger.warning(
                "%d vectors are too few to train %s, which needs %d: they are searched exactly until there are more.",
                len(sample), self.factory, max(factories.codebook(self.factory), PER_CLUSTER),
            )  # fmt: skip
            return
        if clusters < wanted:
            self._built = factories.with_clusters(self.factory, clusters)
            logger.warning(
                "%d vectors are too few for the clusters of %s (%d vectors each are wanted): built as %s.",
                len(sample), self.factory, PER_CLUSTER, self._built,
            )  # fmt: skip
        index = self._make(self._built)
        try:
            factories.train(import_faiss(), index, np.ascontiguousarray(sample), self._built)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"faiss cannot train {self._built!r} on {len(sample)} vectors: {_reason(error)}. Use another factory, "
                "or 'flat' for a small collection."
            ) from None
        self._index = index
        self._inspect()

    def _append(self, vectors: Vectors) -> None:
        # What is opened stays as it is on disk: a commit writes what came since as vectors, which are the tail.
        if self._index.is_trained and not self._opened and not len(self._tail):
            self._add(vectors)
            return
        self._tail.append(vectors)
        enough = factories.training_minimum(self.factory)
        if not self._opened and not self._index.is_trained and len(self._tail) >= enough:
            self._train(self._tail.sample(factories.training_sample(self.factory)))
            waiting, self._tail = self._tail, VectorBlocks(self.dim)
            for block in waiting.views():
                self._add(block)

    def _add(self, vectors: Vectors) -> None:
        """Give `vectors` to the base."""
        self._forget_places()
        try:
            self._index.add(np.ascontiguousarray(vectors))
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"faiss index {self._built!r} did not take {len(vectors)} vectors: {_reason(error)}."
            ) from None
        if self._stored is not None:
            self._stored.append(vectors)
        self._on_gpu = None

    def _clear(self) -> None:
        self._restart()

    def _build_base(self, vectors: VectorBlocks) -> None:
        name = str(getattr(self, "spec", None) or "")
        if name.partition("+")[0] in NAMED:
            # A name means another factory once there are more vectors.
            self.factory = parse_spec(name, dim=self.dim, count=len(vectors)).factory
        self._restart()
        if wanted := self._needs_training():
            self._train(vectors.sample(wanted))
        if not self._index.is_trained:
            self._tail.extend(vectors)
            return
        stored, self._stored = self._stored, None
        for start in range(0, len(vectors), SLICE):
            for part in vectors.between(start, min(start + SLICE, len(vectors))):
                self._add(part)
        if stored is not None:
            stored.extend(vectors)
        self._stored = stored

    # Reading vectors back.

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        size = self._base_size()
        inside = positions < size
        if not inside.any():
            return self._tail.at(positions - size)
        if not inside.all():
            out = np.empty((len(positions), self.dim), np.float32)
            out[inside] = self._base_vectors(positions[inside])
            out[~inside] = self._tail.at(positions[~inside] - size)
            return out
        return self._base_vectors(positions)

    def _base_vectors(self, positions: NDArray[np.int64]) -> Vectors:
        if self._stored is not None:
            return self._stored.at(positions)
        if self._clusters and not self._direct:
            with self._lock:
                if not self._direct:
                    factories.ivf_layer(import_faiss(), self._index).make_direct_map(True)
                    self._direct = True
        try:
            return self._index.reconstruct_batch(positions)  # type: ignore[no-any-return]
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"faiss index {self.factory!r} cannot give vectors back: {_reason(error)}. Add +rescore to its spec to "
                "keep them beside it."
            ) from None

    def _forget_places(self) -> None:
        if self._direct:
            factories.ivf_layer(import_faiss(), self._index).make_direct_map(False)
            self._direct = False

    # Search.

    def _scan(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        size = self._base_size()
        if not len(self._tail):
            return self._scan_base(queries, k, allowed, size if allowed is None else int(np.count_nonzero(allowed)))
        parts: list[Found] = []
        inside = None if allowed is None else allowed[:size]
        count = size if inside is None else int(np.count_nonzero(inside))
        if count:
            parts.append(self._scan_base(queries, min(k, count), inside, count))
        outside = None if allowed is None else allowed[size:]
        count = len(self._tail) if outside is None else int(np.count_nonzero(outside))
        if count:
            positions, scores, counts = scan(
                queries, min(k, count), list(self._tail.views()), lambda found: self._ids.take(found + size),
                allowed=outside, metric=self.metric,
            )  # fmt: skip
            parts.append((np.where(positions < 0, -1, positions + size), scores, counts))
        return merged(parts, k, self._ids.take)

    def _scan_base(self, queries: Vectors, k: int, allowed: Mask | None, count: int) -> Found:
        """As `_scan`, over the base alone; `count` of its positions are allowed."""
        size = self._base_size()
        if count == size:
            allowed = None
        positions = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        counts = np.zeros(len(queries), np.int64)
        pending: Any = slice(None)
        # One more than asked for shows whether the k-th score is tied with what lies beyond. Ties of codes say nothing
        # about the vectors, so they are not pursued.
        fetch = self.settings.candidates(k) if self.rescore else k + self._faithful
        most = size if self._exhaustive else max(_MAX_FETCH, 4 * fetch)
        while True:
            fetch = min(fetch, count)
            found_scores, found, done = self._search(queries[pending], fetch, allowed, count / size)
            last = fetch >= min(count, most)
            alike = found_scores[:, 0] == found_scores[:, -1]
            if self.rescore:
                if self._stored is None:
                    raise DataError("the vectors of this index are not there; build it again with +rescore.")
                found_scores = rescored(import_faiss(), queries[pending], found, self._stored, metric=self.metric)
            else:
                found_scores[found < 0] = -np.inf
            found, found_scores, there = sort_rows(found, found_scores, self._ids.take)
            if last:
                done[:] = True
            elif self.rescore:
                done |= (there >= k) & ~alike
            elif not self._faithful:
                done |= there >= k
            elif self._selects or allowed is None:
                # Complete if a lower score follows the k-th.
                done |= found_scores[:, -1] < found_scores[:, k - 1]
            else:
                reached = np.take_along_axis(found_scores, np.maximum(there - 1, 0)[:, None], axis=1)[:, 0]
                done |= (there > k) & (reached < found_scores[:, k - 1])
            width = min(k, found.shape[1])
            if isinstance(pending, slice) and done.all() and width == k:
                return cut(found, found_scores, there, k)
            rows = np.arange(len(queries))[pending][done]
            positions[rows, :width], scores[rows, :width] = found[done, :width], found_scores[done, :width]
            counts[rows] = np.minimum(there[done], width)
            pending = np.arange(len(queries))[pending][~done]
            if not len(pending):
                positions[scores == -np.inf] = -1
                return positions, scores, counts
            fetch *= 4

    def _search(
        self, queries: Vectors, fetch: int, allowed: Mask | None, share: float
    ) -> tuple[Vectors, NDArray[np.int64], Mask]:
        """Scores and positions `(queries, fetch or more)` from faiss, and which queries it has no more results for.

        The position is −1 for what is not there or not allowed.
        """
        faiss, index, settings = import_faiss(), self._index, self.settings
        selector = None
        # What a filter leaves lies further away: look further.
        wider = 1.0 if allowed is None else min(_WIDEST, 1 / math.sqrt(share))
        if allowed is not None:
            if self._selects:
                selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
            else:
                fetch = min(len(allowed), max(16, math.ceil(1.25 * fetch / share)))
        elif self.device == "auto" and fetch <= _MAX_GPU_RESULTS and gpu_status()[0]:
            index = self._gpu_copy() or index
        chosen = None
        if selector is not None or not self._exhaustive:
            chosen = factories.parameters(
                faiss, self._index,
                nprobe=math.ceil(wider * (settings.nprobe or default_probes(max(self._clusters, 1)))),
                ef_search=math.ceil(wider * (settings.ef_search or DEFAULT_EF_SEARCH)), selector=selector,
            )  # fmt: skip
        try:
            scores, positions = index.search(queries, fetch, params=chosen)
        except RuntimeError as error:
            if selector is None:
                raise ConfigError(f"faiss index {self._built!r} cannot search: {_reason(error)}.") from None
            # This kind takes no selector after all.
            self._selects = False
            return self._search(queries, fetch, allowed, share)
        # A −1 at the end says that there is nothing more to find.
        exhausted = positions[:, -1] < 0
        if allowed is not None and not self._selects:
            exhausted |= fetch >= len(allowed)
            positions[~allowed[positions]] = -1
            scores, positions = to_front(scores, positions, descending=self.metric == "ip")
        return -scores if self.metric == "l2" else scores, positions, exhausted

    def _gpu_copy(self) -> Any:
        if self._on_gpu is None:
            try:
                self._on_gpu = import_faiss().index_cpu_to_all_gpus(self._index)
            except (RuntimeError, AssertionError) as error:
                logger.info("%s searches on the CPU: faiss cannot copy it to a GPU: %s.", self.factory, _reason(error))
                self._on_gpu = False
        return self._on_gpu

    # Files.

    def _write_base(self, directory: Path) -> None:
        self._forget_places()
        import_faiss().write_index(self._index, str(directory / FILE))

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        self._opened = True
        if not count:
            return
        faiss = import_faiss()
        file = segment / FILE
        try:
            self._index = faiss.read_index(str(file), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
        except RuntimeError:
            # Kinds that cannot be mapped are read into memory.
            try:
                self._index = faiss.read_index(str(file))
            except RuntimeError as error:
                raise DataError(f"faiss cannot read {file}: {_reason(error)}. Build the index again.") from None
        if self._index.ntotal != count or self._index.d != self.dim:
            raise DataError(
                f"{file} holds {self._index.ntotal} vectors of {self._index.d} dimensions, expected {count} of "
                f"{self.dim}; build the index again."
            )
        self._mapped = True
        if self.rescore:
            self._stored = vectors
        self._inspect()

    def _open_tail(self, blocks: VectorBlocks) -> None:
        self._opened = True
        self._tail = VectorBlocks(self.dim)
        self._tail.extend(blocks)


@lru_cache(maxsize=1)
def import_faiss() -> Any:
    """The faiss module. Raises MissingExtraError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            f"faiss cannot be imported ({error}); install it with `pip install faiss-cpu`, or use ExactIndex "
            "(--index exact), which needs none."
        ) from None
    if sys.platform == "darwin":
        # torch and faiss each bring an OpenMP runtime there; with one faiss thread they do not meet.
        faiss.omp_set_num_threads(1)
    return faiss


@lru_cache(maxsize=1)
def gpu_status() -> tuple[bool, str]:
    """Whether faiss can search on a GPU here, found by a tiny search, and why not; logged once.

    A wheel may carry GPU symbols without kernels for the card, which only a search shows.
    """
    faiss = import_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        usable, why = False, "this faiss is built for the CPU only"
    elif not faiss.get_num_gpus():
        usable, why = False, "faiss sees no GPU"
    else:
        try:
            probe = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(4))
            probe.add(np.eye(4, dtype=np.float32))
            usable = probe.search(np.eye(4, dtype=np.float32), 1)[1][:, 0].tolist() == [0, 1, 2, 3]
            why = "" if usable else "a probe search on the GPU gave a wrong result"
        except RuntimeError as error:
            usable, why = False, f"a probe search on the GPU failed: {_reason(error)}"
    if not usable and torch.cuda.is_available():
        logger.info("FaissIndex searches on the CPU: %s. ExactIndex searches on the GPU through torch.", why)
    return usable, why


def _reason(error: Exception) -> str:
    """The part of a faiss message that a user can read."""
    text = re.split(r"\.(?:cpp|h):\d+: (?:Error: )?", str(error).strip().split("\n")[0])[-1]
    return text.rpartition("failed: ")[2].rstrip(".") or type(error).__name__

"""Search with faiss behind the same protocol: string ids, complete ties, fewer results instead of −1.

faiss is imported on first use and after torch: on macOS the two bring an OpenMP runtime each, and loading faiss first
can abort the process. `ExactIndex` needs no faiss.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  (before faiss, see above)
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, MissingExtraError
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.topk import sort_rows

logger = logging.getLogger(__name__)

FILE = "index.faiss"
_MAX_GPU_RESULTS = 2048  # faiss's limit for k on a GPU


class FaissIndex(VectorIndex):
    """A faiss index under string ids: "Flat" (exact) or any other factory string.

    Flat gives the results of `ExactIndex`. Other factories train on the first vectors that are added; removed
    vectors are skipped at search time, so every factory can remove. Saved and opened memory-mapped where faiss can.

    Args:
        dim: length of a vector.
        factory: a faiss factory string, such as "Flat" or "HNSW32".
        metric: "ip" (cosine over normalised vectors) or "l2" (scores are negated squared distances).
        device: "auto" uses a GPU if this faiss passes a probe search on one, "cpu" never does.

    Raises:
        MissingExtraError: faiss is not installed.
        ConfigError: faiss does not know the factory.
    """

    kind = "faiss"
    _keeps_vectors = False
    metrics = ("ip", "l2")

    def __init__(self, dim: int, *, factory: str = "Flat", metric: str = "ip", device: str = "auto"):
        super().__init__(dim, metric=metric)
        if device not in ("auto", "cpu"):
            raise ConfigError(f"device {device!r} is not one of auto, cpu for FaissIndex; use ExactIndex for others.")
        faiss = import_faiss()
        self.factory = factory
        self.device = device
        self._mapped = False
        self._on_gpu: Any = None
        try:
            self._index = faiss.index_factory(
                self.dim, factory, faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
            )
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"faiss cannot make {factory!r} for {dim} dimensions: {_reason(error)}.") from None

    def transforms(self) -> list[str]:
        """Names of faiss's vector transforms inside the factory, such as NormalizationTransform for "L2norm,Flat".

        One that gives fewer dimensions than it takes is said to be "shortening".
        """
        faiss = import_faiss()
        names: list[str] = []
        index: Any = self._index
        while index is not None:
            # Wrappers, such as IndexPreTransform, IndexIDMap and IndexRefine, hold the next index under these names.
            index = faiss.downcast_index(index)
            chain = getattr(index, "chain", None)
            if chain is not None:
                for place in map(chain.at, range(chain.size())):
                    name = type(faiss.downcast_VectorTransform(place)).__name__
                    names.append(name if place.d_out >= place.d_in else f"shortening {name}")
            index = getattr(index, "base_index", None) or getattr(index, "index", None)
        return names

    def _settings(self) -> dict[str, Any]:
        return {"factory": self.factory}

    @classmethod
    def _open_options(cls, manifest: dict[str, Any]) -> dict[str, Any]:
        return {"factory": manifest["factory"]}

    def _append(self, vectors: Vectors) -> None:
        faiss = import_faiss()
        if self._mapped:
            # A mapped index cannot grow: copy it into memory once. Its file may have been replaced since it was opened.
            self._index = faiss.deserialize_index(faiss.serialize_index(self._index))
            self._mapped = False
        try:
            if not self._index.is_trained:
                self._index.train(vectors)
            self._index.add(vectors)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"faiss index {self.factory!r} did not take {len(vectors)} vectors: {_reason(error)}. A factory that "
                "trains needs more vectors than clusters in the first add; use 'Flat' for a small collection."
            ) from None
        self._on_gpu = None

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        if not len(positions):
            return np.zeros((0, self.dim), np.float32)
        return np.stack([self._index.reconstruct(position) for position in positions.tolist()])

    def _base_size(self) -> int:
        return int(self._index.ntotal)

    def _scan(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        total = len(self._ids)
        positions = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        pending = np.arange(len(queries))
        # One more than asked for shows whether the k-th score is tied with what lies beyond.
        fetch = k + 1 + min(self._ids.num_removed, k)
        while len(pending):
            fetch = min(fetch, total)
            found_scores, found = self._search(queries[pending], fetch)
            exhausted = (found < 0).any(axis=1)
            found_scores[found < 0 if allowed is None else (found < 0) | ~allowed[found]] = -np.inf
            found, found_scores, counts = sort_rows(found, found_scores, self._ids.take)
            done = np.ones(len(pending), bool)
            if fetch < total:
                # Complete if faiss had no more to give, or if k are there and a lower score follows them.
                last = np.take_along_axis(found_scores, np.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
                enough = (counts > k) & (last < found_scores[:, k - 1])
                done = enough | exhausted
            width = min(k, fetch)
            rows = pending[done]
            positions[rows, :width], scores[rows, :width] = found[done, :width], found_scores[done, :width]
            pending = pending[~done]
            fetch *= 4
        positions[scores == -np.inf] = -1
        return positions, scores, (scores > -np.inf).sum(axis=1)

    def _search(self, queries: Vectors, fetch: int) -> tuple[Vectors, NDArray[np.int64]]:
        index = self._index
        if self.device == "auto" and fetch <= _MAX_GPU_RESULTS and gpu_status()[0]:
            if self._on_gpu is None:
                self._on_gpu = import_faiss().index_cpu_to_all_gpus(index)
            index = self._on_gpu
        scores, positions = index.search(queries, fetch)
        return -scores if self.metric == "l2" else scores, positions

    def _write_base(self, directory: Path) -> None:
        import_faiss().write_index(self._index, str(directory / FILE))

    def _open_tail(self, blocks: VectorBlocks) -> None:
        for block in blocks.views():
            self._append(block)

    def _clear(self) -> None:
        if self._mapped:
            self._index = import_faiss().clone_index(self._index)
            self._mapped = False
        self._index.reset()
        self._on_gpu = None

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        faiss = import_faiss()
        file = segment / FILE
        try:
            self._index = faiss.read_index(str(file), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
            self._mapped = True
        except RuntimeError:
            # Kinds that cannot be mapped are read into memory.
            try:
                self._index = faiss.read_index(str(file))
            except RuntimeError as error:
                raise DataError(f"faiss cannot read {file}: {_reason(error)}. Build the index again.") from None
        if self._index.ntotal != count:
            raise DataError(f"{file} holds {self._index.ntotal} vectors for {count} ids; build the index again.")


@lru_cache(maxsize=1)
def import_faiss() -> Any:
    """The faiss module. Raises MissingExtraError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            f"faiss cannot be imported ({error}); install it with `pip install faiss-cpu`, or use ExactIndex "
            "(--kind exact), which needs none."
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
    text = str(error).strip().split("\n")[0]
    return text.rpartition("failed: ")[2].rstrip(".") or type(error).__name__

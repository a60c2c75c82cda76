"""Exact search with torch on any device: every score is computed, over float32 vectors or over compressed codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.devices import resolve_device
from shortlist.errors import ConfigError
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.codes import Codes
from shortlist.indexes.compressed import scan_codes
from shortlist.indexes.scan import QUERIES, DeviceBlocks, scan
from shortlist.indexes.segments import shards_of
from shortlist.indexes.specs import DTYPES


class ExactIndex(VectorIndex):
    """Exact inner-product search over float32 vectors, in memory or memory-mapped, on CPU, CUDA or MPS.

    The default kind: nothing to tune, add and remove at once, results equal to a full sort under the package's tie
    rule. Scanning costs docs × dim multiplications a query; prefer an approximate `FaissIndex` when that is too slow.

    With another `dtype` compressed codes are scanned, and what an error bound cannot exclude is scored again from the
    float32 vectors: the results are the same. It pays where vectors are read from disk or must fit on a GPU; on a CPU
    with all vectors in memory float32 is as fast.

    Args:
        dim: length of a vector.
        metric: "ip", the inner product; cosine when the vectors are normalised.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        dtype: what is scanned: "float32", "float16", "bfloat16" or "int8".
        resident: whether what is scanned stays on the device between searches; None: on CUDA, as far as it fits.

    Raises:
        ConfigError: an unknown dtype, metric or device.
    """

    kind = "exact"
    _only_vectors = True
    metrics = ("ip",)

    def __init__(
        self,
        dim: int,
        *,
        metric: str = "ip",
        device: str = "auto",
        dtype: str = "float32",
        resident: bool | None = None,
    ):
        super().__init__(dim, metric=metric)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)} for ExactIndex.")
        self.device = resolve_device(device)
        self.dtype = dtype
        self._resident = resident
        self._vectors = VectorBlocks(self.dim)
        self._base = self._vectors  # what was opened as the base: the tail is held beside it
        self._codes: Codes | None = None
        self._forget()

    def _forget(self) -> None:
        """Start anew with what was derived from the vectors: codes, and copies on the device."""
        self._codes = None if self.dtype == "float32" else Codes(self.dim, self.dtype)
        self._held = DeviceBlocks(self.device, keep=self._resident)

    def vectors(self) -> Iterator[NDArray[np.float32]]:
        """The stored vectors in order, removed ones included, as views of at most one shard each."""
        return self._vectors.views()

    def _settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    @classmethod
    def _open_options(cls, manifest: dict[str, Any]) -> dict[str, Any]:
        return {"dtype": manifest.get("dtype", "float32")}

    def _append(self, vectors: Vectors) -> None:
        self._vectors.append(vectors)

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        return self._vectors.at(positions)

    def _base_size(self) -> int:
        return len(self._base)

    def _scan(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        if self._codes is None:
            return self._scan_vectors(queries, k, allowed, self._held)
        self._codes.extend(self._vectors)
        parts = []
        for start in range(0, len(queries), QUERIES):
            block = queries[start : start + QUERIES]
            found = scan_codes(block, k, self._codes, self._vectors, self._ids.take, allowed=allowed, held=self._held)
            if found is None:
                # Too many vectors alike to tell apart by their codes.
                found = self._scan_vectors(block, k, allowed, DeviceBlocks(self.device, keep=False))
            parts.append(found)
        positions, scores, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
        return positions, scores, counts

    def _scan_vectors(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None, held: DeviceBlocks
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        return scan(queries, k, list(self.vectors()), self._ids.take, allowed=allowed, held=held)

    def _write_base(self, directory: Path) -> None:
        if self._codes is not None:
            # Of the vectors just written there, which are those that were not removed.
            self._codes.write(directory, shards_of(directory, self.dim))

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        if vectors is not None:
            self._base = self._vectors = vectors
            self._forget()
            if self._codes is not None:
                self._codes.open(segment, count)

    def _open_tail(self, blocks: VectorBlocks) -> None:
        vectors = VectorBlocks(self.dim)
        vectors.extend(self._base)
        vectors.extend(blocks)
        self._vectors = vectors
        self._held = DeviceBlocks(self.device, keep=self._resident)
        if self._codes is not None:
            self._codes.cut(len(self._base))

    def _clear(self) -> None:
        self._base = self._vectors = VectorBlocks(self.dim)
        self._forget()

    def _build_base(self, vectors: VectorBlocks) -> None:
        self._base = self._vectors = vectors
        self._forget()

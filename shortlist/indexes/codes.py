"""Compressed copies of vectors with what bounds their error: int8, float16 or bfloat16, one scale a vector.

A vector x is kept as s·c: the scale s is its largest magnitude, c are its components divided by s in the small type
(times 127 and rounded for int8). Beside it stand its residual ‖x − s·c‖ and its norm ‖x‖, both rounded up, from which
|q·x − q·(s·c)| ≤ ‖q‖ · ‖x − s·c‖ follows for every query q (Cauchy and Schwarz).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.errors import DataError
from shortlist.indexes.blocks import VectorBlocks, Vectors

CODES, BOUNDS = "codes.npy", "codes.bounds.npy"
_STORED = {"int8": np.int8, "float16": np.float16, "bfloat16": np.int16}  # numpy has no bfloat16: its bits
_BLOCK = 16_384  # vectors encoded at a time
_TINY = np.float32(1e-30)  # a vector of smaller components is kept as zeros, and its norm is its residual


class Codes:
    """Codes `(n, dim)` and bounds `(n, 3)` (scale, residual, norm) of the first `n` vectors of an index, in blocks.

    Args:
        dim: length of a vector.
        dtype: "int8", "float16" or "bfloat16".
    """

    def __init__(self, dim: int, dtype: str):
        self.dim = dim
        self.dtype = dtype
        self.codes: list[NDArray[Any]] = []
        self.bounds: list[NDArray[np.float32]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(block) for block in self.codes)

    def extend(self, vectors: VectorBlocks) -> None:
        """Encode those of `vectors` that are not yet encoded."""
        with self._lock:
            start, stop = len(self), len(vectors)
            if start == stop:
                return
            parts = [encode(view, self.dtype) for view in _slices(vectors, start, stop)]
            codes, bounds = (np.concatenate(part) for part in zip(*parts, strict=True))
            self.bounds.append(bounds)
            self.codes.append(codes)

    def cut(self, count: int) -> None:
        """Forget the blocks that reach beyond the first `count`; `extend` encodes again what is missing."""
        while len(self) > count:
            self.codes.pop()
            self.bounds.pop()

    def write(self, directory: Path, vectors: VectorBlocks) -> None:
        """Write the codes of `vectors` to `directory`, encoding block by block: any number of them."""
        codes = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            directory / CODES, mode="w+", dtype=_STORED[self.dtype], shape=(len(vectors), self.dim)
        )
        bounds = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            directory / BOUNDS, mode="w+", dtype=np.float32, shape=(len(vectors), 3)
        )
        row = 0
        for view in _slices(vectors, 0, len(vectors)):
            codes[row : row + len(view)], bounds[row : row + len(view)] = encode(view, self.dtype)
            row += len(view)
        codes.flush()
        bounds.flush()

    def open(self, directory: Path, count: int) -> None:
        """Map the codes of `count` vectors in `directory`. Raises DataError if they do not fit."""
        codes, bounds = _map(directory / CODES), _map(directory / BOUNDS)
        shapes = codes.shape == (count, self.dim) and bounds.shape == (count, 3)
        if not shapes or codes.dtype != _STORED[self.dtype] or bounds.dtype != np.float32:
            raise DataError(
                f"{directory / CODES} holds {codes.dtype} {codes.shape}, expected {self.dtype} ({count}, {self.dim}); "
                "build the index again."
            )
        if count:
            self.codes, self.bounds = [codes], [bounds]

    def decoded(self, codes: torch.Tensor) -> torch.Tensor:
        """Stored codes `(n, dim)` as float32, without their scales."""
        return (codes.view(torch.bfloat16) if self.dtype == "bfloat16" else codes).float()


def encode(vectors: Vectors, dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Codes and bounds of `vectors` `(n, dim)`."""
    scale = np.abs(vectors).max(axis=1)
    scale[scale < _TINY] = 1
    if dtype == "int8":
        scale /= 127
        codes = np.rint(vectors / scale[:, None]).clip(-127, 127).astype(np.int8)
        kept = codes.astype(np.float64)
    else:
        kind = torch.float16 if dtype == "float16" else torch.bfloat16
        small = torch.from_numpy(vectors / scale[:, None]).to(kind)
        codes = small.view(torch.int16).numpy().view(_STORED[dtype])
        kept = small.double().numpy()
    kept *= scale[:, None]
    residual = np.sqrt(np.square(vectors - kept).sum(axis=1))
    norm = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
    bounds = np.stack([scale, _up(residual), _up(norm)], axis=1)
    return codes, bounds


def _up(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 that is no smaller than `values`, whose own rounding is far below one part in 2**24."""
    return np.nextafter((values * (1 + 1e-10)).astype(np.float32), np.float32(np.inf))


def _slices(vectors: VectorBlocks, start: int, stop: int) -> Any:
    for first in range(start, stop, _BLOCK):
        yield from vectors.between(first, min(first + _BLOCK, stop))


def _map(file: Path) -> NDArray[Any]:
    try:
        # Copy on write, because torch wants a writable array; nothing writes.
        return np.load(file, mmap_mode="c", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}); build the index again.") from None

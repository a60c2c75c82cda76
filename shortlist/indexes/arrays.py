"""One-dimensional `.npy` files written piece by piece, so that their length need not be known or held in memory."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class ArrayWriter:
    """Writes a `.npy` file of one dimension as its values come.

    Args:
        file: the file to write.
        dtype: of the values; little-endian on disk.
    """

    def __init__(self, file: Path, dtype: DTypeLike):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._handle: IO[bytes] = open(file, "wb")
        self._length = 0
        self._header()
        self._start = self._handle.tell()

    def __len__(self) -> int:
        return self._length

    def append(self, values: NDArray[Any]) -> None:
        """Write `values` `(n,)` after those before."""
        self._handle.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        """Put the length into the header and close the file; a second call does nothing."""
        if not self._handle.closed:
            self._handle.seek(0)
            self._header()
            if self._handle.tell() != self._start:
                raise OSError(f"{self._handle.name}: the .npy header changed its size from {self._start} bytes.")
            self._handle.close()

    def abort(self) -> None:
        """Close the file as it is."""
        self._handle.close()

    def _header(self) -> None:
        # numpy pads the header for a length of up to 21 digits, so that it can be written again in place.
        np.lib.format.write_array_header_1_0(
            self._handle,
            {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)},
        )


def map_array(file: Path) -> NDArray[Any]:
    """The `.npy` file at `file`, memory-mapped, as a plain array: a numpy.memmap is several times slower to index."""
    return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))

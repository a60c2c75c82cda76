"""A 64-bit hash of strings in numpy, equal in every process and on every platform, and the hash table on disk.

A table of n ids is two arrays: `order`, the positions sorted by bucket, and `buckets`, where each bucket begins in it
(compressed sparse rows). The bucket of an id is the top bits of its hash. A look-up reads one or two candidates of
one bucket and compares the ids themselves, so a collision costs time and never an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError

Hashes = NDArray[np.uint64]

_WORDS = 32  # words of 8 bytes that are hashed in numpy; longer ids are rare and go through BLAKE2b
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINAL = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # the finaliser of MurmurHash3
_KEPT = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)  # the low `size` bytes of a word


class Encoded:
    """Ids as one block of UTF-8 bytes with the start and length of each.

    Raises:
        DataError: an id holds a lone surrogate.
    """

    def __init__(self, ids: Sequence[str]):
        self.ids = ids
        text = "".join(ids)
        if text.isascii():
            self.lengths = np.fromiter(map(len, ids), np.int64, len(ids))
            blob = text.encode("ascii")
        else:
            encoded = [encode(value) for value in ids]
            self.lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            blob = b"".join(encoded)
        self.size = len(blob)
        self.stops = np.cumsum(self.lengths)
        self.starts = self.stops - self.lengths
        # Room to read a whole word from any byte on.
        self.bytes = np.frombuffer(blob + bytes(8), np.uint8)

    @property
    def blob(self) -> memoryview:
        """The bytes of all ids."""
        return self.bytes[: self.size].data


def encode(value: str) -> bytes:
    """An id in UTF-8; DataError for a lone surrogate."""
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{value!r} holds a lone surrogate and cannot be written as UTF-8; clean it first.") from None


def hash_encoded(encoded: Encoded) -> Hashes:
    """A hash of each id: eight bytes at a time are mixed in, for all ids at once."""
    lengths = encoded.lengths
    hashes = lengths.astype(np.uint64) * _MULTIPLIER
    windows = np.lib.stride_tricks.sliding_window_view(encoded.bytes, 8)
    longest = int(lengths.max(initial=0))
    for word in range(min(_WORDS, -(-longest // 8))):
        left = lengths - 8 * word
        rows: NDArray[np.int64] | slice = slice(None) if not word else np.flatnonzero(left > 0)
        left = left[rows]
        values = windows[encoded.starts[rows] + 8 * word].view("<u8").reshape(-1).astype(np.uint64, copy=False)
        values &= _KEPT[np.minimum(left, 8)]
        values ^= hashes[rows]
        values *= _MULTIPLIER
        values ^= values >> np.uint64(29)
        hashes[rows] = values
    for row in np.flatnonzero(lengths > 8 * _WORDS).tolist():
        content = encoded.bytes[encoded.starts[row] : encoded.stops[row]]
        hashes[row] = int.from_bytes(hashlib.blake2b(content.data, digest_size=8).digest(), "little")
    for multiplier in _FINAL:
        hashes ^= hashes >> np.uint64(33)
        hashes *= multiplier
    return hashes ^ (hashes >> np.uint64(33))


def bucket_bits(count: int) -> int:
    """The number of top bits of a hash that name its bucket: one or two ids a bucket."""
    return max(1, (max(count, 2) // 2 - 1).bit_length())


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers `start … start + length` of every row, one after another."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    return np.arange(total) + np.repeat(starts - (stops - lengths), lengths)

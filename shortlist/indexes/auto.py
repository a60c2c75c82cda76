"""Choosing an index from the number of vectors, their dimension, and what the user can give: memory, latency, recall.

The rules are those that `benchmarks/ann.py` bears out on real vectors:

| case | choice |
| --- | --- |
| recall 1 is asked for | exact; its 8-bit codes where the float32 vectors do not fit in memory |
| a scan of everything costs about a millisecond, or half of the latency target | exact: nothing to tune or to lose |
| otherwise | clusters of 4-bit product-quantised codes, scanned in registers, and the best scored again with float32 |
| the codes do not fit in memory | the same with fewer bits a dimension |

At recall@10 0.95 on 182,115 vectors of 256 dimensions the third served over three times the queries of the best graph
(HNSW, at any size of links and list), in a fifteenth of the memory and a fifth of the build time: a graph is never
chosen. Quantising what is left after the cluster's centre costs an inner product nothing and needs fewer finds to be
scored again; twice as many clusters, or codes of one bit (RaBitQ), were slower at equal recall.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from shortlist.errors import ConfigError
from shortlist.indexes.specs import PER_CLUSTER, clusters

# Multiplications a second of one core in a scan of many queries at once, and for a single one, which waits for memory.
_BATCH_RATE, _SINGLE_RATE = 8e9, 2e9
_SMALL = 5_000_000  # numbers that a core scans in about a millisecond
_MOST_CORES = 4  # that a scan is taken to gain from
_POSITION = 8  # bytes a vector for its position in the lists
_WIDTHS = (2, 4, 8)  # dimensions of a 4-bit code: 2, 1 and 0.5 bits a dimension


@dataclass(frozen=True)
class Choice:
    """What `choose` decided.

    Attributes:
        spec: what to build (see `specs.py`).
        reason: why, as a sentence.
        bytes: memory that searches keep busy, estimated; vectors that are read only to score finds again stay on disk.
    """

    spec: str
    reason: str
    bytes: int


def choose(
    count: int,
    dim: int,
    *,
    recall: float = 0.95,
    memory: int | None = None,
    latency: float | None = None,
    cores: int | None = None,
    k: int = 10,
) -> Choice:
    """The cheapest index that can reach `recall` for `count` vectors of `dim` dimensions.

    Args:
        count: number of vectors.
        dim: length of a vector.
        recall: share of the true `k` best that must be found, above 0 and at most 1.
        memory: bytes that searches may keep busy; None: no limit.
        latency: seconds that half of the single queries may take on one core; None: no limit.
        cores: that serve searches; None: those of this machine.
        k: results a query.

    Raises:
        ConfigError: a target out of range, or no index that fits into `memory`.
    """
    check_targets(recall=recall, memory=memory, latency=latency, k=k)
    cores = min(cores or os.cpu_count() or 1, _MOST_CORES)
    numbers = count * dim
    size = 4 * numbers
    fits = memory is None or size <= memory
    if recall == 1:
        return _lossless(count, dim, memory)
    if fits and numbers <= _SMALL * cores:
        return Choice("exact", f"scanning all {count:,} vectors takes about {_time(numbers / _BATCH_RATE)}.", size)
    if fits and latency is not None and numbers / _SINGLE_RATE <= latency / 2:
        expected = _time(numbers / _SINGLE_RATE)
        return Choice("exact", f"scanning all vectors takes about {expected} of the {_time(latency)} allowed.", size)
    if count < 2 * PER_CLUSTER:
        return _lossless(count, dim, memory)
    nlist = clusters(count)
    smallest = 0
    for width in [width for width in _WIDTHS if dim % width == 0] or [3 if dim % 3 == 0 else 1]:
        codes = dim // width
        smallest = count * (math.ceil(codes / 2) + _POSITION) + 4 * nlist * dim
        if memory is None or smallest <= memory:
            bits = 4 / width
            reason = (
                f"of {count:,} vectors a search visits a few of {nlist:,} clusters, scans codes of {bits:g} bits a "
                "dimension and scores the best again with the vectors on disk"
            )
            if width > 2 and memory is not None:
                reason += f"; wider codes would not fit into {_size(memory)}"
            return Choice(f"IVF{nlist},PQ{codes}x4fsr+rescore", reason + ".", smallest)
    raise ConfigError(
        f"no index of {count:,} vectors of {dim} dimensions fits into {_size(memory or 0)}: the smallest keeps "
        f"{_size(smallest)} busy. Give it more memory, use vectors of fewer dimensions, or split it over machines."
    )


def check_targets(*, recall: float, memory: int | None, latency: float | None, k: int) -> None:
    """Raise ConfigError for a target that is out of range."""
    if not 0 < recall <= 1:
        raise ConfigError(f"recall is {recall!r}; expected a share above 0 and at most 1, such as 0.95.")
    if memory is not None and memory < 1:
        raise ConfigError(f"memory is {memory!r}; expected a number of bytes above 0.")
    if latency is not None and not 0 < latency < math.inf:
        raise ConfigError(f"latency is {latency!r}; expected a number of seconds above 0.")
    if k < 1:
        raise ConfigError(f"k is {k!r}; expected at least 1.")


def _lossless(count: int, dim: int, memory: int | None) -> Choice:
    size = 4 * count * dim
    if memory is None or size <= memory:
        return Choice("exact", "only a scan of every vector finds all of the best for certain.", size)
    codes = count * (dim + 4)
    if codes > memory:
        raise ConfigError(
            f"recall 1 needs a scan of all {count:,} vectors: {_size(codes)} as 8-bit codes, more than the "
            f"{_size(memory)} allowed. Ask for a lower recall, or give it more memory."
        )
    reason = (
        f"8-bit codes are scanned, for the vectors ({_size(size)}) do not fit into {_size(memory)}; nothing is lost."
    )
    return Choice("exact:int8", reason, codes)


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "4GB" (decimal), "512MiB" (binary) or "1000000". Raises ConfigError for anything else."""
    match = _QUANTITY.fullmatch(text)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or not (size := int(float(match.group(1)) * factor)):
        raise ConfigError(f"memory {text!r} is not a size; expected a number and a unit, such as 4GB or 512MiB.")
    return size


def parse_time(text: str) -> float:
    """Seconds of "5ms", "800us" or "0.01s"; the unit must be there. Raises ConfigError for anything else."""
    match = _QUANTITY.fullmatch(text)
    factor = _TIMES.get(match.group(2).lower()) if match else None
    if match is None or factor is None or not (seconds := float(match.group(1)) * factor):
        raise ConfigError(f"latency {text!r} is not a time; expected a number and a unit, such as 5ms or 0.01s.")
    return seconds


def _size(number: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} bytes"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 1 else f"{seconds:.2g} s"

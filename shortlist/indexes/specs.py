"""What an index is, as one string: `exact`, a name such as `ivf-pq`, or a faiss factory string.

| spec | what it is |
| --- | --- |
| `exact` | every score, float32; nothing is lost and nothing is tuned |
| `exact:int8` `exact:bfloat16` `exact:float16` | compressed codes are scanned, then re-scored; results equal `exact` |
| `flat` | faiss's own exact search |
| `hnsw` | graph over float32 vectors: fastest at high recall, twice the memory and a slow build |
| `ivf-flat` | clusters of float32 vectors, of which a search visits a few |
| `sq8` | clusters of vectors of one byte a dimension |
| `ivf-pq` | clusters of product-quantised vectors (two bits a dimension), re-scored |
| `opq` | the same after a rotation learnt to suit the quantiser (Ge et al., 2013), re-scored |
| `rabitq` | clusters of one bit a dimension (RaBitQ: Gao and Long, 2024), re-scored |
| `IVF1024,PQ64` … | any faiss factory string; with `+rescore` at its end its finds are scored again |

"Re-scored" is a search in two stages: the codes give `fetch × k` candidates, whose scores are computed again from the
float32 vectors, which stay on disk and are mapped into memory.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from shortlist.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16", "int8")
RESCORE = "+rescore"

# Training vectors per cluster below which faiss warns that clusters are badly placed.
PER_CLUSTER = 39
_ASSUMED = 100_000  # documents, where the number is not known when a name is expanded


@dataclass(frozen=True)
class SearchSettings:
    """How thoroughly an approximate index is searched; None: a default that grows with the number of clusters.

    Args:
        nprobe: clusters that a search visits (IVF kinds).
        ef_search: length of the candidate list (HNSW kinds); at least k is always kept.
        fetch: candidates that are scored again, as a multiple of k (kinds with re-scoring); codes of one bit a
            dimension need about 10.

    Raises:
        ConfigError: a number that is not positive.
    """

    nprobe: int | None = None
    ef_search: int | None = None
    fetch: float = 4.0

    def __post_init__(self) -> None:
        for name in ("nprobe", "ef_search"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) < 2**31
            if value is not None and not whole:
                raise ConfigError(f"{name} is {value!r}; expected a whole number from 1 to 2,147,483,647, or None.")
        if isinstance(self.fetch, bool) or not isinstance(self.fetch, Real) or not 1 <= self.fetch <= 1e6:
            raise ConfigError(f"fetch is {self.fetch!r}; expected a multiple of k from 1 to 1,000,000.")

    def candidates(self, k: int) -> int:
        """How many candidates are scored again for `k` results."""
        return max(k, math.ceil(self.fetch * k))

    def record(self) -> dict[str, Any]:
        """The settings for a manifest."""
        return {"nprobe": self.nprobe, "ef_search": self.ef_search, "fetch": self.fetch}

    @classmethod
    def from_record(cls, record: Any) -> SearchSettings:
        """Settings from a manifest; unknown keys are ignored. Raises ConfigError for values out of range."""
        known = record if isinstance(record, dict) else {}
        return cls(**{name: known[name] for name in ("nprobe", "ef_search", "fetch") if name in known})


@dataclass(frozen=True)
class IndexSpec:
    """A parsed spec.

    Attributes:
        text: the spec as it was given, spelled in the standard way.
        kind: "exact" or "faiss", the name of the class that serves it.
        dtype: of the codes that an exact index scans.
        factory: faiss factory string, empty for an exact index.
        rescore: whether finds are scored again from float32 vectors.
    """

    text: str
    kind: str
    dtype: str = "float32"
    factory: str = ""
    rescore: bool = False

    def options(self) -> dict[str, Any]:
        """Constructor arguments of the index class."""
        return {"dtype": self.dtype} if self.kind == "exact" else {"factory": self.factory, "rescore": self.rescore}


def parse_spec(text: str, *, dim: int, count: int | None = None) -> IndexSpec:
    """What `text` stands for, for `count` vectors of `dim` dimensions; a name becomes a factory string.

    Raises ConfigError, naming what is valid, for a text that is none. Whether faiss can make a factory shows when the
    index is made.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"index {text!r} is not a spec; expected {_valid()}.")
    stripped = text.strip()
    rescore = stripped.endswith(RESCORE)
    body = stripped.removesuffix(RESCORE)
    name, colon, dtype = body.lower().partition(":")
    if name == "exact":
        if rescore or (colon and dtype not in DTYPES):
            kinds = ", ".join(f"exact:{kind}" for kind in DTYPES[1:])
            raise ConfigError(f"index {text!r} is unknown; expected exact, {kinds}: all of them give exact results.")
        dtype = dtype or "float32"
        return IndexSpec("exact" if dtype == "float32" else f"exact:{dtype}", "exact", dtype)
    # Names may be written in any case, but RaBitQ is also a faiss factory.
    if name in NAMED and not colon and body != "RaBitQ":
        factory, named_rescore = NAMED[name](dim, _ASSUMED if count is None else count)
        again = rescore or named_rescore
        return IndexSpec(name + (RESCORE if rescore and not named_rescore else ""), "faiss", "float32", factory, again)
    if name == "auto":
        raise ConfigError(
            "index 'auto' must be resolved to a kind before an index is made: build it with `shortlist index --index "
            "auto`, or ask shortlist.indexes.auto.choose."
        )
    if not _FACTORY.fullmatch(body):
        near = difflib.get_close_matches(name, ["exact", *NAMED], n=1)
        hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
        raise ConfigError(f"index {text!r} is unknown; {hint} {_valid()}.")
    return IndexSpec(stripped, "faiss", "float32", body, rescore)


# Factory strings are parts such as IVF1024(Flat), OPQ16_64, PQ32x4fs, HNSW32 joined by commas; faiss knows the rest.
_FACTORY = re.compile(r"[A-Z][A-Za-z0-9_()+,.\-\[\]]*")


def _valid() -> str:
    return (
        f"exact, exact:int8, exact:bfloat16, exact:float16, {', '.join(NAMED)}, or a faiss factory string such as "
        f"IVF1024,Flat (with {RESCORE} at its end to score its finds again)"
    )


def clusters(count: int) -> int:
    """Number of IVF clusters for `count` vectors: the power of two nearest to 1.2 √count, with enough vectors each.

    More of them take longer to train and to compare with than they save in a scan of fast codes.
    """
    wanted = 2 ** round(math.log2(1.2 * math.sqrt(max(count, 1))))
    return max(1, min(wanted, count // PER_CLUSTER))


def default_probes(nlist: int) -> int:
    """Clusters visited where nothing was set: 2 √nlist, at least 8.

    faiss's own default of 1 costs a quarter to a third of the recall, unnoticed.
    """
    return min(nlist, max(8, math.ceil(2 * math.sqrt(nlist))))


DEFAULT_EF_SEARCH = 64


def _ivf(count: int, codes: str) -> str:
    return f"IVF{clusters(count)},{codes}"


def _fast_scan(dim: int) -> str:
    """4-bit product quantiser of what is left after a vector's cluster, over 2 dimensions each (3 or 1 if odd)."""
    width = next(width for width in (2, 3, 1) if dim % width == 0)
    return f"PQ{dim // width}x4fsr"


def _opq(dim: int, count: int) -> str:
    width = next(width for width in (2, 3, 1) if dim % width == 0)
    return f"OPQ{dim // width},{_ivf(count, _fast_scan(dim))}"


# Name → factory string and whether finds are scored again, by dimension and number of vectors.
NAMED: dict[str, Callable[[int, int], tuple[str, bool]]] = {
    "flat": lambda dim, count: ("Flat", False),
    "hnsw": lambda dim, count: ("HNSW32,Flat", False),
    "ivf-flat": lambda dim, count: (_ivf(count, "Flat"), False),
    "sq8": lambda dim, count: (_ivf(count, "SQ8"), False),
    "ivf-pq": lambda dim, count: (_ivf(count, _fast_scan(dim)), True),
    "opq": lambda dim, count: (_opq(dim, count), True),
    "rabitq": lambda dim, count: (_ivf(count, "RaBitQfs"), True),
}

"""The index kinds by name, and opening one whatever its kind."""

from __future__ import annotations

import os
from typing import Any

from shortlist.errors import DataError
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.exact import ExactIndex
from shortlist.indexes.faiss import FaissIndex
from shortlist.indexes.specs import parse_spec
from shortlist.indexes.storage import read_manifest

INDEXES: dict[str, type[VectorIndex]] = {"exact": ExactIndex, "faiss": FaissIndex}


def new_index(
    spec: str, dim: int, *, metric: str = "ip", device: str = "auto", count: int | None = None
) -> VectorIndex:
    """An empty index of what `spec` says (see `specs.py`), for about `count` vectors.

    Raises ConfigError for an unknown spec, or one that does not go with `dim` or `metric`.
    """
    parsed = parse_spec(spec, dim=dim, count=count)
    kind: Any = INDEXES[parsed.kind]
    options = {name: value for name, value in parsed.options().items() if value}
    index: VectorIndex = kind(dim, metric=metric, device=device, **options)
    index._spec = parsed.text
    return index


def open_index(path: str | os.PathLike[str], **options: Any) -> VectorIndex:
    """Open a saved index of any kind, memory-mapped; `options` (such as `device`) go to its class.

    Raises MissingInputError or DataError, see `storage.read_manifest`.
    """
    from shortlist.indexes.sharded import ShardedIndex, is_sharded  # which opens its parts with this function

    if is_sharded(path):
        return ShardedIndex.open(path, **options)
    kind = read_manifest(path).get("kind")
    if kind not in INDEXES:
        raise DataError(f"{path} holds an index of kind {kind!r}; this shortlist knows {', '.join(INDEXES)}.")
    return INDEXES[kind].open(path, **options)

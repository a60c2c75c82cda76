"""The index kinds by name, and opening one whatever its kind."""

from __future__ import annotations

import os
from typing import Any

from shortlist.errors import ConfigError, DataError
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.exact import ExactIndex
from shortlist.indexes.faiss import FaissIndex
from shortlist.indexes.storage import read_manifest

INDEXES: dict[str, type[VectorIndex]] = {"exact": ExactIndex, "faiss": FaissIndex}


def new_index(kind: str, dim: int, **options: Any) -> VectorIndex:
    """An empty index; `options` go to its class. Raises ConfigError for an unknown kind."""
    if kind not in INDEXES:
        raise ConfigError(f"index kind {kind!r} is unknown; expected {' or '.join(INDEXES)}.")
    return INDEXES[kind](dim, **options)


def open_index(path: str | os.PathLike[str], **options: Any) -> VectorIndex:
    """Open a saved index of any kind, memory-mapped; `options` (such as `device`) go to its class.

    Raises MissingInputError or DataError, see `storage.read_manifest`.
    """
    kind = read_manifest(path).get("kind")
    if kind not in INDEXES:
        raise DataError(f"{path} holds an index of kind {kind!r}; this shortlist knows {', '.join(INDEXES)}.")
    return INDEXES[kind].open(path, **options)

"""Vector indexes under string ids: exact search with torch, faiss, and their directory. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortlist.indexes.base import VectorIndex as VectorIndex
    from shortlist.indexes.build import build_index as build_index
    from shortlist.indexes.build import model_record as model_record
    from shortlist.indexes.exact import ExactIndex as ExactIndex
    from shortlist.indexes.faiss import FaissIndex as FaissIndex
    from shortlist.indexes.kinds import INDEXES as INDEXES
    from shortlist.indexes.kinds import open_index as open_index
    from shortlist.indexes.storage import read_manifest as read_manifest
    from shortlist.indexes.storage import verify as verify

_MODULES = {
    "VectorIndex": "shortlist.indexes.base",
    "build_index": "shortlist.indexes.build",
    "model_record": "shortlist.indexes.build",
    "ExactIndex": "shortlist.indexes.exact",
    "FaissIndex": "shortlist.indexes.faiss",
    "INDEXES": "shortlist.indexes.kinds",
    "open_index": "shortlist.indexes.kinds",
    "read_manifest": "shortlist.indexes.storage",
    "verify": "shortlist.indexes.storage",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shortlist.indexes' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

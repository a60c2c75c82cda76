"""Neural retrieval and ranking: train, index, search, rerank, evaluate.

The public names below load on first use, so that `import shortlist` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shortlist._version import __version__

if TYPE_CHECKING:
    from shortlist.data import Collection as Collection
    from shortlist.data import load_collection as load_collection
    from shortlist.indexes import ExactIndex as ExactIndex
    from shortlist.indexes import FaissIndex as FaissIndex
    from shortlist.indexes import open_index as open_index
    from shortlist.metrics import evaluate as evaluate
    from shortlist.retrieval import DualEncoder as DualEncoder
    from shortlist.retrieval import LexicalRetriever as LexicalRetriever
    from shortlist.retrieval import Retriever as Retriever
    from shortlist.types import Qrels as Qrels
    from shortlist.types import Ranked as Ranked
    from shortlist.types import Run as Run

_MODULES = {
    "Collection": "shortlist.data",
    "load_collection": "shortlist.data",
    "ExactIndex": "shortlist.indexes",
    "FaissIndex": "shortlist.indexes",
    "open_index": "shortlist.indexes",
    "evaluate": "shortlist.metrics",
    "DualEncoder": "shortlist.retrieval",
    "LexicalRetriever": "shortlist.retrieval",
    "Retriever": "shortlist.retrieval",
    "Qrels": "shortlist.types",
    "Ranked": "shortlist.types",
    "Run": "shortlist.types",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shortlist' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

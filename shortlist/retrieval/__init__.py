"""Retrieval: dual encoders, the lexical first stage, encoding and search. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder as DualEncoder
    from shortlist.retrieval.encode import VectorStore as VectorStore
    from shortlist.retrieval.encode import encode_corpus as encode_corpus
    from shortlist.retrieval.lexical import LexicalRetriever as LexicalRetriever
    from shortlist.retrieval.search import Retriever as Retriever

_MODULES = {
    "DualEncoder": "shortlist.retrieval.dual_encoder",
    "VectorStore": "shortlist.retrieval.encode",
    "encode_corpus": "shortlist.retrieval.encode",
    "LexicalRetriever": "shortlist.retrieval.lexical",
    "Retriever": "shortlist.retrieval.search",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shortlist.retrieval' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

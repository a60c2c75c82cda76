"""Retrieval: dual encoders, the lexical first stage, encoding and search. Names load on first use."""

from typing import TYPE_CHECKING

from shortlist._lazy import lazy_names

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder as DualEncoder
    from shortlist.retrieval.encode import VectorStore as VectorStore
    from shortlist.retrieval.encode import encode_corpus as encode_corpus
    from shortlist.retrieval.fusion import fuse as fuse
    from shortlist.retrieval.fusion_weights import tune_weights as tune_weights
    from shortlist.retrieval.lexical import LexicalRetriever as LexicalRetriever
    from shortlist.retrieval.rollup import roll_up as roll_up
    from shortlist.retrieval.search import Retriever as Retriever

__getattr__, __all__ = lazy_names(
    "shortlist.retrieval",
    {
        "DualEncoder": "dual_encoder",
        "VectorStore": "encode",
        "encode_corpus": "encode",
        "LexicalRetriever": "lexical",
        "Retriever": "search",
        "fuse": "fusion",
        "roll_up": "rollup",
        "tune_weights": "fusion_weights",
    },
)

"""Neural retrieval and ranking: train, index, search, evaluate.

The public names below load on first use, so that `import shortlist` stays fast.
"""

from typing import TYPE_CHECKING

from shortlist._lazy import lazy_names
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
    from shortlist.retrieval import fuse as fuse
    from shortlist.retrieval import roll_up as roll_up
    from shortlist.retrieval import tune_weights as tune_weights
    from shortlist.retrieval.mining import mine_hard_negatives as mine_hard_negatives
    from shortlist.types import Qrels as Qrels
    from shortlist.types import Ranked as Ranked
    from shortlist.types import Run as Run

__getattr__, __all__ = lazy_names(
    "shortlist",
    {
        "Collection": "data",
        "load_collection": "data",
        "ExactIndex": "indexes",
        "FaissIndex": "indexes",
        "open_index": "indexes",
        "evaluate": "metrics",
        "DualEncoder": "retrieval",
        "LexicalRetriever": "retrieval",
        "Retriever": "retrieval",
        "fuse": "retrieval",
        "roll_up": "retrieval",
        "tune_weights": "retrieval",
        "mine_hard_negatives": "retrieval.mining",
        "Qrels": "types",
        "Ranked": "types",
        "Run": "types",
    },
)
__all__ = ["__version__", *__all__]


def __dir__() -> list[str]:
    return sorted(__all__)

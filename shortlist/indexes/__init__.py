"""Vector indexes under string ids: exact search with torch, faiss, and their directory. Names load on first use."""

from typing import TYPE_CHECKING

from shortlist._lazy import lazy_names

if TYPE_CHECKING:
    from shortlist.indexes.base import VectorIndex as VectorIndex
    from shortlist.indexes.build import build_index as build_index
    from shortlist.indexes.build import model_record as model_record
    from shortlist.indexes.exact import ExactIndex as ExactIndex
    from shortlist.indexes.export import export_index as export_index
    from shortlist.indexes.expressions import parse_filter as parse_filter
    from shortlist.indexes.faiss import FaissIndex as FaissIndex
    from shortlist.indexes.filters import Filter as Filter
    from shortlist.indexes.filters import field as field
    from shortlist.indexes.frequency import FrequencyPrior as FrequencyPrior
    from shortlist.indexes.kinds import INDEXES as INDEXES
    from shortlist.indexes.kinds import new_index as new_index
    from shortlist.indexes.kinds import open_index as open_index
    from shortlist.indexes.sharded import ShardedIndex as ShardedIndex
    from shortlist.indexes.storage import read_manifest as read_manifest
    from shortlist.indexes.storage import verify as verify

__getattr__, __all__ = lazy_names(
    "shortlist.indexes",
    {
        "VectorIndex": "base",
        "build_index": "build",
        "model_record": "build",
        "ExactIndex": "exact",
        "export_index": "export",
        "FaissIndex": "faiss",
        "Filter": "filters",
        "field": "filters",
        "parse_filter": "expressions",
        "FrequencyPrior": "frequency",
        "INDEXES": "kinds",
        "new_index": "kinds",
        "open_index": "kinds",
        "ShardedIndex": "sharded",
        "read_manifest": "storage",
        "verify": "storage",
    },
)

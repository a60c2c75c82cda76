"""Data sets in and out: one internal shape, readers that detect the format, writers for the standard ones.

The names load on first use: reading a run needs neither Arrow nor SciPy.
"""

from typing import TYPE_CHECKING

from shortlist._lazy import lazy_names

if TYPE_CHECKING:
    from shortlist.data.beir import read_queries as read_queries
    from shortlist.data.beir import write_beir as write_beir
    from shortlist.data.collection import Collection as Collection
    from shortlist.data.corpus import Corpus as Corpus
    from shortlist.data.documents import Document as Document
    from shortlist.data.documents import RankedList as RankedList
    from shortlist.data.lists import read_lists as read_lists
    from shortlist.data.lists import write_lists as write_lists
    from shortlist.data.load import load_collection as load_collection
    from shortlist.data.trec import read_qrels as read_qrels
    from shortlist.data.trec import read_run as read_run
    from shortlist.data.trec import write_qrels as write_qrels
    from shortlist.data.trec import write_run as write_run

__getattr__, __all__ = lazy_names(
    "shortlist.data",
    {
        "Collection": "collection",
        "Corpus": "corpus",
        "Document": "documents",
        "RankedList": "documents",
        "load_collection": "load",
        "read_lists": "lists",
        "read_qrels": "trec",
        "read_queries": "beir",
        "read_run": "trec",
        "write_beir": "beir",
        "write_lists": "lists",
        "write_qrels": "trec",
        "write_run": "trec",
    },
)

"""`shortlist mine`: hard negatives for the judged queries of a collection, in a file that training reads."""

from __future__ import annotations

import os
from pathlib import Path

from shortlist.data import load_collection
from shortlist.retrieval.mining import mine_hard_negatives
from shortlist.training.mining import MiningCounts


def mine(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    bm25: bool = False,
    split: str = "train",
    k: int = 50,
    depth: int | None = None,
    skip: int = 0,
    min_score: float | None = None,
    max_score: float | None = None,
    relative_margin: float | None = None,
    margin: float | None = None,
    index: str = "exact",
    device: str = "auto",
    dtype: str = "auto",
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> MiningCounts:
    """Mine for the queries of `split`; arguments as in `shortlist.retrieval.mining.mine_hard_negatives`.

    Args:
        data: path or name of a collection.
        output: file to write.
        split: whose judged queries are mined for.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.
    """
    collection = load_collection(data, on_empty=on_empty, on_error=on_error)
    return mine_hard_negatives(
        collection.qrels(split), collection.corpus, queries=collection.all_queries(), output=output, model=model,
        bm25=bm25, k=k, depth=depth, skip=skip, min_score=min_score, max_score=max_score,
        relative_margin=relative_margin, margin=margin, index=index, banned=collection.filters(split), device=device,
        dtype=dtype, overwrite=overwrite,
    )  # fmt: skip

"""An extreme-classification folder as a Collection: labels are the documents, points the queries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from shortlist.data import xc
from shortlist.data.collection import Collection
from shortlist.data.options import ReadOptions


def read_xc(folder: Path, options: ReadOptions) -> Collection:
    """Open an XC folder. Labels without text are kept whatever `on_empty` says: a label's number is its line."""
    parts = xc.read(folder, on_error=options.on_error)
    keep = ReadOptions("error" if options.on_empty == "error" else "keep", "fail", options.template, options.cache_dir)
    corpus = keep.open_corpus(
        [parts.label_file],
        lambda errors: parts.numbered_labels(),
        source=str(parts.label_file),
        reader_name=f"xc labels, titles_only={parts.titles_only}",
    )

    def queries(split: str | None) -> Mapping[str, str]:
        if split is not None:
            return parts.queries(split, template=options.template)
        return parts.all_queries(template=options.template)

    return Collection(
        name=parts.name,
        kind="xc",
        path=folder,
        corpus=corpus,
        queries=queries,
        qrels={split: partial(parts.qrels, split) for split in parts.splits},
        filters=parts.filters,
        files=parts.files,
        default_split=parts.info.default_split,
        measures=parts.info.measures,
        propensity=parts.propensity,
    )

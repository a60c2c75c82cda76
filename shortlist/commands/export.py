"""`shortlist export`: write an index as the files that another system's loader takes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from shortlist.errors import ConfigError
from shortlist.files import refuse_existing
from shortlist.indexes.export import GUIDE, check_target, export_index
from shortlist.indexes.kinds import open_index
from shortlist.retrieval.engine import progress_bar
from shortlist.retrieval.lexical_files import is_bm25

logger = logging.getLogger(__name__)


def export(
    *,
    index: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    store_documents: bool = True,
    name: str = "documents",
    gzip: bool = False,
    reconstruct: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Export the index directory `index` as a directory `output`; see `export_index`. Returns what was written.

    Raises ConfigError too if writing `output` would replace the index itself.
    """
    # What is wrong with the arguments is said before a large index is opened.
    check_target(to)
    source, target = Path(os.path.realpath(index)), Path(os.path.realpath(output))
    if overwrite and (target == source or target in source.parents or source in target.parents):
        raise ConfigError(f"{output} and the index {index} lie one within the other; choose another output.")
    refuse_existing(Path(output), overwrite=overwrite)
    if is_bm25(index):
        raise ConfigError(f"{index} is a BM25 index: it holds weights of terms, no vectors that another engine takes.")
    opened = open_index(index)
    with progress_bar(len(opened), "documents") as bar:
        bar.set_description("export documents")
        result = export_index(
            opened, to, output, documents=store_documents, name=name, gzip=gzip, reconstruct=reconstruct,
            overwrite=overwrite, progress=bar.update,
        )  # fmt: skip
    for note in result.notes:
        logger.info("note: %s", note)
    logger.info(
        "%s holds %s vectors for %s in %s bytes; %s says how to load them",
        output, f"{result.count:,}", to, f"{result.bytes:,}", Path(output) / GUIDE,
    )  # fmt: skip
    return {
        "output": str(output),
        "to": to,
        "count": result.count,
        "dim": result.dim,
        "documents": result.documents,
        "bytes": result.bytes,
        "notes": list(result.notes),
    }

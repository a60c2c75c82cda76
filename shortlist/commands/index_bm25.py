"""`shortlist index --index bm25`: a BM25 index on disk, memory-mapped by `search` like an index of vectors."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from shortlist.data import load_collection
from shortlist.errors import ConfigError
from shortlist.files import refuse_existing, write_json
from shortlist.manifest import run_manifest
from shortlist.retrieval.analysis import BY_LANGUAGE, Analyzer
from shortlist.retrieval.lexical import LexicalRetriever

logger = logging.getLogger(__name__)

NONE = "none"  # what stands for no language, stemmer or stop words on the command line


def index_bm25(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    language: str | None = None,
    stemmer: str | None = None,
    stopwords: str | None = None,
    store_documents: bool = True,
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Index the corpus of `data` with BM25; returns documents, terms, bytes and seconds.

    Args:
        data: path or name of a collection.
        output: index directory to write.
        language: sets stemmer and stop words (default English); "none" for neither.
        stemmer: another stemmer; "none" for none.
        stopwords: the code of another language, or a file with a word a line; "none" for none.
        store_documents: keep titles, texts and fields in the index, for showing results and for filters.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.
        overwrite: replace what is at `output`.
    """
    started = time.perf_counter()
    target = Path(output)
    refuse_existing(target, overwrite=overwrite)
    chosen = _options(language, stemmer, stopwords)
    # Refused before the corpus is read.
    settings = Analyzer(**chosen).settings()
    collection = load_collection(data, on_empty=on_empty, on_error=on_error)
    retriever = LexicalRetriever.build(collection.corpus, **chosen)
    retriever.save(target, overwrite=overwrite, documents=store_documents)
    write_json(
        target / "provenance.json",
        run_manifest(data=collection.name, corpus=collection.corpus.fingerprint, checksums=collection.checksums()),
    )
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in target.iterdir())
    stats = retriever.stats()
    shown = settings["stopwords"] if not isinstance(settings["stopwords"], list) else "a list"
    logger.info(
        "BM25 with k1 %g, b %g, stemmer %s, stop words %s", stats["k1"], stats["b"], settings["stemmer"] or NONE,
        shown or NONE,
    )  # fmt: skip
    logger.info(
        "%s holds %s documents and %s terms in %s bytes; %.1f s, %s documents a second",
        target, f"{len(retriever):,}", f"{stats['terms']:,}", f"{size:,}", seconds, f"{len(retriever) / seconds:,.0f}",
    )  # fmt: skip
    return {
        "output": str(target),
        "index": "bm25",
        "documents": len(retriever),
        "terms": stats["terms"],
        "bytes": size,
        "seconds": round(seconds, 3),
    }


def refuse_others(**given: Any) -> None:
    """Refuse options of an index of vectors, those of a cluster among them: BM25 is built in one process."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for an index of vectors; BM25 has none: leave it out.")


def _options(language: str | None, stemmer: str | None, stopwords: str | None) -> dict[str, Any]:
    """The arguments of `LexicalRetriever.build`, from those of the command line."""
    options: dict[str, Any] = {
        "language": "english" if language is None else None if language == NONE else language,
        "stemmer": BY_LANGUAGE if stemmer is None else None if stemmer == NONE else stemmer,
        "stopwords": BY_LANGUAGE if stopwords is None else None if stopwords == NONE else stopwords,
    }
    if stopwords is not None and Path(stopwords).is_file():
        options["stopwords"] = Path(stopwords).read_text(encoding="utf-8-sig").split()
    return options

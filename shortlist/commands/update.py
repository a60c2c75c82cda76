"""`shortlist update`: add documents to an index, remove some, merge another index, compact."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shortlist.commands.searchers import encoder_of
from shortlist.data import Collection, Corpus, load_collection
from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError
from shortlist.indexes import open_index
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.lifecycle import writing
from shortlist.retrieval.lexical_files import is_bm25

logger = logging.getLogger(__name__)

_LARGE_TAIL = 0.2  # share of vectors outside the base from which a compaction is advised


def update(
    *,
    index: str | os.PathLike[str],
    data: str | Path | None = None,
    replace: bool = False,
    remove: str | os.PathLike[str] | None = None,
    merge: Sequence[str | os.PathLike[str]] = (),
    compact: bool = False,
    model: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    on_empty: str = "keep",
    on_error: str = "fail",
) -> dict[str, Any]:
    """Change the index directory `index` in one step, durably: all of it, or after any error nothing.

    Removal comes first, then merging, adding and compaction. Searches that have the index open go on with what they
    opened. Vectors that are added are held in memory until the end (4 × dim bytes each).

    Args:
        index: directory made by `shortlist index`.
        data: collection whose documents are added, encoded by the model of the index.
        replace: documents that are in the index already get their new vectors and texts; else they are refused.
        remove: file of ids, one a line. Ids that are not there are counted and ignored.
        merge: directories of other indexes that the same model has made.
        compact: drop what was removed from the files, and build the index anew with what was added.
        model: dual encoder of the documents; by default the one the index was built with.
        device: of the model.
        dtype: of the model's computation.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.

    Raises:
        ConfigError: nothing to do.
        IndexMismatchError: `model` or an index to merge is not of the index's model.
        DataError: an id that is there already.
        ShortlistError: another process is writing the index.
    """
    started = time.perf_counter()
    if data is None and remove is None and not merge and not compact:
        raise ConfigError("nothing to update: pass --data, --remove, --merge or --compact.")
    if replace and data is None and not merge:
        raise ConfigError("--replace is for documents that come in; pass it with --data or --merge.")
    path = Path(index)
    if is_bm25(path):
        if data is not None or merge or compact:
            raise ConfigError(
                f"{path} is a BM25 index: its term weights depend on all documents, so that only --remove works; build "
                "it again with `shortlist index --index bm25 --overwrite`."
            )
        return _remove_bm25(path, Path(str(remove)))
    opened = open_index(path, device="cpu")
    before = len(opened)
    unwanted = _read_ids(Path(remove)) if remove is not None else []
    others = [_other(other, path) for other in merge]
    with writing(opened):
        removed = opened.remove(unwanted)
        if remove is not None:
            logger.info("removed %s of %s ids in %s", f"{removed:,}", f"{len(set(unwanted)):,}", remove)
            if unwanted and not removed:
                logger.warning("none of the ids in %s is in the index; it should hold one id a line.", remove)
        merged = sum(opened.merge(other, replace=replace) for other in others)
        added = 0
        if data is not None:
            collection = load_collection(data, on_empty=on_empty, on_error=on_error)
            added = _add(opened, path, collection, replace=replace, model=model, device=device, dtype=dtype)
        if compact:
            opened.compact()
        generation = opened.commit()
    facts = opened.stats()
    logger.info(
        "%s holds %s documents (%s before), generation %d; %.1f s",
        path, f"{len(opened):,}", f"{before:,}", generation, time.perf_counter() - started,
    )  # fmt: skip
    if facts["kind"] != "exact" and facts["tail"] > _LARGE_TAIL * max(1, len(opened)):
        logger.info(
            "%s of them were added since the index was built and are scanned one by one; `shortlist update %s "
            "--compact` builds it anew.",
            f"{facts['tail']:,}", path,
        )  # fmt: skip
    return {**facts, "added": added, "removed": removed, "merged": merged, "seconds": time.perf_counter() - started}


def _remove_bm25(path: Path, remove: Path) -> dict[str, Any]:
    from shortlist.retrieval.lexical import LexicalRetriever

    unwanted = _read_ids(remove)
    opened = LexicalRetriever.open(path)
    removed = opened.remove(unwanted)
    logger.info("removed %s of %s ids in %s", f"{removed:,}", f"{len(set(unwanted)):,}", remove)
    opened.commit()
    return {**opened.stats(), "added": 0, "removed": removed, "merged": 0}


def _add(
    index: VectorIndex, path: Path, collection: Collection, *, replace: bool, model: Any, device: str, dtype: str
) -> int:
    """Encode the documents of a collection and add them; returns how many."""
    if index.frequency_prior is not None:
        raise ConfigError(
            f"{path} holds a frequency prior, whose shares change with every document; build the index again with "
            "`shortlist index --frequency-prior`."
        )
    corpus = collection.corpus
    if not replace:
        _refuse_known(index, corpus)
    encoder = encoder_of(path, index.model, model, device, dtype)
    if index.model.get("fingerprint") not in (None, encoder.fingerprint):
        raise IndexMismatchError(
            f"{path} was built with {index.model.get('name') or 'a model'} (fingerprint {index.model['fingerprint']}), "
            f"the documents would be encoded by {encoder.source} (fingerprint {encoder.fingerprint}); use the model "
            "of the index, or build the index again."
        )
    documents = iter(corpus) if index.documents is not None or not len(index) else None
    count = 0
    pairs = zip(corpus.ids, corpus.texts(getattr(encoder, "template", None)), strict=True)
    for ids, vectors in encoder.stream_documents(pairs, total=len(corpus)):
        stored = list(islice(documents, len(ids))) if documents is not None else None
        index.add(ids, vectors, replace=replace, documents=stored)
        count += len(ids)
    return count


def _refuse_known(index: VectorIndex, corpus: Corpus) -> None:
    """Say before anything is encoded that a document is in the index already."""
    known = [id for start in range(0, len(corpus), 65_536) for id in _known(index, corpus.ids[start : start + 65_536])]
    if known:
        examples = ", ".join(map(repr, known[:3]))
        raise DataError(
            f"{len(known):,} of {len(corpus):,} documents are in the index already (for example {examples}); nothing "
            "was added: pass --replace to replace them."
        )


def _known(index: VectorIndex, ids: Iterable[str]) -> list[str]:
    wanted = list(ids)
    return [id for id, position in zip(wanted, index._ids.find(wanted).tolist(), strict=True) if position >= 0]


def _read_ids(file: Path) -> list[str]:
    """The ids of a file, one a line; blank lines do not count."""
    if not file.is_file():
        raise MissingInputError(f"there is no file {file}; --remove takes a file of ids, one a line.")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); --remove takes one id a line.") from None
    return [line for line in (line.removesuffix("\r") for line in lines) if line.strip()]


def _other(other: str | os.PathLike[str], path: Path) -> VectorIndex:
    if os.path.realpath(other) == os.path.realpath(path):
        raise ConfigError(f"--merge {other} is the index itself; merge another one.")
    return open_index(other, device="cpu")

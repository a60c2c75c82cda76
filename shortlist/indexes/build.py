"""Building an index: streamed to a directory with bounded memory, or encoded in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.errors import DataError
from shortlist.indexes.base import SLICE, VectorIndex
from shortlist.indexes.blocks import Vectors
from shortlist.indexes.checks import check_finite
from shortlist.indexes.directory import new_index_directory, refuse_output
from shortlist.indexes.frequency import FrequencyPrior, check_inner_product
from shortlist.indexes.ids import check_ids
from shortlist.indexes.kinds import new_index
from shortlist.indexes.lifecycle import make_base
from shortlist.indexes.segments import SegmentWriter

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]


def build_index(
    path: str | os.PathLike[str],
    vectors: Iterable[tuple[Sequence[str], Any]],
    *,
    dim: int,
    spec: str = "exact",
    metric: str = "ip",
    count: int | None = None,
    model: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    documents: Iterable[Any] | None = None,
    frequency_prior: FrequencyPrior | None = None,
    link: bool = False,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> int:
    """Write an index directory from a stream of `(ids, vectors)` blocks; returns the number of vectors.

    The vectors are first written as they are; then what the spec asks for is trained on an even sample of them and
    built by reading them back. Memory holds one shard (64 MB), whatever the number of vectors, and what faiss itself
    needs. Equal input gives equal bytes in every file but `provenance.json`. An index that is at `path` stays readable
    until the new one is complete.

    Args:
        path: directory to write; it is an index when it is complete.
        vectors: blocks of ids and float vectors `(docs, dim)`.
        dim: length of a vector.
        spec: what the index is, such as "exact", "hnsw" or "IVF1024,PQ64+rescore" (see `specs.py`).
        metric: "ip", or "l2" for kinds of faiss.
        count: number of vectors, if known: a wrong spec is then found before the first one is written.
        model: what made the vectors (see `model_record`); search compares its fingerprint.
        provenance: how it came to be (see `manifest.run_manifest`), written as provenance.json; not part of the index.
        documents: records with id, title, text and metadata in the order of the ids, stored for titles, snippets and
            filters.
        frequency_prior: becomes one more coordinate of every vector, after whatever normalised it; `dim` is without it.
        link: take blocks that are whole memory-mapped `.npy` files by hard link instead of writing them again. The
            files must never be changed afterwards.
        progress: called with the number of vectors of each block once it is written.
        overwrite: replace what is at `path`.

    Raises:
        OutputExistsError: `path` exists and `overwrite` is false.
        ShortlistError: another process is writing at `path`.
        ConfigError: an unknown spec, or a frequency prior in an index that does not rank by the plain inner product.
        DataError: an id is empty or comes twice, or ids and documents differ.
        NonFiniteError: a NaN or infinity, naming the document.
    """
    refuse_output(path, overwrite=overwrite)
    dim += frequency_prior is not None
    index = new_index(spec, dim, metric=metric, device="cpu", count=count)
    prior = None
    if frequency_prior is not None:
        check_inner_product(index)
        prior, vectors = frequency_prior.record(), frequency_prior.extend(vectors)
    with new_index_directory(path, overwrite=overwrite) as change:
        folder = change.new_segment()
        with SegmentWriter(folder, dim, documents=documents is not None) as writer:
            _write_stream(writer, vectors, index, documents=documents, link=link, progress=progress)
            writer.close(distinct=True)
        total = len(writer)
        if total != count:
            # The expansion of a name depends on the number of vectors.
            index = new_index(spec, dim, metric=metric, device="cpu", count=total)
        index.model = dict(model or {})
        index.frequency_prior = prior
        segment = make_base(index, folder, total)
        change.publish({**index.manifest, "count": total}, segments=[segment], provenance=provenance)
    logger.info("indexed %s vectors of %d dimensions in %s (%s)", f"{total:,}", dim, path, index.spec)
    return total


def _write_stream(
    writer: SegmentWriter,
    vectors: Iterable[tuple[Sequence[str], Any]],
    index: VectorIndex,
    *,
    documents: Iterable[Any] | None,
    link: bool,
    progress: Progress | None,
) -> None:
    """Write a stream of ids and vectors, and the documents of the same order, checking each."""
    stream = iter(documents) if documents is not None else None
    for ids, block in vectors:
        file = _whole_file(block) if link else None
        checked = check_ids(ids, len(block))
        for start in range(0, len(block), SLICE):
            part = index.check_vectors(block[start : start + SLICE])
            check_finite(part, _namer(checked, start))
            if file is None:
                writer.shards.append(part)
        if file is not None:
            writer.shards.adopt(file)
        writer.append(checked)
        if writer.documents is not None and stream is not None:
            writer.documents.append(_matching(stream, checked))
        if progress is not None:
            progress(len(checked))
    if stream is not None and (extra := next(stream, None)) is not None:
        raise DataError(f"document {extra.id!r} has no vector; ids and documents must agree.")


def model_record(encoder: Any, *, name: str | None = None) -> dict[str, Any]:
    """What an index stores about the model that made it: name, fingerprint, prompts, lengths, norm, template, dtype.

    Any encoder with a `fingerprint` will do; `settings()` is taken where there is one. The device is left out: it is
    a property of the machine, and the same vectors must give the same index.
    """
    settings = dict(encoder.settings()) if hasattr(encoder, "settings") else {}
    settings.pop("device", None)
    name = name or getattr(encoder, "source", None)
    if name is not None and Path(name).exists():
        # A path of this machine means nothing on another one.
        name = Path(name).name
    return {
        "name": name,
        "fingerprint": str(encoder.fingerprint),
        "dim": encoder.dim,
        **settings,
    }


def encode_slices(encoder: Any, corpus: Any, *, size: int = SLICE) -> Iterator[tuple[list[str], Vectors]]:
    """Ids and vectors of `corpus`, slice by slice; accepts what `VectorIndex.build` does."""
    items = _id_texts(corpus, getattr(encoder, "template", None))
    if hasattr(encoder, "stream_documents"):
        # One pass, so that truncated texts are counted and reported once.
        total = len(corpus) if hasattr(corpus, "__len__") else None
        yield from encoder.stream_documents(items, total=total)
        return
    while part := list(islice(items, size)):
        ids, texts = zip(*part, strict=True)
        yield list(ids), encoder.encode_documents(list(texts))


def _id_texts(corpus: Any, template: str | None) -> Iterator[tuple[str, str]]:
    if hasattr(corpus, "texts") and hasattr(corpus, "ids"):
        yield from zip(corpus.ids, corpus.texts(template), strict=True)
        return
    if isinstance(corpus, str):
        raise DataError(
            f"the corpus is the string {corpus[:40]!r}; pass a list of texts, or load_collection(path).corpus."
        )
    pairs = corpus.items() if isinstance(corpus, Mapping) else ((str(row), item) for row, item in enumerate(corpus))
    for id, item in pairs:
        if isinstance(item, str):
            yield str(id), item
        elif hasattr(item, "joined"):
            yield item.id, item.joined(template) if template else item.joined()
        else:
            raise DataError(f"document {id!r} is a {type(item).__name__}; expected a text or a Document.")


def _namer(ids: list[str], start: int) -> Callable[[int], str]:
    return lambda row: f"the vector of document {ids[start + row]!r}"


def _matching(stream: Iterator[Any], ids: list[str]) -> Iterator[Any]:
    """The next documents of `stream`, which must be those of `ids`."""
    for id in ids:
        document = next(stream, None)
        if document is None or document.id != id:
            found = "nothing" if document is None else repr(document.id)
            raise DataError(
                f"the vector of {id!r} meets {found} in the documents; both must be in the same order: encode the "
                "collection again, or pass the collection the vectors were made from."
            )
        yield document


def _whole_file(block: Any) -> Path | None:
    """The `.npy` file that `block` maps completely as float32 rows, None if it is anything else."""
    name = getattr(block, "filename", None)
    if not isinstance(block, np.memmap) or name is None or block.dtype != np.float32 or not block.flags.c_contiguous:
        return None
    file = Path(name)
    whole = file.suffix == ".npy" and file.stat().st_size == block.offset + block.nbytes and block.ndim == 2
    # A slice of a mapping keeps its file name: only one that starts at the end of the header is the whole.
    return file if whole and np.load(file, mmap_mode="r", allow_pickle=False).shape == block.shape else None

"""Building an index: streamed to a directory with bounded memory, or encoded in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shortlist.errors import DataError
from shortlist.files import atomic_directory, refuse_existing, write_json
from shortlist.indexes.base import SLICE, Vectors, check_finite
from shortlist.indexes.documents import DocumentWriter
from shortlist.indexes.faiss import FILE, FaissIndex, import_faiss
from shortlist.indexes.frequency import FrequencyPrior, check_inner_product
from shortlist.indexes.ids import IdWriter, check_ids
from shortlist.indexes.kinds import new_index
from shortlist.indexes.storage import PROVENANCE, ShardWriter, write_manifest

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]


class _Writer(Protocol):
    def append(self, vectors: Vectors) -> None: ...

    def close(self) -> object: ...


def build_index(
    path: str | os.PathLike[str],
    vectors: Iterable[tuple[Sequence[str], Any]],
    *,
    dim: int,
    kind: str = "exact",
    factory: str = "Flat",
    metric: str = "ip",
    model: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    documents: Iterable[Any] | None = None,
    frequency_prior: FrequencyPrior | None = None,
    link: bool = False,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> int:
    """Write an index directory from a stream of `(ids, vectors)` blocks; returns the number of vectors.

    Memory holds one shard (64 MB) and 24 bytes a document, whatever the number of vectors; kind "faiss" also holds
    what faiss itself needs. Equal input gives equal bytes in every file but `provenance.json`.

    Args:
        path: directory to write; it appears when it is complete.
        vectors: blocks of ids and float vectors `(docs, dim)`.
        dim: length of a vector.
        kind: "exact" or "faiss".
        factory: faiss factory string, for kind "faiss".
        metric: "ip", or "l2" for kind "faiss".
        model: what made the vectors (see `model_record`); search compares its fingerprint.
        provenance: how it came to be (see `manifest.run_manifest`), written as provenance.json; not part of the index.
        documents: records with id, title and text in the order of the ids, stored for titles and snippets.
        frequency_prior: becomes one more coordinate of every vector, after whatever normalised it; `dim` is without it.
        link: take blocks that are whole memory-mapped `.npy` files by hard link instead of writing them again. The
            files must never be changed afterwards.
        progress: called with the number of vectors of each block once it is written.
        overwrite: replace what is at `path`.

    Raises:
        OutputExistsError: `path` exists and `overwrite` is false.
        ConfigError: a frequency prior in an index that does not rank by the plain inner product.
        DataError: an id is empty or comes twice, or ids and documents differ.
        NonFiniteError: a NaN or infinity, naming the document.
    """
    refuse_existing(Path(path), overwrite=overwrite)
    faiss_options = {"factory": factory} if kind == "faiss" else {}
    dim += frequency_prior is not None
    index = new_index(kind, dim, metric=metric, device="cpu", **faiss_options)
    index.model = dict(model or {})
    if frequency_prior is not None:
        check_inner_product(index)
        index.frequency_prior, vectors = frequency_prior.record(), frequency_prior.extend(vectors)
    stream = iter(documents) if documents is not None else None
    with atomic_directory(path, overwrite=overwrite) as directory:
        ids_out = IdWriter(directory)
        store = DocumentWriter(directory) if stream is not None else None
        shards: _Writer = FaissFile(index, directory) if isinstance(index, FaissIndex) else ShardWriter(directory, dim)
        try:
            for ids, block in vectors:
                file = _whole_file(block) if link and isinstance(shards, ShardWriter) else None
                checked = check_ids(ids, len(block))
                for start in range(0, len(block), SLICE):
                    part = index.check_vectors(block[start : start + SLICE])
                    check_finite(part, _namer(checked, start))
                    if file is None:
                        shards.append(part)
                if file is not None and isinstance(shards, ShardWriter):
                    shards.adopt(file)
                ids_out.append(checked)
                if store is not None and stream is not None:
                    store.append(_matching(stream, checked))
                if progress is not None:
                    progress(len(checked))
            if stream is not None and (extra := next(stream, None)) is not None:
                raise DataError(f"document {extra.id!r} has no vector; ids and documents must agree.")
            shards.close()
            ids_out.close()
            if store is not None:
                store.close()
        finally:
            ids_out.abort()
            if store is not None:
                store.abort()
        count = len(ids_out)
        if provenance is not None:
            write_json(directory / PROVENANCE, provenance)
        write_manifest(directory, {**index.manifest, "count": count})
    logger.info("indexed %s vectors of %d dimensions in %s (kind %s)", f"{count:,}", dim, path, kind)
    return count


class FaissFile:
    """Adds streamed vectors to a faiss index and writes it at the end."""

    def __init__(self, index: FaissIndex, directory: Path):
        self._index = index
        self._directory = directory

    def append(self, vectors: Vectors) -> None:
        """Add `vectors` at the next positions."""
        self._index._append(vectors)

    def close(self) -> None:
        """Write `index.faiss`."""
        import_faiss().write_index(self._index._index, str(self._directory / FILE))


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

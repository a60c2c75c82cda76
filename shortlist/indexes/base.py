"""What every index kind shares: string ids, checked input, removal, saving and opening, results as (id, score).

A kind adds how vectors are kept (`_append`, `_vectors_at`), how they are scanned (`_scan`), and which files hold them
beside the vectors (`_write_base`, `_open_base`, `_open_tail`).
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, IndexMismatchError, NonFiniteError
from shortlist.files import atomic_directory, refuse_existing
from shortlist.indexes.blocks import Block, VectorBlocks, Vectors
from shortlist.indexes.documents import DocumentStore, DocumentWriter
from shortlist.indexes.frequency import FrequencyPrior, check_inner_product
from shortlist.indexes.ids import IdTable, IdWriter, check_ids
from shortlist.indexes.storage import REMOVED, ShardWriter, read_manifest, write_manifest
from shortlist.types import check_k

if TYPE_CHECKING:
    from typing_extensions import Self

SLICE = 16_384


class VectorIndex(abc.ABC):
    """A searchable set of vectors `(docs, dim)` under string ids; see `ExactIndex` and `FaissIndex`.

    `model` describes what made the vectors (fingerprint, name, prompts, lengths …); it is stored in the manifest and
    checked by `Retriever`. `documents` is the optional store of titles and texts of an opened index.
    """

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    def __init__(self, dim: int, *, metric: str = "ip"):
        whole = isinstance(dim, Real) and not isinstance(dim, bool) and 1 <= dim < 2**31 and int(dim) == dim
        if not whole:
            raise ConfigError(f"dim is {dim!r}; expected the length of a vector, a whole number of at least 1.")
        if metric not in self.metrics:
            raise ConfigError(
                f"metric {metric!r} is not one of {', '.join(self.metrics)} for {type(self).__name__}; cosine is 'ip' "
                "over normalised vectors, and FaissIndex also has 'l2'."
            )
        self.dim = int(dim)
        self.metric = metric
        self.model: dict[str, Any] = {}
        self.documents: DocumentStore | None = None
        # What the last coordinate of every vector is, if it is a frequency prior (see frequency.py).
        self.frequency_prior: dict[str, Any] | None = None
        self._ids = IdTable()

    # What a kind provides.

    # Whether `_vectors_at` gives the very vectors that were added.
    lossless: bool = True
    # Whether float32 shards are stored beside what `_write_base` writes.
    _keeps_vectors: bool = True
    # Whether stored vectors are all there is: no base file, so that saving can leave out what was removed.
    _only_vectors: ClassVar[bool] = False

    @abc.abstractmethod
    def _append(self, vectors: Vectors) -> None:
        """Keep checked `vectors` at the next positions."""

    @abc.abstractmethod
    def _scan(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        """Positions and scores `(queries, k)` in ranked order and the number of entries of each query.

        `allowed` is a mask over all positions, None for every position; k is at most the number of allowed ones.
        Unused places hold −1 and −inf.
        """

    @abc.abstractmethod
    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        """The vectors `(n, dim)` at `positions`: those that were added if `lossless`, else the nearest there is."""

    @abc.abstractmethod
    def _base_size(self) -> int:
        """Number of positions that the base holds; those from there on are the tail."""

    def _needs_training(self) -> int:
        """Number of vectors that `_train` wants; 0 if there is nothing to train."""
        return 0

    def _train(self, sample: Vectors) -> None:  # noqa: B027
        """Learn from `sample` `(n, dim)` what the kind needs before the first vector is added."""

    def _write_base(self, directory: Path) -> None:  # noqa: B027
        """Write the files of the base, those of its vectors excepted."""

    @abc.abstractmethod
    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        """Open the base of `count` vectors in `segment`; `vectors` are its float32 shards where they are stored."""

    @abc.abstractmethod
    def _open_tail(self, blocks: VectorBlocks) -> None:
        """Take `blocks`, the vectors that were added after the base was built, in place of the tail there is."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Forget all vectors; what was learnt from them may stay."""

    def _build_base(self, vectors: VectorBlocks) -> None:
        """Replace all vectors by a base of `vectors`, which may lie on disk and be larger than memory.

        Where there are too few to train on, they become the tail.
        """
        self._clear()
        if wanted := self._needs_training():
            self._train(vectors.sample(wanted))
        for start in range(0, len(vectors), SLICE):
            for part in vectors.between(start, min(start + SLICE, len(vectors))):
                self._append(part)

    def _settings(self) -> dict[str, Any]:
        """Keys of this kind for the manifest."""
        return {}

    def _restore(self, manifest: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `_settings` wrote."""

    def transforms(self) -> list[str]:
        """What is done to vectors before their inner products are taken, by the names of this kind; here nothing."""
        return []

    # Contents.

    def __len__(self) -> int:
        return self._ids.num_present

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and bool(self._ids.find([id])[0] >= 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} vectors, dim={self.dim}, metric={self.metric!r})"

    @property
    def ids(self) -> Iterator[str]:
        """The ids that are there, in the order they were added; read from disk as you go."""
        return iter(self._ids)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the index is, as stored beside it: kind, metric, dim, count, dtype, model."""
        return {
            "kind": self.kind,
            "metric": self.metric,
            "dim": self.dim,
            "count": len(self),
            "dtype": "float32",
            **self._settings(),
            **({} if self.frequency_prior is None else {"frequency_prior": self.frequency_prior}),
            "model": self.model,
        }

    def add(self, ids: Sequence[str], vectors: Any, *, replace: bool = False) -> None:
        """Add `vectors` `(docs, dim)` under `ids`: all of them, or none if anything is wrong.

        Raises:
            DataError: an id that is there already (unless `replace`), given twice, or empty.
            IndexMismatchError: vectors of another dimension.
            NonFiniteError: a NaN or infinity, naming the document.
        """
        vectors = self.check_vectors(vectors)
        checked = check_ids(ids, len(vectors))
        check_finite(vectors, lambda row: f"the vector of document {checked[row]!r}")
        found = self._ids.find(checked)
        there = found >= 0
        if there.any() and not replace:
            examples = ", ".join(repr(checked[row]) for row in np.flatnonzero(there)[:3].tolist())
            raise DataError(
                f"{int(there.sum())} of {len(checked)} ids are in the index already (for example {examples}); nothing "
                "was added: pass replace=True to replace their vectors, or remove them first."
            )
        # Vectors first: if a kind cannot take them, the ids stay as they were.
        self._append(vectors)
        self._ids.remove(found[there])
        self._ids.append(checked)

    def remove(self, ids: Iterable[str]) -> int:
        """Remove what is there of `ids`, ignore the rest; returns how many were removed."""
        wanted = list(dict.fromkeys([ids] if isinstance(ids, str) else [str(value) for value in ids]))
        found = self._ids.find(wanted)
        found = found[found >= 0]
        self._ids.remove(found)
        return len(found)

    def document(self, id: str) -> dict[str, Any] | None:
        """`{"id", "title", "text"}` of a document, None where the text was not stored with the index."""
        if self.documents is None:
            return None
        position = int(self._ids.find([id])[0])
        return self.documents.get(position) if position >= 0 else None

    # Search.

    def search(self, vectors: Any, k: int, filter: Any = None) -> list[list[tuple[str, float]]]:
        """The `k` best `(id, score)` of each query vector `(queries, dim)`, best first; ties by descending id.

        An index with fewer than `k` vectors returns what it has; an empty one returns empty lists. With a `filter`
        only documents that pass it are searched, so that `k` come wherever `k` pass.

        Args:
            vectors: query vectors.
            k: results a query.
            filter: a `Filter`, an expression such as "year >= 2010", or a collection of ids; None: everything.

        Raises:
            ConfigError: k below 1.
            IndexMismatchError: query vectors of another dimension.
            NonFiniteError: a NaN or infinity, naming the query by position.
        """
        positions, scores, counts = self.search_arrays(vectors, k, filter)
        width = positions.shape[1]
        full = bool((counts == width).all())
        keep = slice(None) if full else np.arange(width) < counts[:, None]
        pairs = list(zip(self._ids.take(positions[keep].reshape(-1)), scores[keep].reshape(-1).tolist(), strict=True))
        stops = np.cumsum(counts).tolist()
        return [pairs[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def search_arrays(
        self, vectors: Any, k: int, filter: Any = None
    ) -> tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]:
        """`search` as arrays: positions and scores `(queries, min(k, len))`, and the number of results a query.

        `ids_at(positions)` gives the ids. Only the first `counts[row]` entries of a row are results; an approximate
        index may find fewer than the width, and the rest then holds a position that no id has.
        """
        k = min(check_k(k), len(self))
        queries = self.check_vectors(vectors, queries=True)
        check_finite(queries, lambda row: f"the vector of the query at position {row}")
        allowed = self._allowed(filter)
        if allowed is not None:
            k = min(k, int(np.count_nonzero(allowed)))
        if not len(queries) or not k:
            empty = np.zeros((len(queries), 0))
            return empty.astype(np.int64), empty.astype(np.float32), np.zeros(len(queries), np.int64)
        positions, scores, counts = self._scan(queries, k, allowed)
        # −1 would silently mean "the last one" to whoever indexes with it.
        positions[positions < 0] = np.iinfo(np.int64).max
        return positions, scores, counts

    def _allowed(self, filter: Any) -> NDArray[np.bool_] | None:
        """Mask over all positions of what is there and passes `filter`; None if that is everything."""
        removed = self._ids.removed_mask(0, len(self._ids))
        if filter is None:
            return None if removed is None else ~removed
        mask: NDArray[np.bool_] = filter.mask(self)
        return mask if removed is None else mask & ~removed

    def vectors_at(self, positions: Any) -> Vectors:
        """The vectors `(n, dim)` at `positions`; an index that compresses without keeping them gives the nearest."""
        wanted = np.asarray(positions, np.int64).reshape(-1)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self._ids):
            raise ConfigError(f"positions must lie between 0 and {len(self._ids) - 1}; found {int(wanted.max())}.")
        return self._vectors_at(wanted)

    def blocks(self, *, size: int = SLICE) -> Iterator[Block]:
        """What is there, in order, `size` documents at a time: positions, ids and vectors."""
        for start in range(0, len(self._ids), size):
            positions = self._ids.present(start, min(start + size, len(self._ids)))
            if len(positions):
                yield Block(positions, self._ids.take(positions), self._vectors_at(positions))

    def ids_at(self, positions: Any) -> list[str]:
        """The ids at `positions` of `search_arrays`, flat."""
        return self._ids.take(np.asarray(positions, np.int64).reshape(-1))

    def check_vectors(self, vectors: Any, *, queries: bool = False) -> Vectors:
        """`vectors` as contiguous float32 `(n, dim)`; one vector may be given flat. Raises IndexMismatchError."""
        if hasattr(vectors, "detach"):
            vectors = vectors.detach().cpu().float().numpy()
        try:
            array = np.ascontiguousarray(vectors, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"vectors must be an array of numbers (n, {self.dim}): {error}.") from None
        if array.ndim == 1 and len(array) == self.dim:
            array = array[None]
        if array.size == 0 and array.ndim <= 2 and (array.ndim < 2 or not len(array)):
            return np.zeros((0, self.dim), np.float32)
        if array.ndim != 2:
            raise DataError(f"vectors have shape {array.shape}; expected two dimensions, (n, {self.dim}).")
        if array.shape[1] != self.dim:
            whose = "query vectors have" if queries else "vectors have"
            raise IndexMismatchError(
                f"the {whose} {array.shape[1]} dimensions, the index{self._built_by()} has {self.dim}"
                f"{' with its frequency prior as the last' if self.frequency_prior is not None else ''}; "
                "use the model that built the index, or build the index again."
            )
        return array

    def _built_by(self) -> str:
        name, fingerprint = self.model.get("name"), self.model.get("fingerprint")
        return f" (built with {name or 'a model'}, fingerprint {fingerprint})" if fingerprint else ""

    # Files.

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the index as a directory (layout in `storage.py`) under a temporary name, then put it in place.

        Raises OutputExistsError if `path` exists and `overwrite` is false.
        """
        refuse_existing(Path(path), overwrite=overwrite)
        with atomic_directory(path, overwrite=overwrite) as directory:
            compacted = self._only_vectors
            if self._keeps_vectors:
                shards = ShardWriter(directory, self.dim)
                for start in range(0, len(self._ids), SLICE):
                    stop = min(start + SLICE, len(self._ids))
                    shards.append(
                        self._vectors_at(self._ids.present(start, stop) if compacted else np.arange(start, stop))
                    )
                shards.close()
            self._write_base(directory)
            writer = IdWriter(directory)
            store = DocumentWriter(directory) if self.documents is not None else None
            for start in range(0, len(self._ids), SLICE):
                stop = min(start + SLICE, len(self._ids))
                positions = self._ids.present(start, stop) if compacted else np.arange(start, stop)
                writer.append(self._ids.take(positions))
                if store is not None and self.documents is not None:
                    for position in positions.tolist():
                        store.append_line(self.documents.line(position))
            writer.close(distinct=compacted)
            if store is not None:
                store.close()
            if not compacted and self._ids.num_removed:
                np.save(directory / REMOVED, self._ids.removed_positions())
            write_manifest(directory, self.manifest)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Open a saved index, memory-mapped; `options` (such as `device`) are those of the constructor.

        Raises MissingInputError or DataError as `storage.read_manifest`; DataError if it is of another kind.
        """
        directory = Path(path)
        manifest = read_manifest(directory)
        if manifest["kind"] != cls.kind:
            raise DataError(f"{directory} holds an index of kind {manifest['kind']!r}; open it with open_index(path).")
        index = cls(manifest["dim"], metric=manifest["metric"], **cls._open_options(manifest), **options)
        index.model = manifest.get("model", {})
        index.frequency_prior = manifest.get("frequency_prior")
        removed = directory / REMOVED
        index._ids = IdTable.open(directory, np.load(removed, allow_pickle=False) if removed.is_file() else None)
        index._restore(manifest)
        index._open_base(directory, index._open_shards(directory, manifest), len(index._ids))
        if len(index) != manifest["count"]:
            raise DataError(f"{directory} holds {len(index)} ids, expected {manifest['count']}; build the index again.")
        index.documents = DocumentStore.open(directory)
        return index

    def _open_shards(self, directory: Path, manifest: dict[str, Any]) -> VectorBlocks | None:
        if not self._keeps_vectors:
            return None
        blocks = VectorBlocks(self.dim)
        blocks.add_shards(directory / name for name in sorted(manifest["files"]) if name.startswith("vectors-"))
        if len(blocks) != len(self._ids):
            raise DataError(f"{directory} holds {len(blocks)} vectors for {len(self._ids)} ids; build the index again.")
        return blocks

    @classmethod
    def _open_options(cls, manifest: dict[str, Any]) -> dict[str, Any]:
        """Constructor arguments of this kind that the manifest holds."""
        return {}

    @classmethod
    def build(cls, encoder: Any, corpus: Any, *, frequency_prior: FrequencyPrior | None = None, **options: Any) -> Self:
        """Encode `corpus` and index it in memory; `options` are those of the constructor.

        `corpus` is a `Corpus`, a mapping of id to text, a list of texts (ids "0", "1", …) or of documents. For a
        corpus larger than memory use `shortlist index` or `build_index`, which stream to disk. A `frequency_prior`
        becomes one more coordinate; ConfigError if the index does not rank by the plain inner product.
        """
        from shortlist.indexes.build import encode_slices, model_record

        index = cls(encoder.dim + (frequency_prior is not None), **options)
        index.model = model_record(encoder)
        blocks: Iterable[tuple[Sequence[str], Any]] = encode_slices(encoder, corpus)
        if frequency_prior is not None:
            check_inner_product(index)
            index.frequency_prior, blocks = frequency_prior.record(), frequency_prior.extend(blocks)
        for ids, vectors in blocks:
            index.add(ids, vectors)
        return index


def check_finite(vectors: Vectors, name: Any) -> None:
    """Refuse NaN, infinities and values so large that a score would overflow; `name(row)` says whose it is.

    Raises NonFiniteError.
    """
    if not vectors.size:
        return
    limit = 1e18 / math.sqrt(vectors.shape[1])
    # max and min pass NaN on, so two reductions without a temporary array check everything.
    if vectors.max() <= limit and vectors.min() >= -limit:
        return
    bad = ~(np.isfinite(vectors).all(axis=1) & (np.abs(vectors) <= limit).all(axis=1))
    row = int(np.flatnonzero(bad)[0])
    value = vectors[row][~(np.abs(vectors[row]) <= limit)][0]
    raise NonFiniteError(
        f"{name(row)} holds {value} ({int(bad.sum())} such vectors); vectors must be finite and below 1e18 in length: "
        "find out where it was computed."
    )

"""What every index kind shares: string ids, checked input, removal, documents, results as (id, score), and its files.

A kind adds how vectors are kept (`_append`, `_vectors_at`), how they are scanned (`_scan`), and which files hold them
beside the vectors (`_write_base`, `_open_base`, `_open_tail`). Rules of a search are in `searching.py`, saving,
opening and committing in `lifecycle.py`.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, IndexMismatchError
from shortlist.indexes import lifecycle
from shortlist.indexes.blocks import Block, VectorBlocks, Vectors
from shortlist.indexes.checks import as_vectors, check_documents, check_finite
from shortlist.indexes.documents import DocumentStore
from shortlist.indexes.frequency import FrequencyPrior, check_inner_product
from shortlist.indexes.ids import IdTable, check_ids
from shortlist.indexes.searching import allowed_positions, search_index
from shortlist.indexes.specs import RESCORE, SearchSettings
from shortlist.types import check_k

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from shortlist.indexes.fields import FieldStore

SLICE = 16_384


class VectorIndex(abc.ABC):
    """A searchable set of vectors `(docs, dim)` under string ids; see `ExactIndex` and `FaissIndex`.

    A document has a position, its number in order of adding, which stays until the index is compacted.

    Attributes:
        model: what made the vectors (fingerprint, name, prompts, lengths …); stored in the manifest, checked by
            `Retriever`.
        documents: titles, texts and fields by position; None where none are stored.
        frequency_prior: what the last coordinate of every vector is, if it is a frequency prior (see `frequency.py`).
        tuning: what was measured when the search settings were chosen; stored in the manifest.
    """

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    # Whether `_vectors_at` gives the very vectors that were added, whose products are the scores.
    lossless: bool = True
    # Whether float32 shards are stored beside what `_write_base` writes.
    _keeps_vectors: bool = True
    # Whether stored vectors are all there is: no base file, so that saving can leave out what was removed.
    _only_vectors: ClassVar[bool] = False

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
        self.frequency_prior: dict[str, Any] | None = None
        self.tuning: dict[str, Any] = {}
        self._ids = IdTable()
        self._search_settings = SearchSettings()
        self._spec: str | None = None  # as it was given, where it was
        self._home: lifecycle.Home | None = None

    # What a kind provides.

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
        """Forget all vectors; what was learnt from them may stay.

        Attributes are set to new objects and none is changed in place: a copy of the index keeps the old ones.
        """

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

    @classmethod
    def _open_options(cls, manifest: dict[str, Any]) -> dict[str, Any]:
        """Constructor arguments of this kind that the manifest holds."""
        return {}

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
    def fields(self) -> FieldStore | None:
        """The fields of the documents as columns, for filters; None where no documents are stored."""
        return self.documents.fields if self.documents is not None else None

    @property
    def settings(self) -> SearchSettings:
        """How thoroughly the index is searched; set it to change that from the next search on."""
        return self._search_settings

    @settings.setter
    def settings(self, value: SearchSettings) -> None:
        if not isinstance(value, SearchSettings):
            raise ConfigError(
                f"settings are {value!r}; expected SearchSettings, as in replace(index.settings, nprobe=32)."
            )
        self._search_settings = value

    @property
    def spec(self) -> str:
        """What the index is, as one string (see `specs.py`)."""
        if self._spec is not None:
            return self._spec
        settings = self._settings()
        if "factory" in settings:
            return f"{settings['factory']}{RESCORE if settings.get('rescore') else ''}"
        dtype = settings.get("dtype", "float32")
        return self.kind if dtype == "float32" else f"{self.kind}:{dtype}"

    @property
    def manifest(self) -> dict[str, Any]:
        """What the index is, as stored beside it: spec, kind, metric, dim, count, dtype, settings, model."""
        normalised = self.model.get("normalise")
        return {
            "spec": self.spec,
            "kind": self.kind,
            "metric": self.metric,
            "dim": self.dim,
            "count": len(self),
            "dtype": "float32",
            **({"normalised": normalised} if isinstance(normalised, bool) else {}),
            **self._settings(),
            **({} if self.frequency_prior is None else {"frequency_prior": self.frequency_prior}),
            "search": self.settings.record(),
            **({"tuning": self.tuning} if self.tuning else {}),
            "model": self.model,
        }

    def stats(self) -> dict[str, Any]:
        """Size and state: spec, count, removed, segments, generation, bytes on disk (None in memory), tail and more."""
        stored = self._home.manifest if self._home is not None else None
        size = sum(entry["bytes"] for entry in stored["files"].values()) if stored is not None else None
        return {
            "spec": self.spec,
            "kind": self.kind,
            "metric": self.metric,
            "dim": self.dim,
            "count": len(self),
            "removed": self._ids.num_removed,
            "segments": len(stored["segments"]) if stored is not None else 0,
            "generation": stored["generation"] if stored is not None else 0,
            "dtype": self.manifest["dtype"],
            "bytes": size,
            "bytes_per_vector": round(size / len(self), 1) if size is not None and len(self) else None,
            "tail": len(self._ids) - self._base_size(),
            "settings": self.settings.record(),
            "model": self.model.get("name"),
        }

    def add(
        self, ids: Sequence[str], vectors: Any, *, replace: bool = False, documents: Iterable[Any] | None = None
    ) -> None:
        """Add `vectors` `(docs, dim)` under `ids`: all of them, or none if anything is wrong.

        `documents` are records or mappings with id, title, text and metadata, one for each id, in the same order.

        Raises:
            DataError: an id that is there already (unless `replace`), given twice, or empty; documents of other ids.
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
        records = None
        if documents is not None:
            records = check_documents(documents, checked)
            # One that cannot be stored is found before anything changes.
            DocumentStore().append(records)
        self._insert(checked, vectors, records, found)

    def _insert(self, ids: list[str], vectors: Vectors, records: list[Any] | None, found: NDArray[np.int64]) -> None:
        """Add what was checked, in place of what is `found` at its ids; None among `records`: a document not stored."""
        # Vectors first: if a kind cannot take them, the rest stays as it was.
        self._append(vectors)
        if records is not None and self.documents is None:
            self.documents = DocumentStore()
            self.documents.skip(len(self._ids))
        if self.documents is not None:
            lifecycle.hold_documents(self.documents, records if records is not None else [None] * len(ids))
        self._ids.remove(found[found >= 0])
        self._ids.append(ids)

    def remove(self, ids: Iterable[str]) -> int:
        """Remove what is there of `ids`, ignore the rest; returns how many were removed."""
        wanted = list(dict.fromkeys([ids] if isinstance(ids, str) else [str(value) for value in ids]))
        found = self._ids.find(wanted)
        found = found[found >= 0]
        self._ids.remove(found)
        return len(found)

    def merge(self, other: VectorIndex, *, replace: bool = False) -> int:
        """Add everything that is in `other`, documents too; returns how many vectors came in. All of it or nothing.

        Raises:
            IndexMismatchError: another dimension, metric, model or frequency prior.
            DataError: an id that is in both (unless `replace`), or an index that compresses without its vectors.
        """
        return lifecycle.merge(self, other, replace=replace)

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
        only documents that pass it are searched: `k` come wherever `k` pass.

        Args:
            vectors: query vectors.
            k: results a query.
            filter: a `Filter`, an expression such as "year >= 2010", or a collection of ids; None: everything.

        Raises:
            ConfigError: k below 1, or a filter that does not fit the fields.
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
        """`search` as arrays: positions and scores `(queries, width)`, and the number of results of each query.

        `width` is `k`, or less where fewer documents are there or pass the filter. `ids_at(positions)` gives the ids.
        """
        k = min(check_k(k), len(self))
        queries = self.check_vectors(vectors, queries=True)
        check_finite(queries, lambda row: f"the vector of the query at position {row}")
        allowed = allowed_positions(self, filter)
        if allowed is not None and filter is not None:
            k = min(k, int(np.count_nonzero(allowed)))
        if not len(queries) or not k:
            empty = np.zeros((len(queries), 0))
            return empty.astype(np.int64), empty.astype(np.float32), np.zeros(len(queries), np.int64)
        positions, scores, counts = search_index(self, queries, k, allowed)
        # −1 would silently mean "the last one" to whoever indexes with it.
        positions[positions < 0] = np.iinfo(np.int64).max
        return positions, scores, counts

    def ids_at(self, positions: Any) -> list[str]:
        """The ids at `positions` of `search_arrays`, flat."""
        return self._ids.take(np.asarray(positions, np.int64).reshape(-1))

    def vectors_at(self, positions: Any) -> Vectors:
        """The vectors `(n, dim)` at `positions`; an index that compresses without keeping them gives the nearest."""
        wanted = np.asarray(positions, np.int64).reshape(-1)
        outside = wanted[(wanted < 0) | (wanted >= len(self._ids))]
        if len(outside):
            raise ConfigError(f"there is no position {outside[0]}; the positions are 0 to {len(self._ids) - 1}.")
        return self._vectors_at(wanted)

    def blocks(self, *, size: int = SLICE) -> Iterator[Block]:
        """What is there, in order, from at most `size` positions at a time: positions, ids and vectors."""
        for start in range(0, len(self._ids), size):
            positions = self._ids.present(start, min(start + size, len(self._ids)))
            if len(positions):
                yield Block(positions, self._ids.take(positions), self._vectors_at(positions))

    def check_vectors(self, vectors: Any, *, queries: bool = False) -> Vectors:
        """`vectors` as contiguous float32 `(n, dim)`; one vector may be given flat. Raises IndexMismatchError."""
        array = as_vectors(vectors, self.dim)
        if array.shape[1] != self.dim:
            whose = "query vectors have" if queries else "vectors have"
            name, fingerprint = self.model.get("name"), self.model.get("fingerprint")
            model = f" (built with {name or 'a model'}, fingerprint {fingerprint})" if fingerprint else ""
            raise IndexMismatchError(
                f"the {whose} {array.shape[1]} dimensions, the index{model} has {self.dim}"
                f"{' with its frequency prior as the last' if self.frequency_prior is not None else ''}; "
                "use the model that built the index, or build the index again."
            )
        # torch warns of arrays that cannot be written, such as mapped files.
        return array.copy() if queries and not array.flags.writeable else array

    # Files.

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the whole index to the directory `path` (layout in `storage.py`), which is complete or as it was.

        An index that was opened from `path` goes on from what it wrote.

        Raises:
            OutputExistsError: `path` exists and `overwrite` is false.
            ShortlistError: another process is writing there.
        """
        lifecycle.save(self, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Open a saved index, memory-mapped; `options` (such as `device`) are those of the constructor.

        Raises MissingInputError or DataError as `storage.read_manifest`; DataError if it is of another kind.
        """
        return lifecycle.open_as(cls, path, **options)

    def commit(self) -> int:
        """Write what changed since the index was opened or last committed to its directory; returns the generation.

        What was added is appended as a segment, what was removed is marked; nothing else is written. When this
        returns it is on disk; a crash before leaves the index as it was.

        Raises:
            ConfigError: the index was not opened from a directory.
            ShortlistError: another process is writing, or has committed since this index was opened.
        """
        return lifecycle.commit(self)

    def compact(self) -> None:
        """Drop what was removed, and build the base anew with what was added since; positions are numbered anew.

        An index with a directory is written there as one segment, which `commit` makes the index; until then no
        other process can write.
        """
        lifecycle.compact(self)

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

"""Saving, opening, committing, compacting and merging, for every kind of index."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError, ShortlistError
from shortlist.indexes.blocks import VectorBlocks
from shortlist.indexes.checks import as_record
from shortlist.indexes.directory import Change, new_index_directory
from shortlist.indexes.documents import DocumentStore
from shortlist.indexes.ids import IdTable
from shortlist.indexes.segments import SHARDS, open_vectors, shards_of, write_span
from shortlist.indexes.specs import SearchSettings
from shortlist.indexes.storage import parse_manifest, read_manifest, read_removed

if TYPE_CHECKING:
    from shortlist.indexes.base import VectorIndex

AnyIndex = TypeVar("AnyIndex", bound="VectorIndex")

_SLICE = 16_384
_MOST_SEGMENTS = 16  # appended ones, before the tail is written as one
_RETRIES = 100


@dataclass
class Home:
    """The directory that an index was opened from.

    Attributes:
        path: where it is.
        manifest: as it was when the index was opened or last committed.
        change: a compaction that was not committed, and holds the lock.
        compacted: the segment that it wrote.
    """

    path: Path
    manifest: dict[str, Any]
    change: Change | None = None
    compacted: dict[str, Any] | None = None


def save(index: VectorIndex, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """See `VectorIndex.save`."""
    home = index._home
    own = home is not None and os.path.realpath(home.path) == os.path.realpath(path)
    if own and overwrite and home is not None and home.change is not None:
        commit(index)
    with new_index_directory(path, overwrite=overwrite) as change:
        total, alive = len(index._ids), index._ids.alive()
        if index._only_vectors:
            segments = [_write(index, change, 0, total, present_only=True, base=True)]
            removed = None
        else:
            base = index._base_size()
            segments = [_write(index, change, 0, base, base=True)] if base else []
            if base < total or not base:
                segments.append(_write(index, change, base, total))
            removed = None if alive is None else ~alive
        manifest = change.publish(index.manifest, segments=segments, removed=removed)
    if home is not None and own:
        _fill(index, home.path, manifest)
        index._home = Home(home.path, manifest)


def _write(
    index: VectorIndex, change: Change, start: int, stop: int, *, base: bool = False, present_only: bool = False
) -> dict[str, Any]:
    """Write a new segment of the positions from `start` to `stop`; returns its entry in the manifest."""
    folder = change.new_segment()
    ids = index._ids

    def slices() -> Iterator[NDArray[np.int64]]:
        for first in range(start, stop, _SLICE):
            last = min(first + _SLICE, stop)
            yield ids.present(first, last) if present_only else np.arange(first, last)

    count = write_span(
        folder,
        dim=index.dim,
        positions=slices(),
        take_ids=ids.take,
        take_vectors=index._vectors_at if index._keeps_vectors or not base else None,
        take_line=index.documents.line if index.documents is not None else None,
        distinct=present_only,
    )
    if base:
        index._write_base(folder)
    return {"name": folder.name, "count": count, "base": base}


def open_as(kind: type[AnyIndex], path: str | os.PathLike[str], **options: Any) -> AnyIndex:
    """See `VectorIndex.open`. A commit of another process while the files are being mapped starts it anew."""
    directory = Path(path)
    for _ in range(_RETRIES):
        manifest = read_manifest(directory)
        if manifest["kind"] != kind.kind:
            raise DataError(f"{directory} holds an index of kind {manifest['kind']!r}; open it with open_index(path).")
        try:
            index = kind(manifest["dim"], metric=manifest["metric"], **kind._open_options(manifest), **options)
            index.model = manifest.get("model", {})
            index.frequency_prior = manifest.get("frequency_prior")
            index.tuning = manifest.get("tuning", {})
            index.settings = SearchSettings.from_record(manifest.get("search"))
            index._spec = manifest.get("spec")
            index._restore(manifest)
            _fill(index, directory, manifest)
            # What was not there when it was looked for may have been taken for absent.
            if all((directory / name).is_file() for name in manifest["files"]):
                index._home = Home(directory, manifest)
                return index
        except (MissingInputError, DataError, OSError):
            if parse_manifest(directory) == manifest:
                raise
    raise ShortlistError(f"{directory} is being written so often that it could not be opened; try again.")


def _fill(index: VectorIndex, directory: Path, manifest: dict[str, Any]) -> None:
    """Map the files of an index that `manifest` names, in place of its contents."""
    segments = manifest["segments"]
    _open_contents(index, directory, segments, read_removed(directory, manifest))
    if segments and segments[0].get("base"):
        base = segments[0]
        stored = any(name.startswith(f"{base['name']}/{SHARDS}") for name in manifest["files"])
        vectors = None
        if index._keeps_vectors or stored:
            vectors = open_vectors(directory, [base], manifest["files"], index.dim)
        index._open_base(directory / base["name"], vectors, base["count"])
        segments = segments[1:]
    index._open_tail(open_vectors(directory, segments, manifest["files"], index.dim))
    if len(index) != manifest["count"]:
        raise DataError(f"{directory} holds {len(index)} ids, expected {manifest['count']}; build the index again.")


def _open_contents(
    index: VectorIndex, directory: Path, segments: list[dict[str, Any]], removed: NDArray[np.bool_] | None
) -> None:
    """Map the ids and documents of `segments`."""
    folders = [directory / segment["name"] for segment in segments]
    index._ids = IdTable.open(folders, removed)
    index.documents = DocumentStore.open(folders)


def commit(index: VectorIndex) -> int:
    """See `VectorIndex.commit`."""
    home = index._home
    if home is None:
        raise ConfigError(
            "this index has no directory to commit to; save(path) writes it, and open_index(path) opens what can be "
            "committed."
        )
    change = home.change or _begin(home)
    try:
        segments = [home.compacted] if home.compacted is not None else change.segments
        stored, total = sum(segment["count"] for segment in segments), len(index._ids)
        if stored < total:
            tail = [segment for segment in segments if not segment["base"]]
            if len(tail) >= _MOST_SEGMENTS:
                segments = segments[: len(segments) - len(tail)]
                stored = sum(segment["count"] for segment in segments)
            segments = [*segments, _write(index, change, stored, total)]
        record = json.loads(json.dumps(index.manifest))
        if segments == change.segments and _unchanged(index, home.manifest, record):
            change.close()
            return int(home.manifest["generation"])
        alive = index._ids.alive()
        manifest = change.publish(record, segments=segments, removed=None if alive is None else ~alive)
    except BaseException:
        # A compaction keeps its lock and its files, for the index stands on them: commit may be tried again.
        if change is not home.change:
            change.close()
        raise
    change.close()
    home.manifest, home.change, home.compacted = manifest, None, None
    # From here on what was added is read from its file, and not held in memory any more.
    _open_contents(index, home.path, segments, read_removed(home.path, manifest))
    appended = [segment for segment in segments if not segment["base"]]
    index._open_tail(open_vectors(home.path, appended, manifest["files"], index.dim))
    return int(manifest["generation"])


@contextmanager
def writing(index: VectorIndex) -> Iterator[None]:
    """Hold the lock of the index's directory, so that work of hours is not refused when it is committed.

    Raises as `commit`.
    """
    home = index._home
    if home is None:
        raise ConfigError("this index has no directory to write to; open_index(path) opens one that has.")
    home.change = home.change or _begin(home)
    try:
        yield
    finally:
        if home.change is not None:
            home.change.close()
            home.change = None
            if home.compacted is not None:
                # A compaction that was given up: the index stands on files that are no more.
                index._home = None


def _unchanged(index: VectorIndex, stored: dict[str, Any], record: dict[str, Any]) -> bool:
    return index._ids.num_removed == stored["removed"] and all(stored.get(key) == record[key] for key in record)


def _begin(home: Home) -> Change:
    """A change of the directory of an index, once it is clear that it is still the one that was opened."""
    change = Change(home.path)
    if change.manifest != home.manifest:
        change.close()
        found = "no index" if change.manifest is None else f"generation {change.manifest['generation']}"
        raise ShortlistError(
            f"{home.path} was changed since this index was opened: generation {home.manifest['generation']} was read, "
            f"{found} is there now; nothing was written: open it again and repeat the changes."
        )
    return change


def compact(index: VectorIndex) -> None:
    """See `VectorIndex.compact`."""
    home = index._home
    # The index stays as it is until all is done.
    fresh = copy.copy(index)
    if home is None:
        vectors = VectorBlocks(index.dim)
        fresh._ids = IdTable()
        fresh.documents = DocumentStore() if index.documents is not None else None
        for block in index.blocks():
            vectors.append(block.vectors)
            fresh._ids.append(block.ids)
            if fresh.documents is not None:
                hold_documents(fresh.documents, documents_at(index, block.positions))
        fresh._build_base(vectors)
        index.__dict__.update(fresh.__dict__)
        return
    change = home.change or _begin(home)
    try:
        written = _write(index, change, 0, len(index._ids), present_only=True)
        folder = change.path / written["name"]
        segment = make_base(fresh, folder, written["count"])
        _open_contents(fresh, change.path, [segment], None)
        vectors = shards_of(folder, index.dim)
        if segment["base"]:
            fresh._open_base(folder, vectors if index._keeps_vectors else None, segment["count"])
            vectors = VectorBlocks(index.dim)
        fresh._open_tail(vectors)
    except BaseException:
        if change is not home.change:
            change.close()
        raise
    index.__dict__.update(fresh.__dict__)
    home.change, home.compacted = change, segment


def make_base(index: VectorIndex, folder: Path, count: int) -> dict[str, Any]:
    """Make what `index` needs of the `count` vectors in `folder`, and drop those it does not keep.

    Returns the entry of the segment in the manifest: no base where there are too few vectors to train on.
    """
    index._build_base(shards_of(folder, index.dim))
    base = index._only_vectors or (count > 0 and index._base_size() == count)
    if base:
        index._write_base(folder)
        if not index._keeps_vectors:
            for file in folder.glob(f"{SHARDS}*"):
                file.unlink()
    return {"name": folder.name, "count": count, "base": base}


def merge(index: VectorIndex, other: VectorIndex, *, replace: bool) -> int:
    """See `VectorIndex.merge`."""
    if other is index:
        raise ConfigError("an index cannot be merged with itself; merge two opened from two directories.")
    if not len(index._ids) and not index.model and index.frequency_prior is None:
        adopted = (other.model, other.frequency_prior)
    else:
        adopted = (index.model, index.frequency_prior)
    for name, ours, theirs in (
        ("dimension", index.dim, other.dim),
        ("metric", index.metric, other.metric),
        ("model fingerprint", adopted[0].get("fingerprint"), other.model.get("fingerprint")),
        ("frequency prior", adopted[1], other.frequency_prior),
    ):
        if ours != theirs:
            raise IndexMismatchError(
                f"the indexes differ in their {name}: {ours!r} here, {theirs!r} in the other; merge only what one "
                "model has made, or build one index of both collections."
            )
    if not (other.lossless or other._keeps_vectors):
        raise DataError(
            f"the other index ({other.spec}) holds compressed codes without the vectors; build the merged index from "
            "the vectors, or build with +rescore, which keeps them."
        )
    if not replace:
        for start in range(0, len(other._ids), _SLICE):
            ids = other._ids.take(other._ids.present(start, min(start + _SLICE, len(other._ids))))
            both = [id for id, position in zip(ids, index._ids.find(ids).tolist(), strict=True) if position >= 0]
            if both:
                raise DataError(
                    f"id {both[0]!r} is in both indexes; nothing was merged: replace (--replace, in Python "
                    "replace=True) to take the other's vectors, or remove it from one of them."
                )
    index.model, index.frequency_prior = adopted
    count = len(other)
    for block in other.blocks():
        documents = documents_at(other, block.positions) if other.documents is not None else None
        index._insert(block.ids, block.vectors, documents, index._ids.find(block.ids))
    return count


def documents_at(index: VectorIndex, positions: NDArray[np.int64]) -> list[Any]:
    """The stored documents at `positions` as records, None where there is none."""
    store = index.documents
    found = [store.get(position) if store is not None else None for position in positions.tolist()]
    return [None if document is None else as_record(document) for document in found]


def hold_documents(store: DocumentStore, documents: list[Any]) -> None:
    """Append `documents` to `store`; None leaves a position without one."""
    if None not in documents:
        store.append(documents)
        return
    for document in documents:
        if document is None:
            store.skip(1)
        else:
            store.append([document])

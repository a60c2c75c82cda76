"""An index in parts: several index directories under one, opened as one and searched part by part.

```
manifest.json          format "shortlist-sharded-index": what the parts share, their names, positions and the checksums
                       of their manifests; what was removed since; written last
part-00000/ …          an index directory each, never changed afterwards
removed-00002.npy      bits of the positions that were removed since the parts were built, by generation
```

The positions of a part follow those of the one before it. Every part gives its best `k`, and the best `k` of those are
the best of all, so the results of exact parts are those of one exact index. Parts are built and searched on one
machine or on many (`shortlist index|search --engine ray`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError, ShortlistError
from shortlist.files import fsync_directory, sha256, write_json
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.directory import lock_directory
from shortlist.indexes.documents import DocumentStore
from shortlist.indexes.ids import IdTable
from shortlist.indexes.specs import SearchSettings
from shortlist.indexes.storage import MANIFEST, removed_name, verify
from shortlist.indexes.topk import TakeIds, sort_rows

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT, FORMAT_VERSION = "shortlist-sharded-index", 1
Mask = NDArray[np.bool_]
Found = tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]

_SLICE = 65_536
_RETRIES = 100
_SHARED_KEYS = ("spec", "metric", "dim", "frequency_prior")


def part_name(number: int) -> str:
    """Directory of a part."""
    return f"part-{number:05d}"


class ShardedIndex(VectorIndex):
    """An index whose parts are index directories of their own; opened with `open_index`.

    Searching, filtering, removing, reading and `commit` work as on any index. What it does not take is new documents:
    index those by themselves and search both, or merge everything into one index (`new_index(…).merge(sharded)`).

    Args:
        parts: the opened parts, which share dimension, metric and model.
    """

    kind = "sharded"
    metrics = ("ip", "l2")
    # The parts have their own rules for filters that leave few documents.
    _only_vectors = True

    def __init__(self, parts: Sequence[VectorIndex]):
        if not parts:
            raise ConfigError("a sharded index needs at least one part.")
        super().__init__(parts[0].dim, metric=parts[0].metric)
        self.parts = list(parts)
        sizes = [len(part._ids) for part in parts]
        self.starts: list[int] = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
        self.model = parts[0].model
        self.frequency_prior = parts[0].frequency_prior
        self.lossless = all(part.lossless for part in parts)
        self._keeps_vectors = all(part._keeps_vectors for part in parts)
        self._path: Path | None = None
        self._stored: dict[str, Any] = {}
        folders = [folder for part in parts for folder in _segments(part)]
        alive = [part._ids.alive() for part in parts]
        removed = None
        if any(mask is not None for mask in alive):
            pairs = zip(alive, sizes, strict=True)
            removed = np.concatenate([np.zeros(size, bool) if mask is None else ~mask for mask, size in pairs])
        self._ids = IdTable.open(folders, removed)
        self.documents = DocumentStore.open(folders)

    @property
    def spec(self) -> str:
        """What each part is."""
        return self.parts[0].spec

    def transforms(self) -> list[str]:
        """What each part does to vectors."""
        return self.parts[0].transforms()

    @property
    def settings(self) -> SearchSettings:
        """How thoroughly each part is searched; set it to change that from the next search on."""
        return self.parts[0].settings

    @settings.setter
    def settings(self, value: SearchSettings) -> None:
        for part in self.parts:
            part.settings = value

    def stats(self) -> dict[str, Any]:
        """As of any index, summed over the parts, and how many there are."""
        each = [part.stats() for part in self.parts]
        size = sum(stats["bytes"] or 0 for stats in each) or None
        return {
            **super().stats(),
            "parts": len(self.parts),
            "segments": sum(stats["segments"] for stats in each),
            "generation": self._stored.get("generation", 0),
            "dtype": each[0]["dtype"],
            "bytes": size,
            "bytes_per_vector": round(size / len(self), 1) if size and len(self) else None,
            "tail": sum(stats["tail"] for stats in each),
        }

    def _settings(self) -> dict[str, Any]:
        # What the parts say of themselves: dtype, factory.
        return self.parts[0]._settings()

    # Search.

    def _scan(self, queries: Vectors, k: int, allowed: Mask | None) -> Found:
        found = []
        for part, start in zip(self.parts, self.starts, strict=True):
            mask = None if allowed is None else allowed[start : start + len(part._ids)]
            found.append(scan_part(part, queries, k, mask, start))
        return merge_found(found, k, self._ids.take)

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        out = np.empty((len(positions), self.dim), np.float32)
        owner = np.searchsorted(self.starts, positions, side="right") - 1
        for number in np.unique(owner).tolist():
            rows = np.flatnonzero(owner == number)
            out[rows] = self.parts[number]._vectors_at(positions[rows] - self.starts[number])
        return out

    def _base_size(self) -> int:
        return len(self._ids)

    # Files.

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Open a directory of parts, memory-mapped; `options` (such as `device`) go to the parts.

        Raises:
            MissingInputError: nothing there, or a part is gone.
            DataError: not such a directory, or a part that is not the one that was built.
        """
        from shortlist.indexes.kinds import open_index

        directory = Path(path)
        for _ in range(_RETRIES):
            manifest = read_sharded_manifest(directory)
            try:
                removed = _read_removed(directory, manifest)
                break
            except OSError:
                # A commit in between has replaced both.
                if read_sharded_manifest(directory) == manifest:
                    raise
        else:
            raise ShortlistError(f"{directory} is being written so often that it could not be opened; try again.")
        parts = []
        for entry in manifest["parts"]:
            part = open_index(directory / entry["name"], **options)
            if len(part._ids) != entry["positions"]:
                raise DataError(
                    f"{directory / entry['name']} has {len(part._ids)} positions, expected {entry['positions']}; build "
                    "the index again."
                )
            parts.append(part)
        index = cls(parts)
        index._path, index._stored = directory, manifest
        index.model = manifest.get("model", {})
        index.frequency_prior = manifest.get("frequency_prior")
        index.tuning = manifest.get("tuning", {})
        if "search" in manifest:
            index.settings = SearchSettings.from_record(manifest["search"])
        if removed is not None:
            alive = index._ids.alive()
            index._ids.remove(np.flatnonzero(removed if alive is None else removed & alive))
        if len(index) != manifest["count"]:
            raise DataError(f"{directory} holds {len(index)} documents, expected {manifest['count']}; build it again.")
        return index

    def commit(self) -> int:
        """Write what was removed, and the search settings, to the directory; returns the generation.

        Raises:
            ConfigError: the index was not opened from a directory.
            ShortlistError: another process is writing, or has committed since this index was opened.
        """
        if self._path is None:
            raise ConfigError("this sharded index has no directory to commit to; open one with open_index(path).")
        record = {
            "count": len(self), "search": self.settings.record(), **({"tuning": self.tuning} if self.tuning else {}),
        }  # fmt: skip
        if all(self._stored.get(key) == value for key, value in record.items()):
            return int(self._stored["generation"])
        handle = lock_directory(self._path)
        try:
            found = read_sharded_manifest(self._path)
            if found != self._stored:
                raise ShortlistError(
                    f"{self._path} was changed since this index was opened: generation {self._stored['generation']} "
                    f"was read, generation {found['generation']} is there now; nothing was written: open it again and "
                    "repeat the changes."
                )
            self._stored = _write_manifest(self._path, {**found, **record}, self._ids.alive())
        finally:
            os.close(handle)
        return int(self._stored["generation"])

    def verify(self) -> None:
        """Compare the checksum of every file of every part. Raises DataError or MissingInputError."""
        if self._path is None:
            raise ConfigError("this sharded index has no directory; open one with open_index(path).")
        verify_sharded(self._path)

    # What only makes sense for a part.

    def add(
        self, ids: Sequence[str], vectors: Any, *, replace: bool = False, documents: Iterable[Any] | None = None
    ) -> None:
        """Refused: a sharded index takes no new documents."""
        self._refuse("takes no new documents")

    def merge(self, other: VectorIndex, *, replace: bool = False) -> int:
        """Refused: a sharded index takes no new documents; it can be merged into another one."""
        self._refuse("takes no new documents")

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Refused: copy the directory, or merge it into one index."""
        self._refuse("is saved by copying its directory")

    def compact(self) -> None:
        """Refused: the parts of a sharded index are never changed."""
        self._refuse("is never compacted in place")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"a sharded index {what}; index new documents by themselves, or merge all parts into one index: "
            "new_index(spec, dim).merge(sharded)."
        )

    def _append(self, vectors: Vectors) -> None:
        self._refuse("takes no new documents")

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        self._refuse("takes no new documents")

    def _open_tail(self, blocks: VectorBlocks) -> None:
        self._refuse("takes no new documents")

    def _clear(self) -> None:
        self._refuse("is never emptied")


def scan_part(part: VectorIndex, queries: Vectors, k: int, mask: Mask | None, start: int) -> Found:
    """The best of one part, at most `k`, with positions counted from `start`; `mask` over its positions."""
    positions, scores, counts = part.search_arrays(queries, k, mask)
    width = positions.shape[1]
    used = np.arange(width) < counts[:, None]
    return np.where(used, positions + start, -1), np.where(used, scores, np.float32(-np.inf)), counts


def merge_found(found: Sequence[Found], k: int, take_ids: TakeIds) -> Found:
    """The `k` best of what the parts found, by score and then id: positions and scores `(queries, k)` and counts.

    Unused places of the parts, and of the result, hold −1 and −inf.
    """
    positions = np.concatenate([part[0] for part in found], axis=1)
    scores = np.concatenate([part[1] for part in found], axis=1)
    if scores.shape[1] < k:
        room = ((0, 0), (0, k - scores.shape[1]))
        positions, scores = np.pad(positions, room, constant_values=-1), np.pad(scores, room, constant_values=-np.inf)
    elif scores.shape[1] > k:
        kth = np.partition(scores, scores.shape[1] - k, axis=1)[:, scores.shape[1] - k]
        # All that tie with the k-th stay until the ids have decided.
        keep = scores >= kth[:, None]
        width = max(k, int(keep.sum(axis=1).max(initial=0)))
        best = np.argpartition(-scores, width - 1, axis=1)[:, :width] if width < scores.shape[1] else None
        if best is not None:
            positions, scores = np.take_along_axis(positions, best, axis=1), np.take_along_axis(scores, best, axis=1)
    positions, scores, _ = sort_rows(positions, scores, take_ids)
    positions, scores = np.ascontiguousarray(positions[:, :k]), np.ascontiguousarray(scores[:, :k])
    return positions, scores, (scores > -np.inf).sum(axis=1)


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory of parts."""
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def write_sharded(directory: Path, names: Sequence[str], *, distinct: bool = False, **record: Any) -> dict[str, Any]:
    """Make the finished index directories `names` under `directory` one sharded index; returns its manifest.

    Args:
        directory: where the parts are.
        names: of the parts in order.
        distinct: the caller knows that no id is in two parts; otherwise that is checked.
        record: keys of the manifest in place of those of the first part, such as `model`.

    Raises:
        IndexMismatchError: parts of different kinds, dimensions, metrics or models.
        DataError: an id that is in two parts.
    """
    from shortlist.indexes.kinds import open_index

    parts = [open_index(directory / name, device="cpu") for name in names]
    first = parts[0].manifest
    for name, part in zip(names, parts, strict=True):
        for key in _SHARED_KEYS:
            if part.manifest.get(key) != first.get(key):
                raise IndexMismatchError(
                    f"{directory / name} has {key} {part.manifest.get(key)!r}, {names[0]} has {first.get(key)!r}; the "
                    "parts of one index must agree."
                )
        if part.model.get("fingerprint") != parts[0].model.get("fingerprint"):
            raise IndexMismatchError(
                f"{directory / name} was built with the model {part.model.get('fingerprint')}, {names[0]} with "
                f"{parts[0].model.get('fingerprint')}; the parts of one index must agree."
            )
    index = ShardedIndex(parts)
    if not distinct:
        _check_distinct(index)
    kept = {key: value for key, value in index.manifest.items() if key not in ("count", "normalised")}
    manifest = {
        **kept,
        **record,
        "count": len(index),
        "parts": [
            {"name": name, "positions": len(part._ids), "manifest": sha256(directory / name / MANIFEST)}
            for name, part in zip(names, parts, strict=True)
        ],
    }
    return _write_manifest(directory, manifest, None)


def _check_distinct(index: ShardedIndex) -> None:
    for number, (part, start) in enumerate(zip(index.parts, index.starts, strict=True)):
        if not number:
            continue
        for first in range(0, len(part._ids), _SLICE):
            ids = part._ids.take(part._ids.present(first, min(first + _SLICE, len(part._ids))))
            earlier = index._ids.find(ids) < start  # the first part that holds an id answers
            if earlier.any():
                raise DataError(
                    f"id {ids[int(np.flatnonzero(earlier)[0])]!r} is in {part_name(number)} and in an earlier part; "
                    "every document belongs to one part."
                )


def read_sharded_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a directory of parts, once the manifest of every part was found as it says.

    Raises:
        MissingInputError: no manifest, or a part is gone.
        DataError: another format, or a part whose manifest is not the one that was written with this index.
    """
    file = directory / MANIFEST
    if not file.is_file():
        raise MissingInputError(f"there is no index at {directory}; make one with `shortlist index --engine ray`.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); the index is damaged: build it again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{directory} is not a sharded index: its {MANIFEST} is of another kind.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{directory} has sharded format version {manifest.get('format_version')}, this shortlist reads "
            f"{FORMAT_VERSION}; update shortlist or build the index again."
        )
    _check_shape(file, manifest)
    for entry in manifest["parts"]:
        part = directory / entry["name"] / MANIFEST
        if not part.is_file():
            raise MissingInputError(f"{part.parent} is missing although {file} names it; build the index again.")
        if sha256(part) != entry["manifest"]:
            raise DataError(
                f"{part.parent} was changed since {directory} was built; its parts are never changed by themselves: "
                "put the old one back or build the index again."
            )
    return manifest


def verify_sharded(path: str | os.PathLike[str]) -> None:
    """Compare the checksum of every file of every part with its manifest; reads everything."""
    directory = Path(path)
    manifest = read_sharded_manifest(directory)
    for name, entry in manifest["files"].items():
        if sha256(directory / name) != entry["sha256"]:
            raise DataError(f"{directory / name} was changed; build the index again.")
    for part in manifest["parts"]:
        verify(directory / part["name"])


def _check_shape(file: Path, manifest: Mapping[str, Any]) -> None:
    expected = {
        "generation": int,
        "metric": str,
        "dim": int,
        "count": int,
        "removed": int,
        "parts": list,
        "files": dict,
    }
    for key, kind in expected.items():
        if not isinstance(manifest.get(key), kind):
            raise DataError(f"{file}: {key!r} is {manifest.get(key)!r:.60}; the index is damaged: build it again.")
    for entry in manifest["parts"]:
        whole = isinstance(entry, dict) and isinstance(entry.get("positions"), int) and "manifest" in entry
        if not whole or Path(str(entry.get("name"))).name != entry.get("name"):
            raise DataError(f"{file}: part {entry!r:.60} lacks its name, positions or checksum; the index is damaged.")
    for name in manifest["files"]:
        if Path(name).name != name:
            raise DataError(f"{file} names {name!r}; files of an index lie in its own directory: build it again.")


def _write_manifest(directory: Path, manifest: Mapping[str, Any], alive: Mask | None) -> dict[str, Any]:
    """The next generation of `manifest`, durably, with what is not `alive` as a file; older such files go."""
    generation = 1 + int(manifest.get("generation", 0))
    files = {}
    removed = 0
    if alive is not None:
        file = directory / removed_name(generation)
        np.save(file, np.packbits(~alive, bitorder="little"))
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        removed = int(np.count_nonzero(~alive))
    own = ("format", "format_version", "generation", "removed", "files")
    written = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "generation": generation,
        **{key: value for key, value in manifest.items() if key not in own},
        "removed": removed,
        "files": files,
    }
    fsync_directory(directory)
    write_json(directory / MANIFEST, written)
    fsync_directory(directory)
    for file in directory.glob("removed-*.npy"):
        if file.name not in files:
            file.unlink(missing_ok=True)
    # As it reads: tuples of the record have become lists.
    return read_sharded_manifest(directory)


def _read_removed(directory: Path, manifest: Mapping[str, Any]) -> Mask | None:
    if not manifest["removed"]:
        return None
    total = sum(entry["positions"] for entry in manifest["parts"])
    bits = np.load(directory / removed_name(manifest["generation"]), allow_pickle=False)
    if bits.dtype != np.uint8 or bits.shape != ((total + 7) // 8,):
        raise DataError(f"{directory}: {removed_name(manifest['generation'])} is of another index; build it again.")
    return np.unpackbits(bits, count=total, bitorder="little").view(bool)


def _segments(part: VectorIndex) -> list[Path]:
    """The directories that hold the ids and documents of an opened part."""
    home = part._home
    if home is None:
        raise ConfigError("the parts of a sharded index must be opened from their directories.")
    return [home.path / segment["name"] for segment in home.manifest["segments"]]

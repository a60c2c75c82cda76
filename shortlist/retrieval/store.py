"""A directory of vectors on disk: shards of ids and vectors under one manifest, complete or still being written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import atomic_open, refuse_existing, write_json
from shortlist.manifest import run_manifest

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class VectorStore:
    """Vectors made by `encode`: `vectors-00000.npy` `(docs, dim)` float32 with `ids-00000.json`, and so on."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> VectorStore:
        """Open a finished directory.

        Raises:
            MissingInputError: no such directory, or not one of vectors.
            DataError: some shards are still missing, or a file is cut short; the message names them.
        """
        store = cls.open_partial(path)
        missing = [number for number in range(store.num_shards) if not store.has(number)]
        if missing:
            raise DataError(
                f"{store.path}: {len(missing)} of {store.num_shards} shards are missing, the first is "
                f"{store.vectors_file(missing[0]).name}; run the same `shortlist encode` again to finish it."
            )
        for number in range(store.num_shards):
            store.check(number)
        return store

    @classmethod
    def open_partial(cls, path: str | os.PathLike[str]) -> VectorStore:
        """Open a directory that may lack shards."""
        folder = Path(path)
        file = folder / MANIFEST
        if not file.is_file():
            raise MissingInputError(
                f"{folder} is not a directory of vectors ({MANIFEST} is missing); make one with `shortlist encode`."
            )
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            kind, version = manifest["kind"], manifest["format_version"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise DataError(f"{file}: not the manifest of a directory of vectors ({error!r}).") from None
        if kind != "vectors":
            raise DataError(f"{folder} holds {kind!r}; expected vectors made by `shortlist encode`.")
        if version > FORMAT_VERSION:
            raise DataError(
                f"{file}: format version {version}, but this release reads up to {FORMAT_VERSION}; "
                "install a newer shortlist."
            )
        return cls(folder, manifest)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.manifest["dim"])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder that made the vectors."""
        return str(self.manifest["fingerprint"])

    @property
    def shard_size(self) -> int:
        """Vectors of every shard but the last."""
        return int(self.manifest["shard_size"])

    @property
    def num_shards(self) -> int:
        """Number of shards when finished."""
        return -(-len(self) // self.shard_size)

    def __len__(self) -> int:
        return int(self.manifest["count"])

    def __iter__(self) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Ids and memory-mapped vectors, shard by shard, in corpus order."""
        for number in range(self.num_shards):
            yield self.shard_ids(number), self.vectors(number)

    @property
    def ids(self) -> list[str]:
        """All ids in order, read into memory."""
        return [id for number in range(self.num_shards) for id in self.shard_ids(number)]

    def span(self, number: int) -> tuple[int, int]:
        """First row and end row of shard `number`."""
        start = number * self.shard_size
        return start, min(start + self.shard_size, len(self))

    def vectors_file(self, number: int) -> Path:
        """Where the vectors of shard `number` are; the file is there when the shard is finished."""
        return self.path / f"vectors-{number:05d}.npy"

    def ids_file(self, number: int) -> Path:
        """Where the ids of shard `number` are."""
        return self.path / f"ids-{number:05d}.json"

    def has(self, number: int) -> bool:
        """Whether shard `number` is finished."""
        return self.vectors_file(number).exists() and self.ids_file(number).exists()

    def check(self, number: int) -> None:
        """Raise DataError if the vectors of shard `number` have another shape than the manifest says."""
        self.vectors(number)

    def vectors(self, number: int) -> NDArray[np.float32]:
        """Vectors of shard `number`, memory-mapped, `(docs, dim)`."""
        file = self.vectors_file(number)
        start, stop = self.span(number)
        try:
            vectors = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{file} is damaged or cut short ({error}); delete it and run `encode` again.") from None
        if vectors.shape != (stop - start, self.dim) or vectors.dtype != np.float32:
            raise DataError(
                f"{file} holds {vectors.dtype} of shape {vectors.shape}; expected float32 {(stop - start, self.dim)}: "
                "delete it and run `encode` again."
            )
        return vectors

    def shard_ids(self, number: int) -> list[str]:
        """Ids of shard `number`."""
        file = self.ids_file(number)
        start, stop = self.span(number)
        try:
            ids = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{file} is damaged or missing ({error}); delete it and run `encode` again.") from None
        if len(ids) != stop - start:
            raise DataError(f"{file} holds {len(ids)} ids; expected {stop - start}: delete it and run `encode` again.")
        return ids

    def clear(self, number: int) -> None:
        """Delete what a killed process left of shard `number` under temporary names."""
        for file in (self.vectors_file(number), self.ids_file(number)):
            for left in self.path.glob(f".*.tmp.{file.name}"):
                left.unlink(missing_ok=True)

    def write_ids(self, number: int, ids: Sequence[str]) -> None:
        """Write the ids of shard `number`, atomically."""
        with atomic_open(self.ids_file(number)) as handle:
            json.dump(list(ids), handle, ensure_ascii=False)


def begin(path: str | os.PathLike[str], identity: Mapping[str, Any], *, overwrite: bool, resume: bool) -> VectorStore:
    """A directory of vectors to be filled: a new one, or the one at `path` if it was begun with the same `identity`.

    `shard_size` of an existing directory wins over that of `identity`.

    Raises:
        OutputExistsError: something is there and neither `overwrite` nor `resume` fits.
        ConfigError: what is there was begun with other settings; the message names them.
    """
    folder = Path(path)
    ours = (folder / MANIFEST).is_file()
    if ours and not overwrite and resume:
        store = VectorStore.open_partial(folder)
        wanted = {**identity, "shard_size": store.shard_size}
        differing = [key for key in wanted if store.manifest.get(key) != wanted[key]]
        if differing:
            changes = "; ".join(f"{key} was {store.manifest.get(key)!r}, is {wanted[key]!r}" for key in differing[:3])
            raise ConfigError(
                f"{folder} was begun with other settings ({changes}); use the same ones to finish it, another "
                "output, or --overwrite."
            )
        return store
    if ours and overwrite:
        # The manifest goes first: without it nothing takes the rest for a result.
        (folder / MANIFEST).unlink()
        for file in [*folder.glob("vectors-*.npy"), *folder.glob("ids-*.json")]:
            file.unlink()
    refuse_existing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MANIFEST, {"format_version": FORMAT_VERSION, "kind": "vectors", **identity, **run_manifest()})
    return VectorStore.open_partial(folder)

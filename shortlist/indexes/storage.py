"""The index directory: manifest, vector shards, sizes and checksums, and the checks made when one is opened.

```
manifest.json            format, kind, metric, dim, count, model, frequency_prior (if the last coordinate is one), and
                         bytes + sha256 of every other file
ids.utf8 ids.offsets.npy ids by position
vectors-00000.npy …      float32 shards (kind exact)      index.faiss   (kind faiss)
removed.npy              positions removed from index.faiss, if any
docs.jsonl docs.offsets.npy   optional documents, by position
provenance.json          optional: command, versions, time
```

Names are relative and nothing is pickled. Only provenance.json holds a time or a host, so equal input gives equal
bytes in all other files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError, MissingInputError
from shortlist.files import sha256, write_json

FORMAT, FORMAT_VERSION = "shortlist-index", 1
MANIFEST = "manifest.json"
PROVENANCE = "provenance.json"  # when and how it was built: the one file whose bytes differ between equal builds
REMOVED = "removed.npy"
SHARD_BYTES = 64 << 20
_CHECKED_AT_OPEN = 1 << 20  # files up to this size have their checksum compared at open; larger ones by `verify`


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest` with the size and checksum of every file now in `directory`; the last step of a save."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in (MANIFEST, PROVENANCE)
    }
    write_json(directory / MANIFEST, {"format": FORMAT, "format_version": FORMAT_VERSION, **manifest, "files": files})


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of an index directory, after checking that every file it names is there in full.

    Sizes of all files and checksums of the small ones are compared, so opening stays fast; `verify` compares all.

    Raises:
        MissingInputError: nothing at `path`, or a file of the index is gone.
        DataError: not an index, a newer format, or a file that was cut or changed.
    """
    directory = Path(path)
    if not directory.exists():
        raise MissingInputError(f"there is no index at {directory}; make one with `shortlist index`.")
    file = directory / MANIFEST
    advice = f"an index directory made by `shortlist index` has a {MANIFEST} with format {FORMAT!r}"
    if not file.is_file():
        raise DataError(f"{directory} is not an index: it has no {MANIFEST}; {advice}.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); the index is damaged: build it again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{directory} is not an index: its {MANIFEST} is of another kind; {advice}.")
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(
            f"{directory} has index format version {version}, this shortlist reads up to {FORMAT_VERSION}; "
            "update shortlist or build the index again."
        )
    _check_shape(file, manifest)
    for name, entry in manifest["files"].items():
        if Path(name).name != name:
            raise DataError(f"{file} names {name!r}; files of an index lie in its own directory: build it again.")
        _check_file(directory / name, entry, checksum=entry["bytes"] <= _CHECKED_AT_OPEN)
    return manifest


def _check_shape(file: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest that was edited: every later step relies on these keys and their types."""
    expected = {
        "kind": str, "metric": str, "dim": int, "count": int, "model": dict, "frequency_prior": dict, "files": dict,
    }  # fmt: skip
    for key, kind in expected.items():
        if not isinstance(manifest.get(key, {} if key in ("model", "frequency_prior") else None), kind):
            raise DataError(f"{file}: {key!r} is {manifest.get(key)!r:.60}; the index is damaged: build it again.")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or "sha256" not in entry:
            raise DataError(f"{file}: {name!r} lacks its bytes and sha256; the index is damaged: build it again.")


def verify(path: str | os.PathLike[str]) -> None:
    """Compare the checksum of every file of an index with its manifest; reads everything. Raises as `read_manifest`."""
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        _check_file(Path(path) / name, entry, checksum=True)


def _check_file(file: Path, entry: dict[str, Any], *, checksum: bool) -> None:
    if not file.is_file():
        raise MissingInputError(f"{file} is missing although the index's {MANIFEST} names it; build the index again.")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise DataError(
            f"{file} has {size} bytes, expected {entry['bytes']}: the file was cut or changed; build the index again."
        )
    if checksum and (found := sha256(file)) != entry["sha256"]:
        raise DataError(
            f"{file} has sha256 {found[:16]}…, expected {entry['sha256'][:16]}…: its content was changed; "
            "build the index again."
        )


class ShardWriter:
    """Writes vectors given in blocks of any size as `.npy` shards of equal size, holding one shard in memory."""

    def __init__(self, directory: Path, dim: int):
        self._directory = directory
        self._dim = dim
        self._buffer = np.empty((max(1, SHARD_BYTES // (4 * dim)), dim), np.float32)
        self._used = 0
        self.names: list[str] = []

    def append(self, vectors: NDArray[np.float32]) -> None:
        """Write `vectors` `(docs, dim)` at the next positions."""
        start = 0
        while start < len(vectors):
            take = min(len(vectors) - start, len(self._buffer) - self._used)
            self._buffer[self._used : self._used + take] = vectors[start : start + take]
            self._used += take
            start += take
            if self._used == len(self._buffer):
                self._flush()

    def adopt(self, file: Path) -> None:
        """Make the whole `.npy` file at `file` the next shard, as a hard link where possible."""
        self._flush()
        target = self._next()
        try:
            os.link(file, target)
        except OSError:
            shutil.copyfile(file, target)

    def close(self) -> list[str]:
        """Write what is left; returns the shard names in order."""
        self._flush()
        return self.names

    def _flush(self) -> None:
        if self._used:
            np.save(self._next(), self._buffer[: self._used])
            self._used = 0

    def _next(self) -> Path:
        self.names.append(f"vectors-{len(self.names):05d}.npy")
        return self._directory / self.names[-1]

"""The index directory: its manifest, its files with sizes and checksums, and the checks made when one is opened.

```
manifest.json            the commit point: format, generation, spec, factory, kind, metric, dim, count, dtype, model,
                         frequency_prior (if the last coordinate is one), search and tuning settings, removed, segments
                         [{name, count, base}], and bytes + sha256 of every file below
removed-00003.npy        bits of the removed positions, little-endian; written by generation 3; absent if none is
segment-00000/           the first positions
    ids.utf8 ids.offsets.npy ids.buckets.npy ids.order.npy     ids by position and back
    vectors-00000.npy …  float32 shards      index.faiss   what faiss built (kind faiss)
    docs.jsonl docs.offsets.npy fields.arrow    optional documents and the columns that filters look at
segment-00001/ …         what later commits appended
provenance.json          optional: command, versions, time
```

Names are relative, files are never rewritten and nothing is pickled: whoever has opened a generation keeps it. Only
provenance.json holds a time or a host, so equal input gives equal bytes in all other files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError, MissingInputError
from shortlist.files import sha256

FORMAT, FORMAT_VERSION = "shortlist-index", 2
MANIFEST = "manifest.json"
PROVENANCE = "provenance.json"  # when and how it was built: the one file whose bytes differ between equal builds
_CHECKED_AT_OPEN = 1 << 20  # files up to this size have their checksum compared at open; larger ones by `verify`
_NAME = re.compile(r"(segment-\d{5,}/)?[a-z0-9][a-z0-9_.-]*")
_RETRIES = 100


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of an index directory, after checking that every file it names is there in full.

    Sizes of all files and checksums of the small ones are compared, so opening stays fast; `verify` compares all.

    Raises:
        MissingInputError: nothing at `path`, or a file of the index is gone.
        DataError: not an index, another format version, or a file that was cut or changed.
    """
    return _checked(Path(path), limit=_CHECKED_AT_OPEN)


def verify(path: str | os.PathLike[str]) -> None:
    """Compare the checksum of every file of an index with its manifest; reads everything. Raises as `read_manifest`."""
    from shortlist.indexes.sharded import is_sharded, verify_sharded  # which verifies its parts with this function

    if is_sharded(path):
        verify_sharded(path)
        return
    _checked(Path(path), limit=None)


def _checked(directory: Path, *, limit: int | None) -> dict[str, Any]:
    """The manifest, once all its files were found as it says; a commit in between starts the check anew."""
    manifest = parse_manifest(directory)
    for _ in range(_RETRIES):
        try:
            for name, entry in manifest["files"].items():
                _check_file(directory / name, entry, checksum=limit is None or entry["bytes"] <= limit)
            return manifest
        except (DataError, MissingInputError, OSError):
            now = parse_manifest(directory)
            if now == manifest:
                raise
            manifest = now
    return manifest


def parse_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of `directory` without a look at the files that it names. Raises as `read_manifest`."""
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
    if isinstance(manifest, dict) and manifest.get("kind") == "bm25":
        raise DataError(f"{directory} is a BM25 index; expected an index of vectors, which a model makes.")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{directory} is not an index: its {MANIFEST} is of another kind; {advice}.")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        remedy = "build the index again"
        if isinstance(version, int) and version > FORMAT_VERSION:
            remedy = f"update shortlist or {remedy}"
        raise DataError(
            f"{directory} has index format version {version}, this shortlist reads version {FORMAT_VERSION}; {remedy}."
        )
    _check_shape(file, manifest)
    return manifest


def _check_shape(file: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest that was edited: every later step relies on these keys and their types."""
    expected: dict[str, type] = {
        "generation": int, "kind": str, "metric": str, "dim": int, "count": int, "removed": int, "segments": list,
        "files": dict,
    }  # fmt: skip
    optional = {"model": dict, "frequency_prior": dict, "search": dict, "tuning": dict}
    for key, kind in {**expected, **optional}.items():
        if key in expected or key in manifest:
            value = manifest.get(key)
            if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
                raise DataError(f"{file}: {key!r} is {value!r:.60}; the index is damaged: build it again.")
    for segment in manifest["segments"]:
        whole = isinstance(segment, dict) and isinstance(segment.get("name"), str)
        whole = whole and isinstance(segment.get("count"), int) and isinstance(segment.get("base"), bool)
        if not whole or segment["count"] < 0 or not _NAME.fullmatch(segment["name"] + "/x"):
            raise DataError(f"{file}: segment {segment!r:.60} lacks a name, count or base; the index is damaged.")
    for name, entry in manifest["files"].items():
        if not _NAME.fullmatch(name):
            raise DataError(f"{file} names {name!r}; files of an index lie in its own directory: build it again.")
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or "sha256" not in entry:
            raise DataError(f"{file}: {name!r} lacks its bytes and sha256; the index is damaged: build it again.")


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


def removed_name(generation: int) -> str:
    """File of the removed positions that `generation` wrote."""
    return f"removed-{generation:05d}.npy"


def read_removed(directory: Path, manifest: dict[str, Any]) -> NDArray[np.bool_] | None:
    """Mask of the removed positions, `(positions,)`; None if there is none. DataError if it is not of this index."""
    if not manifest["removed"]:
        return None
    file = directory / removed_name(manifest["generation"])
    total = sum(segment["count"] for segment in manifest["segments"])
    bits = np.load(file, allow_pickle=False)
    if bits.dtype != np.uint8 or bits.shape != ((total + 7) // 8,):
        raise DataError(f"{file} holds {bits.dtype} {bits.shape} for {total} positions; build the index again.")
    mask = np.unpackbits(bits, count=total, bitorder="little").view(bool)
    if int(np.count_nonzero(mask)) != manifest["removed"]:
        raise DataError(f"{file} marks {np.count_nonzero(mask)} positions, expected {manifest['removed']}.")
    return mask

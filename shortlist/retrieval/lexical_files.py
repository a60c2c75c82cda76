"""The directory of a BM25 index: written whole, opened memory-mapped, removals committed by one rename.

```
manifest.json                 generation, count, removed, settings, and bytes + sha256 of every file below
data.csc.index.npy …          bm25s's arrays: a score for each posting     vocab.index.json  params.index.json
ids.*  docs.*  fields.arrow   ids, and documents if they are stored, as in an index of vectors
removed-00002.npy             bits of the removed positions, written by generation 2; absent if none is
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError, MissingInputError, ShortlistError
from shortlist.files import atomic_directory, atomic_path, fsync_directory, sha256, write_json
from shortlist.indexes.directory import lock_directory
from shortlist.indexes.documents import DocumentStore, DocumentWriter
from shortlist.indexes.ids import IdTable, IdWriter
from shortlist.indexes.storage import MANIFEST, removed_name

if TYPE_CHECKING:
    import bm25s

    from shortlist.retrieval.lexical import LexicalRetriever

FORMAT, FORMAT_VERSION = "shortlist-bm25", 2
_CHECKED_AT_OPEN = 1 << 20  # files up to this size have their checksum compared, all others their size
_SLICE = 65_536
_RETRIES = 20


@dataclass(frozen=True)
class Home:
    """Where an index lies on disk, and which generation of it is open."""

    path: Path
    generation: int


def is_bm25(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the directory of a BM25 index, of any version."""
    try:
        return _read(Path(path)).get("format") == FORMAT
    except (OSError, ValueError):
        return False


def write(retriever: LexicalRetriever, path: str | os.PathLike[str], *, overwrite: bool, documents: bool) -> Home:
    """Write the index at `path`, whole or not at all."""
    import bm25s

    ids, store, corpus = retriever._ids, retriever.documents, retriever.corpus
    with atomic_directory(path, overwrite=overwrite) as directory:
        retriever._scorer.save(directory, show_progress=False)
        id_writer = IdWriter(directory)
        for start in range(0, len(ids), _SLICE):
            # Those of removed documents as well: positions are what the postings hold.
            id_writer.append(ids.take(np.arange(start, min(start + _SLICE, len(ids)))))
        id_writer.close()
        if documents and (store is not None or corpus is not None):
            writer = DocumentWriter(directory)
            if store is not None:
                for position in range(len(ids)):
                    writer.append_line(store.line(position))
            elif corpus is not None:
                writer.append(corpus)
            writer.close()
        removed = _write_removed(directory, 1, ids)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "generation": 1,
            "kind": "bm25",
            "count": len(ids),
            "removed": removed,
            "k1": retriever.k1,
            "b": retriever.b,
            **retriever.analyzer.settings(),
            "template": retriever.template,
            "bm25s": bm25s.__version__,
            "files": {file.name: _entry(file) for file in sorted(directory.iterdir())},
        }
        write_json(directory / MANIFEST, manifest)
    return Home(Path(path), 1)


def commit(home: Home, ids: IdTable) -> Home:
    """Write which documents are removed into the index's own directory: afterwards the old or the new is there.

    Raises:
        ShortlistError: another process is writing, or has written since the index was opened.
    """
    handle = lock_directory(home.path)
    try:
        manifest = read_manifest(home.path)
        if manifest["generation"] != home.generation:
            raise ShortlistError(
                f"{home.path} was changed by another process since it was opened (generation {manifest['generation']}, "
                f"opened was {home.generation}); open it again and repeat the change."
            )
        generation = home.generation + 1
        manifest["files"].pop(removed_name(home.generation), None)
        manifest |= {"generation": generation, "removed": _write_removed(home.path, generation, ids)}
        file = home.path / removed_name(generation)
        if file.is_file():
            manifest["files"][file.name] = _entry(file)
        fsync_directory(home.path)
        write_json(home.path / MANIFEST, manifest)
        fsync_directory(home.path)
        for old in home.path.glob("removed-*.npy"):
            if old.name not in manifest["files"]:
                old.unlink(missing_ok=True)
    finally:
        os.close(handle)
    return Home(home.path, generation)


def open_parts(
    path: str | os.PathLike[str],
) -> tuple[Home, dict[str, Any], bm25s.BM25, IdTable, DocumentStore | None]:
    """What an index holds, memory-mapped, after its files were checked.

    Raises:
        MissingInputError: no such directory.
        DataError: not a BM25 index, one of another format version, or a file is missing, cut or changed (it is named).
    """
    import bm25s

    directory = Path(path)
    for _ in range(_RETRIES):
        manifest = read_manifest(directory)
        try:
            for name, entry in manifest["files"].items():
                _check_file(directory / name, entry)
            removed = _read_removed(directory, manifest)
            break
        except (DataError, OSError):
            if read_manifest(directory) == manifest:  # no commit in between
                raise
    ids = IdTable.open(directory, removed)
    if len(ids) != manifest["count"]:
        raise DataError(f"{directory} holds {len(ids)} ids, its manifest says {manifest['count']}; build it again.")
    scorer = bm25s.BM25.load(directory, mmap=True, show_progress=False)
    return Home(directory, manifest["generation"]), manifest, scorer, ids, DocumentStore.open(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a BM25 index. Raises as `open_parts`."""
    if not directory.is_dir():
        raise MissingInputError(f"there is no BM25 index at {directory}: there is no such directory.")
    try:
        manifest = _read(directory)
    except (OSError, ValueError):
        manifest = {}
    if manifest.get("format") != FORMAT:
        raise DataError(f"{directory} is not a BM25 index (its {MANIFEST} does not say {FORMAT!r}).")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        remedy = "build the index again"
        if isinstance(version, int) and version > FORMAT_VERSION:
            remedy = f"upgrade shortlist or {remedy}"
        raise DataError(
            f"{directory} has format version {version}, this shortlist reads version {FORMAT_VERSION}; {remedy}."
        )
    return manifest


def _read(directory: Path) -> dict[str, Any]:
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return manifest if isinstance(manifest, dict) else {}


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def _check_file(file: Path, entry: Mapping[str, Any]) -> None:
    size = file.stat().st_size if file.is_file() else -1
    if size != entry["bytes"]:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise DataError(f"{file} {found}, the manifest says {entry['bytes']}; build the index again.")
    if size <= _CHECKED_AT_OPEN and sha256(file) != entry["sha256"]:
        raise DataError(f"the content of {file} was changed (its sha256 differs); build the index again.")


def _write_removed(directory: Path, generation: int, ids: IdTable) -> int:
    """Write the bits of the removed positions, if there are any; returns how many."""
    alive = ids.alive()
    if alive is None:
        return 0
    with atomic_path(directory / removed_name(generation)) as file:
        np.save(file, np.packbits(~alive, bitorder="little"))
    return ids.num_removed


def _read_removed(directory: Path, manifest: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    if not manifest["removed"]:
        return None
    bits = np.load(directory / removed_name(manifest["generation"]), allow_pickle=False)
    return np.unpackbits(bits, count=manifest["count"], bitorder="little").view(bool)

"""Changing an index directory: one writer at a time, and a crash leaves the old index or the new one.

New files get names that no manifest has named. They are flushed to disk, then the manifest is replaced by one rename,
and only then is deleted what the new manifest does not name. What a killed writer left is removed by the next one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import DataError, MissingInputError, ShortlistError
from shortlist.files import atomic_directory, fsync_directory, refuse_existing, sha256, write_json
from shortlist.indexes.storage import FORMAT, FORMAT_VERSION, MANIFEST, PROVENANCE, parse_manifest, removed_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

# What a writer may leave behind, and may therefore delete.
_OURS = re.compile(r"segment-\d{5,}|removed-\d{5,}\.npy|\.\d+\.tmp\..*")
_SEGMENT = re.compile(r"segment-(\d{5,})")


class Change:
    """One change of the index in a directory, under its lock; nothing is seen of it until `publish`.

    Args:
        path: directory of an index, or an empty or unfinished one.

    Raises:
        ShortlistError: another process is writing there.
        DataError: the manifest there is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._handle = lock_directory(path)
        # Also without `close`, as when the index that holds this is forgotten.
        self._release = weakref.finalize(self, os.close, self._handle)
        try:
            self.manifest: dict[str, Any] | None = parse_manifest(path) if (path / MANIFEST).exists() else None
            _clean(path, self.manifest)
        except BaseException:
            self._release()
            raise
        names = [segment["name"] for segment in self.segments]
        self._next = 1 + max((int(name.rpartition("-")[2]) for name in names), default=-1)
        self._new: list[Path] = []

    @property
    def segments(self) -> list[dict[str, Any]]:
        """The segments of the index as it is on disk."""
        return list(self.manifest["segments"]) if self.manifest is not None else []

    def new_segment(self) -> Path:
        """A new, empty directory for the files of a segment."""
        folder = self.path / f"segment-{self._next:05d}"
        folder.mkdir()
        self._next += 1
        self._new.append(folder)
        return folder

    def publish(
        self,
        record: Mapping[str, Any],
        *,
        segments: Sequence[Mapping[str, Any]],
        removed: NDArray[np.bool_] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make `segments` the index, durably; returns the new manifest.

        Args:
            record: what the index is: kind, metric, dim, count …
            segments: name, count and whether it is the base, of each segment in order; old ones or new ones.
            removed: mask of the removed positions, None if there is none.
            provenance: how it came to be, written as provenance.json; None leaves what is there.
        """
        generation = 1 + (self.manifest["generation"] if self.manifest is not None else 0)
        old = self.manifest["files"] if self.manifest is not None else {}
        kept = {segment["name"] for segment in segments}
        files = {name: entry for name, entry in old.items() if name.partition("/")[0] in kept}
        for folder in self._new:
            if folder.name in kept:
                files.update((f"{folder.name}/{file.name}", _entry(file)) for file in sorted(folder.iterdir()))
                fsync_directory(folder)
        if removed is not None:
            file = self.path / removed_name(generation)
            np.save(file, np.packbits(removed, bitorder="little"))
            files[file.name] = _entry(file)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "generation": generation,
            **record,
            "removed": 0 if removed is None else int(np.count_nonzero(removed)),
            "segments": [dict(segment) for segment in segments],
            "files": files,
        }
        fsync_directory(self.path)
        write_json(self.path / MANIFEST, manifest)
        fsync_directory(self.path)
        # What is on disk decides what is deleted, here as after a failure.
        self.manifest = parse_manifest(self.path)
        self._new = []
        _clean(self.path, self.manifest)
        if provenance is not None:
            write_json(self.path / PROVENANCE, provenance)
        return self.manifest

    def close(self) -> None:
        """Delete what was not published, and let others write."""
        if self._release.alive:
            try:
                if self.path.is_dir():
                    _clean(self.path, parse_manifest(self.path) if (self.path / MANIFEST).exists() else None)
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def new_index_directory(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Change]:
    """A `Change` that makes a whole index at `path`, in place of the one that is there.

    An index stays readable until the new one is published. What is there and is no index stays until then as well:
    the new one is made beside it.

    Raises:
        OutputExistsError: `path` exists and `overwrite` is false.
        ShortlistError: nothing can be written there, or another process is writing.
    """
    refuse_output(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    if target.exists() and not _is_unfinished(target) and not is_index(target):
        with atomic_directory(target, overwrite=True) as directory, Change(directory) as change:
            yield change
        return
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with Change(target) as change:
            # Another process may have finished between the look above and the lock.
            if change.manifest is not None and not overwrite:
                refuse_existing(path)
            yield change
    except BaseException:
        if made and target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        raise
    fsync_directory(target.parent)


def refuse_output(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """As `files.refuse_existing`; what a killed build left, which no manifest names, does not count as there."""
    if not _is_unfinished(Path(path)):
        refuse_existing(path, overwrite=overwrite)


def is_index(path: Path) -> bool:
    """Whether `path` has the manifest of an index that this version reads."""
    try:
        parse_manifest(path)
    except (DataError, MissingInputError, OSError):
        return False
    return True


def _is_unfinished(path: Path) -> bool:
    return path.is_dir() and all(_OURS.fullmatch(entry.name) for entry in path.iterdir())


def _clean(path: Path, manifest: Mapping[str, Any] | None) -> None:
    """Delete segments, bitmaps and temporary files that `manifest` does not name."""
    named = set()
    if manifest is not None:
        named = {name.partition("/")[0] for name in manifest["files"]} | {
            segment["name"] for segment in manifest["segments"]
        }
    for entry in list(path.iterdir()):
        if entry.name not in named and _OURS.fullmatch(entry.name):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):  # the next writer tries again
                    entry.unlink()


def _entry(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, which is flushed to disk."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def lock_directory(path: Path) -> int:
    """An open handle of the directory `path` that holds its lock; closing it lets go of the lock.

    Without flock (Windows) there is no lock: let only one process write.
    """
    if fcntl is None:
        return os.open(os.devnull, os.O_RDONLY)
    while True:
        handle = os.open(path, os.O_RDONLY)
        try:
            _flock(handle, path)
            same = os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path))
        except BaseException:
            os.close(handle)
            raise
        if same:
            return handle
        # The directory was replaced between the two calls.
        os.close(handle)


def _flock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShortlistError(
            f"another process is writing the index {path}; nothing was written: try again when it is done."
        ) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP):
            raise
        logger.warning("%s lies on a file system without locks (%s): let only one process write to it.", path, error)

"""Where built Arrow files live: one directory a key, complete or absent, safe with several processes and kills.

The cache is $SHORTLIST_CACHE, else ~/.cache/shortlist; it may be deleted at any time. A cache that cannot be written
is replaced by a temporary directory for the length of the process, with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shortlist.errors import ShortlistError
from shortlist.files import umask

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else $SHORTLIST_CACHE, else ~/.cache/shortlist; not created here."""
    if cache_dir is not None:
        return Path(cache_dir)
    if chosen := os.environ.get("SHORTLIST_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "shortlist"
    except RuntimeError:  # an account without a home directory, as in some containers
        return Path(tempfile.gettempdir()) / "shortlist-cache"


def source_key(files: Sequence[Path], **options: Any) -> str:
    """A key that changes when a file is edited, moved or read with other options.

    It hashes absolute paths, sizes, modification times (ns) and `options`, not the content, which may be gigabytes.
    """
    identity: list[Any] = []
    for file in files:
        state = file.stat()
        identity.append([str(file.resolve()), state.st_size, state.st_mtime_ns])
    text = json.dumps([identity, options], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Entry:
    """A finished cache directory; `owned` ones are temporary and vanish with the last reference."""

    def __init__(self, path: Path, *, owned: bool = False):
        self.path = path
        if owned:
            self._finalizer = weakref.finalize(self, _remove, path, os.getpid())


def cached_directory(key: str, build: Callable[[Path], None], *, cache_dir: str | Path | None = None) -> Entry:
    """The directory for `key`; `build` fills it in a hidden place first if it is not there, complete.

    `build(path)` writes into an empty directory; a manifest with all file sizes is added, and only then the directory
    takes its name. A process that was killed half-way leaves nothing that is ever opened.
    """
    root = cache_root(cache_dir)
    target = root / key
    if is_complete(target):
        return Entry(target)
    with _lock(root / f".{key}.lock") as locked:
        if is_complete(target):
            return Entry(target)
        if locked:  # so no other process is building this key: what is left of one was killed
            for leftover in root.glob(f".{key}.tmp.*"):
                shutil.rmtree(leftover, ignore_errors=True)
        try:
            root.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=f".{key}.tmp.", dir=root))
        except OSError as error:
            logger.warning(
                "the cache %s cannot be written (%s); using a temporary directory: set SHORTLIST_CACHE to keep it.",
                root,
                error.strerror,
            )
            return temporary_directory(build)
        try:
            _fill(building, build)
            os.chmod(building, 0o777 & ~umask())  # one cache may serve several accounts
            return Entry(_take_place(building, target))
        except _NotOurs:
            logger.warning("%s can be neither read nor replaced (another account's?); using a temporary copy.", target)
            return Entry(building, owned=True)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def temporary_directory(build: Callable[[Path], None]) -> Entry:
    """A directory filled by `build` that is deleted when no one holds the entry any more."""
    path = Path(tempfile.mkdtemp(prefix="shortlist-"))
    try:
        _fill(path, build)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return Entry(path, owned=True)


def is_complete(path: Path) -> bool:
    """Whether `path` has its manifest and every file in it has the recorded size."""
    try:
        sizes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(path: Path, owner: int) -> None:
    """Delete a temporary directory, but not from a forked child: the parent still maps it."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _fill(path: Path, build: Callable[[Path], None]) -> None:
    try:
        build(path)
        sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
        (path / MANIFEST).write_text(json.dumps({"sizes": sizes}), encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ShortlistError(
                f"no space left for {path.parent} while building the Arrow files; free some, or set SHORTLIST_CACHE "
                "to a directory on a larger disk."
            ) from error
        raise


def _take_place(building: Path, target: Path) -> Path:
    for _ in range(3):
        try:
            os.rename(building, target)
            return target
        except OSError:
            if is_complete(target):  # another process was first; its content is the same
                shutil.rmtree(building, ignore_errors=True)
                return target
            # The old entry is damaged (a file cut short): set it aside.
            shutil.rmtree(target, ignore_errors=True)
    raise _NotOurs(target)


class _NotOurs(Exception):
    """An entry that can neither be read nor replaced."""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an advisory lock that a dying process releases; yields False where the system has none."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(open(path, "wb"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def cached_checksum(file: Path) -> str:
    """SHA-256 of a file, remembered in the cache until its size or modification time changes."""
    from shortlist.files import sha256, write_json

    note = cache_root() / "checksums" / f"{source_key([file])}.json"
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        digest = sha256(file)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_json(note, {"file": str(file), "sha256": digest})
        return digest

"""Writing files so that a crash leaves the old content or the new, never half of it; and checksums."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shortlist.errors import OutputExistsError, ShortlistError

# Of Linux's renameat2: paths are relative to the working directory; both exist and change places.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed over `path`.

    On any error the temporary file is removed and `path` keeps its old content. A link is followed, and what is no file
    (a pipe, /dev/stdout) is written directly, never replaced.
    """
    target = Path(os.path.realpath(path))
    refuse_directory(target)
    if target.exists() and not target.is_file():
        yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffixes stay at the end: writers choose compression and numpy its `.npy` by them.
    tail = target.name if len(os.fsencode(target.name)) < 200 else target.name[-40:]
    temporary = target.with_name(f".{os.getpid()}.tmp.{tail}")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a full disk names no file; the user knows no temporary one
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_open(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing text (`w`, UTF-8, LF) or bytes (`wb`) atomically; `.gz` is compressed reproducibly."""
    binary = "b" in mode
    with atomic_path(path) as temporary:
        with open(temporary, "wb") as raw:
            # mtime 0 and no name: equal content gives equal bytes.
            stream: Any = gzip.GzipFile("", "wb", 6, raw, 0) if str(path).endswith(".gz") else raw
            try:
                if binary:
                    yield stream
                else:
                    text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
                    yield text
                    text.flush()
                    text.detach()
            finally:
                if stream is not raw:
                    stream.close()


def reserve(path: str | os.PathLike[str], *, shown: str | os.PathLike[str]) -> None:
    """Give a sparse file its blocks now: a full disk is then an OSError here, not a bus error in a mapped write.

    The error names `shown`, the file's final name.
    """
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as handle:
            size = os.fstat(handle.fileno()).st_size
            try:
                os.posix_fallocate(handle.fileno(), 0, size)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(shown)) from None


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically; non-finite numbers are refused, key order is kept."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_open(path) as handle:
        handle.write(text + "\n")


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a fresh temporary directory beside `path`; on success it takes the place of `path`.

    Raises:
        OutputExistsError: `path` exists and `overwrite` is false.
    """
    target = Path(os.path.realpath(path))
    refuse_existing(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp.", dir=target.parent))
    old = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~umask())
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            elif file.is_dir():
                fsync_directory(file)
        fsync_directory(temporary)
        if target.exists():
            if not exchange(temporary, target):
                # Two renames: between them the old content stands under its hidden name, never deleted first.
                os.replace(target, old)
                try:
                    os.replace(temporary, target)
                except OSError:
                    os.replace(old, target)
                    raise
        else:
            os.replace(temporary, target)
        fsync_directory(target.parent)
    finally:
        # After an exchange the old content has the temporary name.
        for left in (temporary, old) if target.exists() else (temporary,):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def exchange(first: Path, second: Path) -> bool:
    """Let two paths change places in one step; False where the system or file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that have no such thing
            raise
    finally:
        os.close(handle)


def refuse_existing(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise OutputExistsError if `path` exists (an empty directory does not count) and `overwrite` is false.

    Called before the work whose result goes to `path`; so it also raises ShortlistError where nothing can be created.
    """
    target = Path(path)
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not overwrite:
        raise OutputExistsError(
            f"{target} exists already; choose another output or overwrite it (--overwrite, in Python overwrite=True)."
        )
    parents = Path(os.path.realpath(target)).parents
    folder = next((parent for parent in parents if parent.exists()), target)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "is not writable" if folder.is_dir() else "is not a directory"
        raise ShortlistError(f"{target} cannot be written: {folder} {reason}; choose another output.")


def refuse_directory(path: str | os.PathLike[str]) -> None:
    """Raise OutputExistsError if `path`, where a file is to be written, is a directory."""
    if os.path.isdir(path):
        raise OutputExistsError(f"{path} is a directory; the output is one file, name it.")


def sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def umask() -> int:
    """The process's file mode mask."""
    value = os.umask(0)
    os.umask(value)
    return value

"""Writing files so that a crash leaves the old content or the new, never half of it; and checksums."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shortlist.errors import OutputExistsError


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed over `path`.

    On any error the temporary file is removed and `path` keeps its old content.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffixes stay at the end: writers choose compression and numpy its `.npy` by them.
    temporary = target.with_name(f".{os.getpid()}.tmp.{target.name}")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
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
    target = Path(path)
    refuse_existing(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp.", dir=target.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        if target.exists():
            # Two renames: between them the old content stands under its hidden name, never deleted first.
            old = temporary.with_name(temporary.name + ".old")
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        else:
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise OutputExistsError if `path` exists (an empty directory does not count) and `overwrite` is false."""
    target = Path(path)
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not overwrite:
        raise OutputExistsError(f"{target} exists already; choose another output or pass --overwrite.")


def sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value

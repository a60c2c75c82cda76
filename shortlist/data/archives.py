"""Unpack a downloaded zip or tar archive without trusting it: nothing leaves the target folder, no links."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from shortlist.errors import DataError, ShortlistError

_JUNK = {"__MACOSX", ".DS_Store", "Thumbs.db"}


def is_archive(path: Path) -> bool:
    """Whether the content of `path` is a zip or a tar archive, whatever its name."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def unpack(archive: Path, target: Path) -> int:
    """Unpack `archive` into the existing folder `target` and return the number of files.

    One top folder that holds everything is left out, so `scifact.zip` gives `target/corpus.jsonl`.

    Raises:
        DataError: the archive is damaged, or a member is a link or would land outside `target`.
        ShortlistError: the disk has less room than the content needs.
    """
    try:
        sizes = {name: size for name, size, _ in _members(archive, read=False)}
        _check_room(archive, sum(sizes.values()), target)
        tops = {PurePosixPath(name).parts[0] for name in sizes}
        strip = 1 if len(tops) == 1 and all(len(PurePosixPath(name).parts) > 1 for name in sizes) else 0
        for name, _, stream in _members(archive, read=True):
            destination = target.joinpath(*PurePosixPath(name).parts[strip:])
            destination.parent.mkdir(parents=True, exist_ok=True)
            with open(destination, "wb") as handle:
                shutil.copyfileobj(stream, handle, 1 << 20)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, RuntimeError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}); delete it and download it again.") from error
    if not sizes:
        raise DataError(f"{archive} holds no files; delete it and download it again.")
    return len(sizes)


def _members(archive: Path, *, read: bool) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Regular files of the archive as (checked relative name, size, open stream or an unused one)."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                link = stat.S_ISLNK(entry.external_attr >> 16)
                if entry.is_dir() or _junk(entry.filename):
                    continue
                name = _checked(archive, entry.filename, link=link)
                if read:
                    with zipped.open(entry) as stream:
                        yield name, entry.file_size, stream
                else:
                    yield name, entry.file_size, _NOTHING
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isdir() or _junk(member.name):
                    continue
                name = _checked(archive, member.name, link=not member.isfile())
                tar_stream = tar.extractfile(member) if read else None
                yield name, member.size, tar_stream or _NOTHING


def _junk(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not parts or bool(_JUNK & set(parts)) or parts[-1].startswith("._")


def _checked(archive: Path, name: str, *, link: bool) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in path.parts[0]:
        raise DataError(f"{archive}: member {name!r} would be written outside the target folder; nothing was unpacked.")
    if link:
        raise DataError(f"{archive}: member {name!r} is a link or a device, not a file; nothing was unpacked.")
    return name


def _check_room(archive: Path, needed: int, target: Path) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ShortlistError(
            f"unpacking {archive} needs {needed / 1e9:.1f} GB and the disk of {target.parent} has {free / 1e9:.1f} GB "
            "free; make room or choose another --root."
        )


class _Nothing:
    def read(self, size: int = -1) -> bytes:
        """No bytes: stands where only names and sizes are wanted."""
        return b""


_NOTHING: IO[bytes] = _Nothing()  # type: ignore[assignment]

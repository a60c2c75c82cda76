"""Fetch a registered data set from its public mirror: resumed after a break, checked, unpacked, put in place whole."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from shortlist._version import __version__
from shortlist.data.archives import is_archive, unpack
from shortlist.data.registry import DataSetInfo, Source, find
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import atomic_directory, write_json

_log = logging.getLogger(__name__)
_BLOCK = 1 << 18
_IDLE_ATTEMPTS = 3
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def download(
    name: str,
    *,
    root: str | os.PathLike[str],
    url: str | None = None,
    md5: str | None = None,
    timeout: float = 30.0,
) -> Path:
    """Fetch data set `name` and return its folder, `root/name`; one that is there already is left as it is.

    A transfer that broke off is continued where it stopped (HTTP Range), also by a later call; a server that cannot
    is asked from the start. A file that was fetched elsewhere and put into `root` is used without a network.

    Args:
        name: a name of the registry (`shortlist.data.registry.REGISTRY`).
        root: folder for data sets.
        url: another mirror of the data set's first file; the known checksum still has to match.
        md5: the checksum to expect of the first file, instead of the registry's.
        timeout: seconds without an answer after which the connection counts as lost.

    Raises:
        ConfigError: no such name, or a URL that is not http(s).
        MissingInputError: no network, no such file on the server, or no public mirror; says what to do by hand.
        DataError: wrong checksum (the file is kept as `.bad`), not an archive, or an unsafe one.
    """
    info = find(name)
    if "/" in info.name:
        # A member of a union shares its archive: fetch the union, return the member's folder.
        union, member = info.name.split("/", 1)
        return download(union, root=root, url=url, md5=md5, timeout=timeout) / member
    folder = Path(root) / info.name
    if folder.is_dir() and any(folder.iterdir()):
        _log.info("%s is there already; delete the folder to fetch it again.", folder)
        return folder
    sources = _sources(info, url, md5)
    folder.parent.mkdir(parents=True, exist_ok=True)
    files = [(source, _fetched(info, source, Path(root), timeout)) for source in sources]
    with atomic_directory(folder) as temporary:
        for source, file in files:
            _install(source, file, temporary)
    for _, file in files:
        file.unlink()
    return folder


def file_name(info: DataSetInfo, source: Source) -> str:
    """Name under which a file of the data set is kept in the root folder until it is unpacked."""
    base = PurePosixPath(urlsplit(source.url).path).name
    stem = info.name.replace("/", "-")
    if source.target:
        return f"{stem}.{source.target}"
    return base if base.endswith((".zip", ".tar.gz", ".tgz", ".tar")) else f"{stem}.zip"


def _sources(info: DataSetInfo, url: str | None, md5: str | None) -> tuple[Source, ...]:
    if url is not None and urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"cannot download from {url!r}; expected an address that starts with http:// or https://.")
    if url is None and not info.sources:
        raise MissingInputError(f"{info.name} has no public mirror. {info.notes}")
    first = info.sources[0] if info.sources else Source(url or "")
    first = Source(url or first.url, md5 or first.md5, first.target)
    return (first, *info.sources[1:])


def _fetched(info: DataSetInfo, source: Source, root: Path, timeout: float) -> Path:
    """The complete, checked file of `source` in `root`."""
    file = root / file_name(info, source)
    if not file.exists():
        try:
            _transfer(source.url, file, timeout)
        except urllib.error.HTTPError as error:
            raise MissingInputError(
                f"{source.url} answered {error.code} {error.reason}. Give another mirror with --url, or "
                f"{_by_hand(info, source, file)}"
            ) from error
        except _NETWORK as error:
            reason = getattr(error, "reason", error)
            raise MissingInputError(
                f"no network, or {urlsplit(source.url).netloc} is down ({reason}): {info.name} was not downloaded. "
                f"With a network, run the command again; without one, {_by_hand(info, source, file)}"
            ) from error
    _check(file, source)
    return file


def _by_hand(info: DataSetInfo, source: Source, file: Path) -> str:
    return (
        f"fetch {source.url} on another machine and put it at {file}, then run the command again "
        f"(or unpack it yourself into {file.parent / info.name})."
    )


def _transfer(url: str, file: Path, timeout: float) -> None:
    """Download `url` to `file` through `file.part`, continuing what is there for as long as bytes keep coming."""
    part = file.with_name(file.name + ".part")
    idle = 0
    while True:
        before = _size(part)
        try:
            if _request(url, part, timeout):
                break
        except urllib.error.HTTPError:
            raise
        except _NETWORK:
            if _size(part) <= before:
                raise
        idle = 0 if _size(part) > before else idle + 1
        if idle == _IDLE_ATTEMPTS:
            raise ConnectionError(f"the server closed {url} early {idle} times at byte {_size(part)}")
        _log.warning("%s: the connection broke after %d bytes; continuing.", file.name, _size(part))
    os.replace(part, file)
    _state_file(part).unlink(missing_ok=True)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _request(url: str, part: Path, timeout: float) -> bool:
    """One request; appends to `part` and returns whether the file is complete."""
    state = _state(part, url)
    have = part.stat().st_size if state is not None else 0
    headers = {"User-Agent": f"shortlist/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if state and state.get("validator"):
            # The server answers with the whole file if it is no longer the one we began with.
            headers["If-Range"] = state["validator"]
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            error.close()
            if have == (state or {}).get("total"):
                return True
            part.unlink()
            return False
        raise
    with response:
        start, total = _extent(response, have)
        write_json(
            _state_file(part),
            {
                "url": url,
                "total": total,
                "validator": response.headers.get("ETag") or response.headers.get("Last-Modified"),
            },
        )
        with open(part, "ab" if start else "wb") as handle, _progress(part, start, total) as bar:
            while block := response.read(_BLOCK):
                handle.write(block)
                bar.update(len(block))
    return total is None or part.stat().st_size == total


def _extent(response: Any, have: int) -> tuple[int, int | None]:
    """First byte of the answer and total size of the file (None if the server does not say)."""
    length = response.headers.get("Content-Length")
    if response.status == 206:
        span = response.headers.get("Content-Range", "")
        first, _, total = span.removeprefix("bytes ").partition("/")
        if first.split("-")[0] == str(have):
            return have, int(total) if total.isdigit() else have + int(length or 0)
        raise ConnectionError(f"asked for bytes from {have}, the server sent {span!r}")
    return 0, int(length) if length is not None else None


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _state(part: Path, url: str) -> dict[str, Any] | None:
    """What is known about a partial file; None if there is none or it came from another address."""
    try:
        state = json.loads(_state_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if part.exists() and isinstance(state, dict) and state.get("url") == url else None


def _check(file: Path, source: Source) -> None:
    if source.md5 is None:
        _log.warning("no checksum is known for %s; its content was not verified.", file.name)
        return
    digest = hashlib.md5(usedforsecurity=False)
    with open(file, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != source.md5:
        bad = file.with_name(file.name + ".bad")
        os.replace(file, bad)
        raise DataError(
            f"{file.name}: expected MD5 {source.md5}, found {found}. The file was kept as {bad} and not installed; "
            "run the command again, or give another mirror with --url."
        )


def _install(source: Source, file: Path, folder: Path) -> None:
    if source.target:
        shutil.copyfile(file, folder / source.target)
    elif is_archive(file):
        unpack(file, folder)
    else:
        with open(file, "rb") as handle:
            start = handle.read(40)
        bad = file.with_name(file.name + ".bad")
        os.replace(file, bad)
        raise DataError(
            f"{source.url} sent neither a zip nor a tar archive (it starts with {start!r}); a mirror may answer with a "
            f"web page when it is busy. The file was kept as {bad}; run the command again later, or use --url."
        )


def _progress(part: Path, start: int, total: int | None) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total, initial=start, unit="B", unit_scale=True, desc=part.name.removesuffix(".part"), mininterval=0.5,
        disable=os.environ.get("SHORTLIST_QUIET") == "1" or not sys.stderr.isatty(),
    )  # fmt: skip

"""Reading text files line by line, strictly: UTF-8 only, lines end at a newline and nowhere else.

Compression is told by the first bytes (gzip, zstandard), not by the name; `-` is standard input. A JSON string may
hold U+2028 or U+0085 without the line being split there; a quote is a character like any other in tab-separated files.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from shortlist.errors import ConfigError, DataError, MissingExtraError, MissingInputError

logger = logging.getLogger(__name__)

_BLOCK = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
COMPRESSED_SUFFIXES = (".gz", ".zst")


class LineErrors:
    """What happens to a line that cannot be used: `fail` raises its error, `skip` counts it and goes on."""

    def __init__(self, policy: str = "fail", *, keep: int = 3):
        if policy not in ("fail", "skip"):
            raise ConfigError(f"on_error is {policy!r}; expected 'fail' or 'skip'.")
        self.policy = policy
        self.count = 0
        self.examples: list[str] = []
        self._keep = keep

    def handle(self, error: DataError) -> None:
        """Raise `error`, or count it and keep its sentence as one of the first examples."""
        if self.policy == "fail":
            raise error
        self.count += 1
        if len(self.examples) < self._keep:
            self.examples.append(str(error))


@contextlib.contextmanager
def open_binary(path: str | Path) -> Iterator[IO[bytes]]:
    """Open `path` (`-` for standard input) for reading bytes, decompressed if it is gzip or zstandard.

    Raises:
        MissingInputError: there is no such file, or it is a directory.
        MissingExtraError: the file is zstandard and the package `zstandard` is not installed.
        DataError: the compressed file is damaged or cut short.
    """
    with contextlib.ExitStack() as stack:
        if str(path) == "-":
            raw: Any = io.BufferedReader(sys.stdin.buffer, _BLOCK)  # type: ignore[arg-type]
            stack.callback(raw.detach)
        else:
            try:
                raw = stack.enter_context(open(path, "rb", buffering=_BLOCK))
            except (FileNotFoundError, NotADirectoryError):
                raise MissingInputError(f"{path} does not exist; check the path.") from None
            except IsADirectoryError:
                raise MissingInputError(f"{path} is a directory; a file is expected here.") from None
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise MissingInputError(f"{path} cannot be read: {reason}.") from None
        head = raw.peek(4)[:4]
        stream: Any = raw
        if head.startswith(_GZIP):
            stream = io.BufferedReader(stack.enter_context(gzip.GzipFile(fileobj=raw)), _BLOCK)  # type: ignore[arg-type]
        elif head.startswith(_ZSTD):
            stream = io.BufferedReader(_zstd_reader(raw, path), _BLOCK)
        try:
            yield stream
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(f"{path} is damaged or cut short ({error}); fetch or write it again.") from None


def read_lines(path: str | Path, *, errors: LineErrors | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its line end) for every line, blank ones included.

    A byte-order mark at the start and a carriage return before the newline are dropped. Bytes that are not UTF-8 raise
    DataError with file and line, or are counted as a skipped line by `errors`.
    """
    with open_binary(path) as handle:
        yield from decode_lines(path, handle, errors=errors)


def decode_lines(
    path: str | Path, lines: Iterable[bytes], *, first: int = 1, errors: LineErrors | None = None
) -> Iterator[tuple[int, str]]:
    """What `read_lines` yields, of `lines` that stand in the file from line `first` on."""
    errors = errors or LineErrors()
    for number, line in enumerate(lines, first):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            errors.handle(_not_utf8(path, number, line, error))
            continue
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text.endswith("\n"):
            text = text[:-2] if text.endswith("\r\n") else text[:-1]
        yield number, text


def read_blocks(path: str | Path, *, size: int = 1 << 22) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, bytes) of blocks of whole lines, for readers that parse many lines at once.

    The byte-order mark and carriage returns before a newline are dropped, and the last line gets its newline.
    """
    number, rest = 1, [b""]
    with open_binary(path) as handle:
        while data := handle.read(size):
            if number == 1 and len(rest) == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            lines, newline, tail = data.rpartition(b"\n")
            if newline:
                block = b"".join([*rest, lines, newline]).replace(b"\r\n", b"\n")
                yield number, block
                number, rest = number + block.count(b"\n"), [b""]
            rest.append(tail)
    if last := b"".join(rest):
        yield number, (last + b"\n").replace(b"\r\n", b"\n")


def read_json_lines(
    path: str | Path, *, expected: str = "one JSON object a line", errors: LineErrors | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (line number, parsed value) for every non-blank line of a JSON-lines file.

    `expected` ends the sentence about a broken line: what a line of this kind of file looks like.
    """
    errors = errors or LineErrors()
    for number, text in read_lines(path, errors=errors):
        if not text or text.isspace():
            continue
        try:
            value = parse_json(path, number, text, expected)
        except DataError as error:
            errors.handle(error)
            continue
        yield number, value


def parse_json(path: str | Path, number: int, text: str, expected: str) -> Any:
    """The JSON value of one line; DataError with file, line, reason and what was `expected`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(path, number, text, error, expected) from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(
                f"{path}, line {number}: {_surrogate_field(value)}not valid Unicode text: half of a surrogate pair "
                "(such as \\ud83d alone) is no character; write the line again with whole characters."
            ) from None
    return value


def shown(value: Any, *, limit: int = 60) -> str:
    """A parsed value as it stands in a JSON file, cut for a message."""
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def read_tab_separated(
    path: str | Path, columns: Sequence[int], *, expected: str, errors: LineErrors | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of a tab-separated file without quoting; every line has one of `columns` fields.

    Blank lines are passed over. Raises DataError with file, line and the number of fields found.
    """
    errors = errors or LineErrors()
    for number, text in read_lines(path, errors=errors):
        fields = text.split("\t")
        if len(fields) in columns:
            yield number, fields
        elif text and not text.isspace():
            errors.handle(
                DataError(
                    f"{path}, line {number}: {len(fields)} tab-separated field{'s' * (len(fields) != 1)}; "
                    f"expected {expected}."
                )
            )


def first_line(path: str | Path) -> str:
    """The first non-blank line of a file ('' if there is none), to tell what the file holds."""
    for _, text in read_lines(path):
        if text and not text.isspace():
            return text
    return ""


def find_file(folder: Path, stem: str) -> Path | None:
    """`folder/stem`, or with a compression suffix, whichever exists; None if none does."""
    for suffix in ("", *COMPRESSED_SUFFIXES):
        candidate = folder / f"{stem}{suffix}"
        if candidate.is_file():
            return candidate
    return None


def bare_name(path: Path) -> str:
    """File name without a compression suffix."""
    return path.name.removesuffix(".gz").removesuffix(".zst")


def examples(values: Sequence[str], limit: int = 3) -> str:
    """Up to `limit` of `values` for a message: `'a', 'b', 'c', …`."""
    shown = ", ".join(repr(value) for value in list(values)[:limit])
    return f"{shown}, …" if len(values) > limit else shown


def _zstd_reader(raw: Any, path: str | Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError(
            f"{path} is compressed with zstandard; pip install zstandard, or compress the file with gzip instead."
        ) from None

    class _Reader(io.RawIOBase):
        """Frames one after the other as a raw stream; a last frame that is cut short is an error, not an end."""

        def __init__(self) -> None:
            self._frame: Any = None
            self._rest = b""
            self._ready = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while not self._ready:
                block = self._rest or raw.read(_BLOCK)
                if not block:
                    if self._frame is not None:
                        raise EOFError("the last zstandard frame has no end")
                    return 0
                if self._frame is None:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    self._ready = self._frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise DataError(f"{path} is damaged ({error}); fetch or write it again.") from None
                self._rest = self._frame.unused_data
                if self._frame.eof:
                    self._frame = None
            size = min(len(buffer), len(self._ready))
            buffer[:size], self._ready = self._ready[:size], self._ready[size:]
            return size

    return _Reader()


def _surrogate_field(value: Any) -> str:
    """`"field" is `: the first field of a record with a lone surrogate in it; empty for a value that is no record."""
    for name, content in value.items() if isinstance(value, dict) else ():
        try:
            json.dumps([name, content], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return f"{json.dumps(name)} is "
    return ""


def _not_utf8(path: str | Path, number: int, line: bytes, error: UnicodeDecodeError) -> DataError:
    if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return DataError(f"{path} is UTF-16; expected UTF-8: convert it (iconv -f UTF-16 -t UTF-8) and try again.")
    return DataError(
        f"{path}, line {number}: byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8; "
        "if the file is Latin-1, convert it (iconv -f LATIN1 -t UTF-8) and try again."
    )


def _not_json(path: str | Path, number: int, text: str, error: Exception, expected: str) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at character {error.pos + 1}"
    else:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
    hint = ""
    if number == 1 and text.strip() in ("[", "{"):
        hint = " The file looks like one JSON value over many lines; write one record a line."
    return DataError(f"{path}, line {number}: not valid JSON ({reason}); expected {expected}.{hint}")

"""Encoding a corpus to a directory of shards: bounded memory, several processes, restartable to the same bytes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from shortlist.errors import ConfigError
from shortlist.files import reserve
from shortlist.retrieval.engine import (
    WINDOW,
    EncodingCounts,
    Forward,
    ahead,
    encode_stream,
    encode_texts,
    progress_bar,
)
from shortlist.retrieval.store import VectorStore, begin
from shortlist.retrieval.tokens import Tokens

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder

__all__ = ["EncodingCounts", "VectorStore", "encode_corpus", "encode_stream", "encode_texts"]

logger = logging.getLogger(__name__)

# Four windows: small enough that a restart of a slow model loses minutes.
SHARD_SIZE = 4 * WINDOW


class TextSource(Protocol):
    """What can be encoded: a Corpus, or anything with its length, ids, texts and fingerprint."""

    @property
    def ids(self) -> Sequence[str]:
        """All ids; slices are taken of it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        ...

    def __len__(self) -> int: ...

    def texts(self, template: str | None = None, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The texts of rows `start` to `stop`."""
        ...


def encode_corpus(
    encoder: DualEncoder,
    corpus: TextSource,
    output_dir: str | os.PathLike[str],
    *,
    side: str = "document",
    shard_size: int | None = None,
    shard: tuple[int, int] | None = None,
    processes: int = 1,
    batch_tokens: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    show_progress: bool | None = None,
) -> VectorStore:
    """Write the vectors of `corpus` to `output_dir` as shards; finished shards of an earlier, equal call are kept.

    The vectors of a shard depend on its texts and the settings alone, so that a run that was killed and started
    again ends with the bytes of one that was not (on one machine, with the same number of threads).

    Args:
        encoder: a dual encoder.
        corpus: the documents (or queries).
        output_dir: directory of `manifest.json`, `vectors-*.npy`, `ids-*.json`.
        side: "document" or "query".
        shard_size: vectors a file.
        shard: (i, n) writes only the i-th of n parts, i from 1; all parts may share one directory, or their files be
            copied into one.
        processes: worker processes, each with its own copy of the model.
        batch_tokens: tokens of one forward pass, padding included.
        resume: go on with what is there; False refuses an existing directory.
        overwrite: delete what is there.
        show_progress: a progress bar; by default if stderr is a terminal.

    Raises:
        OutputExistsError, ConfigError: see `begin`.
        NonFiniteError: a vector has a NaN or infinity.
        ShortlistError: a worker process died or failed.
    """
    if processes < 1:
        raise ConfigError(f"processes is {processes}; expected at least 1.")
    forward = Forward(encoder, side, batch_tokens=batch_tokens)
    part, parts = check_part(shard)
    identity = store_identity(
        encoder, corpus, side, device=encoder.device.type, dtype=encoder.dtype, batch_tokens=forward.budget,
        shard_size=shard_size or default_shard_size(len(corpus), parts if parts > 1 else processes),
    )  # fmt: skip
    store = begin(output_dir, identity, overwrite=overwrite, resume=resume)

    def run(todo: Sequence[int], counts: EncodingCounts, done: Callable[[int], Any]) -> None:
        if min(processes, len(todo)) > 1:
            from shortlist.retrieval.workers import encode_in_processes

            encode_in_processes(
                encoder, corpus, store, todo, min(processes, len(todo)), counts, done, batch_tokens=batch_tokens
            )
        else:
            for _, shard_counts in encode_shards(forward, corpus, store, todo, done=done):
                counts.merge(shard_counts)

    fill(store, (part, parts), run, max_length=forward.max_length, show_progress=show_progress)
    return store


def check_part(shard: tuple[int, int] | None) -> tuple[int, int]:
    """(i, n) of a part, (1, 1) for None. Raises ConfigError unless 1 <= i <= n."""
    part, parts = shard or (1, 1)
    if not 1 <= part <= parts:
        raise ConfigError(f"shard is {part}/{parts}; expected i/n with i from 1 to n, such as 1/4.")
    return part, parts


def default_shard_size(count: int, split: int) -> int:
    """Texts of a shard: `SHARD_SIZE`, or fewer where `split` workers would otherwise have none each."""
    return max(1, min(SHARD_SIZE, -(-count // split)))


def store_identity(
    encoder: DualEncoder,
    corpus: TextSource,
    side: str,
    *,
    device: str,
    dtype: torch.dtype,
    batch_tokens: int,
    shard_size: int,
) -> dict[str, Any]:
    """What decides the bytes of a directory of vectors: a directory is only gone on with under the same identity."""
    return {
        "count": len(corpus),
        "dim": encoder.dim,
        "side": side,
        "fingerprint": encoder.fingerprint,
        **{key: value for key, value in encoder.settings().items() if key != "dim"},
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "batch_tokens": batch_tokens,
        "corpus": corpus.fingerprint,
        "shard_size": shard_size,
    }


def fill(
    store: VectorStore,
    shard: tuple[int, int],
    run: Callable[[Sequence[int], EncodingCounts, Callable[[int], Any]], None],
    *,
    max_length: int | None,
    show_progress: bool | None,
) -> None:
    """Have `run(missing shards, counts, progress)` write what part i of n of `store` lacks, and tell what it did."""
    part, parts = shard
    numbers = range(store.num_shards * (part - 1) // parts, store.num_shards * part // parts)
    todo = [number for number in numbers if not store.has(number)]
    total = sum(stop - start for start, stop in map(store.span, numbers))
    finished = total - sum(stop - start for start, stop in map(store.span, todo))
    what = "queries" if store.manifest["side"] == "query" else "documents"
    if finished:
        rest = "going on with the rest" if todo else "nothing is left to do"
        logger.info("%s of %s %s were encoded before; %s", f"{finished:,}", f"{total:,}", what, rest)
    counts = EncodingCounts()
    started = time.perf_counter()
    with progress_bar(total, what, show_progress, initial=finished) as bar:
        run(todo, counts, bar.update)
    counts.seconds = time.perf_counter() - started
    if counts.texts:
        counts.report(what, max_length)


def encode_shards(
    forward: Forward,
    corpus: TextSource,
    store: VectorStore,
    numbers: Sequence[int],
    *,
    done: Callable[[int], Any] | None = None,
) -> Iterator[tuple[int, EncodingCounts]]:
    """Write the shards `numbers` one after the other; yields each with its counts as it is finished.

    The tokeniser works ahead across the shards. A shard appears under its name when it is whole.
    """

    def windows() -> Iterator[tuple[int, int, Tokens]]:
        for number in numbers:
            first, stop = store.span(number)
            for start in range(first, stop, WINDOW):
                end = min(start + WINDOW, stop)
                texts = list(corpus.texts(forward.encoder.template, start, end))
                yield number, start, forward.tokens(texts, corpus.ids[start:end])

    target: np.memmap[Any, Any] | None = None
    counts = EncodingCounts()
    temporary = None
    try:
        for number, start, tokens in ahead(windows()):
            first, stop = store.span(number)
            if target is None:
                counts = EncodingCounts()
                store.clear(number)
                file = store.vectors_file(number)
                temporary = file.with_name(f".{os.getpid()}.tmp.{file.name}")
                target = np.lib.format.open_memmap(temporary, "w+", np.float32, (stop - first, store.dim))
                reserve(temporary, shown=file)
            ids = corpus.ids[start : start + len(tokens)]
            counts.add(tokens, ids)
            block = target[start - first : start - first + len(tokens)]
            forward.vectors(tokens, block, ids=ids, done=done)
            if start + len(tokens) == stop and temporary is not None:
                store.write_ids(number, corpus.ids[first:stop])
                target.flush()
                target = None
                os.replace(temporary, store.vectors_file(number))
                yield number, counts
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                temporary.unlink()

"""Encoding in several processes: a worker that fails or dies is reported, the parent never waits for ever."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shortlist.errors import ShortlistError
from shortlist.retrieval.encode import TextSource, encode_shards
from shortlist.retrieval.engine import EncodingCounts, Forward
from shortlist.retrieval.store import VectorStore

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder


def encode_in_processes(
    encoder: DualEncoder,
    corpus: TextSource,
    store: VectorStore,
    todo: Sequence[int],
    processes: int,
    counts: EncodingCounts,
    done: Callable[[int], Any],
    *,
    batch_tokens: int | None,
) -> None:
    """Write the shards `todo` of `store` with `processes` workers, each taking the next one when it is free.

    Raises ShortlistError if a worker fails or dies, naming the shard and the cause; finished shards stay.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // processes)
    waiting = list(reversed(todo))
    with tempfile.TemporaryDirectory(prefix="shortlist-model-") as temporary:
        model = encoder.save_pretrained(Path(temporary) / "model")
        workers: dict[Connection, Any] = {}
        busy: dict[Connection, int] = {}
        try:
            for rank in range(processes):
                device = str(encoder.device)
                if encoder.device.type == "cuda":
                    device = f"cuda:{rank % torch.cuda.device_count()}"
                ours, theirs = context.Pipe()
                side = str(store.manifest["side"])
                settings = (str(model), device, encoder.dtype_setting, side, batch_tokens, threads)
                worker = context.Process(target=_work, args=(theirs, corpus, store, settings), daemon=True)
                worker.start()
                # With our copy closed, the death of the worker is the end of the pipe.
                theirs.close()
                workers[ours] = worker
                _assign(ours, waiting, busy)
            while busy:
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    _receive(connection, workers[connection], store, waiting, busy, counts, done)
        finally:
            for connection, worker in workers.items():
                connection.close()
                if worker.is_alive() and busy:
                    worker.terminate()
                worker.join()


def _assign(connection: Connection, waiting: list[int], busy: dict[Connection, int]) -> None:
    number = waiting.pop() if waiting else None
    if number is None:
        busy.pop(connection, None)
    else:
        busy[connection] = number
    # A worker that is dead already is found by the next receive.
    with suppress(BrokenPipeError):
        connection.send(number)


def _receive(
    connection: Connection,
    worker: Any,
    store: VectorStore,
    waiting: list[int],
    busy: dict[Connection, int],
    counts: EncodingCounts,
    done: Callable[[int], Any],
) -> None:
    number = busy[connection]
    first, stop = store.span(number)
    where = f"while encoding shard {number} (rows {first:,} to {stop - 1:,})"
    try:
        kind, value = connection.recv()
    except (EOFError, ConnectionResetError):
        worker.join(10)
        raise ShortlistError(
            f"a worker process ended with exit code {worker.exitcode} {where}; -9 usually means too little memory: use "
            "fewer processes or a smaller batch_tokens. A script that calls this needs "
            '`if __name__ == "__main__":` around it. Finished shards are kept; run the same command to go on.'
        ) from None
    if kind == "progress":
        done(value)
    elif kind == "finished":
        counts.merge(value)
        _assign(connection, waiting, busy)
    else:
        raise ShortlistError(f"a worker process failed {where}: {value}")


def _work(connection: Connection, corpus: TextSource, store: VectorStore, settings: tuple[Any, ...]) -> None:
    """Body of a worker: open the model, write the shards it is told to, report; ends when told None."""
    from shortlist.retrieval.dual_encoder import DualEncoder

    model, device, dtype, side, batch_tokens, threads = settings
    try:
        torch.set_num_threads(threads)
        encoder = DualEncoder.from_pretrained(model, device=device, dtype=dtype)
        if encoder.fingerprint != store.fingerprint:
            raise ShortlistError(f"the copy of the model has the fingerprint {encoder.fingerprint}.")
        forward = Forward(encoder, side, batch_tokens=batch_tokens)
        while (number := connection.recv()) is not None:
            for _, counts in encode_shards(
                forward, corpus, store, [number], done=lambda count: connection.send(("progress", count))
            ):
                connection.send(("finished", counts))
    except (EOFError, BrokenPipeError):
        # The parent is gone: nobody to report to.
        return
    except Exception as error:  # every failure becomes the parent's
        with suppress(BrokenPipeError):
            connection.send(("failed", f"{type(error).__name__}: {error}"))

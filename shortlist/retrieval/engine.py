"""The encoding engine: sorted by length, packed to a token budget, tokenised ahead, checked, in input order."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm.auto import tqdm

from shortlist.errors import ConfigError, DataError, NonFiniteError, ShortlistError
from shortlist.retrieval.document_vectors import DocumentVectors, TextAndVectors
from shortlist.retrieval.tokens import Tokens

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder

logger = logging.getLogger(__name__)

# Texts that are tokenised and sorted together. Part of the result's identity: it decides the batches.
WINDOW = 4096

T = TypeVar("T")
Id = TypeVar("Id")


@dataclass
class EncodingCounts:
    """What one encoding did, for its summary line and for manifests."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    longest: int = 0
    seconds: float = 0.0
    # Documents that a model with document vectors has none for, and the first ids of them.
    zero_shot: int = 0
    examples: list[object] = field(default_factory=list)

    def add(self, tokens: Tokens, ids: Sequence[object] = ()) -> None:
        """Count the texts of one window; `ids` are their names."""
        if tokens.rows is not None:
            unknown = np.flatnonzero(tokens.rows < 0)
            self.zero_shot += len(unknown)
            self.examples = [*self.examples, *(ids[position] for position in unknown[:3].tolist())][:3]
        if len(tokens):
            self.texts += len(tokens)
            self.tokens += int(tokens.lengths.sum())
            self.truncated += int((tokens.full_lengths > tokens.lengths).sum())
            self.longest = max(self.longest, int(tokens.full_lengths.max()))

    def merge(self, other: EncodingCounts) -> None:
        """Add what another process counted; the seconds of both ran at once."""
        self.texts += other.texts
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.longest = max(self.longest, other.longest)
        self.seconds = max(self.seconds, other.seconds)
        self.zero_shot += other.zero_shot
        self.examples = [*self.examples, *other.examples][:3]

    def report(self, what: str, max_length: int | None) -> None:
        """Log the one line of this encoding: a warning if texts were truncated; and zero-shot documents, if any."""
        rate = self.texts / self.seconds if self.seconds > 0 else 0.0
        line = f"encoded {self.texts:,} {what} ({self.tokens:,} tokens) in {self.seconds:.1f} s, {rate:,.0f} a second; "
        if self.truncated:
            logger.warning(
                "%s%s truncated to %s tokens (the longest has %s)",
                line, f"{self.truncated:,}", max_length, f"{self.longest:,}",
            )  # fmt: skip
        else:
            # A single query that fits is not worth a line.
            level = logging.INFO if self.texts > 1 else logging.DEBUG
            logger.log(level, "%snone truncated (the longest has %s tokens)", line, f"{self.longest:,}")
        if self.zero_shot:
            logger.warning(
                "%s of %s documents have no vector of their own in this model and are their encoded text alone "
                "(zero-shot), such as %s",
                f"{self.zero_shot:,}", f"{self.texts:,}", ", ".join(map(repr, self.examples)),
            )  # fmt: skip


class Forward:
    """Turns windows of texts of one side into vectors; the same texts in a window give the same bytes.

    Args:
        encoder: whose tower, prompt and length limit are used.
        side: "query" or "document".
        batch_tokens: bound on texts × longest of one forward pass; None chooses by device.
    """

    def __init__(self, encoder: DualEncoder, side: str, *, batch_tokens: int | None = None):
        if batch_tokens is not None and batch_tokens < 1:
            raise ConfigError(f"batch_tokens is {batch_tokens}; expected at least 1.")
        self.encoder = encoder
        self.side = side
        self.tower = encoder.query_tower if side == "query" else encoder.document_tower
        self.max_length = encoder.query_max_length if side == "query" else encoder.doc_max_length
        self.device = encoder.device
        self.dtype = encoder.dtype
        self.budget = batch_tokens or default_batch_tokens(self.device)

    def tokens(self, texts: Sequence[str], ids: Sequence[Any] | None = None) -> Tokens:
        """Token ids of `texts`, prompt added, truncated.

        `ids` name the documents to a model with document vectors, and are not looked at by others.

        Raises:
            DataError: such a model and no ids; or one that has no vector for a document and cannot do without.
        """
        by_row = self.tower if isinstance(self.tower, DocumentVectors | TextAndVectors) else None
        rows = None if by_row is None else by_row.rows_of(_as_ids(ids))
        prompted = self.encoder.with_prompt(list(texts), self.side)
        try:
            tokens = self.tower.tokens(prompted, max_length=self.max_length)
            return tokens if rows is None else tokens.at_rows(rows)
        except (TypeError, UnicodeEncodeError):
            # What a tokenizer says of a str that is not Unicode text.
            _refuse_surrogates(texts)
            raise

    def vectors(
        self,
        tokens: Tokens,
        out: NDArray[np.float32],
        *,
        ids: Sequence[object] | None = None,
        done: Callable[[int], object] | None = None,
    ) -> None:
        """Fill `out` `(texts, dim)` with the vectors of `tokens`, in their order.

        Args:
            tokens: one window.
            out: an array or memory map that takes the rows as they come.
            ids: what to call the texts in an error.
            done: called with the number of texts of every finished batch.

        Raises:
            NonFiniteError: a vector has a NaN or infinity; names the text and the layer where it began.
        """
        training = self.tower.training
        self.tower.eval()
        try:
            pending: tuple[NDArray[np.int64], torch.Tensor] | None = None
            for rows in self._batches(tokens):
                launched = (rows, self._run(tokens, rows))
                # The copy of a batch to the host waits for it: the next one is on its way by then.
                if pending is not None:
                    self._store(tokens, pending, out, ids, done)
                pending = launched
            if pending is not None:
                self._store(tokens, pending, out, ids, done)
        finally:
            self.tower.train(training)

    def _batches(self, tokens: Tokens) -> Iterator[NDArray[np.int64]]:
        """Rows of each batch: longest first, so that a batch too large for the memory fails at once."""
        lengths = tokens.lengths
        if self.tower.sort_by_length:
            order = np.argsort(-lengths, kind="stable")
        else:
            order = np.arange(len(lengths))
        start = 0
        while start < len(order):
            if self.tower.sort_by_length:
                count = max(1, self.budget // max(1, int(lengths[order[start]])))
            else:
                count = len(order)
            yield order[start : start + count]
            start += count

    def _run(self, tokens: Tokens, rows: NDArray[np.int64]) -> torch.Tensor:
        """Vectors of `rows` on the device; halves the batch, and later ones, if the memory is not enough."""
        try:
            batch = tokens if len(rows) == len(tokens) and not self.tower.sort_by_length else tokens.take(rows)
            with torch.inference_mode():
                return self.tower.vectors(self.tower.collate(batch, device=self.device), dtype=self.dtype)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            if len(rows) == 1:
                raise ShortlistError(
                    f"not enough memory on {self.device} for one text of {int(tokens.lengths[rows[0]])} tokens; "
                    f"lower {'query' if self.side == 'query' else 'doc'}_max_length, or use another device."
                ) from error
        # Outside the handler: its traceback holds the tensors of the failed pass.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.budget = max(1, len(rows) // 2 * int(tokens.lengths[rows].max()))
        logger.warning("out of memory on %s: batch_tokens lowered to %s", self.device, f"{self.budget:,}")
        half = len(rows) // 2
        return torch.cat([self._run(tokens, rows[:half]), self._run(tokens, rows[half:])])

    def _store(
        self,
        tokens: Tokens,
        batch: tuple[NDArray[np.int64], torch.Tensor],
        out: NDArray[np.float32],
        ids: Sequence[object] | None,
        done: Callable[[int], object] | None,
    ) -> None:
        rows, result = batch
        vectors = result.float().cpu().numpy()
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            position = int(rows[np.flatnonzero(~finite)[0]])
            self._refuse(tokens, position, repr(ids[position]) if ids is not None else str(position))
        out[rows] = vectors
        if done is not None:
            done(len(rows))

    def _refuse(self, tokens: Tokens, position: int, label: str) -> None:
        """Raise NonFiniteError for the text at `position`, after finding the module where it went wrong."""
        features = self.tower.collate(tokens.take([position]), device=self.device)
        found: list[str] = []
        handles = []

        def watch(module_name: str) -> Callable[..., None]:
            def look(module: nn.Module, inputs: object, output: object) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, torch.Tensor) and first.is_floating_point() and not torch.isfinite(first).all():
                    found.append(module_name)

            return look

        module = self.tower.inference_module(self.dtype)
        for module_name, part in module.named_modules():
            if module_name and not list(part.children()):
                handles.append(part.register_forward_hook(watch(module_name)))
        try:
            with torch.inference_mode():
                self.tower.vectors(features, dtype=self.dtype)
        finally:
            for handle in handles:
                handle.remove()
        weights = chain(module.named_parameters(), self.tower.named_parameters())
        weight = next((n for n, p in weights if not torch.isfinite(p).all()), None)
        kind = str(self.dtype).removeprefix("torch.")
        if weight is not None:
            cause = f"the weight {weight} of the model is not finite: the checkpoint is broken, or training diverged"
        elif self.dtype == torch.float16:
            cause = "float16 overflows above 65,504: use dtype bfloat16 or float32"
        else:
            cause = "look at this layer and at the text"
        where = f", first in the layer {found[0]}" if found else ""
        raise NonFiniteError(
            f"the vector of {self.side} {label} has a NaN or an infinity{where} ({kind} on {self.device}); {cause}."
        )


def _as_ids(ids: Sequence[Any] | None) -> Sequence[str]:
    # Positions in a list are no ids: "0" could be another document's.
    if ids is None or not all(isinstance(id, str) for id in ids):
        raise DataError(
            "this model has a vector for each document it was trained with and knows them by their ids; pass a mapping "
            "id → text in place of texts alone."
        )
    return ids


def _refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise DataError for the first text that cannot be written as UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"the text {text!r:.60} holds half of a surrogate pair (such as \\ud83d alone), which is no character; "
                "clean it first."
            ) from None


def default_batch_tokens(device: torch.device) -> int:
    """Tokens of one forward pass: activations that stay in a CPU's cache, or enough to fill a GPU."""
    return 65_536 if device.type == "cuda" else 4_096


def encode_texts(
    encoder: DualEncoder,
    texts: Sequence[str],
    *,
    side: str = "document",
    ids: Sequence[str] | None = None,
    batch_tokens: int | None = None,
    show_progress: bool | None = None,
) -> NDArray[np.float32]:
    """Vectors `(texts, dim)` in float32, in input order; `ids` name the texts in errors."""
    out = np.zeros((len(texts), encoder.dim), np.float32)
    names = ids if ids is not None else range(len(texts))
    items = zip(names, texts, strict=True)
    start = 0
    for part, vectors in encode_stream(
        encoder, items, side=side, total=len(texts), batch_tokens=batch_tokens, show_progress=show_progress
    ):
        out[start : start + len(part)] = vectors
        start += len(part)
    return out


def encode_stream(
    encoder: DualEncoder,
    items: Iterable[tuple[Id, str]],
    *,
    side: str = "document",
    total: int | None = None,
    batch_tokens: int | None = None,
    show_progress: bool | None = None,
) -> Iterator[tuple[list[Id], NDArray[np.float32]]]:
    """Ids and vectors `(texts, dim)` of (id, text) pairs, window by window, in order; memory does not grow."""
    forward = Forward(encoder, side, batch_tokens=batch_tokens)
    counts = EncodingCounts()
    source = iter(items)

    def windows() -> Iterator[tuple[list[Id], Tokens]]:
        while window := list(islice(source, WINDOW)):
            ids = [id for id, _ in window]
            yield ids, forward.tokens([text for _, text in window], ids)

    started = time.perf_counter()
    # One window has nothing to overlap with: no thread for it.
    alone = total is not None and total <= WINDOW
    what = "queries" if side == "query" else "documents"
    with progress_bar(total, what, show_progress) as bar:
        for ids, tokens in windows() if alone else ahead(windows()):
            counts.add(tokens, ids)
            vectors = np.zeros((len(ids), encoder.dim), np.float32)
            forward.vectors(tokens, vectors, ids=ids, done=bar.update)
            yield ids, vectors
    counts.seconds = time.perf_counter() - started
    if counts.texts:
        counts.report(what, forward.max_length)


def ahead(items: Iterable[T], *, depth: int = 2) -> Iterator[T]:
    """Yield `items`, computed by a background thread at most `depth` ahead; its exceptions are raised here."""
    ready: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(entry: tuple[str, object]) -> bool:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(("item", item)):
                    return
            put(("end", None))
        except BaseException as error:  # handed to the consumer, which raises it
            put(("error", error))

    thread = threading.Thread(target=work, name="shortlist-tokenise", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "end":
                return
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()


def progress_bar(total: int | None, what: str, show: bool | None = None, *, initial: int = 0) -> tqdm:
    """A bar with rate and time left on stderr; off by default where nobody watches (no terminal, --quiet)."""
    if show is None:
        show = sys.stderr.isatty() and os.environ.get("SHORTLIST_QUIET") != "1"
    return tqdm(
        total=total, initial=initial, desc=f"encode {what}", unit=" texts", unit_scale=total is None or total > 100_000,
        disable=not show, mininterval=0.5, smoothing=0.1, file=sys.stderr,
    )  # fmt: skip


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text

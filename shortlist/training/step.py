"""One batch from features to the loss, and what is said when it does not fit into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.training.batches import Pairs
from shortlist.training.gradcache import embed
from shortlist.training.objective import Objective


class PairEncoder(Protocol):
    """A model of two sides; shortlist.retrieval.DualEncoder is one."""

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights."""
        ...

    def embed_queries(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(queries, dim)` with gradients."""
        ...

    def embed_documents(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(docs, dim)` with gradients."""
        ...


class OutOfMemoryError(ShortlistError, MemoryError):
    """A training step does not fit into the memory of the machine or the accelerator."""


def batch_loss(
    encoder: PairEncoder,
    objective: Objective,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Tensor:
    """The loss of a batch, with both sides encoded micro-batch by micro-batch through the gradient cache.

    Args:
        encoder: the model.
        objective: vectors and batch → loss.
        batch: what shortlist.training.batches.BatchBuilder makes; features stay where they are until their
            micro-batch is encoded.
        device: of the model.
        autocast: makes the context in which the encoder runs.
    """
    device = torch.device(device)
    moved = {name: _moved(value, device) for name, value in batch.items() if name not in ("queries", "documents")}
    with autocast():
        queries = _vectors(encoder.embed_queries, batch["queries"], encoder, device)
        documents = _vectors(encoder.embed_documents, batch["documents"], encoder, device)
    return objective(queries, documents, moved)


def _vectors(
    encode: Callable[[dict[str, Tensor]], Tensor],
    chunks: Sequence[dict[str, Tensor]],
    encoder: PairEncoder,
    device: torch.device,
) -> Tensor:
    """Vectors `(texts, dim)` of one side; none where this process has no part of a small batch."""
    if not chunks:
        # Vectors are float32 whatever the weights are, but for weights finer than that.
        double = next(encoder.parameters()).dtype == torch.float64
        return torch.zeros(0, encoder.dim, device=device, dtype=torch.float64 if double else torch.float32)

    def of(features: dict[str, Tensor]) -> Tensor:
        return encode({name: value.to(device, non_blocking=True) for name, value in features.items()})

    return embed(of, chunks, device=device)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | Pairs) else value


@contextlib.contextmanager
def memory_advice(*, step: int) -> Iterator[None]:
    """Turn running out of memory within a step into OutOfMemoryError, which names the settings that bound it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        wanted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if isinstance(error, ShortlistError) or not (wanted or "not enough memory" in text or "out of memory" in text):
            raise
        raise OutOfMemoryError(
            f"step {step} does not fit into memory ({text.splitlines()[0] if text else type(error).__name__}). "
            "training.micro_batch_size bounds the activations (texts encoded at once, by gradient cache) and "
            "training.score_memory the blocks of the score matrix (MiB): lower them; then training.batch_size, or the "
            "pool in data.negatives."
        ) from error

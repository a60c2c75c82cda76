"""From two sets of vectors to one number: scores in float32, divided by the temperature, through the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ConfigError, NonFiniteError


class Objective:
    """Scores `(queries, docs)` of a batch under a loss, optionally summed over truncated vectors.

    With `matryoshka` the loss is summed over vectors cut to each dimension (and normalised again if the similarity
    is cosine); the full dimension always takes part (Kusupati et al. 2022, equal weights).

    Args:
        loss: a module of shortlist.losses: loss(scores, positives, valid), or towards teacher scores.
        temperature: scores are divided by it.
        dim: length of the vectors.
        normalise: whether the similarity is cosine.
        matryoshka: further dimensions.

    Raises:
        ConfigError: a dimension above `dim`.
    """

    def __init__(
        self,
        loss: nn.Module,
        *,
        temperature: float,
        dim: int,
        normalise: bool,
        matryoshka: Sequence[int] | None = None,
    ):
        too_large = [size for size in matryoshka or () if size > dim]
        if too_large:
            raise ConfigError(f"training.matryoshka has {too_large[0]}, but the vectors have {dim} dimensions.")
        self.loss = loss
        self.temperature = temperature
        self.normalise = normalise
        self.dims = sorted({dim, *(matryoshka or ())}, reverse=True)
        self.teacher = getattr(loss, "target", "positives") == "teacher"

    def __call__(self, queries: Tensor, documents: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch, a float32 scalar with a graph back to the vectors.

        Args:
            queries: `(queries, dim)` vectors.
            documents: `(docs, dim)` vectors.
            batch: what shortlist.training.batches.BatchBuilder makes.
        """
        shape = (len(queries), len(documents))
        target = batch["positives"].dense(shape)
        target = target if bool((target > 1).any()) else target > 0
        valid = batch["valid"].mask(shape) if batch["valid"] is not None else None
        total: Tensor | None = None
        for size in self.dims:
            scores = self.scores(queries, documents, size)
            if self.teacher:
                judged = batch["teacher"].dense(shape, fill=float("nan"))
                keep = ~judged.isnan()
                value = self.loss(scores, judged, keep if valid is None else keep & valid, positives=target)
            else:
                value = self.loss(scores, target, valid)
            total = value if total is None else total + value
        return total if total is not None else queries.sum() * 0.0

    def scores(self, queries: Tensor, documents: Tensor, dim: int) -> Tensor:
        """Similarities of vectors cut to `dim`, over the temperature: float32 `(queries, docs)`."""
        # Half precision loses small differences of large scores: everything from here on is float32.
        with torch.autocast(queries.device.type, enabled=False):
            left, right = queries.float(), documents.float()
            if dim < left.shape[1]:
                left, right = left[:, :dim], right[:, :dim]
                if self.normalise:
                    left, right = functional.normalize(left, dim=-1), functional.normalize(right, dim=-1)
            return (left / self.temperature) @ right.T


def check_finite(loss: Tensor, *, step: int, dtype: str, temperature: float) -> None:
    """Raise NonFiniteError, with what usually helps, unless the loss is a finite number."""
    if bool(torch.isfinite(loss)):
        return
    if dtype == "float16":
        hint = "float16 overflows above 65,504: set training.dtype to bfloat16 or float32"
    else:
        hint = (
            f"lower training.learning_rate, set training.max_grad_norm to 1, raise training.temperature ({temperature})"
        )
    raise NonFiniteError(
        f"the loss of step {step} is {loss.item()}; training stops, the checkpoints written so far are good. "
        f"What usually helps: {hint}; then go on with a new output, or --resume after the change is undone."
    )

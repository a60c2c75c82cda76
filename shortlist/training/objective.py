"""From two sets of vectors to one number: scores in float32, divided by the temperature, through the loss.

Losses that need only statistics of the rows (`blockwise`: shortlist.losses.RankingLoss) never see the whole score
matrix: it is made and used block by block within a budget, and over several processes each holds its columns only.
Other losses (towards a teacher, on lists, a module of the user's own) get the matrix; over several processes every one
makes it whole, and back-propagates to its own vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ConfigError, NonFiniteError
from shortlist.losses import Shard, pool_loss
from shortlist.training import distributed
from shortlist.training.checkpoints import checkpoint_steps

MIB = 1 << 20


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
        bias: `(documents of the corpus,)` numbers added to the logits of each document, such as a frequency prior
            times its strength (logit adjustment, Menon et al. 2021); None: none.
        score_memory: MiB for blocks of the score matrix; None: 256 on a CPU, 1024 elsewhere.

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
        bias: Tensor | None = None,
        score_memory: int | None = None,
    ):
        too_large = [size for size in matryoshka or () if size > dim]
        if too_large:
            raise ConfigError(f"training.matryoshka has {too_large[0]}, but the vectors have {dim} dimensions.")
        self.loss: Any = loss
        self.temperature = temperature
        self.normalise = normalise
        self.dims = sorted({dim, *(matryoshka or ())}, reverse=True)
        self.bias = bias
        self.score_memory = score_memory
        self.blockwise = bool(getattr(loss, "blockwise", False))
        self.teacher = getattr(loss, "target", "positives") == "teacher"

    def __call__(self, queries: Tensor, documents: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch, a float32 scalar with a graph back to the vectors.

        Over several processes the value is that of the whole batch on each, and the sum of their gradients is its
        gradient.

        Args:
            queries: `(queries, dim)` vectors, this process's part.
            documents: `(docs, dim)` vectors, this process's part.
            batch: what shortlist.training.batches.BatchBuilder makes, on the device of the vectors.
        """
        way = self._pooled if self._blockwise(batch) else self._dense
        return way(queries, documents, batch)

    def scores(self, queries: Tensor, documents: Tensor, dim: int) -> Tensor:
        """Similarities of vectors cut to `dim`, over the temperature: float32 `(queries, docs)`."""
        # Half precision loses small differences of large scores: everything from here on is float32.
        with torch.autocast(queries.device.type, enabled=False):
            left, right = self._cut(queries, documents, dim)
            return (left / self.temperature) @ right.T

    def _blockwise(self, batch: Mapping[str, Any]) -> bool:
        """Whether the loss takes rows, and every query sees the whole pool."""
        return self.blockwise and batch["valid"] is None

    def _pooled(self, queries: Tensor, documents: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Without the matrix: each process holds its columns, for the queries of all."""
        counts = batch.get("document_counts", [len(documents)])
        own = distributed.rank()
        start = sum(counts[:own])
        shard = Shard(start, start + counts[own], sum(counts)) if distributed.world() > 1 else None
        # Each process has the part of the gradient that comes from its columns.
        everyone = distributed.gather_rows(queries, batch.get("query_counts", [len(queries)]), reduce=True)
        bias = self._bias(batch, slice(start, start + counts[own]))
        positives, left_out, excluded = batch["positives"], batch.get("left_out"), batch.get("excluded")
        total: Tensor | None = None
        with torch.autocast(queries.device.type, enabled=False):
            for size in self.dims:
                left, right = self._cut(everyone, documents, size)
                value = pool_loss(
                    self.loss, left, right,
                    rows=positives.rows, columns=positives.columns, values=positives.values,
                    temperature=self.temperature, bias=bias,
                    left_out=None if left_out is None else (left_out.rows, left_out.columns),
                    excluded=None if excluded is None else (excluded.rows, excluded.columns),
                    memory=self.score_memory * MIB if self.score_memory else None, shard=shard,
                )  # fmt: skip
                total = value if total is None else total + value
        return total if total is not None else queries.sum() * 0.0

    def _dense(self, queries: Tensor, documents: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """With the matrix, whole on every process."""
        queries = distributed.gather_rows(queries, batch.get("query_counts", [len(queries)]), reduce=False)
        documents = distributed.gather_rows(documents, batch.get("document_counts", [len(documents)]), reduce=False)
        shape = (len(queries), len(documents))
        bias = self._bias(batch, slice(None))
        positives, left_out = batch["positives"], batch.get("left_out")
        target = positives.dense(shape)
        target = target if bool((positives.values != 1).any()) else target > 0
        valid = batch["valid"].mask(shape) if batch["valid"] is not None else None
        # A known positive that was not drawn must not act as a negative, unless the loss wants it in its denominator.
        if left_out is not None and not (self.blockwise and not getattr(self.loss, "drops_left_out", True)):
            keep = ~left_out.mask(shape)
            valid = keep if valid is None else keep & valid
        if batch.get("excluded") is not None:
            keep = ~batch["excluded"].mask(shape)
            valid = keep if valid is None else keep & valid
        total: Tensor | None = None
        for size in self.dims:
            scores = self.scores(queries, documents, size)
            scores = scores if bias is None else scores + bias.to(scores.dtype)
            if self.teacher:
                judged = batch["teacher"].dense(shape, fill=float("nan"))
                taught = ~judged.isnan()
                value = self.loss(scores, judged, taught if valid is None else taught & valid, positives=target)
            else:
                value = self.loss(scores, target, valid)
            total = value if total is None else total + value
        return total if total is not None else queries.sum() * 0.0

    def _cut(self, queries: Tensor, documents: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Vectors cut to `dim`, in float32 unless they are in float64."""
        left, right = (side if side.dtype == torch.float64 else side.float() for side in (queries, documents))
        if dim < left.shape[1]:
            left, right = left[:, :dim], right[:, :dim]
            if self.normalise:
                left, right = functional.normalize(left, dim=-1), functional.normalize(right, dim=-1)
        return left, right

    def _bias(self, batch: Mapping[str, Any], part: slice) -> Tensor | None:
        """Bias of the columns in `part` of the pool."""
        if self.bias is None:
            return None
        rows = batch["document_rows"][part]
        if self.bias.device != rows.device:
            self.bias = self.bias.to(rows.device)
        return self.bias[rows]


def check_finite(loss: Tensor, *, step: int, dtype: str, temperature: float, output: str | Path) -> None:
    """Raise NonFiniteError, with what usually helps, unless the loss is finite; `output` has the checkpoints so far."""
    if bool(torch.isfinite(loss)):
        return
    if dtype == "float16":
        hint = "float16 overflows above 65,504: set training.dtype to bfloat16 or float32"
    else:
        hint = (
            f"lower training.learning_rate, set training.max_grad_norm to 1, raise training.temperature ({temperature})"
        )
    if checkpoint_steps(output):
        written = "the checkpoints written so far are good"
        go_on = "then go on with a new output, or --resume after the change is undone"
    else:
        written = "no checkpoint was written yet"
        go_on = "then start again, in a new output or with --overwrite"
    raise NonFiniteError(
        f"the loss of step {step} is {loss.item()}; training stops, {written}. What usually helps: {hint}; {go_on}."
    )

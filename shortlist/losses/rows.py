"""The rows of a score matrix as a loss sees them: one statistic a row, and the scores of the positives.

A loss is written once, on `ScoreRows`. `DenseRows` takes them from a matrix that is there; shortlist.losses.pool makes
them from vectors, block by block, and over several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import Columns, RowStatistic, Workspace, blocks, compute_dtype


class ScoreRows(Protocol):
    """Some rows of a score matrix."""

    @property
    def rows(self) -> slice:
        """Which rows of the batch these are."""

    @property
    def queries(self) -> int:
        """Number of rows of the whole batch."""

    def statistic(self, statistic: RowStatistic, entries: PositiveEntries) -> tuple[Tensor, Tensor]:
        """Return the (rows,) statistic and the (n,) scores of the positives, both differentiable."""

    def columns(self) -> Tensor:
        """Return (rows,) numbers of columns that exist for the loss: valid, and not -inf."""


class DenseRows:
    """All rows of a score matrix in memory.

    The gradient is the only tensor of full size that is made beside it, filled block by block of rows.

    Args:
        scores: (queries, docs), neither empty.
        valid: (queries, docs) bools, True = keep, or None.
    """

    def __init__(self, scores: Tensor, valid: Tensor | None) -> None:
        self.scores = scores
        self.valid = valid
        self.queries = scores.shape[0]
        self.rows = slice(0, self.queries)

    def statistic(self, statistic: RowStatistic, entries: PositiveEntries) -> tuple[Tensor, Tensor]:
        """Return the (queries,) statistic and the (n,) scores of the positives, both differentiable."""
        return _DenseStatistic.apply(self.scores, self.valid, entries.rows, entries.columns, statistic)

    def columns(self) -> Tensor:
        """Return (queries,) numbers of columns that are valid and not -inf."""
        parts = masked_blocks(self.scores.detach(), self.valid, as_is=True)
        return torch.cat([Columns.of(block).counts() for _, block in parts])


def masked_blocks(
    scores: Tensor, valid: Tensor | None, *, into: Tensor | None = None, as_is: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their scores in the compute dtype, -inf where not valid).

    Args:
        scores: (queries, docs).
        valid: (queries, docs) bools, or None.
        into: write the blocks here, if it has the compute dtype; otherwise the next block overwrites the one before.
        as_is: the blocks are only read. If no copy has to be made there is one block: the scores.
    """
    memory, dtype = Workspace(), compute_dtype(scores)
    if as_is and valid is None and scores.dtype == dtype:
        yield slice(0, scores.shape[0]), scores
        return
    for rows in blocks(scores):
        target = memory.like(scores[rows], 0, dtype=dtype) if into is None or into.dtype != dtype else into[rows]
        block = target.copy_(scores[rows])
        if valid is not None:
            dropped = torch.logical_not(valid[rows], out=memory.like(valid[rows], 1))
            block.masked_fill_(dropped, -torch.inf)
        yield rows, block


class _DenseStatistic(Function):
    @staticmethod
    def forward(ctx, scores, valid, rows, columns, statistic):  # noqa: D102
        parts: Iterator[tuple[slice, Tensor]]
        if statistic.without_positives:
            parts = ((part, block) for part, _, block in _positive_blocks(scores, valid, rows, columns, statistic))
        else:
            parts = masked_blocks(scores, valid, as_is=True)
        value = torch.cat([statistic.value(Columns.of(block), part) for part, block in parts])
        ctx.save_for_backward(scores, valid, rows, columns, value)
        ctx.statistic = statistic
        return value, scores[rows, columns].to(compute_dtype(scores))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_value, grad_positive):  # noqa: D102
        scores, valid, rows, columns, value = ctx.saved_tensors
        gradient = torch.empty_like(scores)
        for part, mine, block in _positive_blocks(scores, valid, rows, columns, ctx.statistic, gradient):
            ctx.statistic.weights(block, value[part], part)
            factor = grad_value[part].to(block.dtype)
            if ctx.statistic.share is not None:
                factor = factor * ctx.statistic.factor(block.sum(dim=1))
            block.mul_(factor[:, None])
            # Added in the compute dtype: a positive's two terms nearly cancel, which half precision would lose.
            block[rows[mine] - part.start, columns[mine]] += grad_positive[mine]
            if gradient.dtype != block.dtype:
                gradient[part] = block
        return gradient, None, None, None, None


def _positive_blocks(
    scores: Tensor,
    valid: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    statistic: RowStatistic,
    into: Tensor | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (rows of the block, positives inside it, masked copy of the block)."""
    bounds = torch.tensor([part.stop for part in blocks(scores)], device=rows.device)
    stops = torch.searchsorted(rows, bounds).tolist()
    parts = masked_blocks(scores, valid, into=into)
    for (part, block), start, stop in zip(parts, [0, *stops], stops, strict=False):
        mine = slice(start, stop)
        if statistic.without_positives:
            block[rows[mine] - part.start, columns[mine]] = -torch.inf
        yield part, mine, block

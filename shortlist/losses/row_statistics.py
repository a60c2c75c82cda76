"""One number a row, differentiated without full-size temporaries: the engine under the losses.

Softmax, decoupled softmax, soft top-k and one-vs-all cross-entropy have the same form. A row of scores enters
through one statistic (a log-sum-exp, a threshold, a sum of softplus), and beside it only the scores of the positives
matter. `row_statistic` returns both. The loss is then ordinary autograd on two small vectors, and the only tensor of
full size that is ever made is the gradient itself, filled block by block of rows. Statistics that are computed in
column blocks, or on shards of the columns, can replace this function without a change in the losses.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CPU_BLOCK = 1 << 18  # elements: a block and its temporaries stay in a core's cache
GPU_BLOCK = 1 << 25  # elements: few launches, 128 MB a temporary


def compute_dtype(scores: Tensor) -> torch.dtype:
    """Return the dtype in which losses compute: float64 for float64 scores, otherwise float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of rows of a (rows, columns) matrix, so that each block has a bounded size."""
    rows, columns = matrix.shape
    step = max(1, (CPU_BLOCK if matrix.device.type == "cpu" else GPU_BLOCK) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Workspace:
    """Memory for the temporaries of one block, used again for the next: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._slots: dict[int, Tensor] = {}

    def like(self, block: Tensor, slot: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised memory of the shape, dtype and device of a block; one per slot, until asked again."""
        dtype = dtype or block.dtype
        held = self._slots.get(slot)
        if held is None or held.numel() < block.numel() or held.dtype != dtype or held.device != block.device:
            held = self._slots[slot] = torch.empty(block.numel(), dtype=dtype, device=block.device)
        return held[: block.numel()].view(block.shape)


def masked_blocks(scores: Tensor, valid: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their scores in the compute dtype, -inf where not valid); the next overwrites the block."""
    memory = Workspace()
    for rows in blocks(scores):
        block = memory.like(scores[rows], 0, dtype=compute_dtype(scores)).copy_(scores[rows])
        if valid is not None:
            dropped = torch.logical_not(valid[rows], out=memory.like(valid[rows], 1))
            block.masked_fill_(dropped, -torch.inf)
        yield rows, block


class RowStatistic(ABC):
    """A function of a row that ignores entries of -inf, with its gradient. Blocks may be overwritten."""

    without_positives: bool = True
    """Whether the positives are taken out of the row (set to -inf) first."""

    @abstractmethod
    def value(self, block: Tensor, rows: slice) -> Tensor:
        """Return the statistic of each row of a (rows, docs) block."""

    @abstractmethod
    def gradient(self, block: Tensor, value: Tensor) -> Tensor:
        """Return the (rows, docs) derivative of each row's statistic; exactly 0 where the block is -inf."""


class LogSumExp(RowStatistic):
    """log sum exp of the row; -inf for an empty row."""

    def __init__(self, *, without_positives: bool) -> None:
        self.without_positives = without_positives

    def value(self, block: Tensor, rows: slice) -> Tensor:
        """Return (rows,) values, shifted by the maximum so that they never overflow."""
        shift = _finite_shift(block.amax(dim=1))
        return block.sub_(shift[:, None]).exp_().sum(dim=1).log_() + shift

    def gradient(self, block: Tensor, value: Tensor) -> Tensor:
        """Return the softmax of the row."""
        return block.sub_(_finite_shift(value)[:, None]).exp_()


class SoftplusSum(RowStatistic):
    """Sum of log(1 + exp(score)) over the row without its positives."""

    def __init__(self) -> None:
        self.workspace = Workspace()

    def value(self, block: Tensor, rows: slice) -> Tensor:
        """Return (rows,) sums, as max(s, 0) + log(1 + exp(-|s|)) in place."""
        linear = torch.clamp(block, min=0.0, out=self.workspace.like(block, 0)).sum(dim=1)
        return linear + block.abs_().neg_().exp_().log1p_().sum(dim=1)

    def gradient(self, block: Tensor, value: Tensor) -> Tensor:
        """Return the logistic function of the row."""
        return block.sigmoid_()


def row_statistic(
    scores: Tensor, valid: Tensor | None, rows: Tensor, columns: Tensor, statistic: RowStatistic
) -> tuple[Tensor, Tensor]:
    """Return the (queries,) statistic of each row and the (n,) scores of the positives, both differentiable.

    Args:
        scores: (queries, docs), neither empty.
        valid: (queries, docs) bools, or None.
        rows: (n,) rows of the positives, ascending.
        columns: (n,) columns of the positives; every (row, column) at most once.
        statistic: the statistic and its gradient.
    """
    return _RowStatistic.apply(scores, valid, rows, columns, statistic)


class _RowStatistic(Function):
    @staticmethod
    def forward(ctx, scores, valid, rows, columns, statistic):  # noqa: D102
        values = [
            statistic.value(block, part) for part, _, block in _positive_blocks(scores, valid, rows, columns, statistic)
        ]
        value = torch.cat(values)
        ctx.save_for_backward(scores, valid, rows, columns, value)
        ctx.statistic = statistic
        return value, scores[rows, columns].to(compute_dtype(scores))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_value, grad_positive):  # noqa: D102
        scores, valid, rows, columns, value = ctx.saved_tensors
        gradient = torch.empty_like(scores)
        grad_value = grad_value.to(compute_dtype(scores))
        for part, mine, block in _positive_blocks(scores, valid, rows, columns, ctx.statistic):
            block = ctx.statistic.gradient(block, value[part]).mul_(grad_value[part, None])
            # Added in the compute dtype: a positive's two terms nearly cancel, which half precision would lose.
            block[rows[mine] - part.start, columns[mine]] += grad_positive[mine]
            gradient[part] = block
        return gradient, None, None, None, None


def _positive_blocks(
    scores: Tensor, valid: Tensor | None, rows: Tensor, columns: Tensor, statistic: RowStatistic
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (rows of the block, positives inside it, masked copy of the block)."""
    bounds = torch.tensor([part.stop for part in blocks(scores)], device=rows.device)
    stops = torch.searchsorted(rows, bounds).tolist()
    for (part, block), start, stop in zip(masked_blocks(scores, valid), [0, *stops], stops, strict=False):
        mine = slice(start, stop)
        if statistic.without_positives:
            block[rows[mine] - part.start, columns[mine]] = -torch.inf
        yield part, mine, block


def _finite_shift(value: Tensor) -> Tensor:
    """Replace -inf, the mark of an empty row, by 0, so that -inf - (-inf) never happens; NaN stays NaN."""
    return value.masked_fill(value == -torch.inf, 0.0)

"""One number a row: the statistics through which a row of scores enters a loss, and how blocks of them are reduced.

Softmax, decoupled softmax, soft top-k and one-vs-all cross-entropy have the same form. A row of scores enters
through one statistic (a log-sum-exp, a threshold, a sum of softplus), and beside it only the scores of the positives
matter. A statistic reads its row through `Columns.reduce`, so the same code serves a block that is in memory, column
blocks that are made one after the other, and columns that are spread over processes. Its derivative is, in every
case, a row factor times weights of the columns, and the weights take the place of the scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from shortlist.losses.shards import Shard

CPU_BLOCK = 1 << 19  # elements: a block and its temporaries stay in a core's cache, and threads have enough to do
GPU_BLOCK = 1 << 25  # elements: few launches, 128 MB a temporary

Operation = Literal["max", "min", "sum", "logsumexp"]
Partial = Callable[[Tensor, slice], Sequence[Tensor]]
"""From a (rows, docs) block, which is left as it is, and its rows to one (rows,) tensor for each operation."""


def compute_dtype(scores: Tensor) -> torch.dtype:
    """Return the dtype in which losses compute: float64 for float64 scores, otherwise float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def block_elements(device: torch.device) -> int:
    """Elements of the blocks in which elementwise work is done on a device."""
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of rows of a (rows, columns) matrix, so that each block has a bounded size."""
    rows, columns = matrix.shape
    step = max(1, block_elements(matrix.device) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Workspace:
    """Memory for the temporaries of one block, used again for the next: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._slots: dict[object, Tensor] = {}

    def like(self, block: Tensor, slot: object, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised memory of the shape, dtype and device of a block; one per slot, until asked again."""
        return self.shaped(block.shape, slot, dtype=dtype or block.dtype, device=block.device)

    def shaped(self, shape: Sequence[int], slot: object, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory of a shape; one per slot, until asked again."""
        size = 1
        for length in shape:
            size *= length
        held = self._slots.get(slot)
        if held is None or held.numel() < size or held.dtype != dtype or held.device != device:
            held = self._slots[slot] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(*shape)


class Columns:
    """All columns of some rows of scores, which a statistic may read as often as it needs.

    Args:
        parts: makes the (rows, docs) blocks that together are all columns of this process, -inf where there is none;
            at least one, which may have no column.
        counts: (rows,) number of columns, over all processes, that are not -inf; None counts them when asked.
        shard: where the other columns are; None: there are no others.
    """

    def __init__(self, parts: Callable[[], Iterator[Tensor]], counts: Tensor | None, shard: Shard | None = None):
        self._parts = parts
        self._counts = counts
        self._shard = shard

    @classmethod
    def of(cls, block: Tensor, counts: Tensor | None = None) -> Columns:
        """The columns of a block that is in memory and has all of them."""
        return cls(lambda: iter((block,)), counts)

    def counts(self) -> Tensor:
        """Return (rows,) numbers of columns that are not -inf."""
        if self._counts is None:
            (self._counts,) = self.reduce(_count, "sum")
        return self._counts

    def reduce(self, partial: Partial, *operations: Operation) -> tuple[Tensor, ...]:
        """Return one (rows,) tensor for each operation: the partial results of all blocks and processes, merged.

        Sums are merged in float64 where the device has it.
        """
        merged: list[Tensor] = []
        for block in self._parts():
            found = _of_block(block, partial, operations)
            if merged:
                found = [_MERGE[name](*pair) for name, *pair in zip(operations, merged, found, strict=True)]
            merged = found
        if self._shard is not None:
            merged = [self._shard.reduce(value, name) for name, value in zip(operations, merged, strict=True)]
        return tuple(merged)


def _count(block: Tensor, rows: slice) -> tuple[Tensor]:
    """Number of columns that are not -inf; the usual row has none, and its minimum says so at a tenth of the cost."""
    if bool((block.amin(dim=1) == -torch.inf).any()):
        return ((block > -torch.inf).sum(dim=1),)
    return (torch.full((block.shape[0],), block.shape[1], dtype=torch.long, device=block.device),)


def _of_block(block: Tensor, partial: Partial, operations: Sequence[Operation]) -> list[Tensor]:
    """Partial results of a block, made some rows at a time."""
    if not block.shape[1]:
        found = [_identity(operation, block) for operation in operations]
    else:
        tiles = [partial(block[rows], rows) for rows in blocks(block)]
        found = [torch.cat([tile[i] for tile in tiles]) for i in range(len(operations))]
    return [_widened(value) if name == "sum" else value for name, value in zip(operations, found, strict=True)]


def _identity(operation: Operation, block: Tensor) -> Tensor:
    fill = {"max": -torch.inf, "min": torch.inf, "sum": 0.0, "logsumexp": -torch.inf}[operation]
    return torch.full((block.shape[0],), fill, dtype=block.dtype, device=block.device)


def _widened(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()  # that device has no float64


_MERGE: dict[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "sum": torch.add,
    "logsumexp": torch.logaddexp,
}


class RowStatistic(ABC):
    """A function of a row that ignores entries of -inf, with its derivative."""

    without_positives: bool = True
    """Whether the positives are taken out of the row (set to -inf) first."""
    workspace: Workspace
    """Memory for temporaries; a caller with many blocks gives every statistic the same."""
    share: float | None = None
    """The derivative is the weights themselves (None), or this number times their share of the row's sum."""

    @abstractmethod
    def value(self, columns: Columns, rows: slice) -> Tensor:
        """Return the (rows,) statistic; `rows` says which of the statistic's rows these are."""

    @abstractmethod
    def weights(self, block: Tensor, value: Tensor, rows: slice) -> None:
        """Turn a (rows, docs) block of scores into weights, in place; exactly 0 where the block is -inf."""

    def factor(self, total: Tensor) -> Tensor:
        """Return what the weights of a row are multiplied by, from (rows,) sums of the weights."""
        if self.share is None:
            return torch.ones_like(total)
        return self.share / total.masked_fill(total == 0, 1.0)


class LogSumExp(RowStatistic):
    """log sum exp of the row; -inf for an empty row. The weights are the softmax."""

    def __init__(self, *, without_positives: bool) -> None:
        self.without_positives = without_positives
        self.workspace = Workspace()

    def value(self, columns: Columns, rows: slice) -> Tensor:
        """Return (rows,) values, shifted by the maximum so that they never overflow."""
        return columns.reduce(self._partial, "logsumexp")[0]

    def _partial(self, block: Tensor, rows: slice) -> tuple[Tensor]:
        shift = finite_shift(block.amax(dim=1))
        powers = torch.sub(block, shift[:, None], out=self.workspace.like(block, 0)).exp_()
        return (powers.sum(dim=1).log_() + shift,)

    def weights(self, block: Tensor, value: Tensor, rows: slice) -> None:
        """Turn the scores into their softmax."""
        block.sub_(finite_shift(value)[:, None]).exp_()


class SoftplusSum(RowStatistic):
    """Sum of log(1 + exp(score)) over the row without its positives. The weights are the logistic function."""

    def __init__(self) -> None:
        self.workspace = Workspace()

    def value(self, columns: Columns, rows: slice) -> Tensor:
        """Return (rows,) sums, as max(s, 0) + log(1 + exp(-|s|))."""
        return columns.reduce(self._partial, "sum")[0]

    def _partial(self, block: Tensor, rows: slice) -> tuple[Tensor]:
        memory = self.workspace.like(block, 0)
        linear = torch.clamp(block, min=0.0, out=memory).sum(dim=1)
        return (linear + torch.copysign(block, -1.0, out=memory).exp_().log1p_().sum(dim=1),)

    def weights(self, block: Tensor, value: Tensor, rows: slice) -> None:
        """Turn the scores into their logistic function."""
        block.sigmoid_()


def finite_shift(value: Tensor) -> Tensor:
    """Replace -inf, the mark of an empty row, by 0, so that -inf - (-inf) never happens; NaN stays NaN."""
    return value.masked_fill(value == -torch.inf, 0.0)

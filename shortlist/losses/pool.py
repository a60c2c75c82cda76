"""A loss over a pool of documents, from vectors: exact value and gradients without the whole score matrix.

The gradient of a loss with respect to the scores of a row is a factor times weights of the columns (see
row_statistics.py), plus a term for each positive. So a block of rows is scored once, its statistic taken, the loss of
its rows differentiated on two small vectors, and the block turned into weights in place, which are multiplied into
the gradients of queries and documents: three matrix products in all, and one block of scores in memory. Where a
block of whole rows does not fit the memory, blocks of columns are scored, merged and forgotten, and scored again for
every further look: once more for the softmax losses, once a step of the solver for SoftTopK.

Over several processes each holds some columns; the statistics, the scores of the positives and the sums behind a
threshold are merged by all-reduce, so that every denominator is over all documents. Source: Gupta et al. 2024 (arXiv
2310.10636) and its released code for the sharded form; the column blocks use the merged
log-sum-exp of Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shortlist.errors import ConfigError, DataError
from shortlist.losses.base import RankingLoss, check_number
from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import Columns, RowStatistic, Workspace, block_elements, blocks, compute_dtype
from shortlist.losses.shards import Shard

CPU_MEMORY = 256 << 20  # bytes
ACCELERATOR_MEMORY = 1024 << 20  # bytes
USEFUL_HEIGHT = 16  # rows: below it the products read the documents more often than they compute
CPU_HEIGHT = 256  # rows: beyond it a CPU gains nothing
CPU_ELEMENTS = 1 << 23  # of a block of few columns: fresh memory costs more than it saves


def pool_loss(
    loss: RankingLoss,
    queries: Tensor,
    documents: Tensor,
    *,
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    left_out: tuple[Tensor, Tensor] | None = None,
    excluded: tuple[Tensor, Tensor] | None = None,
    memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Return the loss of queries against a pool of documents: `loss(queries @ documents.T / temperature + bias, ...)`.

    Equal to the plain form in value and gradient, up to rounding, whatever the memory and the number of processes.

    Args:
        loss: a loss with `blockwise` true.
        queries: (queries, dim), the same on every process of a shard.
        documents: (docs, dim); with a shard, those of its columns.
        rows: (n,) row of each positive, ascending.
        columns: (n,) column of each positive among all documents, ascending within a row; no pair twice.
        values: (n,) grades above zero, or 1 each.
        temperature: what inner products are divided by.
        bias: (docs,) finite numbers added to the scores of the columns after the temperature; a constant. With
            tau log(frequency) it is logit adjustment (Menon et al. 2021, arXiv 2007.07314, section 4.2: the loss
            **adds** tau log pi, so that the scores without it rank rare documents fairly). That holds for pools of
            all documents or uniformly drawn ones. In-batch negatives are drawn in proportion to pi already, and
            sampled softmax **subtracts** log pi for that (Yi et al. 2019, section 4): the two cancel at tau = 1, and
            tau > 0 on an in-batch pool corrects twice.
        left_out: rows and columns of known positives that were not drawn. They leave the row if `loss.drops_left_out`;
            otherwise they stay in it as in the plain loss (in the denominator of InfoNCE).
        excluded: rows and columns that do not exist for the loss, none of them a positive.
        memory: bytes for scores and their gradients; None: 256 MiB on a CPU, 1 GiB elsewhere.
        shard: the columns of this process. The value is then the loss over all columns, the same on every process, and
            the gradients are this process's part: summed over the processes they are the whole.

    Returns:
        a scalar in float32 (float64 for float64 vectors): the mean over the queries that have a positive.

    Raises:
        DataError: shapes do not fit, positives lie outside the matrix or out of order, or a bias or a value is not
            finite.
        ConfigError: the loss needs a whole score matrix, or every positive while some are left out; a temperature or a
            memory that is not above 0.
    """
    if not getattr(loss, "blockwise", False):
        raise ConfigError(f"{type(loss).__name__} needs a whole score matrix; call it on scores.")
    if left_out is not None and not loss.samples_positives:
        raise ConfigError(f"{type(loss).__name__} (one_vs_all_bce, say) needs every positive: none can be left out.")
    check_number("temperature", float(temperature))
    if memory is not None and memory < 1:
        raise ConfigError(f"memory of the scores must be a number of bytes above 0, got {memory!r}.")
    shard = shard or Shard(0, documents.shape[0], documents.shape[0])
    _check(queries, documents, rows, columns, values, bias, shard)
    dtype = torch.promote_types(compute_dtype(queries), compute_dtype(documents))
    gone = [cells for cells in (left_out if loss.drops_left_out else None, excluded) if cells is not None]
    removed = [torch.cat([part[:0], *(cells[side] for cells in gone)]) for side, part in enumerate((rows, columns))]
    if memory is None:
        memory = CPU_MEMORY if documents.device.type == "cpu" else ACCELERATOR_MEMORY
    with torch.no_grad(), torch.autocast(documents.device.type, enabled=False):
        pool = _Pool(
            loss=loss,
            queries=(queries.detach().to(dtype) / temperature),
            documents=documents.detach().to(dtype),
            bias=None if bias is None else bias.detach().to(dtype),
            temperature=temperature,
            positives=_Cells(rows, columns),
            grades=values.detach().to(dtype),
            removed=_sorted_cells(*removed),
            shard=shard,
            plan=_plan(queries.shape[0], documents, dtype, memory, shard),
        )
    differentiable = torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad)
    return _PoolLoss.apply(queries, documents, pool, differentiable)


class _PoolLoss(Function):
    @staticmethod
    def forward(ctx, queries, documents, pool, differentiable):  # noqa: D102
        with torch.autocast(documents.device.type, enabled=False):
            value, *ctx.gradients = pool.run(differentiable)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # noqa: D102
        if ctx.gradients is None:
            raise RuntimeError("the gradients of pool_loss were handed out already; call it again.")
        # Let go, so that they are not held twice: they are scaled in place.
        gradients, ctx.gradients = ctx.gradients, None
        return *(gradient.mul_(grad_output) for gradient in gradients), None, None


@dataclass(frozen=True)
class _Plan:
    """Sizes of the blocks."""

    height: int
    width: int
    """Columns of a block; the whole width of the shard if `held`."""
    held: bool
    """A block has whole rows and is scored once."""


def _plan(queries: int, documents: Tensor, dtype: torch.dtype, memory: int, shard: Shard) -> _Plan:
    """Choose block sizes that fit the memory, the same height on every process."""
    elements = max(1, memory // dtype.itemsize)
    # Beside the block, one temporary of the elementwise work.
    elements = max(elements // 2, elements - block_elements(documents.device))
    width = documents.shape[0]
    if shard.world > 1:
        agreed = torch.tensor([width, -elements], device=documents.device)
        width, elements = (abs(number) for number in shard.reduce(agreed, "max").tolist())
    fitting = elements // max(1, width)
    if fitting >= min(USEFUL_HEIGHT, queries):
        if documents.device.type == "cpu":
            fitting = min(fitting, max(CPU_HEIGHT, CPU_ELEMENTS // max(1, width)))
        return _Plan(max(1, min(queries, fitting)), documents.shape[0], True)
    height = max(1, min(queries, math.isqrt(elements)))
    return _Plan(height, max(1, elements // height), False)


@dataclass(frozen=True)
class _Cells:
    """Cells of a matrix, sorted by row."""

    rows: Tensor
    columns: Tensor

    def bounds(self, queries: int, height: int) -> list[int]:
        """Where the cells of each block of rows begin and end."""
        edges = torch.arange(0, queries + height, height, device=self.rows.device)
        return torch.searchsorted(self.rows, edges).tolist()


def _sorted_cells(rows: Tensor, columns: Tensor) -> _Cells:
    order = torch.argsort(rows, stable=True)
    return _Cells(rows[order], columns[order])


@dataclass
class _Pool:
    """One call of pool_loss: its arguments, and the gradients as they grow."""

    loss: RankingLoss
    queries: Tensor
    documents: Tensor
    bias: Tensor | None
    temperature: float
    positives: _Cells
    grades: Tensor
    removed: _Cells
    shard: Shard
    plan: _Plan
    workspace: Workspace = field(default_factory=Workspace)

    def run(self, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and the gradients of queries and documents (empty unless differentiable)."""
        count = self.queries.shape[0]
        total = self.queries.new_zeros(())
        empty = self.queries.new_zeros(0)
        gradients = (
            (torch.zeros_like(self.queries), torch.zeros_like(self.documents)) if differentiable else (empty,) * 2
        )
        counted = max(1, int(torch.unique_consecutive(self.positives.rows).numel()))
        bounds = self.positives.bounds(count, self.plan.height), self.removed.bounds(count, self.plan.height)
        for number, start in enumerate(range(0, count, self.plan.height)):
            part = slice(start, min(start + self.plan.height, count))
            mine, gone = (slice(edges[number], edges[number + 1]) for edges in bounds)
            if mine.start == mine.stop:  # no positives: no loss and no gradient, on every process
                continue
            view = _BlockRows(self, part, mine, gone)
            with torch.enable_grad():
                value = self.loss.row_losses(view, view.entries).sum() / counted
            total += value.detach()
            if differentiable:
                view.differentiate(value, *gradients)
        if differentiable:
            gradients[0].div_(self.temperature)
        return total, *gradients


class _BlockRows:
    """`ScoreRows` of a block of rows of a pool."""

    def __init__(self, pool: _Pool, rows: slice, mine: slice, gone: slice) -> None:
        self.pool = pool
        self.rows = rows
        self.queries = pool.queries.shape[0]
        self.height = rows.stop - rows.start
        row = pool.positives.rows[mine] - rows.start
        counts = torch.bincount(row, minlength=self.height)
        self.entries = PositiveEntries(row, pool.positives.columns[mine], pool.grades[mine], counts)
        self.gone = _Cells(pool.removed.rows[gone] - rows.start, pool.removed.columns[gone])
        self._taken: list[tuple[RowStatistic, Tensor, Tensor]] = []
        self._content: Literal["nothing", "scores", "negatives"] = "nothing"  # of a held block

    def columns(self) -> Tensor:
        """Return (rows,) numbers of documents, all shards together, without those that left the row."""
        return self.pool.shard.total - torch.bincount(self.gone.rows, minlength=self.height)

    def statistic(self, statistic: RowStatistic, entries: PositiveEntries) -> tuple[Tensor, Tensor]:
        """Return the (rows,) statistic and the (n,) scores of the positives, both differentiable."""
        statistic.workspace = self.pool.workspace
        with torch.no_grad():
            positive = self.pool.shard.reduce(self._positive_scores(), "sum")
            counts = self.columns() - (self.entries.counts if statistic.without_positives else 0)
            columns = Columns(lambda: (block for _, block in self._blocks(statistic)), counts, self.pool.shard)
            value = statistic.value(columns, slice(0, self.height))
        self._taken.append((statistic, value.requires_grad_(), positive.requires_grad_()))
        return value, positive

    def differentiate(self, loss: Tensor, queries: Tensor, documents: Tensor) -> None:
        """Add the gradient of a scalar made from the statistics to those of the scaled queries and the documents."""
        leaves = [leaf for _, value, positive in self._taken for leaf in (value, positive)]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        for i in reversed(range(len(self._taken))):  # the last one's block may still be there
            statistic, value, _ = self._taken[i]
            for_value, for_positive = found[2 * i], found[2 * i + 1]
            if for_value is not None:
                self._spread(statistic, value.detach(), for_value, queries[self.rows], documents)
            if for_positive is not None:
                self._spread_positives(for_positive, queries[self.rows], documents)

    def _blocks(self, statistic: RowStatistic) -> Iterator[tuple[slice, Tensor]]:
        """Yield (columns of the shard, their scores), -inf where a column is no part of the row; at least one."""
        width = self.pool.documents.shape[0]
        wanted: Literal["scores", "negatives"] = "negatives" if statistic.without_positives else "scores"
        if self.pool.plan.held:
            if self._content not in (wanted, "scores"):
                self._score(slice(0, width))
            block = self._memory(width)
            if self._content != wanted:
                self._hide_positives(slice(0, width), block)
            yield slice(0, width), block
            return
        for start in range(0, max(1, width), self.pool.plan.width):
            part = slice(start, min(start + self.pool.plan.width, width))
            block = self._score(part)
            if wanted == "negatives":
                self._hide_positives(part, block)
            yield part, block

    def _memory(self, width: int) -> Tensor:
        like = self.pool.queries
        return self.pool.workspace.shaped((self.height, width), "scores", dtype=like.dtype, device=like.device)

    def _score(self, part: slice) -> Tensor:
        pool = self.pool
        block = self._memory(part.stop - part.start)
        queries, documents = pool.queries[self.rows], pool.documents[part].T
        if pool.bias is None:
            torch.mm(queries, documents, out=block)
        else:
            torch.addmm(pool.bias[part], queries, documents, out=block)
        self._hide(self.gone.rows, self.gone.columns, part, block)
        self._content = "scores"
        return block

    def _hide_positives(self, part: slice, block: Tensor) -> None:
        self._hide(self.entries.rows, self.entries.columns, part, block)
        self._content = "negatives"

    def _hide(self, rows: Tensor, columns: Tensor, part: slice, block: Tensor) -> None:
        which, columns = self._local(columns, part)
        block[rows[which], columns] = -torch.inf

    def _local(self, columns: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return which of some columns lie in a part of the shard, and their places in it."""
        first = self.pool.shard.start + part.start
        inside = ((columns >= first) & (columns < first + part.stop - part.start)).nonzero().squeeze(1)
        return inside, columns[inside] - first

    def _positive_scores(self) -> Tensor:
        """Return (n,) scores of the positives, 0 where another process holds the column."""
        entries, pool = self.entries, self.pool
        scores = torch.zeros_like(entries.grades)
        whole = slice(0, pool.documents.shape[0])
        which, columns = self._local(entries.columns, whole)
        if pool.plan.held:
            if self._content != "scores":
                self._score(whole)
            scores[which] = self._memory(whole.stop)[entries.rows[which], columns]
            return scores
        for cells in _chunks(len(which), pool.documents):
            place, column = which[cells], columns[cells]
            products = pool.queries[self.rows][entries.rows[place]].mul_(pool.documents[column])
            scores[place] = products.sum(dim=1)
            if pool.bias is not None:
                scores[place] += pool.bias[column]
        return scores

    def _spread(
        self, statistic: RowStatistic, value: Tensor, incoming: Tensor, queries: Tensor, documents: Tensor
    ) -> None:
        """Add incoming * d statistic / d scores, as products with the documents and the queries."""
        pool = self.pool
        factor = incoming.to(pool.queries.dtype)
        if not pool.plan.held:
            factor = factor * self._factor(
                statistic, (self._weigh(statistic, value, b) for _, b in self._blocks(statistic))
            )
        for part, block in self._blocks(statistic):
            sums = self._weigh(statistic, value, block)
            if pool.plan.held:
                factor = factor * self._factor(statistic, (sums,))
            # The rows are scaled on the thin side of the products.
            queries.addcmul_(block @ pool.documents[part], factor[:, None])
            documents[part].addmm_(block.T, pool.queries[self.rows] * factor[:, None])

    def _weigh(self, statistic: RowStatistic, value: Tensor, block: Tensor) -> Tensor:
        """Turn scores into weights; return their (rows,) sums, or zeros if nobody needs them."""
        self._content = "nothing"
        sums = block.new_zeros(self.height)
        for tile in blocks(block):
            statistic.weights(block[tile], value[tile], tile)
            if statistic.share is not None:
                sums[tile] = block[tile].sum(dim=1)
        return sums

    def _all_sums(self, statistic: RowStatistic, value: Tensor) -> Iterator[Tensor]:
        for _, block in self._blocks(statistic):
            yield self._weigh(statistic, value, block)

    def _factor(self, statistic: RowStatistic, sums: Iterable[Tensor]) -> Tensor | float:
        if statistic.share is None:
            return 1.0
        total = self.pool.queries.new_zeros(self.height)
        for part in sums:
            total += part
        return statistic.factor(self.pool.shard.reduce(total, "sum"))

    def _spread_positives(self, incoming: Tensor, queries: Tensor, documents: Tensor) -> None:
        """Add the gradient of the positives' scores, for those whose column is here."""
        pool = self.pool
        which, columns = self._local(self.entries.columns, slice(0, pool.documents.shape[0]))
        for cells in _chunks(len(which), pool.documents):
            place, column = which[cells], columns[cells]
            row, size = self.entries.rows[place], incoming[place].to(queries.dtype)[:, None]
            queries.index_add_(0, row, pool.documents[column].mul_(size))
            documents.index_add_(0, column, pool.queries[self.rows][row].mul_(size))


def _chunks(number: int, vectors: Tensor) -> Iterator[slice]:
    """Slices of a list of cells for which vectors are gathered, of bounded size."""
    step = max(1, block_elements(vectors.device) // max(1, vectors.shape[1]))
    return (slice(start, min(start + step, number)) for start in range(0, number, step))


def _check(
    queries: Tensor,
    documents: Tensor,
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    bias: Tensor | None,
    shard: Shard,
) -> None:
    """Raise DataError where the arguments of pool_loss do not fit together."""
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise DataError(
            f"queries and documents must be matrices of vectors of one length, "
            f"got {tuple(queries.shape)} and {tuple(documents.shape)}."
        )
    if documents.shape[0] != shard.stop - shard.start:
        raise DataError(
            f"there are {documents.shape[0]} document vectors, but the shard holds columns "
            f"{shard.start}..{shard.stop}, {shard.stop - shard.start} of them."
        )
    if not rows.shape == columns.shape == values.shape or rows.ndim != 1:
        raise DataError(
            f"rows, columns and values of the positives must be lists of one length, "
            f"got {tuple(rows.shape)}, {tuple(columns.shape)} and {tuple(values.shape)}."
        )
    if any(part.is_floating_point() or part.is_complex() or part.dtype == torch.bool for part in (rows, columns)):
        raise DataError(
            f"rows and columns of the positives must be whole numbers, got {rows.dtype} and {columns.dtype}; convert "
            "them with .long()."
        )
    if bias is not None and bias.shape != documents.shape[:1]:
        raise DataError(f"the bias has shape {tuple(bias.shape)}; {documents.shape[0]} columns need one number each.")
    if bias is not None and not bool(torch.isfinite(bias).all()):
        raise DataError("the bias has numbers that are not finite; smooth the frequencies of documents never seen.")
    if not len(rows):
        return
    cell = rows * shard.total + columns
    if bool((columns < 0).any() | (columns >= shard.total).any() | (rows < 0).any() | (rows >= len(queries)).any()):
        raise DataError(
            f"positives must lie in {len(queries)} rows and {shard.total} columns; rows are "
            f"{int(rows.min())}..{int(rows.max())}, columns {int(columns.min())}..{int(columns.max())}."
        )
    if bool((cell[1:] <= cell[:-1]).any()):
        raise DataError("positives must be sorted by row, then column, each pair once; sort them, merge equal ones.")
    usable = (values > 0) & torch.isfinite(values)
    if not bool(usable.all()):
        raise DataError(
            f"values of positives must be finite and above 0, got {values[~usable][0].item():g}; leave those out."
        )

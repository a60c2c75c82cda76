"""Which columns of a score matrix this process holds, and how row statistics are merged over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from shortlist.errors import DataError


@dataclass(frozen=True)
class Shard:
    """The columns start..stop (stop not included) of `total` that this process holds of a pool of documents.

    The shards of all processes of the group lie side by side and cover 0..total; they may differ in size, and one may
    be empty. Every process has to make the same calls with the same queries and positives.

    Raises:
        DataError: the bounds are not 0 <= start <= stop <= total, or one process alone does not hold every column.
    """

    start: int
    stop: int
    total: int
    group: Any = None
    """A torch.distributed process group; None: all processes, or this one alone if there is no process group."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.total:
            raise DataError(
                f"a shard holds columns start..stop of total with 0 <= start <= stop <= total, "
                f"got {self.start}..{self.stop} of {self.total}."
            )
        if self.world == 1 and (self.start, self.stop) != (0, self.total):
            raise DataError(
                f"the shard holds columns {self.start}..{self.stop} of {self.total}, but there is no other process "
                "that holds the rest; start torch.distributed first, or give this process every column."
            )

    @property
    def world(self) -> int:
        """Number of processes that share the columns."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.group)

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        """Merge the values of all processes elementwise: "max", "min", "sum", or "logsumexp" in that domain."""
        if self.world == 1:
            return values
        if operation == "logsumexp":
            top = self.reduce(values, "max")
            shift = top.masked_fill(top == -torch.inf, 0.0)
            return self.reduce((values - shift).exp(), "sum").log() + shift
        values = values.clone()
        operations = distributed.ReduceOp
        distributed.all_reduce(
            values,
            {"max": operations.MAX, "min": operations.MIN, "sum": operations.SUM}[operation],
            group=self.group,
        )
        return values

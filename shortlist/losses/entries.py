"""The positive entries of a score matrix as a list, and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shortlist.losses.row_statistics import blocks, compute_dtype


@dataclass(frozen=True)
class PositiveEntries:
    """The positive entries of a score matrix, row by row, n of them in all."""

    rows: Tensor
    """(n,) row of each entry, ascending."""
    columns: Tensor
    """(n,) column of each entry, ascending within a row."""
    grades: Tensor
    """(n,) grade of each entry in the compute dtype; 1 where the positives are a mask."""
    counts: Tensor
    """(queries,) number of positives of each row."""

    def weights(self, *, by_grade: bool, normalise: bool = True) -> Tensor:
        """Return (n,) weights of the terms of a row: equal and summing to one, or by grade.

        With `by_grade` and `normalise` they are the grades over their sum; without `normalise` the grades over their
        number, so that a row of rare documents (grades of 1 / propensity) weighs more than a row of frequent ones.
        """
        if not by_grade:
            return 1.0 / self.counts.to(self.grades.dtype)[self.rows]
        divisor = self.row_sums(self.grades) if normalise else self.counts.to(self.grades.dtype)
        return self.grades / divisor[self.rows]

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum (n,) values of the entries into (queries,)."""
        return values.new_zeros(self.counts.shape[0]).index_add(0, self.rows, values)


def positive_entries(scores: Tensor, positives: Tensor, valid: Tensor | None) -> PositiveEntries:
    """List the positives that are valid, block by block of rows so that no second mask of full size is made."""
    rows, columns = [], []
    for block in blocks(positives):
        keep = positives[block] if positives.dtype == torch.bool else positives[block] > 0
        if valid is not None:
            keep = keep & valid[block]
        row, column = keep.nonzero(as_tuple=True)
        rows.append(row + block.start)
        columns.append(column)
    empty = torch.zeros(0, dtype=torch.long, device=positives.device)
    row, column = torch.cat([empty, *rows]), torch.cat([empty, *columns])
    scored = scores.detach()[row, column] != -torch.inf
    row, column = row[scored], column[scored]
    grades = positives[row, column].to(compute_dtype(scores))
    return PositiveEntries(row, column, grades, torch.bincount(row, minlength=positives.shape[0]))

"""Losses that judge each (query, doc) pair by itself."""

import torch.nn.functional as F
from torch import Tensor

from shortlist.losses.base import RankingLoss
from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import SoftplusSum
from shortlist.losses.rows import ScoreRows


class OneVsAllBCE(RankingLoss):
    """Binary cross-entropy of every column against its label: L = (1/D) sum_l [ log(1 + exp(s_l)) - y_l s_l ].

    D is the number of valid columns of the row. Prefer it for heads with a bias per label, or where calibrated
    probabilities of single pairs are the goal. For a dual encoder over many documents prefer DecoupledSoftmax: with
    few positives among many columns the mean is all negatives, and training hardly moves (precision at 1 of 0.001 on
    EURLex-4K). Like every loss here it averages over the queries that have a positive. It needs all positives: one that
    was not drawn would be called a negative.

    Source: Gupta et al. 2024 (arXiv 2310.10636), the one-versus-all baseline; with weights, Jain et al. 2016
    and Qaraei et al. 2021 (arXiv 2007.00237), the propensity-scored form that leaves the negative terms as they are.

    Args:
        weight_by_grade: multiply the terms of the positives by their grades; otherwise grades only say which columns
            are positive.
    """

    def __init__(self, *, weight_by_grade: bool = False) -> None:
        super().__init__()
        self.weight_by_grade = weight_by_grade

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (rows,) losses."""
        # The positives are left out of the sum: log(1 + e^s) - s of a large s would cancel there.
        negatives, positive = view.statistic(SoftplusSum(), entries)
        terms = -F.logsigmoid(positive)
        if self.weight_by_grade:
            terms = terms * entries.grades
        total = negatives.to(terms.dtype) + entries.row_sums(terms)
        return total.where(entries.counts > 0, 0.0) / view.columns().clamp(min=1).to(terms.dtype)

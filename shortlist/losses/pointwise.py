"""Losses that judge each (query, doc) pair by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.losses.base import PositiveEntries, RankingLoss
from shortlist.losses.row_statistics import SoftplusSum, masked_blocks, row_statistic


class OneVsAllBCE(RankingLoss):
    """Binary cross-entropy of every column against its label: L = (1/D) sum_l [ log(1 + exp(s_l)) - y_l s_l ].

    D is the number of valid columns of the row. Prefer it for heads with a bias per label, or where calibrated
    probabilities of single pairs are the goal. For a dual encoder over many documents prefer DecoupledSoftmax: with
    few positives among many columns the mean is all negatives, and training hardly moves (precision at 1 of 0.10 on
    EURLex-4K). Grades only say which columns are positive. Like every loss here it averages over the queries that have
    a positive.

    Source: Gupta et al. 2024 (arXiv 2310.10636), the one-versus-all baseline.
    """

    def row_losses(self, scores: Tensor, entries: PositiveEntries, valid: Tensor | None) -> Tensor:
        """Return (queries,) losses."""
        # The positives are left out of the sum: log(1 + e^s) - s of a large s would cancel there.
        negatives, positive = row_statistic(scores, valid, entries.rows, entries.columns, SoftplusSum())
        total = negatives + entries.row_sums(-F.logsigmoid(positive))
        return total.where(entries.counts > 0, 0.0) / _valid_columns(scores, valid)


def _valid_columns(scores: Tensor, valid: Tensor | None) -> Tensor:
    """Count (queries,) columns that are valid and not -inf, at least 1."""
    scores = scores.detach()
    counts = [block.gt_(-torch.inf).sum(dim=1) for _, block in masked_blocks(scores, valid)]
    return torch.cat(counts).clamp(min=1)

"""Softmax losses over the columns of a score matrix: InfoNCE, and its form for several positives.

Symbols of the papers, and their names here:

    s_l   scores[query, l], already divided by the temperature tau
    y_l   positives[query, l] > 0;   P: the positives of the row,   N: all other valid columns
    Z     exp(negatives), the sum of exp(s_j) over N
    w_i   weights: 1 / |P|, or grade_i / (sum of the row's grades) with weight_by_grade, or grade_i / |P| with
          weight_by_grade and without normalise_weights
"""

import torch.nn.functional as F
from torch import Tensor

from shortlist.losses.base import RankingLoss
from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import LogSumExp
from shortlist.losses.rows import ScoreRows


class InfoNCE(RankingLoss):
    """Softmax cross-entropy over all columns: L = - sum_{i in P} w_i log( exp(s_i) / sum_{j in P and N} exp(s_j) ).

    Prefer it when every query has one positive: it is then the standard contrastive loss, and equal to
    DecoupledSoftmax. The `valid` mask should drop the columns that are copies of the scored text.

    With several positives it fails in a known way. They share one unit of probability, so the optimum puts 1/|P| on
    each, and the gradient of a positive is `p_i - 1/|P|`: an easy positive with p_i above 1/|P| is pushed **down**,
    only because harder positives of the same query are still low. Use DecoupledSoftmax there, or `mask_positives=True`,
    which leaves the other positives of the query out of the denominator of each and equals DecoupledSoftmax.

    Source: van den Oord et al. 2018 (arXiv 1807.03748), eq. 4; the several-positives form and its failure as in Gupta
    et al. 2024 (arXiv 2310.10636), section 4.1, here with the mean over the positives for their sum.

    Args:
        mask_positives: leave the other positives out of the denominator.
        weight_by_grade: weight the positives of a query in proportion to their grades.
        normalise_weights: see DecoupledSoftmax.
    """

    samples_positives = True

    def __init__(
        self, *, mask_positives: bool = False, weight_by_grade: bool = False, normalise_weights: bool = True
    ) -> None:
        super().__init__()
        self.mask_positives = self.drops_left_out = mask_positives
        self.weight_by_grade = weight_by_grade
        self.normalise_weights = normalise_weights

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (rows,) losses."""
        weights = entries.weights(by_grade=self.weight_by_grade, normalise=self.normalise_weights)
        if self.mask_positives:
            return _decoupled(view, entries, weights)
        everything, positive = view.statistic(LogSumExp(without_positives=False), entries)
        return entries.row_sums(weights * (everything[entries.rows] - positive))


class DecoupledSoftmax(RankingLoss):
    """Softmax in which each positive meets the negatives alone: L = - sum_{i in P} w_i log( e^s_i / (e^s_i + Z) ).

    The loss of choice when queries have several positives. It is the mean of |P| single-positive cross-entropies, each
    with the other positives masked. The gradient of a positive, `-w_i Z / (exp(s_i) + Z)`, is never above zero, so a
    positive is never pushed down, however easy. With one positive it equals InfoNCE. The more negatives are in the
    matrix the more it gains: use all documents where memory allows. Prefer SoftTopK to aim at a cut-off.

    Source: Gupta et al. 2024 (arXiv 2310.10636), DecoupledSoftmax; the factor 1/|P| as in the released code.

    Args:
        weight_by_grade: weight the positives of a query in proportion to their grades.
        normalise_weights: the weights of a query sum to one. False: grade / |P|, for grades whose scale means
            something. Inverse propensities as grades (1 / p_l, Jain et al. 2016) then make the loss an estimate of the
            one with no positive missing, as Qaraei et al. 2021 (arXiv 2007.00237) do for the convex losses of rare
            labels; scale them to a mean of 1 over the training positives to keep the learning rate.
    """

    samples_positives = True
    drops_left_out = True

    def __init__(self, *, weight_by_grade: bool = False, normalise_weights: bool = True) -> None:
        super().__init__()
        self.weight_by_grade = weight_by_grade
        self.normalise_weights = normalise_weights

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (rows,) losses."""
        weights = entries.weights(by_grade=self.weight_by_grade, normalise=self.normalise_weights)
        return _decoupled(view, entries, weights)


def _decoupled(view: ScoreRows, entries: PositiveEntries, weights: Tensor) -> Tensor:
    negatives, positive = view.statistic(LogSumExp(without_positives=True), entries)
    # -log( e^s / (e^s + Z) ) = -log sigmoid(s - log Z); a row without negatives has log Z = -inf and costs 0.
    return entries.row_sums(weights * -F.logsigmoid(positive - negatives[entries.rows]))

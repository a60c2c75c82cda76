"""Learning-to-rank losses for graded lists: RankNet on pairs, ListNet and ApproxNDCG on the list.

Made for lists of candidates (tens to a few thousand columns). RankNet and ApproxNDCG hold (positives, docs)
temporaries, for all positives of the batch: for whole label sets use the losses of contrastive.py and soft_topk.py.

Symbols of the papers, and their names here:

    s_l   scores[query, l], already divided by the temperature
    y_l   grades, positives[query, l]; negative grades count as 0, a mask as grades of 0 and 1
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.errors import ConfigError
from shortlist.losses.base import RankingLoss, check_number, kept
from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import LogSumExp, compute_dtype
from shortlist.losses.rows import DenseRows, ScoreRows


class ListNet(RankingLoss):
    """Cross-entropy of two softmax distributions, of grades and of scores: - sum_l softmax(y)_l log softmax(s)_l.

    The top-one form of ListNet. Prefer it where grades are real judgements on most documents of a list. The softmax of
    grades 0 and 1 leaves most of the mass of a long list on the documents graded 0; a `target_temperature` below 1
    moves it to the best grades (0.1 gives a binary positive e^10 times the mass of a negative). Two equally good
    documents share one unit of probability, as for InfoNCE.

    Source: Cao et al. 2007, "Learning to Rank: From Pairwise Approach to Listwise Approach", equation 3 and section 4.

    Args:
        target_temperature: what grades are divided by before their softmax.
    """

    blockwise = False

    def __init__(self, *, target_temperature: float = 1.0) -> None:
        super().__init__()
        self.target_temperature = check_number("target_temperature", target_temperature)

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (queries,) losses."""
        scores, keep = _matrix(view)
        grades = _dense(entries, keep, 0.0).div_(self.target_temperature).masked_fill_(~keep, -torch.inf)
        target = grades.softmax(dim=1).masked_fill_(~keep, 0.0)  # the fill also clears the NaN of an empty row
        normaliser, _ = view.statistic(LogSumExp(without_positives=False), entries)
        values = scores.to(compute_dtype(scores)).where(keep, 0.0)
        has_positive = entries.counts > 0
        # The softmax of the grades sums to 1, so its product with the normaliser is the normaliser.
        return normaliser.where(has_positive, 0.0) - (target * values).sum(dim=1).where(has_positive, 0.0)


class RankNet(RankingLoss):
    """Logistic loss on the pairs of a list whose grades differ: mean over y_i > y_j of log(1 + exp(-(s_i - s_j))).

    Every pair counts alike, wherever it stands in the ranking. Prefer it for a robust pairwise start on graded lists;
    prefer ApproxNDCG when the top of the list is what counts.

    Source: Burges et al. 2005, "Learning to Rank using Gradient Descent", with the mean over the pairs of the query.
    """

    blockwise = False

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (queries,) losses; 0 for a row whose valid documents all have one grade."""
        scores, keep = _matrix(view)
        values = scores.to(compute_dtype(scores)).where(keep, 0.0)
        grades = _dense(entries, keep, 0.0)
        better = keep[entries.rows] & (entries.grades[:, None] > grades[entries.rows])
        margins = values[entries.rows, entries.columns][:, None] - values[entries.rows]
        losses = entries.row_sums((-F.logsigmoid(margins)).where(better, 0.0).sum(dim=1))
        pairs = entries.row_sums(better.sum(dim=1).to(losses.dtype))
        return losses / pairs.clamp(min=1)


class ApproxNDCG(RankingLoss):
    """One minus nDCG of the whole list with soft ranks: rank_i = 1 + sum_{j != i} sigmoid(sharpness (s_j - s_i)).

    The gain of a document is 2^grade - 1 and the discount 1 / log2(1 + rank). Prefer it to fine-tune for nDCG on graded
    lists from a model that already ranks well: where scores are far apart its gradient vanishes, so from scratch start
    with ListNet or RankNet. The loss lies in [0, 1).

    Source: Qin, Liu and Li 2010, "A general approximation framework for direct optimization of information retrieval
    measures"; Bruch et al. 2019, "Revisiting Approximate Metric Optimization in the Age of Deep Neural Networks", whose
    sharpness of 10 is the default.

    Args:
        sharpness: slope of the sigmoid; larger is closer to the true ranks, with gradients at fewer pairs.
    """

    blockwise = False

    def __init__(self, *, sharpness: float = 10.0) -> None:
        super().__init__()
        self.sharpness = check_number("sharpness", sharpness)

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (queries,) losses."""
        scores, keep = _matrix(view)
        values = scores.to(compute_dtype(scores)).where(keep, 0.0)
        behind = values[entries.rows] - values[entries.rows, entries.columns][:, None]
        wins = torch.sigmoid(self.sharpness * behind).where(keep[entries.rows], 0.0)
        soft_rank = wins.sum(dim=1) + 0.5  # a document ties with itself at 0.5, and 1 is the best rank
        gains = torch.exp2(entries.grades) - 1
        gained = entries.row_sums(gains / torch.log2(1 + soft_rank))
        return (1 - gained / _ideal(entries, gains)).where(entries.counts > 0, 0.0)


def _matrix(view: ScoreRows) -> tuple[Tensor, Tensor]:
    """Return the whole score matrix and the mask of what exists in it."""
    if not isinstance(view, DenseRows):
        raise ConfigError(
            "this loss compares every document of a list with every other and takes a whole score matrix."
        )
    return view.scores, kept(view.scores, view.valid)


def _ideal(entries: PositiveEntries, gains: Tensor) -> Tensor:
    """Return the (queries,) discounted gain of the best order, 1 where there is no positive."""
    order = torch.argsort(gains, descending=True, stable=True)
    order = order[torch.argsort(entries.rows[order], stable=True)]
    starts = entries.counts.cumsum(0) - entries.counts
    rank = 1 + torch.arange(len(gains), device=gains.device) - starts[entries.rows]
    ideal = entries.row_sums(gains[order] / torch.log2(1 + rank.to(gains.dtype)))
    return ideal.where(entries.counts > 0, 1.0)


def _dense(entries: PositiveEntries, like: Tensor, fill: float) -> Tensor:
    """Return the grades as a (queries, docs) matrix again, without those that are not valid."""
    grades = torch.full(like.shape, fill, dtype=entries.grades.dtype, device=like.device)
    return grades.index_put_((entries.rows, entries.columns), entries.grades)

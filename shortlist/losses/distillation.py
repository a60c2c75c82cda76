"""Losses towards the scores of a teacher: the second argument is its score matrix, not a mask.

Symbols of the papers, and their names here:

    s_l   scores[query, l];   t_l   teacher_scores[query, l]
    P     positives of the row,   N   its other valid columns;   P_s, P_t   softmax of a row of s, of t

Teacher scores are needed where `valid` is True; elsewhere they may be anything, NaN too. The teacher gets no gradient.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shortlist.losses.base import check_matrices, check_number, kept, mean_over_queries
from shortlist.losses.entries import positive_entries
from shortlist.losses.row_statistics import compute_dtype


class MarginMSE(nn.Module):
    """Squared error of the margins: mean over p in P, n in N of ( (s_p - s_n) - (t_p - t_n) )^2.

    Only differences count, so student and teacher may differ by a constant a query. The scale does count: leave the
    temperature at 1 and give the student unnormalised scores or a learnable scale. The usual choice to distil a
    cross-encoder, and best for late interaction with a learned scorer (LITE); prefer KLDivergence when there are long
    lists and no positives, or the scales differ.

    All pairs of a row are used in closed form, var_P(e) + var_N(e) + (mean_P(e) - mean_N(e))^2 with e = s - t, so
    memory grows with the columns and not with the pairs. A row without negatives costs 0.

    Source: Hofstätter et al. 2020 (arXiv 2010.02666), section 3; one positive and one negative a query there.
    """

    target: ClassVar[Literal["positives", "teacher"]] = "teacher"

    def __init__(self) -> None:  # takes nothing, so that build_loss can tell a wrong option
        super().__init__()

    def forward(
        self, scores: Tensor, teacher_scores: Tensor, valid: Tensor | None = None, *, positives: Tensor
    ) -> Tensor:
        """Return the mean over the queries that have a positive, 0 if none has.

        Args:
            scores: (queries, docs) student scores.
            teacher_scores: (queries, docs) floats.
            valid: (queries, docs) bools, True = keep; None keeps all.
            positives: (queries, docs) bools, or grades where a grade above zero is a positive.

        Raises:
            DataError: the shapes differ, scores are not floats, or valid is not a bool mask.
        """
        check_matrices(scores, teacher_scores, valid, name="teacher_scores")
        check_matrices(scores, positives, valid, name="positives")
        keep = kept(scores, valid)
        error = _error(scores, teacher_scores, keep)
        entries = positive_entries(scores, positives, valid)
        positive = torch.zeros_like(keep).index_put((entries.rows, entries.columns), torch.ones_like(entries.rows) > 0)
        mean_positive, spread_positive = _moments(error, positive)
        mean_negative, spread_negative = _moments(error, keep & ~positive)
        rows = spread_positive + spread_negative + (mean_positive - mean_negative).square()
        counted = entries.counts > 0
        has_pair = counted & (keep.sum(dim=1) > entries.counts)
        return mean_over_queries(rows.where(has_pair, 0.0), counted)


class KLDivergence(nn.Module):
    """Kullback-Leibler divergence of the softmax of a row from the teacher's: sum_l P_t(l) log( P_t(l) / P_s(l) ).

    Copies the teacher's whole ranking of a list, its confidence included, and needs no positives. Prefer it over
    MarginMSE for lists of many candidates, or when the teacher's scale is not the student's: a `teacher_temperature`
    above 1 softens an overconfident teacher.

    Source: Hinton et al. 2015 (arXiv 1503.02531), with the softmax over the documents of a query.

    Args:
        teacher_temperature: what teacher scores are divided by; the student's are already divided by theirs.
    """

    target: ClassVar[Literal["positives", "teacher"]] = "teacher"

    def __init__(self, *, teacher_temperature: float = 1.0) -> None:
        super().__init__()
        self.teacher_temperature = check_number("teacher_temperature", teacher_temperature)

    def forward(
        self, scores: Tensor, teacher_scores: Tensor, valid: Tensor | None = None, *, positives: Tensor | None = None
    ) -> Tensor:
        """Return the mean over the queries with a valid document (with `positives`: that have a positive), or 0.

        Args:
            scores: (queries, docs) student scores, divided by the student's temperature.
            teacher_scores: (queries, docs) floats; -inf gives a document no mass.
            valid: (queries, docs) bools, True = keep; None keeps all.
            positives: (queries, docs) bools or grades; only chooses which queries count.

        Raises:
            DataError: the shapes differ, scores are not floats, or valid is not a bool mask.
        """
        check_matrices(scores, teacher_scores, valid, name="teacher_scores")
        keep = kept(scores, valid)
        counted = keep.any(dim=1)
        if positives is not None:
            check_matrices(scores, positives, valid, name="positives")
            counted = positive_entries(scores, positives, valid).counts > 0
        # A large finite number in the place of -inf: a row with nothing to keep then stays free of NaN.
        floor = torch.finfo(compute_dtype(scores)).min / 4
        student = scores.to(compute_dtype(scores)).where(keep, floor).log_softmax(dim=1)
        teacher = teacher_scores.detach().to(student.dtype).div(self.teacher_temperature)
        teacher = teacher.where(keep, floor).clamp(min=floor).log_softmax(dim=1)
        rows = (teacher.exp() * (teacher - student)).where(keep, 0.0).sum(dim=1)
        return mean_over_queries(rows.where(counted, 0.0), counted)


def _error(scores: Tensor, teacher_scores: Tensor, keep: Tensor) -> Tensor:
    dtype = compute_dtype(scores)
    return (scores.where(keep, 0.0).to(dtype) - teacher_scores.detach().to(dtype).where(keep, 0.0)).where(keep, 0.0)


def _moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (queries,) mean and variance of the values under the mask, 0 for an empty row."""
    count = mask.sum(dim=1).clamp(min=1)
    mean = values.where(mask, 0.0).sum(dim=1) / count
    return mean, (values - mean[:, None]).where(mask, 0.0).square().sum(dim=1) / count

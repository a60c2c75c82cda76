"""SoftTop-k: probabilities that sum to k instead of 1, and the loss on them.

Symbols of the paper, and their names here:

    x_l     scores[query, l], already divided by the temperature
    alpha   sharpness
    t       minus the threshold; the code works with tau = -alpha t, so that  z_l = alpha x_l - tau
    p_l     sigmoid(z_l), with tau such that  sum_l p_l = k
    v_l     p_l (1 - p_l),   V = sum_l v_l;   share_l = v_l / V
            d tau / d x_j = alpha share_j,   d p_i / d x_j = alpha v_i (delta_ij - share_j)

Source: Gupta et al. 2024, "Dual-Encoders for Extreme Multi-label Classification" (arXiv 2310.10636); the construction
is Thomas Ahle's. The threshold comes from a safeguarded Newton iteration (threshold.py) and the gradient from implicit
differentiation, so that nothing is recorded by autograd inside the solver.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shortlist.errors import ConfigError
from shortlist.losses.base import RankingLoss, check_matrices, check_number
from shortlist.losses.entries import PositiveEntries
from shortlist.losses.row_statistics import Columns, blocks, compute_dtype
from shortlist.losses.rows import ScoreRows, masked_blocks
from shortlist.losses.threshold import Threshold, difference

LARGEST_SHARPNESS = 1e4  # float32 resolves sharpness times score up to about 1e8


class SoftTopK(RankingLoss):
    """Negative log-probability of the positives under SoftTop-k: L = - sum_{i in P} w_i log p_i.

    The row has k units of probability and each p is at most 1, so up to k positives can all be certain and none is
    pushed down for being easy. Prefer it to aim at a cut-off: k = 5 for precision at 5, k = 100 for recall at 100.
    When it is not clear which cut-off counts, DecoupledSoftmax is the safer choice. SoftTop-1 is not the softmax: it
    has the same sum and other values.

    The loss is the mean over all positives of the query, each in proportion to its grade with `weight_by_grade`.
    Positives that were left out of a sample leave the row: they use none of its mass and are no negatives. With
    "num_pos" k is then the number of those drawn.

    Args:
        k: mass of each row: a number above zero (whole or not), "num_pos" for the row's number of positives, or a
            tensor with one value a row. Above the number of valid columns it is that number.
        sharpness: alpha; a larger one brings p closer to the hard top k.
        weight_by_grade: weight the positives of a query in proportion to their grades.
        normalise_weights: see DecoupledSoftmax.

    Raises:
        ConfigError: k or the sharpness is not above zero, or the sharpness is above `LARGEST_SHARPNESS`.
    """

    samples_positives = True
    drops_left_out = True

    def __init__(
        self,
        *,
        k: float | Tensor | Literal["num_pos"] = 5,
        sharpness: float = 2.0,
        weight_by_grade: bool = False,
        normalise_weights: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(k, str) and k != "num_pos":
            raise ConfigError(f'k of soft_top_k must be a number above 0 or "num_pos", got {k!r}.')
        self.k = k if isinstance(k, (str, Tensor)) else check_number("k of soft_top_k", k)
        self.sharpness = _check_sharpness(sharpness)
        self.weight_by_grade = weight_by_grade
        self.normalise_weights = normalise_weights

    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (rows,) losses."""
        device = entries.rows.device
        if isinstance(self.k, str):
            k = _row_k(entries.counts.clamp(min=1), len(entries.counts), device)
        else:
            k = _row_k(self.k, view.queries, device)[view.rows]
        tau, positive = view.statistic(Threshold(k, self.sharpness), entries)
        z = self.sharpness * positive.to(tau.dtype) - tau[entries.rows]
        terms = -F.logsigmoid(z).to(positive.dtype)
        weights = entries.weights(by_grade=self.weight_by_grade, normalise=self.normalise_weights)
        return entries.row_sums(weights * terms)


def soft_top_k(scores: Tensor, k: float | Tensor, sharpness: float = 2.0, valid: Tensor | None = None) -> Tensor:
    """Return probabilities p = sigmoid(alpha (score + t)) of which each row sums to k: a soft form of the top k.

    p is in the order of the scores, does not change when a constant is added to a row, and tends to the indicator of
    the k best as the sharpness grows. The gradient is exact.

    Args:
        scores: (queries, docs) floats.
        k: sum of each row, above zero: a number or a tensor (queries,). Above the number of valid columns of a row it
            is that number, and every valid p of the row is 1.
        sharpness: alpha.
        valid: (queries, docs) bools, True = keep. A column that is not valid gets p = 0 and gradient 0.

    Returns:
        (queries, docs) in float32, or float64 for float64 scores; |sum p - k| is at most 1e-6 max(k, 100), or 1e-10.

    Raises:
        ConfigError: k or the sharpness is not above zero, the sharpness above `LARGEST_SHARPNESS`, or k does not have
            one value a row.
        DataError: scores is not a float matrix, or valid has another shape.
    """
    check_matrices(scores, scores, valid, name="scores")
    threshold = Threshold(_row_k(k, scores.shape[0], scores.device), _check_sharpness(sharpness))
    return _SoftTopK.apply(scores, valid, threshold) if scores.numel() else scores.to(compute_dtype(scores), copy=True)


class _SoftTopK(Function):
    @staticmethod
    def forward(ctx, scores, valid, threshold):  # noqa: D102
        p = torch.empty(scores.shape, dtype=compute_dtype(scores), device=scores.device)
        tau = torch.empty_like(threshold.k)
        for rows, block in masked_blocks(scores, valid, as_is=True):
            tau[rows] = threshold.value(Columns.of(block), rows)
            for tile in blocks(block):
                difference(block[tile], tau[rows][tile], threshold.sharpness, out=p[rows][tile]).sigmoid_()
        ctx.save_for_backward(scores, valid, tau)
        ctx.threshold = threshold
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # noqa: D102
        scores, valid, tau = ctx.saved_tensors
        threshold = ctx.threshold
        gradient = torch.empty_like(scores)
        for rows, block in masked_blocks(scores, valid):
            threshold.weights(block, tau[rows], rows)
            total = block.sum(dim=1, keepdim=True)
            weighted = torch.mul(block, grad_output[rows], out=threshold.workspace.like(block, 0))
            # alpha v_j (g_j - sum_i share_i g_i), with v = weights * largest
            mean = weighted.sum(dim=1, keepdim=True).div_(total.masked_fill_(total == 0, 1.0))
            largest = threshold.largest[rows].exp().to(block.dtype)[:, None]
            gradient[rows] = weighted.sub_(block.mul_(mean)).mul_(largest * threshold.sharpness)
        return gradient, None, None


def _check_sharpness(value: float) -> float:
    if check_number("sharpness", value) > LARGEST_SHARPNESS:
        raise ConfigError(
            f"sharpness of soft_top_k is {value:g}; expected at most {LARGEST_SHARPNESS:g}, which is the hard top k "
            "already for scores that differ by a thousandth."
        )
    return float(value)


def _row_k(k: float | Tensor, rows: int, device: torch.device) -> Tensor:
    """Return k as one float64 a row; refuse what is not above zero."""
    dtype = torch.float32 if device.type == "mps" else torch.float64  # that device has no float64
    try:
        values = torch.as_tensor(k, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"k of soft_top_k must be one number or one value a row, got {k!r:.60}.") from None
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] != rows):
        raise ConfigError(f"k must be one number or one value a row, got shape {tuple(values.shape)} for {rows} rows.")
    if not bool((values > 0).all()):
        raise ConfigError(f"k of soft_top_k must be above 0, got {values[~(values > 0)].flatten()[0].item():g}.")
    return values.expand(rows)

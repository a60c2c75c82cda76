"""SoftTop-k: probabilities that sum to k instead of 1, and the loss on them.

Symbols of the paper, and their names here:

    x_l     scores[query, l], already divided by the temperature
    alpha   sharpness
    t       minus the threshold; the code works with tau = -alpha t, so that  z_l = alpha x_l - tau
    p_l     sigmoid(z_l), with tau such that  sum_l p_l = k
    v_l     p_l (1 - p_l),   V = sum_l v_l;   share_l = v_l / V
            d tau / d x_j = alpha share_j,   d p_i / d x_j = alpha v_i (delta_ij - share_j)

Source: Gupta et al. 2024, "Dual-Encoders for Extreme Multi-label Classification" (arXiv 2310.10636); the construction
is Thomas Ahle's. The threshold comes from a safeguarded Newton iteration and the gradient from implicit
differentiation, so that nothing is recorded by autograd inside the solver.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shortlist.errors import ConfigError
from shortlist.losses.base import PositiveEntries, RankingLoss, check_matrices, check_number
from shortlist.losses.row_statistics import RowStatistic, Workspace, compute_dtype, masked_blocks, row_statistic

EVERYTHING = -1e30  # the threshold of a row whose k is all it has: every p is 1
FREE_STEPS = 5  # Newton alone; usually enough
MAX_STEPS = 400  # out of reach: from then on steps or bracket halve


class SoftTopK(RankingLoss):
    """Negative log-probability of the positives under SoftTop-k: L = - sum_{i in P} w_i log p_i.

    The row has k units of probability and each p is at most 1, so up to k positives can all be certain and none is
    pushed down for being easy. Prefer it to aim at a cut-off: k = 5 for precision at 5, k = 100 for recall at 100.
    When it is not clear which cut-off counts, DecoupledSoftmax is the safer choice. SoftTop-1 is not the softmax: it
    has the same sum and other values.

    The loss is the mean over all positives of the query, each in proportion to its grade with `weight_by_grade`.

    Args:
        k: mass of each row: a number above zero (whole or not), "num_pos" for the row's number of positives, or a
            tensor with one value a row. Above the number of valid columns it is that number.
        sharpness: alpha; a larger one brings p closer to the hard top k.
        weight_by_grade: weight the positives of a query in proportion to their grades.

    Raises:
        ConfigError: k or the sharpness is not above zero.
    """

    def __init__(
        self, *, k: float | Tensor | Literal["num_pos"] = 5, sharpness: float = 2.0, weight_by_grade: bool = False
    ) -> None:
        super().__init__()
        if isinstance(k, str) and k != "num_pos":
            raise ConfigError(f'k of soft_top_k must be a number above 0 or "num_pos", got {k!r}.')
        self.k = k if isinstance(k, (str, Tensor)) else check_number("k of soft_top_k", k)
        self.sharpness = check_number("sharpness", sharpness)
        self.weight_by_grade = weight_by_grade

    def row_losses(self, scores: Tensor, entries: PositiveEntries, valid: Tensor | None) -> Tensor:
        """Return (queries,) losses."""
        k = entries.counts.clamp(min=1) if isinstance(self.k, str) else self.k
        statistic = Threshold(_row_k(k, scores), self.sharpness)
        tau, positive = row_statistic(scores, valid, entries.rows, entries.columns, statistic)
        z = self.sharpness * positive.to(tau.dtype) - tau[entries.rows]
        terms = -F.logsigmoid(z).to(positive.dtype)
        return entries.row_sums(entries.weights(by_grade=self.weight_by_grade) * terms)


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
        ConfigError: k or the sharpness is not above zero, or k does not have one value a row.
        DataError: scores is not a float matrix, or valid has another shape.
    """
    check_matrices(scores, scores, valid, name="scores")
    threshold = Threshold(_row_k(k, scores), check_number("sharpness", sharpness))
    return _SoftTopK.apply(scores, valid, threshold) if scores.numel() else scores.to(compute_dtype(scores), copy=True)


class Threshold(RowStatistic):
    """The threshold tau of each row, in float64 whatever the scores are: see `_difference`."""

    without_positives = False

    def __init__(self, k: Tensor, sharpness: float) -> None:
        self.k = k
        self.sharpness = sharpness
        self.workspace = Workspace()

    def value(self, block: Tensor, rows: slice) -> Tensor:
        """Return (rows,) thresholds."""
        return _solve(block.mul_(self.sharpness), self.k[rows], self.workspace)

    def gradient(self, block: Tensor, value: Tensor) -> Tensor:
        """Return (rows, docs) alpha v / V."""
        shares, _ = self.shares(block, value)
        return shares.mul_(self.sharpness)

    def z(self, block: Tensor, value: Tensor) -> Tensor:
        """Turn the scores of a block into z, in place."""
        return _difference(block.mul_(self.sharpness), value, out=block)

    def shares(self, block: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, docs) v / V, which take the place of the block, and (rows, 1) V.

        v = e^-|z| / (1 + e^-|z|)^2, scaled by the largest of the row, so that the shares hold where every v underflows.
        """
        size = self.z(block, value).abs_()
        nearest = size.amin(dim=1, keepdim=True)
        nearest = nearest.masked_fill(nearest == torch.inf, 0.0)  # a row with no valid column
        scaled = torch.sub(nearest, size, out=size).exp_()
        largest = nearest.neg().exp_()
        below = torch.mul(scaled, largest, out=self.workspace.like(block, 0)).add_(1)
        scaled.div_(below.square_())
        total = scaled.sum(dim=1, keepdim=True)
        return scaled.div_(total.masked_fill(total == 0, 1.0)), total * largest


class _SoftTopK(Function):
    @staticmethod
    def forward(ctx, scores, valid, threshold):  # noqa: D102
        p = torch.empty(scores.shape, dtype=compute_dtype(scores), device=scores.device)
        tau = torch.empty_like(threshold.k)
        for rows, block in masked_blocks(scores, valid):
            part = p[rows].copy_(block)
            tau[rows] = threshold.value(block, rows)
            threshold.z(part, tau[rows]).sigmoid_()
        ctx.save_for_backward(scores, valid, tau)
        ctx.threshold = threshold
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # noqa: D102
        scores, valid, tau = ctx.saved_tensors
        gradient = torch.empty_like(scores)
        for rows, block in masked_blocks(scores, valid):
            shares, total = ctx.threshold.shares(block, tau[rows])
            incoming = grad_output[rows]
            weighted = torch.mul(shares, incoming, out=ctx.threshold.workspace.like(block, 0))
            # alpha v_j (g_j - sum_i share_i g_i), with v = share V
            mean = weighted.sum(dim=1, keepdim=True)
            gradient[rows] = weighted.sub_(shares.mul_(mean)).mul_(total * ctx.threshold.sharpness)
        return gradient, None, None


def _row_k(k: float | Tensor, scores: Tensor) -> Tensor:
    """Return k as one float64 a row; refuse what is not above zero."""
    dtype = torch.float32 if scores.device.type == "mps" else torch.float64  # that device has no float64
    try:
        values = torch.as_tensor(k, dtype=dtype, device=scores.device)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"k of soft_top_k must be one number or one value a row, got {k!r:.60}.") from None
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] != scores.shape[0]):
        raise ConfigError(
            f"k must be one number or one value a row, got shape {tuple(values.shape)} for {scores.shape[0]} rows."
        )
    if not bool((values > 0).all()):
        raise ConfigError(f"k of soft_top_k must be above 0, got {values[~(values > 0)].flatten()[0].item():g}.")
    return values.expand(scores.shape[0])


def _difference(a: Tensor, tau: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return z = a - tau as if tau had not been rounded to the dtype of a.

    With float32 scores of 1e4 a rounded threshold would be wrong by 5e-4, and so would the sum of p. Near the threshold
    a - high is exact (Sterbenz), and the low part then corrects it.
    """
    high = tau.to(a.dtype)
    z = torch.sub(a, high[:, None], out=out)
    return z if a.dtype == tau.dtype else z.sub_((tau - high).to(a.dtype)[:, None])


def _solve(a: Tensor, k: Tensor, workspace: Workspace) -> Tensor:
    """Return (rows,) tau with sum_l sigmoid(a_l - tau) = k, for a (rows, docs) with -inf where a column is masked.

    Newton steps on the logarithm of (sum / k), nearly linear in tau, inside a bracket that shrinks. A step that leaves
    the bracket, or after a few steps is not half as long as the one before, is replaced by the bracket's middle.
    All that is read of the columns are their number, maximum, minimum and sums. A Newton step ends the iteration when
    it is so small that the quadratic error it leaves is below the precision of the dtype, so the last one needs no
    further look at the columns.
    """
    low, high = a.amin(dim=1), a.amax(dim=1)
    count = torch.full_like(k, a.shape[1])
    if bool((low == -torch.inf).any()):
        masked = torch.eq(a, -torch.inf, out=workspace.like(a, 1, dtype=torch.bool))
        count = a.shape[1] - masked.sum(dim=1).to(k.dtype)
        low = workspace.like(a, 0).copy_(a).masked_fill_(masked, torch.inf).amin(dim=1)
    tau = torch.where(count > 0, EVERYTHING, -EVERYTHING).to(k.dtype)
    unsolved = k < count
    if not bool(unsolved.all()):
        if bool(unsolved.any()):
            tau[unsolved] = _solve(a[unsolved], k[unsolved], workspace)
        return tau

    # sigmoid(z) <= e^z gives tau <= log sum exp a - log k, close when k is a small part of the columns. With every a
    # replaced by the minimum or the maximum, tau lies between min - logit(k / count) and max - logit(k / count).
    tail = torch.sub(a, high[:, None], out=workspace.like(a, 0)).exp_().sum(dim=1).log_()
    low, high = low.to(k.dtype), high.to(k.dtype)
    logit = k.log() - (count - k).log()
    current = torch.minimum(high - logit, high + tail.to(k.dtype) - k.log())
    slack = 1 + 1e-6 * torch.maximum(low.abs(), high.abs())
    lower, upper = torch.minimum(low - logit, current) - slack, current + slack

    tolerance = 1e-7 if a.dtype == torch.float64 else 5e-4
    done, moved = torch.zeros_like(unsolved), upper - lower
    for step in range(MAX_STEPS):
        excess, slope = _excess(a, current, k, workspace)
        lower = torch.where(excess > 0, current, lower)
        upper = torch.where(excess > 0, upper, current)
        proposal = current + excess / slope
        halve = (proposal < lower) | (proposal > upper)
        if step >= FREE_STEPS:
            halve |= (proposal - current).abs() > moved / 2
        proposal = torch.where(halve, (lower + upper) / 2, proposal)
        moved = (proposal - current).abs()
        # A finished row stays as it is: its result must not depend on the rows it shares a block with.
        current = torch.where(done, current, proposal)
        # A halving leaves an error as large as itself, a Newton step its square. NaN ends here too.
        done |= ~(moved > torch.where(halve, tolerance**2, tolerance))
        if bool(done.all()):
            break
    return current


def _excess(a: Tensor, tau: Tensor, k: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Return (rows,) log(sum p / k), or another number of that sign and root, and minus its slope in tau."""
    p = torch.sigmoid(_difference(a, tau, out=workspace.like(a, 0)), out=workspace.like(a, 0))
    total = p.sum(dim=1).to(k.dtype)
    slope = 1 - p.square_().sum(dim=1).to(k.dtype) / total  # V / sum p
    excess = (total / k).log()
    flat = ~(slope > 0.01)
    if bool(flat.any()):
        excess[flat], slope[flat] = _balance(_difference(a[flat], tau[flat]), k[flat])
    return excess, slope


def _balance(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the excess and slope of rows that are all but decided, where sum p is flat and its rounding all one sees.

    sum p = k says: the mass below the threshold plus the number of columns above it is k plus what those above lack,

        sum_{z <= 0} p + above  =  k + sum_{z > 0} (1 - p),

    with every term small and without rounding error. With above - k on the side where it is positive, the excess is
    the logarithm of the ratio of the two sides. Its slope lies between 1/2 and 2, however wide the gap at rank k.
    """
    below = z <= 0
    above = (~below).sum(dim=1).to(k.dtype)
    log_small, log_large = F.logsigmoid(-z.abs()), F.logsigmoid(z.abs())

    def side(mask: Tensor, surplus: Tensor) -> tuple[Tensor, Tensor]:
        kept = log_small.masked_fill(~mask, -torch.inf)
        mass = torch.logaddexp(kept.logsumexp(dim=1).to(k.dtype), surplus.clamp(min=0).log())
        return mass, ((kept + log_large).logsumexp(dim=1).to(k.dtype) - mass).exp()

    left, left_slope = side(below, above - k)
    right, right_slope = side(~below, k - above)
    return left - right, left_slope + right_slope

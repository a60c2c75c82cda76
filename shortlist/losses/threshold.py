"""The threshold of SoftTop-k: the one number a row for which the sigmoids of the row sum to k.

    z_l = alpha x_l - tau,   p_l = sigmoid(z_l),   tau such that  sum_l p_l = k
    v_l = p_l (1 - p_l),     d tau / d x_j = alpha v_j / sum_l v_l

A safeguarded Newton iteration, warm-started at a bound that is nearly reached when k is a small part of the columns. It
needs nothing from earlier steps, so training resumes exactly. When k is more than half of the columns it looks for the
other side instead,

    sum_l sigmoid(tau - alpha x_l) = count - k,

so that the sum it works with is never nearly everything, where rounding would hide what is missing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shortlist.losses.row_statistics import Columns, Operation, RowStatistic, Workspace

EVERYTHING = 1e30  # beyond every score: the threshold of a row whose k is all it has is minus this
FREE_STEPS = 5  # Newton alone; usually enough
MAX_STEPS = 400  # out of reach: from then on steps or bracket halve
FLAT = 0.01  # a slope below it: all columns but a few are decided


class Threshold(RowStatistic):
    """The threshold tau of each row, in float64 whatever the scores are: see `difference`. The weights are v.

    Args:
        k: (queries,) sums, above zero; above the number of valid columns of a row it is that number.
        sharpness: alpha.
    """

    without_positives = False

    def __init__(self, k: Tensor, sharpness: float) -> None:
        self.k = k
        self.sharpness = self.share = sharpness
        self.workspace = Workspace()
        # log of the largest v of a row in which every v may underflow, else 0
        self.largest = torch.zeros_like(k)

    def value(self, columns: Columns, rows: slice) -> Tensor:
        """Return (rows,) thresholds."""
        solver = _Solver(columns, self.k[rows], self.sharpness, self.workspace)
        tau, flat = solver.solve()
        nearest = torch.zeros_like(tau)
        if bool(flat.any()):
            (found,) = columns.reduce(lambda block, part: (self._size(block, tau[part]).amax(dim=1),), "max")
            nearest = found.to(tau.dtype).where(flat & (found > -torch.inf), 0.0)
        self.largest[rows] = nearest
        return tau

    def z(self, block: Tensor, tau: Tensor) -> Tensor:
        """Turn the scores of a block into z, in place."""
        return difference(block, tau, self.sharpness, out=block)

    def weights(self, block: Tensor, value: Tensor, rows: slice) -> None:
        """Turn the scores into v, or into v over the largest v of the row where all are tiny."""
        torch.copysign(self.z(block, value), -1.0, out=block)
        largest = self.largest[rows]
        if bool((largest == 0).all()):
            block.sigmoid_()
            torch.addcmul(block, block, block, value=-1, out=block)
            return
        # v = e^-|z| / (1 + e^-|z|)^2
        below = torch.exp(block, out=self.workspace.like(block, 0)).add_(1).square_()
        block.sub_(largest.to(block.dtype)[:, None]).exp_().div_(below)

    def _size(self, block: Tensor, tau: Tensor) -> Tensor:
        memory = self.workspace.like(block, 0)
        return torch.copysign(difference(block, tau, self.sharpness, out=memory), -1.0, out=memory)


def difference(x: Tensor, tau: Tensor, alpha: float, *, out: Tensor | None = None) -> Tensor:
    """Return z = alpha x - tau as if tau had not been rounded to the dtype of x.

    With float32 scores of 1e4 a rounded threshold would be wrong by 5e-4, and so would the sum of p. Near the threshold
    alpha x - high is exact (Sterbenz), and the low part then corrects it.
    """
    high = tau.to(x.dtype)
    z = torch.add(-high[:, None], x, alpha=alpha, out=out)
    if x.dtype == tau.dtype:
        return z
    low = (tau - high).to(x.dtype)
    return z if bool((low == 0).all()) else z.sub_(low[:, None])


class _Solver:
    """Newton steps on the logarithm of (sum / k), nearly linear in tau, inside a bracket that shrinks.

    A step that leaves the bracket, or after a few steps is not half as long as the one before, is replaced by the
    bracket's middle. All that is read of the columns are their number, maximum, minimum and sums. A Newton step ends
    the iteration when it is so small that the quadratic error it leaves is below the precision of the dtype, so the
    last one needs no further look at the columns.

    Everything below is about sign (alpha x - tau), with k the smaller of k and count - k: for sign = -1 the sum of
    sigmoids is what the row lacks.
    """

    def __init__(self, columns: Columns, k: Tensor, alpha: float, workspace: Workspace) -> None:
        self.columns = columns
        self.count = columns.counts().to(k.dtype)
        lacking = self.count - k
        self.unsolved = lacking > 0
        self.sign = torch.where(k > lacking, -1.0, 1.0).to(k.dtype).where(self.unsolved, 1.0)
        self.k = torch.minimum(k, lacking).where(self.unsolved, 1.0)
        self.alpha = alpha
        self.workspace = workspace
        self.reversed = bool((self.sign < 0).any())
        self.missing = False  # whether a column of this process is -inf
        self.same_sign = not self.reversed or bool((self.sign < 0).all())

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return (rows,) tau, and bools: the row has a gap at rank k so wide that every v may underflow."""
        done = ~self.unsolved
        everything = torch.where(self.count > 0, -EVERYTHING, EVERYTHING).to(self.k.dtype)
        if bool(done.all()):
            return everything, torch.zeros_like(done)
        current, lower, upper, tolerance = self._bounds()
        moved = upper - lower
        flat, solution = torch.zeros_like(done), current
        for step in range(MAX_STEPS):
            current = _representable(current, tolerance)
            excess, slope, now_flat = self._excess(current, done)
            flat = torch.where(done, flat, now_flat)
            lower = torch.where(excess > 0, current, lower)
            upper = torch.where(excess > 0, upper, current)
            proposal = current + excess / slope
            halve = (proposal < lower) | (proposal > upper)
            if step >= FREE_STEPS:
                halve |= (proposal - current).abs() > moved / 2
            proposal = torch.where(halve, (lower + upper) / 2, proposal)
            moved = (proposal - current).abs()
            # A finished row stays as it is: its result must not depend on the rows it shares a block with.
            solution = torch.where(done, solution, proposal)
            current = torch.where(done, current, proposal)
            # A halving leaves an error as large as itself, a Newton step its square. NaN ends here too.
            done = done | ~(moved > torch.where(halve, tolerance**2, tolerance))
            if bool(done.all()):
                break
        return (self.sign * solution).where(self.unsolved, everything), flat | (self.k < 1e-20)

    def _bounds(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return where to start, a bracket, and the step at which to stop.

        sigmoid(z) <= e^z gives tau <= log sum exp a - log k, close when k is a small part of the columns. With every a
        replaced by the minimum or the maximum, tau lies between min - logit(k / count) and max - logit(k / count).
        """
        found = self.columns.reduce(self._ends, "max", "min", "logsumexp")
        dtype = self.k.dtype
        high, low, total = (value.to(dtype) for value in found)
        logit = self.k.log() - (self.count - self.k).log()
        upper = torch.minimum(high - logit, total - self.k.log())
        slack = 1 + 1e-6 * torch.maximum(low.abs(), high.abs())
        lower = torch.minimum(low - logit, upper) - slack
        return upper, lower, upper + slack, 1e-7 if found[0].dtype == torch.float64 else 5e-4

    def _ends(self, block: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum, minimum and log sum exp of sign alpha x over the columns that exist."""
        top, bottom = block.amax(dim=1), block.amin(dim=1)
        memory = self.workspace.like(block, 0)
        if bool((bottom == -torch.inf).any()):
            self.missing = True
            bottom = memory.copy_(block).masked_fill_(block == -torch.inf, torch.inf).amin(dim=1)
        sign = self.sign[rows].to(block.dtype)
        if self.reversed:
            top, bottom = torch.where(sign < 0, -bottom, top), torch.where(sign < 0, -top, bottom)
        shift = (self.alpha * top).masked_fill(top.isinf(), 0.0)
        powers = self._signed(block, shift, rows, memory).exp_()
        return self.alpha * top, self.alpha * bottom, powers.sum(dim=1).log() + shift

    def _signed(self, block: Tensor, tau: Tensor, rows: slice, memory: Tensor) -> Tensor:
        """Return sign alpha x - tau in `memory`; -inf where there is no column, whatever the sign."""
        high = tau.to(block.dtype)
        low = (tau - high).to(block.dtype) if tau.dtype != block.dtype else None
        sign = self.sign[rows].to(block.dtype)
        if self.same_sign:
            alpha = -self.alpha if self.reversed else self.alpha
            z = torch.add(-high[:, None], block, alpha=alpha, out=memory)
        else:
            z = torch.add(-(sign * high)[:, None], block, alpha=self.alpha, out=memory).mul_(sign[:, None])
        if low is not None and not bool((low == 0).all()):
            z.sub_(low[:, None])
        if self.reversed and self.missing:
            z.masked_fill_(z == torch.inf, -torch.inf)
        return z

    def _excess(self, tau: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows,) log(sum p / k), or another number of that sign and root, and minus its slope in tau.

        The third are bools: the row is all but decided.
        """
        total, squares = self.columns.reduce(lambda block, rows: self._moments(block, tau, rows, done), "sum", "sum")
        total, squares = total.to(self.k.dtype), squares.to(self.k.dtype)
        slope = 1 - squares / total  # V / sum p
        excess = (total / self.k).log()
        flat = ~(slope > FLAT) & ~done & ~total.isnan()
        if bool(flat.any()):
            balanced = self._balance(tau, flat)
            excess, slope = (torch.where(flat, new, old) for new, old in zip(balanced, (excess, slope), strict=True))
        return excess, slope, flat

    def _moments(self, block: Tensor, tau: Tensor, rows: slice, done: Tensor) -> tuple[Tensor, Tensor]:
        if bool(done[rows].all()):  # nobody will look
            return block.new_ones(block.shape[0]), block.new_zeros(block.shape[0])
        memory = self.workspace.like(block, 0)
        p = self._signed(block, tau[rows], rows, memory).sigmoid_()
        return p.sum(dim=1), torch.linalg.vector_norm(p, dim=1).square()

    def _balance(self, tau: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the excess and slope of rows that are all but decided: sum p is flat, its rounding all one sees.

        sum p = k says: the mass below the threshold plus the number of columns above it is k plus what those above
        lack,

            sum_{z <= 0} p + above  =  k + sum_{z > 0} (1 - p),

        with every term small and without rounding error. With above - k on the side where it is positive, the excess
        is the logarithm of the ratio of the two sides. Its slope lies between 1/2 and 2, however wide the gap at k.
        """
        operations: tuple[Operation, ...] = ("sum", "logsumexp", "logsumexp", "logsumexp", "logsumexp")
        above, *parts = self.columns.reduce(lambda block, rows: self._sides(block, tau, rows, flat), *operations)
        above = above.to(self.k.dtype)
        surplus = above - self.k
        left, right, left_change, right_change = (part.to(self.k.dtype) for part in parts)
        left = torch.logaddexp(left, surplus.clamp(min=0).log())
        right = torch.logaddexp(right, (-surplus).clamp(min=0).log())
        return left - right, (left_change - left).exp() + (right_change - right).exp()

    def _sides(self, block: Tensor, tau: Tensor, rows: slice, flat: Tensor) -> tuple[Tensor, ...]:
        """Number of columns above, and the logarithms of the mass and of its change on each side, of the flat rows."""
        chosen = flat[rows]
        signed = self._signed(block, tau[rows], rows, self.workspace.like(block, 0))
        z = signed[chosen]
        below = z <= 0
        size = z.abs_()
        missing = size == torch.inf
        log_large = F.logsigmoid(size)
        log_small = (log_large - size).masked_fill_(missing, -torch.inf)  # log sigmoid(-|z|)
        change = log_large.add_(log_small)
        results = [torch.zeros(chosen.shape, dtype=block.dtype, device=block.device)]
        results += [torch.full_like(results[0], -torch.inf) for _ in range(4)]
        results[0][chosen] = (~below).sum(dim=1).to(block.dtype)
        for slot, (values, left_out) in enumerate(
            [(log_small, ~below), (log_small, below), (change, ~below), (change, below)], start=1
        ):
            results[slot][chosen] = values.masked_fill(left_out, -torch.inf).logsumexp(dim=1)
        return tuple(results)


def _representable(tau: Tensor, tolerance: float) -> Tensor:
    """Return tau rounded to float32 where that moves it by less than the tolerance: its low part need not be added."""
    if tolerance < 1e-5:
        return tau
    rounded = tau.float().to(tau.dtype)
    return torch.where((rounded - tau).abs() < tolerance / 4, rounded, tau)

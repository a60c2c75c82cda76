"""SoftTop-k forward and backward: the loss of this package beside bisection, and beside autograd through a solver.

    python benchmarks/soft_topk.py [--columns 4000 131073 1305265] [--k 5] [--rounds 5] [--output soft_topk.json]

(a) bisection: the published construction, 32 halvings of a bracket and the gradient by implicit differentiation,
written here from the formulas with plain tensor operations. (b) autograd through the solver: Newton steps recorded by
autograd and differentiated, as one would write it without the implicit function theorem. All three give the mean
log-probability of the positives of each row and its gradient with respect to the scores; the scores are what a dual
encoder makes at temperature 0.05 (standard deviation 3). Seconds are medians of alternating rounds. Peak memory is
measured in a process of its own for each method, above what it held with the scores in memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional

from shortlist.losses import SoftTopK

ROWS = {4000: 512, 131_073: 64, 1_305_265: 8}
ALPHA = 2.0
POSITIVES = 3  # a row


def ours(scores: Tensor, positives: Tensor, k: float) -> Tensor:
    """The loss of this package."""
    return SoftTopK(k=k, sharpness=ALPHA)(scores, positives)


class _Bisection(torch.autograd.Function):
    """log p of every column, by 32 halvings; vector-Jacobian products from the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: float) -> Tensor:
        low = -scores.amax(dim=1, keepdim=True) - 10 / ALPHA
        high = -scores.amin(dim=1, keepdim=True) + 10 / ALPHA
        for _ in range(32):
            middle = (low + high) / 2
            total = torch.sigmoid(ALPHA * (scores + middle)).sum(dim=1, keepdim=True)
            low = torch.where(total < k, middle, low)
            high = torch.where(total < k, high, middle)
        z = ALPHA * (scores + (low + high) / 2)
        ctx.save_for_backward(z)
        return z - torch.logaddexp(z, torch.zeros_like(z))

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        p = torch.sigmoid(z)
        v = ALPHA * p * (1 - p)
        weighted = incoming * ALPHA * (1 - p)
        return weighted - v / v.sum(dim=1, keepdim=True) * weighted.sum(dim=1, keepdim=True), None


def bisection(scores: Tensor, positives: Tensor, k: float) -> Tensor:
    """(a): the mean of log p over the positives."""
    log_p = _Bisection.apply(scores, k)
    return _mean(log_p, positives)


def recorded(scores: Tensor, positives: Tensor, k: float) -> Tensor:
    """(b): Newton on log(sum p / k), every step recorded."""
    tau = torch.logsumexp(ALPHA * scores, dim=1, keepdim=True) - torch.log(torch.tensor(k))
    for _ in range(6):
        p = torch.sigmoid(ALPHA * scores - tau)
        total = p.sum(dim=1, keepdim=True)
        slope = 1 - p.square().sum(dim=1, keepdim=True) / total
        tau = tau + torch.log(total / k) / slope
    return _mean(functional.logsigmoid(ALPHA * scores - tau), positives)


def _mean(log_p: Tensor, positives: Tensor) -> Tensor:
    return -(log_p.masked_fill(~positives, 0.0).sum(dim=1) / positives.sum(dim=1)).mean()


METHODS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "ours": ours,
    "bisection": bisection,
    "autograd": recorded,
}


def case(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Scores, and positives among the better ones."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, columns, generator=generator) * 3
    chosen = torch.randint(columns, (rows, POSITIVES), generator=generator)
    scores.scatter_add_(1, chosen, torch.full(chosen.shape, 6.0))
    return scores, torch.zeros(rows, columns, dtype=torch.bool).scatter_(1, chosen, True)


def step(method: str, scores: Tensor, positives: Tensor, k: float) -> tuple[float, Tensor]:
    """One forward and backward: the loss and the gradient of the scores."""
    leaf = scores.detach().requires_grad_()
    loss = METHODS[method](leaf, positives, k)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


def peak(method: str, columns: int, k: float) -> float:
    """MiB one step adds at its peak, measured in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--child", method, "--columns", str(columns), "--k", str(k)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["mib"] if done.returncode == 0 else float("nan")


def child(method: str, columns: int, k: float) -> None:
    """Print the peak of one step. The gradient of the scores is part of it."""
    scores, positives = case(ROWS[columns], columns)
    step(method, *case(2, 100), k)  # libraries load what they need
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is held now
    before = common.status_mib("VmHWM", Path("/proc/self/status").read_text())
    step(method, scores, positives, k)
    after = common.status_mib("VmHWM", Path("/proc/self/status").read_text())
    sys.stdout.write(json.dumps({"mib": after - before}))


def measure(columns: int, k: float, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    scores, positives = case(ROWS[columns], columns)
    losses, gradients = zip(*(step(method, scores, positives, k) for method in METHODS), strict=True)
    difference = max((gradient - gradients[0]).abs().max().item() for gradient in gradients[1:])
    if max(losses) - min(losses) > 1e-3 or difference > 1e-3:
        raise SystemExit(f"the methods disagree at {columns} columns: losses {losses}, gradients by {difference}.")
    del gradients
    calls = {method: (lambda name=method: step(name, scores, positives, k)) for method in METHODS}
    seconds = {name: common.median(values) for name, values in common.alternate(calls, rounds=rounds).items()}
    row: dict[str, Any] = {"columns": columns, "rows": ROWS[columns]}
    row |= {f"{name} s": value for name, value in seconds.items()}
    row |= {f"{name} / ours": seconds[name] / seconds["ours"] for name in METHODS if name != "ours"}
    row |= {f"{name} MiB": round(peak(name, columns, k)) for name in METHODS}
    return row


def main() -> None:
    parser: argparse.ArgumentParser = common.arguments(__doc__)
    parser.add_argument("--columns", type=int, nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--k", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=list(METHODS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.columns[0], options.k)
        return
    rows = [measure(columns, options.k, options.rounds) for columns in options.columns]
    common.report("soft_topk", rows, options.output, k=options.k, alpha=ALPHA, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()

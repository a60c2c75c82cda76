"""What all losses share: the checks of their arguments, and the reduction.

Conventions of the folder: scores are `(queries, docs)`, already divided by the temperature. Positives are a
mask of the same shape, or grades, where a grade above zero is a positive. Masks are True = keep. An entry that
`valid` drops does not exist for the loss, and neither does one whose score is -inf: it has no probability, no
gradient and is no positive. Losses compute in float32 (float64 for float64 scores); the gradient comes back in
the dtype of the scores.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shortlist.errors import ConfigError, DataError
from shortlist.losses.entries import PositiveEntries, positive_entries
from shortlist.losses.row_statistics import compute_dtype
from shortlist.losses.rows import DenseRows, ScoreRows


def check_matrices(scores: Tensor, other: Tensor, valid: Tensor | None, *, name: str) -> None:
    """Raise DataError unless scores is a float matrix and the other arguments have its shape."""
    for label, argument in (("scores", scores), (name, other), ("valid", valid)):
        if argument is not None and not isinstance(argument, Tensor):
            raise DataError(f"{label} is {type(argument).__name__}; the losses take torch tensors.")
    if scores.ndim != 2 or not scores.is_floating_point():
        raise DataError(
            f"scores must be a matrix (queries, docs) of floats, got shape {tuple(scores.shape)} of {scores.dtype}."
        )
    for label, argument in ((name, other), ("valid", valid)):
        if argument is not None and argument.shape != scores.shape:
            raise DataError(
                f"{label} has shape {tuple(argument.shape)} but scores has {tuple(scores.shape)}; "
                "give one value for each (query, doc) pair."
            )
    if valid is not None and valid.dtype != torch.bool:
        raise DataError(f"valid must be a bool mask, True = keep, got {valid.dtype}; convert it with valid.bool().")


def kept(scores: Tensor, valid: Tensor | None) -> Tensor:
    """Return a (queries, docs) mask of what exists for a loss: valid, and not -inf."""
    keep = scores.detach() != -torch.inf
    return keep if valid is None else keep & valid


def check_number(name: str, value: float) -> float:
    """Return an option as a float; raise ConfigError unless it is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}.")
    return float(value)


def check_sampled_positives(loss: nn.Module) -> None:
    """Raise ConfigError unless positives may be drawn for a loss: where a draw stands for the mean over all.

    Drawing one in proportion to its grade is unbiased for the exact mean with `weight_by_grade`; the weights are in
    the draw, and would count twice.
    """
    if not getattr(loss, "samples_positives", False):
        raise ConfigError(
            f"training.sample_positives: {type(loss).__name__} needs every positive of a query; leave it empty, or "
            "use info_nce, decoupled_softmax or soft_top_k (one_vs_all_bce would call the others negatives)."
        )
    if getattr(loss, "weight_by_grade", False):
        raise ConfigError(
            "training.sample_positives draws in proportion to the grades, so loss.weight_by_grade would count them "
            "twice; set one of the two."
        )


def mean_over_queries(values: Tensor, counted: Tensor) -> Tensor:
    """Average (queries,) values over the counted rows; 0, still attached to the graph, if there is none."""
    return values.sum() / counted.sum().clamp(min=1)


class RankingLoss(nn.Module, ABC):
    """A loss on a score matrix: subclasses give one value a query, this class checks and averages.

    A subclass sees the matrix through `ScoreRows`, so the same lines serve scores that are there and scores that
    `shortlist.losses.pool_loss` makes from vectors, block by block.
    """

    target: ClassVar[Literal["positives", "teacher"]] = "positives"
    """What the second argument is: a mask or grades, or teacher scores."""
    blockwise: ClassVar[bool] = True
    """Whether statistics of the rows and the scores of the positives are all it needs, so that pool_loss takes it."""
    samples_positives: ClassVar[bool] = False
    """Whether the loss of a few positives of a query, drawn in proportion to their grades, stands for that of all."""
    drops_left_out: bool = False
    """Whether known positives that were not drawn leave the row, or stay in it as in the plain loss."""

    def __init__(self) -> None:  # takes nothing, so that build_loss can tell a wrong option
        super().__init__()

    def forward(self, scores: Tensor, positives: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the mean loss over the queries that have a positive, 0 if none has.

        Args:
            scores: (queries, docs) floats, already divided by the temperature.
            positives: (queries, docs) bools, or grades where a grade above zero is a positive.
            valid: (queries, docs) bools, True = keep; None keeps all. This is where copies of a positive's text
                and known positives that must not act as negatives are masked.

        Raises:
            DataError: the shapes differ, scores are not floats, or valid is not a bool mask.
        """
        return mean_over_queries(*self.per_query(scores, positives, valid))

    def per_query(self, scores: Tensor, positives: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (queries,) losses, 0 where a row has no positive, and (queries,) bools: has a positive.

        For callers that reduce over more than this matrix, or weight the queries.
        """
        check_matrices(scores, positives, valid, name="positives")
        entries = positive_entries(scores, positives, valid)
        if scores.numel() == 0:
            return scores.to(compute_dtype(scores)).sum(dim=1), entries.counts > 0
        return self.row_losses(DenseRows(scores, valid), entries), entries.counts > 0

    @abstractmethod
    def row_losses(self, view: ScoreRows, entries: PositiveEntries) -> Tensor:
        """Return (rows,) losses in the compute dtype, exactly 0 for a row without positives."""

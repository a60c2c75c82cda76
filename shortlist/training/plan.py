"""How many steps a run takes, known before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortlist.errors import ConfigError
from shortlist.settings import TrainingConfig


@dataclass(frozen=True)
class StepPlan:
    """Counts of one run. A batch is one forward pass, a step one update of the weights."""

    queries: int
    batches_per_epoch: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    eval_every: int
    save_every: int

    def __str__(self) -> str:
        return (
            f"{self.queries} training queries, {self.batches_per_epoch} batches and {self.steps_per_epoch} steps an "
            f"epoch, {self.total_steps} steps in all, evaluation every {self.eval_every} steps"
        )


def plan_steps(queries: int, training: TrainingConfig, *, processes: int = 1) -> StepPlan:
    """Steps for `queries` training queries, each of `processes` taking `batch_size` of them.

    Raises:
        ConfigError: the settings give zero steps an epoch, or a step count is not a whole number.
    """
    size = training.batch_size * processes
    batches = queries // size if training.drop_last else math.ceil(queries / size)
    if batches == 0:
        raise ConfigError(
            f"{queries} training queries make zero batches of {size} when the last, smaller one is "
            "dropped: lower training.batch_size or set training.drop_last to false."
        )
    steps = math.ceil(batches / training.gradient_accumulation_steps)
    total = training.max_steps or math.ceil(steps * training.num_train_epochs)
    return StepPlan(
        queries=queries,
        batches_per_epoch=batches,
        steps_per_epoch=steps,
        total_steps=total,
        warmup_steps=_count("warmup_steps", training.warmup_steps, total),
        eval_every=min(total, _count("eval_steps", training.eval_steps or steps, total) or 1),
        save_every=min(total, _count("save_steps", training.save_steps or training.eval_steps or steps, total) or 1),
    )


def _count(name: str, value: float, total: int) -> int:
    """`value` as a number of steps: a fraction of `total` below 1, else a whole number."""
    if value < 1:
        return math.ceil(total * value)
    if value != int(value):
        raise ConfigError(f"training.{name} is {value}; expected a whole number of steps, or a fraction below 1.")
    return int(value)

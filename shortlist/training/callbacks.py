"""What happens between steps: when to evaluate, save and stop; the log file; the progress bar."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shortlist.files import atomic_open
from shortlist.training.plan import StepPlan

logger = logging.getLogger(__name__)


class Schedule(TrainerCallback):
    """Evaluates every `eval_every` steps, saves every `save_every`, after each new best, and at the end.

    The best value and its step live in the trainer's state and so in every checkpoint; how many evaluations
    have passed without a new best is read from the log history.
    """

    def __init__(self, plan: StepPlan, *, metric: str | None, patience: int | None):
        self.plan = plan
        self.metric = metric
        self.patience = patience

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for evaluation and saving where they are due."""
        step = state.global_step
        last = step >= self.plan.total_steps
        control.should_evaluate = self.metric is not None and (last or step % self.plan.eval_every == 0)
        control.should_save = last or step % self.plan.save_every == 0
        return control

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Note a new best, ask for its checkpoint, and stop when patience is over."""
        step, value = state.global_step, kwargs["metrics"][f"eval_{self.metric}"]
        if step == 0:
            return control
        if state.best_metric is None or value > state.best_metric:
            state.best_metric, state.best_global_step = value, step
            control.should_save = True
        elif self.patience is not None:
            since = [
                entry for entry in eval_entries(state.log_history) if entry["step"] > (state.best_global_step or 0)
            ]
            if len(since) >= self.patience:
                logger.info("No new best %s in %d evaluations: training stops.", self.metric, len(since))
                control.should_training_stop = True
                control.should_save = True
        return control


class LogFile(TrainerCallback):
    """Writes one JSON object a logged step to `train_log.jsonl`: loss and learning rate, or the held-out measures.

    A resumed run first drops what was logged after its checkpoint, and a line that a kill left half-written.
    """

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring the file back to the step that training starts from."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_log(self.path) if line["step"] <= state.global_step]
        with atomic_open(self.path) as handle:
            handle.writelines(json.dumps(line) + "\n" for line in kept)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Append a line."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        dev = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        if not state.is_world_process_zero or (not dev and "loss" not in logs):
            return
        line: dict[str, Any] = {"step": state.global_step, "epoch": round(float(state.epoch or 0.0), 6)}
        line |= {"dev": dev} if dev else {name: logs[name] for name in logs if name != "epoch"}
        with open(self.path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")
        shown = ", ".join(f"{name} {value:.4f}" for name, value in (dev or {"loss": logs["loss"]}).items())
        logger.log(logging.INFO if dev else logging.DEBUG, "step %d: %s", state.global_step, shown)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `train_log.jsonl`, without a last one that is incomplete; empty if there is no file."""
    lines: list[dict[str, Any]] = []
    if not Path(path).is_file():
        return lines
    for text in Path(path).read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def eval_entries(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Evaluations after the start in a trainer's log history, as {"step", measure: value}."""
    entries = []
    for entry in history:
        measured = {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        if measured and entry["step"] > 0:
            entries.append({"step": entry["step"], **measured})
    return entries


class Saved(TrainerCallback):
    """Calls `then` after each checkpoint."""

    def __init__(self, then: Callable[[], None]):
        self.then = then

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The checkpoint is on the disk."""
        self.then()


class Progress(TrainerCallback):
    """A bar on stderr, on a terminal only and not under --quiet."""

    def __init__(self, total: int):
        self.total = total
        self.bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar at the step training starts from."""
        quiet = os.environ.get("SHORTLIST_QUIET") == "1" or not sys.stderr.isatty()
        hidden = quiet or not state.is_world_process_zero
        self.bar = tqdm(
            total=self.total, initial=state.global_step, desc="train", unit="step", file=sys.stderr, disable=hidden,
            mininterval=0.5,
        )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move by one."""
        self.bar.update(1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close it."""
        self.bar.close()

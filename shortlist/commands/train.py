"""`shortlist train`: one output directory from one configuration; dispatches on `model.kind`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shortlist.commands.training_output import MANIFEST_FILE, TrainingOutput
from shortlist.config import apply_overrides, load_config
from shortlist.errors import ConfigError, ShortlistError
from shortlist.files import write_json
from shortlist.manifest import run_manifest
from shortlist.settings import TrainConfig, nearest

logger = logging.getLogger(__name__)

# What the manifest says of a finished run, and `--resume` says again.
_SUMMARY = ("steps", "best_step", "measures", "untrained", "seconds")


@dataclass(frozen=True)
class TrainResult:
    """What a training run gave: its directory, steps, the step whose weights were kept, measures and seconds.

    `measures` and `untrained` are on the held-out part, of the kept weights and of the encoder before training.
    """

    output: Path
    steps: int
    best_step: int
    measures: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Job(Protocol):
    """One kind of model: what has to be read before the output is touched, then the training itself."""

    @property
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 of the source files, by name."""
        ...

    def run(self, output: Path, *, resume: bool, saved: Callable[[], None]) -> tuple[TrainResult, dict[str, Any]]:
        """Train into `output`; the result, and what the manifest records beside it.

        `saved` is called, on every process, when a checkpoint is on the disk.
        """
        ...


def train(
    config: str | Path | TrainConfig,
    *,
    overrides: Iterable[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> TrainResult | dict[str, Any]:
    """Train from a packaged configuration, a YAML file or a TrainConfig; returns the result (dry run: the estimate).

    Args:
        config: packaged name, file, or resolved configuration.
        overrides: `section.key=value` strings.
        output: directory of the trained model, its log and checkpoints.
        overwrite: replace `output` if it is there; it is given up when the new run has its first checkpoint.
        resume: continue the run in `output`, exactly, with the same configuration.
        dry_run: print steps, memory and what is missing, and touch nothing.

    Raises:
        ConfigError: in the configuration, or `--resume` with another one (the key is named).
        OutputExistsError: `output` exists and neither `overwrite` nor `resume` was asked for, or another run is
            writing it.
        NonFiniteError: the loss is no longer finite.

    Started by `torchrun` or `accelerate launch`, every process calls this and they make each step together.
    """
    if isinstance(config, TrainConfig):
        resolved = apply_overrides(config, overrides)
    else:
        resolved = load_config(config, overrides)
    kind = KINDS.get(resolved.model.kind)
    if kind is None:
        raise ConfigError(
            f"model.kind is {resolved.model.kind!r}{nearest(resolved.model.kind, KINDS) or '.'} "
            f"Known: {', '.join(KINDS)}."
        )
    prepare, estimate = kind
    if dry_run:
        report = estimate()(resolved)
        if os.environ.get("RANK", "0") == "0":  # one of several processes prints
            sys.stdout.write(_table(report))
        return report
    if output is None:
        raise ConfigError("training needs a directory for the model: -o OUT.")
    with _processes() as processes:
        return _train(resolved, prepare, Path(output), processes, overwrite=overwrite, resume=resume)


def _train(
    config: TrainConfig,
    prepare: Callable[[], Callable[[TrainConfig], Job]],
    output: Path,
    processes: Any,
    *,
    overwrite: bool,
    resume: bool,
) -> TrainResult:
    """Prepare, run and record; every process does this, rank 0 alone reads and writes the output."""
    claim = TrainingOutput(output, config, overwrite=overwrite, resume=resume)
    try:
        finished = processes.on_main(claim.check)
        if finished is not None:
            logger.warning("%s is finished (%d steps); there is nothing to resume.", output, finished["steps"])
            return TrainResult(output, **{name: finished[name] for name in _SUMMARY})
        job: Job = processes.main_first(lambda: prepare()(config))
        facts = {"seed": config.seed, "data": dict(job.checksums), "processes": processes.world()}
        processes.on_main(lambda: claim.begin(facts))
        started = time.perf_counter()
        result, details = job.run(output, resume=resume, saved=claim.saved)
        seconds = time.perf_counter() - started
        result = TrainResult(**{**vars(result), "seconds": seconds})
        summary = {name: getattr(result, name) for name in _SUMMARY} | {"seconds": round(seconds, 3)}
        processes.on_main(
            lambda: write_json(output / MANIFEST_FILE, run_manifest(finished=True, **facts, **details, **summary))
        )
        claim.saved()
    except BaseException:
        claim.failed()
        raise
    finally:
        claim.release()
    logger.info("Trained %d steps in %.1f s; the model is in %s", result.steps, seconds, output)
    return result


@contextlib.contextmanager
def _processes() -> Iterator[Any]:
    """The processes of this run (shortlist.training.distributed), joined where a launcher started several."""
    from shortlist.training import distributed

    joined = distributed.start()
    level = logging.getLogger("shortlist").level
    if not distributed.is_main():
        # What rank 0 has to say, it says once for all.
        logging.getLogger("shortlist").setLevel(logging.ERROR)
    try:
        yield distributed
    except RuntimeError as error:
        if not (joined and distributed.lost_another(error)):
            raise
        raise ShortlistError(
            "another process of this run has ended, and a step needs them all; its own messages say why. If the output "
            "has a checkpoint, continue from it with --resume and as many processes."
        ) from error
    finally:
        logging.getLogger("shortlist").setLevel(level)
    # Only after success: others may be waiting for a process that failed, whose exit tells them and the launcher.
    if joined:
        distributed.stop()


def _table(report: Mapping[str, Any]) -> str:
    """A dry run's report, one fact a line."""
    width = max(len(name) for name in report)
    lines = []
    for name, value in report.items():
        values = value if isinstance(value, list) else [value]
        for position, item in enumerate(values or ["nothing"]):
            lines.append(f"{name if position == 0 else '':<{width}}  {item}")
    return "\n".join(lines) + "\n"


def _dual_encoder_job() -> Callable[[TrainConfig], Job]:
    from shortlist.commands.train_dual_encoder import DualEncoderJob

    return DualEncoderJob


def _dual_encoder_estimate() -> Callable[[TrainConfig], dict[str, Any]]:
    from shortlist.commands.dry_run import estimate

    return estimate


# model.kind → (what prepares a job, what estimates a dry run); both load their modules when called.
KINDS: dict[str, tuple[Callable[[], Callable[[TrainConfig], Job]], Callable[[], Callable[[TrainConfig], dict]]]] = {
    "dual_encoder": (_dual_encoder_job, _dual_encoder_estimate),
}

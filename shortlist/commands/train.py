"""`shortlist train`: one output directory from one configuration; dispatches on `model.kind`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shortlist.config import apply_overrides, differing_keys, load_config, write_config
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError
from shortlist.files import refuse_existing, write_json
from shortlist.manifest import run_manifest
from shortlist.settings import TrainConfig, nearest

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"


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

    def run(self, output: Path, *, resume: bool) -> tuple[TrainResult, dict[str, Any]]:
        """Train into `output`; the result, and what the manifest records beside it."""
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
        overwrite: replace `output` if it is there.
        resume: continue the run in `output`, exactly, with the same configuration.
        dry_run: print steps, memory and what is missing, and touch nothing.

    Raises:
        ConfigError: in the configuration, or `--resume` with another one (the key is named).
        OutputExistsError: `output` exists and neither `overwrite` nor `resume` was asked for.
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
    finished = processes.on_main(lambda: _check_output(output, config, overwrite=overwrite, resume=resume))
    if finished is not None:
        return finished
    job: Job = processes.main_first(lambda: prepare()(config))
    facts = {"seed": config.seed, "data": dict(job.checksums), "processes": processes.world()}
    processes.on_main(lambda: _begin(output, config, facts, overwrite=overwrite, resume=resume))
    started = time.perf_counter()
    result, details = job.run(output, resume=resume)
    seconds = time.perf_counter() - started
    result = TrainResult(**{**vars(result), "seconds": seconds})
    summary = {
        "steps": result.steps, "best_step": result.best_step, "measures": result.measures,
        "untrained": result.untrained, "seconds": round(seconds, 3),
    }  # fmt: skip
    processes.on_main(
        lambda: write_json(output / MANIFEST_FILE, run_manifest(finished=True, **facts, **details, **summary))
    )
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
    finally:
        logging.getLogger("shortlist").setLevel(level)
    # Only after success: others may be waiting for a process that failed, whose exit tells them and the launcher.
    if joined:
        distributed.stop()


def _begin(output: Path, config: TrainConfig, facts: Mapping[str, Any], *, overwrite: bool, resume: bool) -> None:
    """Give up an old output, now that everything that can be wrong with the input was looked at, and begin the new."""
    if resume:
        _check_data(output, facts["data"], facts["processes"])
    if overwrite and output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    write_config(config, output / CONFIG_FILE)
    write_json(output / MANIFEST_FILE, run_manifest(finished=False, **facts))


def _check_output(output: Path, config: TrainConfig, *, overwrite: bool, resume: bool) -> TrainResult | None:
    """Refuse an output that may not be used; a result if the run there is finished already."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other: one discards the run, the other continues it.")
    if not resume:
        empty = output.is_dir() and not any(output.iterdir())
        if overwrite and output.exists() and not empty and not _is_training_output(output):
            raise OutputExistsError(
                f"{output} is not an output of shortlist train (it has no {CONFIG_FILE} and {MANIFEST_FILE}), so it is "
                "not replaced; remove it yourself or choose another output."
            )
        if not overwrite and output.is_dir() and _is_training_output(output):
            raise OutputExistsError(
                f"{output} holds a training run already; continue it with --resume, replace it with --overwrite, or "
                "choose another output."
            )
        refuse_existing(output, overwrite=overwrite)
        return None
    if not (output / CONFIG_FILE).is_file():
        raise MissingInputError(
            f"{output} holds no training run to resume ({CONFIG_FILE} is missing); leave out --resume."
        )
    before = load_config(output / CONFIG_FILE)
    changed = differing_keys(before, config)
    if changed:
        listed = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"{output} was started with another configuration: {listed}. Resume with the same settings, or start anew "
            "in another output."
        )
    manifest = _manifest(output)
    if not manifest.get("finished"):
        return None
    logger.warning("%s is finished (%d steps); there is nothing to resume.", output, manifest["steps"])
    return TrainResult(
        output, manifest["steps"], manifest["best_step"], manifest["measures"], manifest["untrained"],
        manifest["seconds"],
    )  # fmt: skip


def _check_data(output: Path, checksums: Mapping[str, str], processes: int) -> None:
    """Refuse to continue on other data, or with another number of processes, than the run began with."""
    began = _manifest(output).get("processes", processes)
    if began != processes:
        raise ConfigError(
            f"the run in {output} began with {began} processes and this is one of {processes}: a step would take "
            f"another number of queries. Resume with {began}, or start anew in another output."
        )
    before = _manifest(output).get("data", {})
    changed = [name for name in {**before, **checksums} if before.get(name) != checksums.get(name)]
    if before and changed:
        raise DataError(
            f"{changed[0]} has changed since the run in {output} began; the steps would not continue it. Start anew in "
            "another output, or put the file back."
        )


def _manifest(output: Path) -> dict[str, Any]:
    path = output / MANIFEST_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_training_output(output: Path) -> bool:
    return (output / CONFIG_FILE).is_file() and (output / MANIFEST_FILE).is_file()


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

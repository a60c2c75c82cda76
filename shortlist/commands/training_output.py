"""The output of a training run: who may write it, and what becomes of the model that it replaces.

One run at a time writes an output: it holds a lock on a file there, which goes with the process, so that a killed run
is in nobody's way. With `--overwrite` the old output stands aside, as the hidden sibling `.NAME.replaced`, until the
new run has a checkpoint; if that run fails before, the old output is put back. What a kill left aside is put back, or
kept for the run that continues, when the next one begins. So both take room on the disk for a while.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shortlist.config import differing_keys, load_config, write_config
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError
from shortlist.files import refuse_existing, write_json
from shortlist.manifest import run_manifest
from shortlist.settings import TrainConfig

try:
    import fcntl
except ImportError:  # not on every system; two runs into one output are then not told apart
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"


class TrainingOutput:
    """One run's claim on its output; every method is for rank 0 alone and harmless elsewhere before `check`.

    Args:
        path: the directory.
        config: the resolved configuration of the run.
        overwrite: replace what is there.
        resume: continue what is there.
    """

    def __init__(self, path: Path, config: TrainConfig, *, overwrite: bool, resume: bool):
        self.path, self.config, self.overwrite, self.resume = path, config, overwrite, resume
        self._folder = Path(os.path.realpath(path))
        self._aside = self._folder.with_name(f".{self._folder.name}.replaced")
        self._rubbish = self._folder.with_name(f".{self._folder.name}.removed")
        self._replaces = False  # an old output stands aside for this run
        self._began = False  # what is in the output is of this run
        self._held: dict[tuple[int, int], int] = {}  # (device, inode) of a lock file → its descriptor

    def check(self) -> dict[str, Any] | None:
        """Refuse an output that may not be used; the manifest of the run there if it is finished and to be resumed.

        Raises:
            ConfigError: `overwrite` with `resume`, or `resume` with another configuration (the key is named).
            OutputExistsError: the output is there and neither was asked for, or another run is writing it.
            MissingInputError: there is nothing to resume.
        """
        if self.overwrite and self.resume:
            raise ConfigError(
                "--overwrite and --resume exclude each other: one discards the run, the other continues it."
            )
        if self._folder.is_dir():
            self._lock(create=self.resume and (self._folder / CONFIG_FILE).is_file())
        self._recover()
        if self.resume:
            return self._continued()
        empty = self._folder.is_dir() and _is_empty(self._folder)
        if self._folder.exists() and not empty:
            if self.overwrite and not _is_output(self._folder):
                raise OutputExistsError(
                    f"{self.path} is not an output of shortlist train (it has no {CONFIG_FILE} and {MANIFEST_FILE}), "
                    "so it is not replaced; remove it yourself or choose another output."
                )
            if not self.overwrite and _is_output(self._folder):
                raise OutputExistsError(
                    f"{self.path} holds a training run already; continue it with --resume, replace it with "
                    "--overwrite, or choose another output."
                )
        refuse_existing(self.path, overwrite=self.overwrite or empty)
        return None

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Lock the output, set an old one aside, and write what the run began with, or compare it where it goes on.

        Called when everything that can be seen to be wrong with the input was looked at.

        Raises:
            DataError: resumed on other data.
            ConfigError: resumed with another number of processes.
            OutputExistsError: another run has taken the output since `check`.
        """
        self.check()
        if self.resume:
            self._check_facts(facts)
            self._replaces = self._aside.exists()
        elif self.overwrite and self._folder.is_dir() and not _is_empty(self._folder):
            self._lock()
            os.replace(self._folder, self._aside)
            self._replaces = True
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        if not self.resume and not _is_empty(self._folder):
            raise OutputExistsError(f"another run has just written {self.path}; choose another output.")
        self._began = True
        write_config(self.config, self._folder / CONFIG_FILE)
        write_json(self._folder / MANIFEST_FILE, run_manifest(finished=False, **facts))

    def saved(self) -> None:
        """The run has a checkpoint, or is finished: what it replaces is no longer needed."""
        if self._replaces:
            self._replaces = False
            self._remove_aside()

    def failed(self) -> None:
        """The run ends with an error: what it was to replace is put back, if it has no checkpoint yet."""
        if not self._replaces:
            return
        self._replaces = False
        try:
            if not self._began and self._folder.exists():
                self._folder.rmdir()  # not more than an empty directory: the rest is another's
            self._put_back()
        except OSError as error:  # the run's own error is the one to show
            logger.error("%s could not be put back (%s); the former output is in %s.", self.path, error, self._aside)
        else:
            logger.warning("The run ended before its first checkpoint: the former output of %s is back.", self.path)

    def release(self) -> None:
        """Give up the lock."""
        for folder in (self._folder, self._aside):
            if _inode(folder / LOCK_FILE) in self._held:
                (folder / LOCK_FILE).unlink(missing_ok=True)
        for descriptor in self._held.values():
            _OPEN.discard(descriptor)
            os.close(descriptor)
        self._held.clear()

    # What was there -----------------------------------------------------------------------------------

    def _continued(self) -> dict[str, Any] | None:
        if not (self._folder / CONFIG_FILE).is_file():
            raise MissingInputError(
                f"{self.path} holds no training run to resume ({CONFIG_FILE} is missing); leave out --resume."
            )
        changed = differing_keys(load_config(self._folder / CONFIG_FILE), self.config)
        if changed:
            listed = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in changed.items())
            raise ConfigError(
                f"{self.path} was started with another configuration: {listed}. Resume with the same settings, or "
                "start anew in another output."
            )
        manifest = _manifest(self._folder)
        return manifest if manifest.get("finished") else None

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        """Refuse to continue on other data, or with another number of processes, than the run began with."""
        manifest = _manifest(self._folder)
        began = manifest.get("processes", facts["processes"])
        if began != facts["processes"]:
            raise ConfigError(
                f"the run in {self.path} began with {began} processes and this is one of {facts['processes']}: a step "
                f"would take another number of queries. Resume with {began}, or start anew in another output."
            )
        before, now = manifest.get("data", {}), facts["data"]
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if before and changed:
            raise DataError(
                f"{changed[0]} has changed since the run in {self.path} began; the steps would not continue it. Start "
                "anew in another output, or put the file back."
            )

    def _recover(self) -> None:
        """Decide about an old output that a killed run left aside; nothing of it is lost without a word."""
        shutil.rmtree(self._rubbish, ignore_errors=True)
        if not self._aside.exists():
            return
        if not _is_output(self._aside):
            raise OutputExistsError(
                f"{self._aside} is in the way: old outputs of {self.path} stand there while they are replaced, and it "
                "is none; move it, or choose another output."
            )
        if _has_progress(self._folder):
            logger.info("%s has a checkpoint; what it replaced is removed from %s.", self.path, self._aside)
            self._remove_aside()
        elif self.resume and (self._folder / CONFIG_FILE).is_file():
            logger.info(
                "%s replaces a former output, which stands in %s until the first checkpoint.", self.path, self._aside
            )
        elif not self._folder.exists() or _is_empty(self._folder) or (self._folder / CONFIG_FILE).is_file():
            self._put_back()
            logger.warning(
                "A run that was to replace %s was killed before its first checkpoint: the former output is back.",
                self.path,
            )
        else:
            raise OutputExistsError(
                f"{self._aside} is the former output of {self.path}, left by a run that was killed, and {self.path} is "
                "no training run: move one of them away."
            )

    def _put_back(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.replace(self._aside, self._folder)

    def _remove_aside(self) -> None:
        # Renamed first: a kill while it is deleted leaves no half of an output under the name that is put back.
        os.replace(self._aside, self._rubbish)
        shutil.rmtree(self._rubbish, ignore_errors=True)

    # The lock -----------------------------------------------------------------------------------------

    def _lock(self, *, create: bool = True) -> None:
        """Hold the lock file of the output; without `create` only where a run, alive or killed, left one."""
        path = self._folder / LOCK_FILE
        while fcntl is not None and _inode(path) not in self._held:
            try:
                descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
            except OSError:
                if create:
                    raise
                return
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise OutputExistsError(
                    f"another run is writing {self.path}; wait for it or stop it, or choose another output."
                ) from None
            except OSError:  # a file system without locks
                os.close(descriptor)
                return
            status = os.fstat(descriptor)
            if _inode(path) != (status.st_dev, status.st_ino):  # its last holder removed it meanwhile
                os.close(descriptor)
                continue
            self._held[status.st_dev, status.st_ino] = descriptor
            _OPEN.add(descriptor)


# Descriptors of held locks. A forked worker closes its copies: it may outlive a killed run.
_OPEN: set[int] = set()


def _forget() -> None:
    for descriptor in _OPEN:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_empty(folder: Path) -> bool:
    return all(path.name == LOCK_FILE for path in folder.iterdir())


def _is_output(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and (folder / MANIFEST_FILE).is_file()


def _has_progress(folder: Path) -> bool:
    from shortlist.training.checkpoints import checkpoint_steps

    return bool(checkpoint_steps(folder)) or bool(_manifest(folder).get("finished"))


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

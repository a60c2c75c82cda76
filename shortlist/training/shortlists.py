"""Mined negatives during training: each epoch's shortlist, mined with the weights of the moment when it is due.

A shortlist is a file beside the output, `mined-00005.npy` for the one that epoch 5 began with, so that a resumed run
trains on with what the interrupted one had. (Xiong et al. 2021, ANCE; DEXML's hard-negative variant refreshes every
five epochs.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_callback import TrainerCallback

from shortlist.errors import DataError
from shortlist.training import checkpoints, distributed
from shortlist.training.batches import BatchBuilder
from shortlist.training.mining import MiningCounts

logger = logging.getLogger(__name__)


class MinedNegatives(TrainerCallback):
    """Puts the shortlist of an epoch into the batches when the epoch begins.

    Args:
        batches: takes the shortlist.
        write: mines with the weights of the moment into a file (shortlist.training.mining.write_shortlist).
        output: directory of the run.
        steps_per_epoch: optimiser steps of an epoch.
        depth: entries a query, for the check of a file that is there.
        start_epoch: first epoch with mined negatives, from 0.
        refresh_epochs: epochs that one shortlist serves.
    """

    def __init__(
        self,
        batches: BatchBuilder,
        write: Callable[[Path], MiningCounts],
        *,
        output: Path,
        steps_per_epoch: int,
        depth: int,
        start_epoch: int = 0,
        refresh_epochs: int = 5,
    ):
        self.batches = batches
        self.write = write
        self.output = output
        self.steps_per_epoch = steps_per_epoch
        self.shape = (len(batches.examples), depth)
        self.start_epoch = start_epoch
        self.refresh_epochs = refresh_epochs

    def mined_epoch(self, epoch: int) -> int | None:
        """The epoch whose beginning made the shortlist that `epoch` trains with; None before the first."""
        if epoch < self.start_epoch:
            return None
        return epoch - (epoch - self.start_epoch) % self.refresh_epochs

    def path(self, epoch: int) -> Path:
        """File of the shortlist that was mined at the beginning of `epoch`."""
        return self.output / f"mined-{epoch:05d}.npy"

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mine if a shortlist is due, else take the one that is there."""
        epoch = self.mined_epoch(state.global_step // self.steps_per_epoch)
        if epoch is None:
            self.batches.draws.mined = None
            return
        due = state.global_step == epoch * self.steps_per_epoch
        # The main process mines, and the others wait for its file.
        distributed.on_main(lambda: self._provide(epoch, due=due, step=state.global_step))
        self.batches.draws.mined = self._open(self.path(epoch))

    def _provide(self, epoch: int, *, due: bool, step: int) -> None:
        path = self.path(epoch)
        if not due and path.is_file():
            return
        if not due:
            logger.warning(
                "%s, the negatives mined when epoch %d began, is not there any more; they are mined again with the "
                "weights of step %d, so the run will not be exactly the one that was interrupted.",
                path, epoch, step,
            )  # fmt: skip
        started = time.perf_counter()
        counts = self.write(path)
        logger.info("mined at epoch %d in %.1f s: %s", epoch, time.perf_counter() - started, counts)
        # What the checkpoints that are there would resume with stays.
        kept = {self.mined_epoch(saved // self.steps_per_epoch) for saved in checkpoints.checkpoint_steps(self.output)}
        for old in self.output.glob("mined-*.npy"):
            if old != path and not any(old == self.path(other) for other in kept if other is not None):
                old.unlink()

    def _open(self, path: Path) -> Any:
        try:
            mined = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{path} is damaged or cut short ({error}); delete it, and --resume mines again.") from None
        if mined.shape != self.shape or mined.dtype != np.int32:
            raise DataError(
                f"{path} holds {mined.dtype} of shape {mined.shape}; expected int32 {self.shape} (training queries, "
                "data.mining.depth): delete it, and --resume mines again."
            )
        return mined

"""The training loop: transformers.Trainer with our batches, our loss, real search as evaluation, exact resume.

What is overridden, and why: `compute_loss` (the gradient cache and the objective), `training_step` and the preparation
of the model (several processes make the step of one), the data loader (order by seed and epoch, the whole batch for
every process), the optimiser (a rate of its own for free vectors), `evaluate` (search over a held-out part), and the
writing and reading of checkpoints (atomic, no pickle, every tensor accounted for).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from shortlist.errors import ConfigError, MissingExtraError
from shortlist.files import atomic_directory, write_json
from shortlist.settings import TrainConfig, nearest
from shortlist.training import checkpoints, distributed
from shortlist.training.batches import BatchBuilder, EpochSampler, ExampleDataset
from shortlist.training.callbacks import LogFile, Progress, Schedule, eval_entries, read_log
from shortlist.training.evaluation import DevSet
from shortlist.training.objective import Objective, check_finite
from shortlist.training.plan import StepPlan
from shortlist.training.step import batch_loss, memory_advice

logger = logging.getLogger(__name__)

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


class RetrievalTrainer(transformers.Trainer):
    """Trains a dual encoder: one batch is encoded on both sides, scored, and given to the objective.

    Args:
        encoder: a module with `embed_queries`, `embed_documents` and `save_pretrained(path)`.
        batches: makes batches from (epoch, query index) pairs.
        objective: vectors and batch → loss.
        config: the resolved configuration.
        plan: the number of steps.
        output: the run's directory; checkpoints and the log go there.
        dev: held-out queries for selection, or None.
    """

    model: nn.Module
    lr_scheduler: Any

    def __init__(
        self,
        encoder: nn.Module,
        batches: BatchBuilder,
        objective: Objective,
        *,
        config: TrainConfig,
        plan: StepPlan,
        output: Path,
        dev: DevSet | None = None,
    ):
        self.config = config
        self.plan = plan
        self.output = output
        self.objective: Objective = objective
        self.dev = dev
        self.dtype_name = training_dtype(config.training.dtype)
        self.sampler = EpochSampler(len(batches.examples), seed=config.seed)
        self.resume_state: dict[str, Any] | None = None
        arguments = training_arguments(config, plan, output, self.dtype_name)
        schedule = Schedule(plan, metric=dev.metric if dev else None, patience=config.training.early_stopping_patience)
        self.examples = ExampleDataset(batches.examples)
        super().__init__(
            model=encoder,
            args=arguments,
            train_dataset=self.examples,
            data_collator=batches,
            callbacks=[schedule, LogFile(output / "train_log.jsonl"), Progress(plan.total_steps)],
        )
        self.add_callback(_Begin(self))
        # These two print to stdout.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    # The step -----------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Loss of a batch; NonFiniteError, before anything is updated or written, if it is not a finite number."""
        encoder: Any = self.model
        loss = batch_loss(encoder, self.objective, inputs, device=self.args.device, autocast=self.accelerator.autocast)
        check_finite(
            loss,
            step=self.state.global_step + 1,
            dtype=self.dtype_name,
            temperature=self.objective.temperature,
            output=self.output,
        )
        return (loss, None) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a batch; before the update, gradients are summed over the processes.

        Raises:
            OutOfMemoryError: naming the settings that bound the memory.
        """
        with memory_advice(step=self.state.global_step + 1):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            distributed.sum_gradients(self.model.parameters())
        return loss

    def get_train_dataloader(self) -> DataLoader:
        """Every process reads the whole global batch, and takes its part itself (shortlist.training.batches)."""
        return DataLoader(
            self.examples,
            batch_size=self.args.per_device_train_batch_size * distributed.world(),
            sampler=self.sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Features go to the device micro-batch by micro-batch.
        return inputs

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        # Prepared without DistributedDataParallel, which would average gradients that have to be summed.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return super()._prepare_for_training(*arguments, **options)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """As in transformers, and groups of their own for free vectors that have their own learning rate.

        Raises:
            ConfigError: training.head_learning_rate without free vectors.
        """
        optimizer = super().create_optimizer(model)
        rate = self.config.training.head_learning_rate
        if rate is None:
            return optimizer
        head = {id(parameter) for parameter in head_parameters(self.model)}
        for group in list(optimizer.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in head]
            if own:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in head]
                optimizer.add_param_group({**group, "params": own, "lr": rate})
        return optimizer

    def start_epoch(self) -> None:
        """Point the sampler at the epoch that begins, before its first batch is drawn."""
        self.sampler.epoch = self.state.global_step // self.plan.steps_per_epoch

    # Evaluation ---------------------------------------------------------------------------------------

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Search the held-out part with the encoder as it is now: `eval_<measure>` → value. Rank 0 searches."""
        dev = self.dev
        if dev is None:
            raise ConfigError("there is no held-out part to evaluate on; set data.dev.")
        self.model.eval()
        with torch.no_grad():
            measured = distributed.on_main(dev.measure)
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints --------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        states = checkpoints.random_states(self.args.device)
        distributed.on_main(lambda: self._write_checkpoint(states))

    def _write_checkpoint(self, states: dict[str, Tensor]) -> None:
        step = self.state.global_step
        path = checkpoints.checkpoint_path(self.output, step)
        with atomic_directory(path, overwrite=True) as folder:
            encoder: Any = self.model
            encoder.save_pretrained(folder, overwrite=True)
            state = folder / checkpoints.STATE
            state.mkdir()
            checkpoints.save_weights(self.model, state / "weights.safetensors")
            checkpoints.save_optimizer(self.optimizer, state)
            write_json(state / "scheduler.json", self.lr_scheduler.state_dict())
            if self.accelerator.scaler is not None:
                write_json(state / "scaler.json", self.accelerator.scaler.state_dict())
            checkpoints.save_random_state(state, states)
            # The running mean of the next logged loss: without it the first line after a resume would differ.
            write_json(
                state / "logging.json",
                {"loss_sum": self._tr_loss.item(), "last_logged": self._globalstep_last_logged},
            )
            self.state.save_to_json(str(state / checkpoints.TRAINER_STATE))
        checkpoints.remove_checkpoints(
            self.output,
            keep=self.config.training.save_total_limit,
            protected={step, *([self.state.best_global_step] if self.state.best_global_step else [])},
        )

    def resume_from(self, step: int) -> None:
        """Train on from the checkpoint of a step."""
        state = checkpoints.checkpoint_path(self.output, step) / checkpoints.STATE
        self.resume_state = checkpoints.read_state(state, "logging.json")
        self.train(resume_from_checkpoint=str(state))

    def restore_log_state(self) -> None:
        """Put back the running mean of the logged loss, when training begins."""
        if self.resume_state is not None:
            self._tr_loss += self.resume_state["loss_sum"]
            self._globalstep_last_logged = self.resume_state["last_logged"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.load_weights(model or self.model, Path(resume_from_checkpoint) / "weights.safetensors")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        checkpoints.load_optimizer(self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(checkpoints.read_state(Path(checkpoint), "scheduler.json"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(checkpoints.read_state(Path(checkpoint), "scaler.json"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_random_state(Path(checkpoint), self.args.device)

    def best_step(self) -> int:
        """Step of the checkpoint to keep: the best one on the held-out part, else the last."""
        return self.state.best_global_step or self.state.global_step

    def load_best(self) -> int:
        """Put the weights of the best checkpoint into the encoder; returns its step."""
        step = self.best_step()
        if step != self.state.global_step:
            path = checkpoints.checkpoint_path(self.output, step) / checkpoints.STATE / "weights.safetensors"
            checkpoints.load_weights(self.model, path)
        # accelerate put its mixed-precision wrapper around `forward`; the encoder leaves without it.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return step

    def untrained(self) -> dict[str, float]:
        """The measures before training, read from the log file (a resumed run did not take them itself)."""
        for line in read_log(self.output / "train_log.jsonl"):
            if line["step"] == 0 and "dev" in line:
                return dict(line["dev"])
        return {}

    def measured(self) -> list[dict[str, float]]:
        """Every evaluation so far: {"step": …, measure: value}."""
        return eval_entries(self.state.log_history)


class _Begin(TrainerCallback):
    """Tells the trainer when training and each epoch begin."""

    def __init__(self, trainer: RetrievalTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""
        self.trainer.restore_log_state()
        distributed.same_weights(self.trainer.model)
        if distributed.rank() > 0:
            # Dropout makes its choices for each process's own texts; a resumed run has its states from the checkpoint.
            torch.manual_seed(args.seed + distributed.rank())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch of an epoch."""
        self.trainer.start_epoch()


def head_parameters(encoder: nn.Module) -> list[nn.Parameter]:
    """Free vectors and biases of an encoder's towers.

    Raises:
        ConfigError: there are none.
    """
    found = [
        parameter for module in encoder.modules() if hasattr(module, "head_parameters")
        for parameter in module.head_parameters()  # type: ignore[operator]
    ]  # fmt: skip
    if not found:
        raise ConfigError(
            "training.head_learning_rate is set but the model has no free vectors; leave it out, or set "
            "model.document_side to vectors or text_and_vectors."
        )
    return found


def training_dtype(setting: str) -> str:
    """The precision of the forward pass: `auto` is bfloat16 on a GPU that has it, else float32.

    Weights, optimiser, scores and loss stay in float32 whatever it is.

    Raises:
        ConfigError: float16 without a GPU.
    """
    if setting == "auto":
        return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    if setting == "float16" and not torch.cuda.is_available():
        raise ConfigError("training.dtype is float16, which needs a GPU; use bfloat16 or float32 on this machine.")
    return setting


def training_arguments(config: TrainConfig, plan: StepPlan, output: Path, dtype: str) -> TrainingArguments:
    """Our settings as transformers' TrainingArguments; evaluation and saving are left to shortlist's Schedule."""
    training = config.training
    if training.lr_scheduler_type not in SCHEDULES:
        raise ConfigError(
            f"training.lr_scheduler_type is {training.lr_scheduler_type!r}; expected one of {', '.join(SCHEDULES)}."
        )
    check_trackers(training.report_to)
    options: Mapping[str, Any] = dict(
        output_dir=str(output),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        optim=training.optim,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=plan.warmup_steps,
        max_grad_norm=training.max_grad_norm,
        num_train_epochs=training.num_train_epochs,
        max_steps=plan.total_steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        dataloader_drop_last=training.drop_last,
        dataloader_num_workers=training.dataloader_num_workers,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        # Without it, transformers refuses bfloat16 on a machine that has no GPU.
        use_cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=training.logging_steps,
        # A loss that is not finite stops the run; it is not averaged away.
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        seed=config.seed,
        full_determinism=config.deterministic,
        report_to=training.report_to,
        disable_tqdm=True,
        eval_on_start=False,
    )
    try:
        arguments = TrainingArguments(**options)
    except ValueError as error:
        raise ConfigError(f"training: transformers refuses a setting: {error}") from None
    # One process, one accelerator: torch.nn.DataParallel would cut the pool of documents apart.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def check_trackers(names: list[str] | str) -> None:
    """Refuse a tracker that transformers does not know or whose package is not installed.

    Raises:
        ConfigError: there is no such tracker (the nearest name is given).
        MissingExtraError: its package is missing.
    """
    wanted = [names] if isinstance(names, str) else names
    installed = get_available_reporting_integrations()
    for name in wanted:
        if name not in ("none", *INTEGRATION_TO_CALLBACK):
            raise ConfigError(
                f"training.report_to has {name!r}{nearest(name, INTEGRATION_TO_CALLBACK) or '.'} "
                f"Known: none, {', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
            )
        if name != "none" and name not in installed:
            raise MissingExtraError(f"training.report_to names {name}, whose package is not installed; install it.")

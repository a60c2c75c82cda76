"""`shortlist train … --dry-run` for dual encoders: steps, memory, and what is missing; nothing is loaded or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from shortlist.commands.doctor import available_memory
from shortlist.data import load_collection
from shortlist.errors import ConfigError, MissingInputError
from shortlist.losses import RankingLoss, build_loss
from shortlist.retrieval.checkpoints import find_folder
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL
from shortlist.settings import TrainConfig
from shortlist.training.estimate import (
    MIB,
    MemoryEstimate,
    ModelSize,
    estimate_memory,
    free_vectors,
    model_size,
    size,
    sized,
    step_size,
    vector_dim,
)
from shortlist.training.evaluation import metric_name
from shortlist.training.plan import plan_steps

# Tokens of a query and of a document for a static encoder, which has no limit of its own.
STATIC_LENGTHS = (64, 256)


@dataclass(frozen=True)
class DataSize:
    """Training queries, documents, and the mean number of positives of a query; None where it is not known."""

    queries: int | None
    documents: int | None
    positives: float = 1.0


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Facts of a run that has not begun: name → value, with the list of what is "missing" last.

    Sizes come from the data and the model where they are on this machine, else from `expected` in the configuration.
    Under torchrun or `accelerate launch` (WORLD_SIZE above 1) they are those of one of the processes. The network is
    not used.
    """
    loss = build_loss(config.loss.name, **config.loss.options)
    metric_name(config.training.metric_for_best_model)
    processes = world_size()
    missing: list[str] = []
    data = _data_size(config, missing)
    model = _model_size(config, missing)
    report: dict[str, Any] = {
        "model": f"{config.model.kind} {config.model.path}" + (" with LoRA" if config.model.lora else ""),
        "data": f"{config.data.path or 'not set'}, split {config.data.split}",
        "loss": config.loss.name,
        "negatives": ", ".join(str(source) for source in config.data.sources),
    }
    if processes > 1:
        report |= {
            "processes": processes,
            "batch": f"{config.training.batch_size * processes} queries, {config.training.batch_size} a process",
        }
    if data.queries is not None:
        plan = plan_steps(data.queries, config.training, processes=processes)
        report |= {"training queries": data.queries, "steps per epoch": plan.steps_per_epoch, "steps": plan.total_steps}
    if data.documents is not None and model is not None:
        step = step_size(
            config, model, data.documents, processes=processes, positives=data.positives,
            lengths=None if model.layers else STATIC_LENGTHS,
        )  # fmt: skip
        half = _half(config)
        memory = estimate_memory(
            config, model, step, documents=data.documents, half=half, score_memory=_score_memory(config),
            blocks=isinstance(loss, RankingLoss) and getattr(loss, "target", "positives") == "positives",
        )  # fmt: skip
        free = free_vectors(config, data.documents, vector_dim(config, model))
        report |= {
            "documents": data.documents,
            "documents scored per step": f"{step.documents:,}"
            + (f", {step.own_documents:,} a process" if processes > 1 else ""),
            "parameters": f"{model.parameters + free:,} ({model.trainable + free:,} trained)",
            "tokens per step": f"{step.tokens:,} at most",
            "precision": _precision(config, half=half),
            "memory per device": memory.lines(),
        }
        free_bytes = _free_memory()
        if memory.total > free_bytes:
            missing.append(
                f"memory: the step needs about {size(memory.total)}, this device has {size(free_bytes)} free; "
                f"{_remedy(config, model, memory)}."
            )
    elif data.documents is not None:
        report["documents"] = data.documents
    report["missing"] = missing
    return report


def world_size() -> int:
    """Number of processes of this run, as torchrun and accelerate tell it in the environment; 1 without them."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _data_size(config: TrainConfig, missing: list[str]) -> DataSize:
    """Sizes of the collection, or those of `expected`."""
    expected = DataSize(config.expected.queries, config.expected.documents)
    path = config.data.path
    if path is None:
        missing.append("data: data.path is not set.")
        return expected
    try:
        collection = load_collection(path, on_empty=config.data.on_empty)
        judged = collection.qrels(config.data.split) if config.data.split in collection.splits else None
    except (MissingInputError, ConfigError) as error:
        missing.append(f"data: {error}")
        return expected
    documents = len(collection.corpus)
    if judged is None:
        missing.append(f"data: {path} has no split {config.data.split!r}; it has {', '.join(collection.splits)}.")
        return DataSize(config.expected.queries, documents)
    queries = len(judged)
    positives = judged.num_judgements / max(1, queries)
    if config.data.dev == "auto":
        queries -= round(queries * config.data.dev_fraction)
    return DataSize(min(queries, config.data.max_queries or queries), documents, positives)


def _model_size(config: TrainConfig, missing: list[str]) -> ModelSize | None:
    path = config.model.path
    folder: Path | None = None
    try:
        if Path(path).is_dir() or path == DEFAULT_MODEL:
            folder = find_folder(path)
        else:
            cached = try_to_load_from_cache(path, "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else None
    except (MissingInputError, ValueError) as error:
        missing.append(f"model: {error}")
    else:
        if folder is None:
            missing.append(f"model: {path} is not on this disk; it is downloaded when training begins.")
    if folder is not None:
        return model_size(folder, config)
    expected = config.expected
    if expected.parameters is None:
        return None
    parameters = expected.parameters * (1 if config.model.shared else 2)
    return sized(parameters, expected.layers or 0, expected.width or 0, 0, 512, config)


def _half(config: TrainConfig) -> bool:
    """Whether the encoder computes in half precision here (`auto`: on a GPU that has bfloat16)."""
    if config.training.dtype == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return config.training.dtype != "float32"


def _precision(config: TrainConfig, *, half: bool) -> str:
    if half:
        return "half in the encoder, float32 elsewhere"
    auto = config.training.dtype == "auto"
    return "float32" + (" here; on a GPU with bfloat16 activations take half of what is said below" if auto else "")


def _score_memory(config: TrainConfig) -> int:
    default = 1024 if torch.cuda.is_available() else 256
    return (config.training.score_memory or default) * MIB


def _remedy(config: TrainConfig, model: ModelSize, memory: MemoryEstimate) -> str:
    """What makes the largest part smaller."""
    largest = max(("activations", "vectors", "scores"), key=lambda name: getattr(memory, name))
    if largest == "scores":
        return "set training.score_memory lower"
    if largest == "vectors":
        return "share the documents among more processes, or set data.negatives to sampled(n) or mined(k)"
    if config.training.micro_batch_size is None and model.layers:
        return "set training.micro_batch_size (32 to 512): the activations are then those of one micro-batch"
    if config.training.micro_batch_size is not None:
        return "lower training.micro_batch_size, model.query_max_length or model.doc_max_length"
    return "lower training.batch_size"


def _free_memory() -> int:
    """Bytes free on the device that would train: what programs can have without swapping, as `doctor` says it."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    available = available_memory()
    return int(available * 2**30) if available is not None else 2**63

"""`shortlist train … --dry-run` for dual encoders: steps, memory, and what is missing; nothing is loaded or written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from shortlist.data import load_collection
from shortlist.errors import ConfigError, MissingInputError
from shortlist.losses import build_loss
from shortlist.retrieval.checkpoints import find_folder
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL
from shortlist.settings import TrainConfig
from shortlist.training.estimate import ModelSize, estimate_memory, model_size, pool_size, size, sized, tokens_per_step
from shortlist.training.evaluation import metric_name
from shortlist.training.plan import plan_steps


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Facts of a run that has not begun: name → value, with the list of what is "missing" last.

    Sizes come from the data and the model where they are on this machine, else from `expected` in the configuration.
    The network is not used.
    """
    build_loss(config.loss.name, **config.loss.options)
    metric_name(config.training.metric_for_best_model)
    missing: list[str] = []
    queries, documents = _data_sizes(config, missing)
    model = _model_sizes(config, missing)
    report: dict[str, Any] = {
        "model": f"{config.model.kind} {config.model.path}" + (" with LoRA" if config.model.lora else ""),
        "data": f"{config.data.path or 'not set'}, split {config.data.split}",
        "loss": config.loss.name,
    }
    if queries is not None:
        plan = plan_steps(queries, config.training)
        report |= {"training queries": queries, "steps per epoch": plan.steps_per_epoch, "steps": plan.total_steps}
    if documents is not None:
        report |= {"documents": documents, "documents scored per step": pool_size(config, documents)}
    if documents is not None and model is not None:
        lengths = (64, 256) if not model.layers else (0, 0)
        tokens = tokens_per_step(config, documents, longest=model.max_length, query=lengths[0], document=lengths[1])
        memory = estimate_memory(config, model, documents, tokens, config.model.dim or model.width or 256)
        report |= {"parameters": f"{model.parameters:,} ({model.trainable:,} trained)", "tokens per step": tokens}
        report["memory per device"] = memory.lines()
        free = _free_memory()
        if memory.total > free:
            missing.append(
                f"memory: the step needs about {size(memory.total)}, this device has {size(free)} free; lower "
                "training.batch_size or model.doc_max_length, or set training.gradient_checkpointing."
            )
    report["missing"] = missing
    return report


def _data_sizes(config: TrainConfig, missing: list[str]) -> tuple[int | None, int | None]:
    """Training queries and documents, from the collection or from `expected`."""
    expected = config.expected
    path = config.data.path
    if path is None:
        missing.append("data: data.path is not set.")
        return expected.queries, expected.documents
    try:
        collection = load_collection(path, on_empty=config.data.on_empty)
        judged = collection.qrels(config.data.split) if config.data.split in collection.splits else None
    except (MissingInputError, ConfigError) as error:
        missing.append(f"data: {error}")
        return expected.queries, expected.documents
    if judged is None:
        missing.append(f"data: {path} has no split {config.data.split!r}; it has {', '.join(collection.splits)}.")
        return expected.queries, len(collection.corpus)
    queries = len(judged)
    if config.data.dev == "auto":
        queries -= round(queries * config.data.dev_fraction)
    return min(queries, config.data.max_queries or queries), len(collection.corpus)


def _model_sizes(config: TrainConfig, missing: list[str]) -> ModelSize | None:
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
    return sized(expected.parameters, expected.layers or 0, expected.width or 0, 0, 512, config)


def _free_memory() -> int:
    """Bytes free on the device that would train."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2**63

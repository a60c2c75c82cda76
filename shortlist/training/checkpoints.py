"""Checkpoints that continue exactly: weights, optimiser, schedule, random state and counters, without pickle.

A checkpoint is a model folder (open it with DualEncoder.from_pretrained) with a subfolder `state/`: trainable weights
and optimiser tensors in safetensors, everything else in JSON. It is written beside its place and renamed, so that a
kill leaves whole checkpoints only.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shortlist.errors import ConfigError, DataError, MissingInputError, NonFiniteError
from shortlist.files import write_json
from shortlist.training import distributed

CHECKPOINTS = "checkpoints"
STATE = "state"
TRAINER_STATE = "trainer_state.json"


def checkpoint_path(output: str | Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return Path(output) / CHECKPOINTS / f"step-{step}"


def checkpoint_steps(output: str | Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    folder = Path(output) / CHECKPOINTS
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for match in found if match)
    return [step for step in steps if (checkpoint_path(output, step) / STATE / TRAINER_STATE).is_file()]


def remove_unfinished(output: str | Path) -> None:
    """Delete what a killed run left of files and folders it was writing: hidden and named `tmp` (shortlist.files)."""
    for folder in (Path(output), Path(output) / CHECKPOINTS):
        # A folder that is written inside another unfinished one has a dot more.
        for path in folder.glob(".*.tmp.*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove_checkpoints(output: str | Path, *, keep: int | None, protected: set[int]) -> None:
    """Delete the oldest checkpoints beyond `keep`, never a protected one (the best, the last)."""
    if keep is None:
        return
    steps = checkpoint_steps(output)
    surplus = len(steps) - max(keep, len(protected & set(steps)))
    for step in steps:
        if surplus > 0 and step not in protected:
            shutil.rmtree(checkpoint_path(output, step), ignore_errors=True)
            surplus -= 1


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Name → tensor of everything training changes: parameters with gradients and buffers that are saved.

    A tensor that two names share is listed once.
    """
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if name in frozen or (tensor.numel() and place in seen):
            continue
        seen.add(place)
        state[name] = tensor
    return state


def save_weights(model: nn.Module, path: Path) -> None:
    """Write `trainable_state` as safetensors.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in trainable_state(model).items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"{name} has values that are not finite; no checkpoint is written, the earlier ones are good. "
                "What usually helps: a lower training.learning_rate, training.max_grad_norm 1, training.dtype float32."
            )
    save_file(state, path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read `save_weights` back; every saved tensor must have its place and every trainable one its value.

    Raises:
        DataError: names or shapes differ, with the first of them.
    """
    saved, own = load_file(path), trainable_state(model)
    for name in [*saved, *own]:
        if name not in own:
            raise DataError(f"{path} has the tensor {name}, which this model has not; it belongs to another model.")
        if name not in saved:
            raise DataError(f"{path} lacks the tensor {name}, which this model trains; it belongs to another model.")
        if saved[name].shape != own[name].shape:
            raise DataError(f"{path}: {name} has shape {tuple(saved[name].shape)}, expected {tuple(own[name].shape)}.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def save_optimizer(optimizer: Any, folder: Path) -> None:
    """Write an optimiser's state: tensors to optimizer.safetensors, numbers and groups to optimizer.json."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous()
            else:
                numbers.setdefault(str(index), {})[name] = value
    save_file(tensors, folder / "optimizer.safetensors")
    groups = [{name: value for name, value in group.items() if _plain(value)} for group in state["param_groups"]]
    write_json(folder / "optimizer.json", {"numbers": numbers, "param_groups": groups})


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """Read `save_optimizer` back."""
    saved = json.loads((folder / "optimizer.json").read_text())
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in saved["numbers"].items()}
    for name, tensor in load_file(folder / "optimizer.safetensors").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    current = optimizer.state_dict()["param_groups"]
    groups = [{**group, **_tuples(old)} for group, old in zip(current, saved["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_states(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """States of torch's generators: "cpu" and "device" of this process, and those of the others with their rank.

    Every process of a run has to call it at once.
    """
    device = torch.device(device)
    own = {"cpu": torch.random.get_rng_state()}
    if device.type == "cuda":
        own["device"] = torch.cuda.get_rng_state(device)
    return {
        _of_rank(name, number): state
        for number, states in enumerate(distributed.gather_objects(own))
        for name, state in states.items()
    }


def save_random_state(folder: Path, states: Mapping[str, Tensor] | None = None) -> None:
    """Write the state of the Python and NumPy generators, and `random_states` (of this process alone if None)."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    write_json(
        folder / "random.json",
        {
            "python": list(random.getstate()),
            "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        },
    )
    save_file(dict(states or random_states()), folder / "random.safetensors")


def load_random_state(folder: Path, device: torch.device | str = "cpu") -> None:
    """Read `save_random_state` back; torch's generators are those of this process's rank."""
    saved = json.loads((folder / "random.json").read_text())
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = saved["numpy"]
    np.random.set_state((name, np.array(numbers, np.uint32), *rest))
    tensors = load_file(folder / "random.safetensors")
    own = distributed.rank()
    if _of_rank("cpu", own) not in tensors:
        raise ConfigError(
            f"{folder.parent} was written by fewer than {own + 1} processes, and this is process {own} of "
            f"{distributed.world()}; resume with as many processes as the run began with."
        )
    torch.random.set_rng_state(tensors[_of_rank("cpu", own)])
    if torch.device(device).type == "cuda" and _of_rank("device", own) in tensors:
        torch.cuda.set_rng_state(tensors[_of_rank("device", own)], device)


def _of_rank(name: str, number: int) -> str:
    return name if number == 0 else f"{name}.{number}"


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint's state folder."""
    path = folder / name
    if not path.is_file():
        raise MissingInputError(f"{path} is not there; {folder.parent} is not a checkpoint that can be continued.")
    return json.loads(path.read_text())


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | type(None))


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; Adam's betas were one."""
    return {name: tuple(value) if name == "betas" else value for name, value in group.items()}

"""Checkpoints: every tensor accounted for, no pickle, generators and optimiser come back exactly."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from shortlist.errors import DataError, MissingInputError, NonFiniteError
from shortlist.training import checkpoints


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_weights_come_back_and_frozen_ones_are_left_out(tmp_path):
    first, second = model(), model()
    for net in (first, second):
        net[0].weight.requires_grad_(False)
    with torch.no_grad():
        first[2].weight.add_(1.0)
        first[1].running_mean.add_(2.0)
    checkpoints.save_weights(first, tmp_path / "w.safetensors")
    checkpoints.load_weights(second, tmp_path / "w.safetensors")
    assert torch.equal(first[2].weight, second[2].weight)
    assert torch.equal(first[1].running_mean, second[1].running_mean)
    assert "0.weight" not in checkpoints.trainable_state(first)


def test_a_tensor_without_its_place_or_a_place_without_its_tensor_is_refused(tmp_path):
    # user-reports B.55, B.57: checkpoints that load without error and do nothing
    checkpoints.save_weights(model(), tmp_path / "w.safetensors")
    with pytest.raises(DataError, match=r"has the tensor 1\.\w+, which this model has not"):
        checkpoints.load_weights(nn.Sequential(nn.Linear(3, 4)), tmp_path / "w.safetensors")
    larger = model().append(nn.Linear(2, 2))
    with pytest.raises(DataError, match=r"lacks the tensor 3\.weight"):
        checkpoints.load_weights(larger, tmp_path / "w.safetensors")
    other = model()
    other[2] = nn.Linear(4, 5)
    with pytest.raises(DataError, match=r"2\.\w+ has shape \(2.*, expected \(5"):
        checkpoints.load_weights(other, tmp_path / "w.safetensors")


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    net = model()
    with torch.no_grad():
        net[2].bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"2\.bias has values that are not finite"):
        checkpoints.save_weights(net, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimiser_continues_exactly(tmp_path, kind):
    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    first = nn.Linear(3, 2)
    second = nn.Linear(3, 2)
    ours, theirs = kind(first.parameters(), lr=0.1), kind(second.parameters(), lr=0.5)
    step(first, ours)
    checkpoints.save_optimizer(ours, tmp_path)
    second.load_state_dict(first.state_dict())
    checkpoints.load_optimizer(theirs, tmp_path)
    assert theirs.param_groups[0]["lr"] == 0.1
    step(first, ours)
    step(second, theirs)
    assert torch.equal(first.weight, second.weight)


def test_generators_continue_exactly(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves a cached second value
    checkpoints.save_random_state(tmp_path)
    expected = random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    checkpoints.load_random_state(tmp_path)
    assert (random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist()) == expected


def test_only_whole_checkpoints_count_and_best_and_last_are_kept(tmp_path):
    for step in (2, 4, 6, 8):
        folder = checkpoints.checkpoint_path(tmp_path, step) / checkpoints.STATE
        folder.mkdir(parents=True)
        (folder / checkpoints.TRAINER_STATE).write_text(json.dumps({}))
    (tmp_path / "checkpoints" / "step-10").mkdir()
    (tmp_path / "checkpoints" / ".step-12.tmp.x").mkdir()
    assert checkpoints.checkpoint_steps(tmp_path) == [2, 4, 6, 8]
    checkpoints.remove_checkpoints(tmp_path, keep=1, protected={4, 8})
    assert checkpoints.checkpoint_steps(tmp_path) == [4, 8]
    assert checkpoints.checkpoint_steps(tmp_path / "none") == []
    with pytest.raises(MissingInputError, match="not a checkpoint that can be continued"):
        checkpoints.read_state(tmp_path / "checkpoints" / "step-10" / "state", "logging.json")


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    whole, half = tmp_path / "checkpoints" / "step-4", tmp_path / "checkpoints" / ".step-5.tmp.ab12"
    inner, staged = tmp_path / "checkpoints" / "..step-5.tmp.ab12.tmp.cd34", tmp_path / "..model.tmp.ef56"
    for folder in (whole, half, inner, staged):
        folder.mkdir(parents=True)
    mined = tmp_path / ".4711.tmp.negatives.jsonl.gz"
    mined.write_bytes(b"half")
    (tmp_path / ".lock").touch()
    checkpoints.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", ".lock"}
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]

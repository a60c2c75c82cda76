"""Two processes make the step of one: gradients, training runs, checkpoints, and failures that reach every process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from double_encoders import (
    DOCUMENTS,
    PAIRS,
    QUERIES,
    a_batch,
    a_loss,
    assert_equal_gradients,
    gradients_of,
    open_double,
)
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from shortlist.commands.train import train
from shortlist.errors import ConfigError
from shortlist.losses import LOSSES
from shortlist.training import checkpoints, distributed
from shortlist.training.callbacks import read_log
from shortlist.training.objective import Objective
from shortlist.training.step import batch_loss


@dataclass(frozen=True)
class Case:
    """A batch, a loss, and how it is computed."""

    loss: str
    model: str = "transformer"
    micro: int | None = None
    queries: int = len(QUERIES)
    documents: int = len(DOCUMENTS)
    bias: bool = False
    matryoshka: bool = False
    left_out: bool = False
    pairs: tuple = tuple(PAIRS)

    def gradients(self, paths, *, rank=0, world=1):
        """Name → gradient of the step."""
        encoder = open_double(paths[self.model]).eval()
        objective = Objective(
            a_loss(self.loss), temperature=0.1, dim=encoder.dim, normalise=True,
            matryoshka=[8] if self.matryoshka else None,
            bias=torch.linspace(-1, 1, len(DOCUMENTS)).double() if self.bias else None,
        )  # fmt: skip
        pairs = [pair for pair in self.pairs if pair[0] < self.queries and pair[1] < self.documents]
        batch = a_batch(
            encoder, rank=rank, world=world, micro=self.micro, queries=QUERIES[: self.queries],
            documents=DOCUMENTS[: self.documents], pairs=pairs[1:] if self.left_out else pairs,
            left_out=pairs[:1] if self.left_out else None,
        )  # fmt: skip
        loss = batch_loss(encoder, objective, batch)
        loss.backward()
        distributed.sum_gradients(encoder.parameters())
        return {**gradients_of(encoder), "loss": loss.detach()}


SAMPLED = ("info_nce", "decoupled_softmax", "soft_top_k", "list_net")
CASES = {
    **{name: Case(name) for name in LOSSES},
    **{f"{name}-cached": Case(name, micro=2) for name in LOSSES},
    **{f"{name}-sampled": Case(name, left_out=True) for name in SAMPLED},
    "static": Case("decoupled_softmax", model="static"),
    "static-cached": Case("soft_top_k", model="static", micro=1),
    "even": Case("decoupled_softmax", queries=6, documents=8),
    "one-query": Case("decoupled_softmax", queries=1, documents=8, micro=3),
    "one-document": Case("one_vs_all_bce", queries=1, documents=1, pairs=((0, 0, 1.0),)),
    "three-documents": Case(
        "decoupled_softmax", queries=5, documents=3, micro=2, pairs=((0, 0, 1.0), (2, 2, 1.0), (4, 1, 1.0))
    ),
    "one-query-dense": Case("kl_divergence", queries=1, documents=8, micro=3),
    "bias": Case("decoupled_softmax", bias=True),
    "bias-dense": Case("list_net", bias=True),
    "matryoshka": Case("decoupled_softmax", matryoshka=True, micro=4),
}  # fmt: skip


# What the two processes do ------------------------------------------------------------------------------


def work(rank: int, port: int, folder: Path, paths: dict, configuration: Path) -> None:
    """Everything that takes two processes, in one start of them; results go to files."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    distributed.start()
    for name, case in CASES.items():
        save_file(case.gradients(paths, rank=rank, world=2), folder / f"{name}.{rank}.safetensors")
    facts = {
        "main fails": failing(lambda: distributed.on_main(refuse)),
        "second fails": failing(lambda: distributed.all_or_none(refuse if rank == 1 else int)),
        "main first fails": failing(lambda: distributed.main_first(refuse)),
        "main": distributed.on_main(lambda: f"from {distributed.rank()}"),
        "objects": distributed.gather_objects(rank),
        "gathered": gathered(rank),
        "sums": sums(rank),
    }
    train(configuration, output=folder / "run")
    if rank == 0:
        shutil.copytree(folder / "run", folder / "again")
        for step in (8, 12):
            shutil.rmtree(checkpoints.checkpoint_path(folder / "again", step))
        manifest = json.loads((folder / "again/manifest.json").read_text())
        (folder / "again/manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    torch.distributed.barrier()
    train(configuration, output=folder / "again", resume=True)
    facts["exists"] = failing(lambda: train(configuration, output=folder / "run"))
    (folder / f"facts.{rank}.json").write_text(json.dumps(facts))
    distributed.stop()


def refuse():
    raise ConfigError(f"refused by {distributed.rank()}")


def failing(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def gathered(rank: int) -> list:
    """Rows of two processes of which one has none, and the gradients that come back."""
    found = []
    for reduce in (False, True):
        local = torch.full((3 if rank == 0 else 0, 2), 1.0 + rank, requires_grad=True)
        rows = distributed.gather_rows(local, [3, 0], reduce=reduce)
        (rows * (rank + 1)).sum().backward()
        found.append([rows.tolist(), local.grad.tolist()])
    return found


def sums(rank: int) -> list:
    """A gradient on both, on one, and on none."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), 1.0 + rank)
    if rank == 1:
        parameters[1].grad = torch.full((2,), 5.0)
    distributed.sum_gradients(parameters)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


# And what comes of it -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tiny_transformer, tiny_static):
    return {"transformer": str(tiny_transformer), "static": str(tiny_static)}


@pytest.fixture(scope="module")
def configuration(tmp_path_factory, toy_folder, tiny_static) -> Path:
    """Twelve steps of three queries a process, the last batch of an epoch of four: one process has two, one has two."""
    path = tmp_path_factory.mktemp("configuration") / "toy.yaml"
    path.write_text(
        f"model: {{path: {tiny_static}}}\n"
        f"data: {{path: {toy_folder / 'beir'}, dev: dev, negatives: [bm25, sampled(3)], num_negatives: 2}}\n"
        "loss: decoupled_softmax\n"
        "training: {learning_rate: 0.05, weight_decay: 0.0, batch_size: 3, micro_batch_size: 2, max_steps: 12, "
        "eval_steps: 4, logging_steps: 1, save_total_limit: null}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory, paths, configuration) -> Path:
    """Folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(work, args=(free_port(), folder, paths, configuration), nprocs=2)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_weights(run: Path) -> dict:
    return load_file(checkpoints.checkpoint_path(run, 12) / "state/weights.safetensors")


def facts(two, rank):
    return json.loads((two / f"facts.{rank}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_two_processes_are_those_of_one(two, paths, name):
    # user-reports B.45: gathered positives and negatives were mis-aligned
    expected = CASES[name].gradients(paths)
    loss = float(expected.pop("loss"))
    for rank in range(2):
        found = load_file(two / f"{name}.{rank}.safetensors")
        assert float(found.pop("loss")) == pytest.approx(loss, rel=1e-6)
        assert_equal_gradients(found, expected)


def test_rows_are_gathered_and_gradients_come_back_to_their_owner(two):
    whole, summed = facts(two, 0)["gathered"]
    assert whole == [[[1.0, 1.0]] * 3, [[1.0, 1.0]] * 3]
    assert summed == [[[1.0, 1.0]] * 3, [[3.0, 3.0]] * 3]
    assert facts(two, 1)["gathered"][0] == [[[1.0, 1.0]] * 3, []]


def test_gradients_are_summed_and_one_that_nobody_has_stays_away(two):
    assert facts(two, 0)["sums"] == facts(two, 1)["sums"] == [[3.0, 3.0], [5.0, 5.0], None]


def test_a_failure_reaches_every_process(two):
    for rank in range(2):
        found = facts(two, rank)
        assert found["main fails"] == found["main first fails"] == "ConfigError: refused by 0"
        assert found["exists"].startswith("OutputExistsError") and "--resume" in found["exists"]
        assert found["main"] == "from 0" and found["objects"] == [0, 1]
    assert facts(two, 1)["second fails"] == "ConfigError: refused by 1"
    assert "process 1 failed: ConfigError: refused by 1" in facts(two, 0)["second fails"]


@pytest.fixture(scope="module")
def one(tmp_path_factory, configuration) -> Path:
    """The run of one process with twice the batch."""
    output = tmp_path_factory.mktemp("one") / "run"
    train(configuration, overrides=["training.batch_size=6"], output=output)
    return output


def test_a_run_of_two_processes_is_the_run_of_one_with_twice_the_batch(two, one):
    lines = [read_log(folder / "train_log.jsonl") for folder in (two / "run", one)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for left, right in zip(*lines, strict=True):
        assert left.keys() == right.keys()
        for name in {"loss", "grad_norm"} & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6)
        assert left.get("dev") == right.get("dev")
    found = last_weights(two / "run")
    for name, value in last_weights(one).items():
        assert torch.allclose(found[name], value, atol=1e-4), name


def test_the_output_is_written_once_and_says_how_many_processes(two):
    manifest = json.loads((two / "run/manifest.json").read_text())
    assert manifest["finished"] and manifest["processes"] == 2 and manifest["plan"]["batches_per_epoch"] == 2
    assert checkpoints.checkpoint_steps(two / "run") == [4, 8, 12]
    steps = [(line["step"], "dev" in line) for line in read_log(two / "run/train_log.jsonl")]
    assert len(steps) == len(set(steps)) == 12 + 4


def test_a_resumed_run_of_two_processes_continues_exactly(two):
    first, second = last_weights(two / "run"), last_weights(two / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)
    states = load_file(checkpoints.checkpoint_path(two / "again", 12) / "state/random.safetensors")
    assert set(states) == {"cpu", "cpu.1"} and not torch.equal(states["cpu"], states["cpu.1"])


def test_resume_with_another_number_of_processes_is_refused(two, configuration, tmp_path):
    shutil.copytree(two / "again", tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    (tmp_path / "run/manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    with pytest.raises(ConfigError, match="began with 2 processes and this is one of 1.*Resume with 2"):
        train(configuration, output=tmp_path / "run", resume=True)


def test_sharded_parameters_are_refused(monkeypatch, configuration, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP is switched on, which shortlist train does not support.*torchrun"):
        train(configuration, output=tmp_path / "run")


@pytest.mark.slow
def test_torchrun_starts_the_command_and_its_failures_end_every_process(configuration, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "-m", "shortlist", "train", str(configuration), "-o",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    overrides = ["training.max_steps=2", "data.negatives=in_batch", "data.num_negatives=null"]
    done = subprocess.run(
        [*command, str(tmp_path / "run"), *overrides], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr.count("2 processes make each step together") == 1
    assert json.loads((tmp_path / "run/manifest.json").read_text())["steps"] == 2
    again = subprocess.run(
        [*command, str(tmp_path / "run"), *overrides], capture_output=True, text=True, env=environment, timeout=300
    )
    assert again.returncode != 0 and "continue it with --resume" in again.stderr

"""Losses whose columns lie in two processes: the value and the summed gradients of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool_reference import LOSSES, case, plain
from safetensors.torch import load_file
from shard_worker import CUTS, LAYOUTS

WORKER = Path(__file__).parent / "shard_worker.py"
SECONDS = 180


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two gloo processes found, by loss, cut and budget."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = [folder / f"{rank}.safetensors" for rank in range(2)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder / "rendezvous"), str(output)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [load_file(output) for output in outputs]


def expected(name, dtype=torch.float64):
    queries, documents, grades, bias, dropped = case(dtype)
    dropped = dropped if LOSSES[name].drops_left_out else None
    return plain(LOSSES[name], queries, documents, grades, 0.7, bias, dropped)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("cut", "budget"), LAYOUTS)
def test_two_processes_are_one(ranks, name, cut, budget):
    # user-reports B.45: a multi-process run compared with a single process.
    value, queries, documents = expected(name)
    key, parts = f"{name}|{cut}|{budget}|64", ("value", "queries", "documents")
    found = [{part: rank[f"{key}|{part}"] for part in parts} for rank in ranks]
    for rank in found:
        torch.testing.assert_close(rank["value"], value, rtol=1e-11, atol=1e-12)
    assert torch.equal(found[0]["value"], found[1]["value"])
    torch.testing.assert_close(found[0]["queries"] + found[1]["queries"], queries, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([rank["documents"] for rank in found]), documents, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_are_one_in_float32(ranks, name):
    value, queries, documents = expected(name)
    keys = [f"{name}|even|one block|32|{part}" for part in ("value", "queries", "documents")]
    for rank in ranks:
        torch.testing.assert_close(rank[keys[0]].double(), value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((ranks[0][keys[1]] + ranks[1][keys[1]]).double(), queries, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.cat([r[keys[2]] for r in ranks]).double(), documents, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["decoupled", "info_nce", "soft top 3", "bce"])
@pytest.mark.parametrize("cut", ["even", "ragged"])
def test_the_last_document_of_every_shard_is_a_positive_like_any_other(ranks, name, cut):
    # A query whose positives are the first and the last column of both shards: each is pulled towards it.
    edges = [0, CUTS[cut][1] - 1, CUTS[cut][1], 36]
    queries, documents, grades, bias, dropped = case()
    dropped = dropped if LOSSES[name].drops_left_out else None
    value, _, gradient = plain(LOSSES[name], queries, documents, grades, 0.7, bias, dropped)
    found = torch.cat([rank[f"{name}|{cut}|one block|64|documents"] for rank in ranks])
    for edge in edges:
        assert grades[8, edge] > 0
        torch.testing.assert_close(found[edge], gradient[edge], rtol=1e-9, atol=1e-11)
        without = grades.clone()
        without[:, edge] = 0
        wrong = plain(LOSSES[name], queries, documents, without, 0.7, bias, dropped)
        assert (wrong[2][edge] - gradient[edge]).abs().max() > 1e-3 and abs(wrong[0] - value) > 1e-3

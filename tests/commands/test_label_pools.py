"""Label pools as a configuration asks for them: weights of positives, mixtures, one mining for two processes."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from shortlist.commands.train import train
from shortlist.commands.train_dual_encoder import DualEncoderJob
from shortlist.config import load_config
from shortlist.data import load_collection
from shortlist.metrics import count_labels, inverse_propensities
from shortlist.training.callbacks import read_log


@pytest.fixture
def settings(tmp_path, toy_xc, tiny_static):
    path = tmp_path / "toy.yaml"
    path.write_text(
        f"model: {{path: {tiny_static}}}\n"
        f"data: {{path: {toy_xc}, dev: none, negatives: all}}\n"
        "loss: decoupled_softmax\n"
        "training: {learning_rate: 0.05, batch_size: 16, num_train_epochs: 3, logging_steps: 1}\n",
        encoding="utf-8",
    )
    return path


def losses(output):
    return {line["step"]: line["loss"] for line in read_log(output / "train_log.jsonl") if "loss" in line}


def test_positives_weigh_by_the_inverse_propensity_of_their_label(settings, toy_xc):
    job = DualEncoderJob(load_config(settings, ["data.propensity_weights=true"]))
    batch = job._batches()([(0, index) for index in range(len(job.examples))])
    collection = load_collection(toy_xc)
    qrels = collection.qrels("train")
    inverse = inverse_propensities(
        collection.corpus.ids, count_labels(qrels), num_train=len(qrels), propensity=collection.propensity
    )
    labels = [collection.corpus.ids[row] for row in batch["document_rows"].tolist()]
    expected = np.array([inverse[labels[column]] for column in batch["positives"].columns.tolist()])
    values = batch["positives"].values.numpy()
    assert np.allclose(values / values.mean(), expected / expected.mean(), rtol=1e-5)
    assert np.isclose(values.mean(), 1, atol=1e-5) and values.std() > 0.01


@pytest.mark.parametrize("negatives", ["all", "sampled(3)", "mined(2)", "[bm25(1), mined(1), sampled(2)]"])
def test_every_pool_trains_and_gives_the_same_run_twice(settings, tmp_path, negatives):
    overrides = [f"data.negatives={negatives}", "training.sample_positives=1", "training.micro_batch_size=5"]
    for name in ("one", "two"):
        train(settings, overrides=overrides, output=tmp_path / name)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert all(np.isfinite(loss) for loss in losses(tmp_path / "one").values())


@pytest.mark.slow
def test_two_processes_mine_once_and_train_as_one(settings, tmp_path):
    overrides = ["data.negatives=[mined(2), sampled(3)]", "data.mining={refresh_epochs: 1}"]
    train(settings, overrides=overrides, output=tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        "-m", "shortlist.cli", "train", str(settings), *overrides, "training.batch_size=8", "-o", str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mined at epoch") == 3
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() and np.allclose(list(one.values()), list(two.values()), rtol=1e-5)
    for epoch in range(3):
        name = f"mined-{epoch:05d}.npy"
        assert (tmp_path / "one" / name).exists() == (tmp_path / "two" / name).exists()
    assert np.array_equal(np.load(tmp_path / "one/mined-00002.npy"), np.load(tmp_path / "two/mined-00002.npy"))

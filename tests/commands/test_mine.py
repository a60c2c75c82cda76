"""`shortlist mine` on both kinds of collection; training from what it writes, and from what training mines itself."""

import gzip
import json

import numpy as np
import pytest

from shortlist.cli import main
from shortlist.commands.train import train
from shortlist.data import load_collection
from shortlist.training.callbacks import read_log


def run(*arguments) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


@pytest.mark.parametrize("kind", ["beir", "xc"])
@pytest.mark.parametrize("searcher", ["model", "bm25"])
def test_negatives_of_both_kinds_of_collection(kind, searcher, tiny_static, toy_folder, tmp_path, caplog):
    data = toy_folder / kind
    output = tmp_path / "negatives.jsonl.gz"
    how = ["--bm25"] if searcher == "bm25" else ["--model", tiny_static]
    assert run("mine", "--data", data, "-o", output, "-k", 3, *how) == 0
    collection = load_collection(data)
    qrels = collection.qrels("train")
    lines = read(output)
    assert [line["qid"] for line in lines] == [query for query in qrels if qrels.relevant(query)]
    for line in lines:
        (name,) = line["neg"]
        assert set(line["pos"]) == set(qrels.relevant(line["qid"]))
        assert not set(line["pos"]) & set(line["neg"][name]) and len(line["neg"][name]) <= 3
        assert len(line["scores"][name]) == len(line["neg"][name])
        assert line["scores"][name] == sorted(line["scores"][name], reverse=True)
    if searcher == "model":
        assert all(len(line["neg"][name]) == 3 for line in lines)


def test_filters_and_splits_come_from_the_command_line(toy_beir, tiny_static, tmp_path):
    plain, strict = tmp_path / "plain.jsonl.gz", tmp_path / "strict.jsonl.gz"
    common = ["mine", "--data", toy_beir, "--model", tiny_static, "--split", "test", "-k", 5]
    assert run(*common, "-o", plain) == 0
    assert run(*common, "-o", strict, "--skip", 2, "--max-score", 0.9, "--min-score", -0.5, "--index", "Flat") == 0
    for one, other in zip(read(plain), read(strict), strict=True):
        (first,), (second,) = one["neg"].values(), other["neg"].values()
        assert second[: len(first) - 2] == first[2:]


def test_an_output_that_is_there_is_kept_unless_told(toy_beir, tmp_path, capsys):
    output = tmp_path / "negatives.jsonl.gz"
    output.write_bytes(b"mine")
    assert run("mine", "--data", toy_beir, "--bm25", "-o", output) == 2
    assert "--overwrite" in capsys.readouterr().err and output.read_bytes() == b"mine"
    assert run("mine", "--data", toy_beir, "--bm25", "-o", output, "--overwrite") == 0
    assert read(output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--margin", "-1"], "margin of the negatives is -1.0; expected 0 or more"),
        (["--bm25", "--index", "Flat"], "BM25 takes neither a model nor an index"),
        (["--index", "Nonsense"], "faiss cannot make 'Nonsense'"),
        (["--split", "nowhere"], "no split 'nowhere'"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, message, toy_beir, tmp_path, capsys):
    assert run("mine", "--data", toy_beir, "-o", tmp_path / "out.jsonl.gz", *arguments) in (2, 4)
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


# Training with mined negatives


@pytest.fixture
def settings(tmp_path, toy_beir, tiny_static):
    path = tmp_path / "toy.yaml"
    path.write_text(
        f"model: {{path: {tiny_static}}}\n"
        f"data: {{path: {toy_beir}, dev: dev}}\n"
        "loss: decoupled_softmax\n"
        "training: {learning_rate: 0.05, weight_decay: 0.0, batch_size: 4, num_train_epochs: 5, "
        "logging_steps: 1, save_total_limit: null}\n",
        encoding="utf-8",
    )
    return path


def losses(output):
    return {line["step"]: line["loss"] for line in read_log(output / "train_log.jsonl") if "loss" in line}


def test_training_reads_the_file(settings, toy_beir, tiny_static, tmp_path):
    output = tmp_path / "negatives.jsonl.gz"
    assert run("mine", "--data", toy_beir, "--model", tiny_static, "-o", output, "-k", 4) == 0
    given = [f"data.lists={output}", "data.negatives=given(2)"]
    train(settings, overrides=given, output=tmp_path / "out")
    train(settings, output=tmp_path / "plain")
    # More documents in every pool: the first loss is higher.
    assert losses(tmp_path / "out")[1] > losses(tmp_path / "plain")[1]


MINED = ["data.negatives=[mined(2), sampled(3)]", "data.mining={depth: 8, start_epoch: 1, refresh_epochs: 2}"]


def test_mined_negatives_come_from_the_weights_of_the_moment(settings, tmp_path, caplog):
    caplog.set_level("INFO")
    train(settings, overrides=MINED, output=tmp_path / "out")
    assert [text for text in ("mined at epoch 1 ", "mined at epoch 3 ") if text in caplog.text] == [
        "mined at epoch 1 ", "mined at epoch 3 "
    ]  # fmt: skip
    last = sorted((tmp_path / "out").glob("mined-*.npy"))[-1]
    mined = np.load(last)
    assert last.name == "mined-00003.npy" and mined.shape[1] == 8 and mined.dtype == np.int32
    assert losses(tmp_path / "out")[1] > 0


def test_resume_goes_on_with_the_negatives_of_the_interrupted_run(settings, tmp_path, monkeypatch):
    from shortlist.training.trainer import RetrievalTrainer

    overrides = [*MINED, "training.save_steps=1", "training.eval_steps=1"]
    train(settings, overrides=overrides, output=tmp_path / "whole")
    steps = max(losses(tmp_path / "whole"))
    original = RetrievalTrainer.compute_loss
    stop_at = steps * 5 // 10  # in the middle of an epoch that did not begin with mining

    def compute_loss(self, model, inputs, *arguments, **options):
        if self.state.global_step == stop_at:
            raise RuntimeError("killed")
        return original(self, model, inputs, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalTrainer, "compute_loss", compute_loss)
        with pytest.raises(RuntimeError, match="killed"):
            train(settings, overrides=overrides, output=tmp_path / "broken")
    train(settings, overrides=overrides, output=tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")

"""One-vs-all head and hybrid from configuration to measures, through the commands."""

import logging

import numpy as np
import pytest
import torch

from shortlist import load_collection
from shortlist.commands.evaluate import evaluate_files
from shortlist.commands.index import index
from shortlist.commands.search import search
from shortlist.commands.train import train
from shortlist.data import read_run
from shortlist.errors import ConfigError, DataError
from shortlist.metrics import evaluate
from shortlist.retrieval import DualEncoder


@pytest.fixture
def settings(tmp_path, toy_xc, xc_model):
    path = tmp_path / "xc.yaml"
    path.write_text(
        f"model: {{path: {xc_model}}}\n"
        f"data: {{path: {toy_xc}, dev: none, negatives: all}}\n"
        "loss: one_vs_all_bce\n"
        "training: {learning_rate: 0.02, head_learning_rate: 0.05, weight_decay: 0.0, batch_size: 20, max_steps: 60, "
        "temperature: 0.1, logging_steps: 20, eval_steps: 60}\n",
        encoding="utf-8",
    )
    return path


def measured(model, data, path, split="test", **options):
    search(model=model, data=data, split=split, top_k=12, output=path, overwrite=True, **options)
    return evaluate(load_collection(data).qrels(split), read_run(path), ["P@1"]).mean["P@1"]


@pytest.mark.parametrize("side", ["vectors", "text_and_vectors"])
def test_the_label_side_trains_and_is_indexed_searched_and_evaluated(
    settings, xc_model, toy_xc, tmp_path, side, capsys
):
    out = tmp_path / "out"
    loss = "one_vs_all_bce" if side == "vectors" else "decoupled_softmax"
    train(settings, overrides=[f"model.document_side={side}", f"loss={loss}"], output=out)
    before = measured(xc_model, toy_xc, tmp_path / "before.run")
    after = measured(out, toy_xc, tmp_path / "after.run")
    assert after >= before + 0.15 and measured(out, toy_xc, tmp_path / "fit.run", split="train") > 0.9
    encoder = DualEncoder.from_pretrained(out)
    assert encoder.document_side == side and encoder.temperature == 0.1
    index(model=out, data=toy_xc, output=tmp_path / "index", index="flat")
    capsys.readouterr()
    search(index=tmp_path / "index", data=toy_xc, split="test", top_k=12, output=tmp_path / "out.run.gz")
    evaluate_files([str(tmp_path / "out.run.gz"), "P@1"], data=str(toy_xc), split="test")
    assert f"{after:.4f}" in capsys.readouterr().out


def test_the_head_begins_at_the_text_encoder_and_the_base_rate(settings, xc_model, toy_xc, tmp_path):
    from shortlist.commands.document_side import with_document_side
    from shortlist.commands.train_dual_encoder import open_encoder
    from shortlist.config import load_config

    config = load_config(settings, ["model.document_side=vectors"])
    corpus = load_collection(toy_xc).corpus
    head = with_document_side(open_encoder(config), config, corpus)
    text = DualEncoder.from_pretrained(xc_model)
    texts = dict(zip(corpus.ids, corpus.texts(text.template), strict=True))
    documents = head.encode_documents(texts)
    np.testing.assert_allclose(documents[:, :-1], text.encode_documents(texts), atol=1e-6)
    # Of 12 labels one is right a priori: sigmoid(bias / temperature) = 1 / 12.
    assert torch.sigmoid(torch.from_numpy(documents[:, -1]) / 0.1).tolist() == pytest.approx([1 / 12] * 12)


def test_a_frozen_encoder_comes_out_as_it_went_in(settings, xc_model, tmp_path, toy_xc):
    out = tmp_path / "out"
    train(settings, overrides=["model.document_side=vectors", "model.freeze_encoder=true"], output=out)
    start = DualEncoder.from_pretrained(xc_model)
    assert DualEncoder.from_pretrained(out / "text").fingerprint == start.fingerprint
    assert measured(out, toy_xc, tmp_path / "fit.run", split="train") > 0.8


def test_training_goes_on_from_a_head_and_keeps_the_vectors_of_known_labels(settings, toy_xc, tmp_path, caplog):
    first, second = tmp_path / "first", tmp_path / "second"
    train(settings, overrides=["model.document_side=vectors", "training.max_steps=3"], output=first)
    with pytest.raises(ConfigError, match="document side is vectors, but model.document_side is text: set model.docu"):
        train(settings, overrides=[f"model.path={first}"], output=second)
    caplog.set_level(logging.INFO, logger="shortlist")
    rates = ["training.learning_rate=1e-12", "training.head_learning_rate=1e-12"]
    further = [f"model.path={first}", "model.document_side=vectors", "training.max_steps=1", *rates]
    train(settings, overrides=further, output=second)
    assert "12 of 12 documents keep their vectors" in caplog.text
    before, after = (DualEncoder.from_pretrained(path).document_tower for path in (first, second))
    np.testing.assert_allclose(after.weight.detach(), before.weight.detach(), atol=1e-6)
    np.testing.assert_allclose(after.bias.detach(), before.bias.detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.document_side=vectors", "training.matryoshka=[8]"], "where model.document_side vectors has the bias"),
        (["model.freeze_encoder=true"], "leaves nothing to train"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train(settings, overrides=overrides, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_refuses_the_documents_of_another_collection(settings, toy_beir, tmp_path):
    out = tmp_path / "out"
    train(settings, overrides=["model.document_side=vectors", "training.max_steps=1"], output=out)
    with pytest.raises(DataError, match="documents have no vector in this model, such as"):
        index(model=out, data=toy_beir, output=tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("side", ["vectors", "text_and_vectors"])
def test_a_killed_run_resumes_to_the_same_vectors(settings, tmp_path, monkeypatch, side):
    # user-reports B.54
    from shortlist.training.trainer import RetrievalTrainer

    steps = [f"model.document_side={side}", "training.max_steps=6", "training.eval_steps=3"]
    train(settings, overrides=steps, output=tmp_path / "whole")

    class Killed(RuntimeError):
        pass

    original = RetrievalTrainer.compute_loss

    def compute_loss(self, *arguments, **options):
        if self.state.global_step == 4:
            raise Killed
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalTrainer, "compute_loss", compute_loss)
        with pytest.raises(Killed):
            train(settings, overrides=steps, output=tmp_path / "killed")
    train(settings, overrides=steps, output=tmp_path / "killed", resume=True)
    whole, resumed = (DualEncoder.from_pretrained(tmp_path / name) for name in ("whole", "killed"))
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert whole.fingerprint == resumed.fingerprint

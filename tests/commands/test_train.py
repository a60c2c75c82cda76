"""`shortlist train` on the toy collection: what it writes, exact resume, selection, refusals."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shortlist.commands.train import train
from shortlist.config import load_config
from shortlist.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    MissingInputError,
    NonFiniteError,
    OutputExistsError,
)
from shortlist.retrieval import DualEncoder
from shortlist.training import checkpoints
from shortlist.training.callbacks import read_log


class Killed(RuntimeError):
    """Stands for a kill between two steps."""


@pytest.fixture
def settings(tmp_path, toy_beir, tiny_static):
    """A configuration file for the toy collection: twelve steps with an evaluation every four."""
    path = tmp_path / "toy.yaml"
    path.write_text(
        f"model: {{path: {tiny_static}}}\n"
        f"data: {{path: {toy_beir}, dev: dev}}\n"
        "loss: decoupled_softmax\n"
        "training: {learning_rate: 0.05, weight_decay: 0.0, batch_size: 4, max_steps: 12, eval_steps: 4, "
        "logging_steps: 1, save_total_limit: null}\n",
        encoding="utf-8",
    )
    return path


def losses(output):
    return {line["step"]: line["loss"] for line in read_log(output / "train_log.jsonl") if "loss" in line}


def kill_at(monkeypatch, step):
    """Raise when a step begins, after whatever was saved before."""
    from shortlist.training.trainer import RetrievalTrainer

    original = RetrievalTrainer.compute_loss

    def compute_loss(self, model, inputs, *arguments, **options):
        if self.state.global_step == step:
            raise Killed
        return original(self, model, inputs, *arguments, **options)

    monkeypatch.setattr(RetrievalTrainer, "compute_loss", compute_loss)


# What a run leaves --------------------------------------------------------------------------------------


def test_a_run_writes_model_config_manifest_log_card_and_checkpoints(settings, tmp_path):
    output = tmp_path / "out"
    result = train(settings, output=output)
    assert result.steps == 12 and result.best_step in (4, 8, 12)
    assert load_config(output / "config.yaml") == load_config(settings)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["finished"] and manifest["seed"] == 42 and manifest["steps"] == 12
    assert set(manifest["data"]) >= {"corpus.jsonl", "queries.jsonl"}
    assert {"versions", "git", "fingerprint", "seconds", "measures"} <= set(manifest)
    log = read_log(output / "train_log.jsonl")
    assert [line["step"] for line in log if "dev" in line] == [0, 4, 8, 12]
    assert list(losses(output)) == list(range(1, 13))
    assert losses(output)[12] < losses(output)[1]
    card = (output / "README.md").read_text()
    assert "decoupled_softmax" in card and "nDCG@10" in card and "10 queries" in card
    assert checkpoints.checkpoint_steps(output) == [4, 8, 12]
    assert not list(output.rglob("*.bin")) + list(output.rglob("*.pt")) + list(output.rglob("*.pth"))

    trained = DualEncoder.from_pretrained(output)
    assert trained.fingerprint == manifest["fingerprint"]
    best = DualEncoder.from_pretrained(checkpoints.checkpoint_path(output, result.best_step))
    texts = ["the moon", "bread"]
    assert np.array_equal(trained.encode_queries(texts), best.encode_queries(texts))


def test_best_checkpoint_is_by_the_named_measure_and_its_values_are_reported(settings, tmp_path):
    result = train(settings, overrides=["training.metric_for_best_model=mrr@10"], output=tmp_path / "out")
    values = {
        line["step"]: line["dev"]["RR@10"] for line in read_log(tmp_path / "out/train_log.jsonl") if "dev" in line
    }
    trained = {step: value for step, value in values.items() if step > 0}
    assert result.best_step == min(step for step in trained if trained[step] == max(trained.values()))
    assert result.measures["RR@10"] == max(trained.values())
    assert result.untrained["RR@10"] == values[0]


def test_unknown_measure_is_refused_with_the_nearest_name(settings, tmp_path):
    # user-reports B.59
    with pytest.raises(ConfigError, match=r"metric_for_best_model.*nDCG"):
        train(settings, overrides=["training.metric_for_best_model=nDCGG@10"], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_stops_early_and_keeps_best_and_last(settings, tmp_path):
    overrides = [
        "training.learning_rate=1e-12", "training.early_stopping_patience=2", "training.max_steps=40",
        "training.eval_steps=2", "training.save_total_limit=1",
    ]  # fmt: skip
    result = train(settings, overrides=overrides, output=tmp_path / "out")
    assert (result.best_step, result.steps) == (2, 6)
    assert checkpoints.checkpoint_steps(tmp_path / "out") == [2, 6]


def test_no_tracker_is_called_unless_named_and_stdout_stays_empty(settings, tmp_path, capsys):
    # user-reports B.61: W&B asks for a key in the middle of a run
    train(settings, overrides=["training.max_steps=2"], output=tmp_path / "out")
    assert capsys.readouterr().out == ""
    assert load_config(tmp_path / "out" / "config.yaml").training.report_to == "none"
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        train(settings, overrides=["training.report_to=wandbb"], output=tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(MissingExtraError, match="neptune, whose package is not installed"):
        train(settings, overrides=["training.report_to=[neptune]"], output=tmp_path / "again2")


def test_truncated_documents_are_counted(settings, tmp_path, caplog):
    # user-reports D.94
    train(settings, overrides=["training.max_steps=1", "model.doc_max_length=5"], output=tmp_path / "out")
    assert "Training reads the first 5 tokens of" in caplog.text


def test_steps_are_stated_and_accumulation_says_what_it_is_not(settings, tmp_path, caplog):
    # user-reports B.43, B.53
    with caplog.at_level(logging.INFO):
        result = train(
            settings,
            overrides=["training.gradient_accumulation_steps=3", "training.max_steps=null", "data.dev=none"],
            output=tmp_path / "out",
        )
    assert "10 training queries, 3 batches and 1 steps an epoch, 1 steps in all" in caplog.text
    assert "only the negatives of its own batch of 4" in caplog.text
    assert "raise training.batch_size and set training.micro_batch_size (gradient cache)" in caplog.text
    assert result.steps == 1 and result.measures == {}


def test_zero_steps_is_an_error(settings, tmp_path):
    # user-reports B.53
    with pytest.raises(ConfigError, match="zero batches of 400"):
        train(settings, overrides=["training.batch_size=400", "training.drop_last=true"], output=tmp_path / "out")


# Resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("static", ["training.logging_steps=3"]),
        ("static", ["data.negatives=bm25", "data.num_negatives=2", "training.gradient_accumulation_steps=2"]),
        ("transformer", ["training.learning_rate=1e-3"]),  # dropout: the random state counts
        ("transformer", ["model.lora={r: 2, alpha: 4, dropout: 0.1}", "training.learning_rate=1e-2"]),
    ],
)
def test_an_interrupted_run_continues_exactly(
    settings, tmp_path, monkeypatch, tiny_transformer, model, overrides, deterministic_threads
):
    # user-reports B.54, B.55: full state by default, with LoRA too
    if model == "transformer":
        overrides = [*overrides, f"model.path={tiny_transformer}"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(settings, overrides=overrides, output=whole)
    with monkeypatch.context() as patch:
        kill_at(patch, 10)
        with pytest.raises(Killed):
            train(settings, overrides=overrides, output=broken)
    assert checkpoints.checkpoint_steps(broken)[-1] == 8
    with open(broken / "train_log.jsonl", "a") as handle:
        handle.write('{"step": 9, "lo')  # a line that the kill cut
    result = train(settings, overrides=overrides, output=broken, resume=True)

    assert result.steps == 12
    assert read_log(broken / "train_log.jsonl") == read_log(whole / "train_log.jsonl")
    first = load_file(checkpoints.checkpoint_path(whole, 12) / "state" / "weights.safetensors")
    second = load_file(checkpoints.checkpoint_path(broken, 12) / "state" / "weights.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (whole / "config.yaml").read_text() == (broken / "config.yaml").read_text()


@pytest.fixture
def deterministic_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_resume_at_the_end_of_an_epoch_continues_with_the_next_order(settings, tmp_path, monkeypatch):
    overrides = ["training.save_steps=3", "training.eval_steps=3"]  # three batches an epoch
    train(settings, overrides=overrides, output=tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, 7)
        with pytest.raises(Killed):
            train(settings, overrides=overrides, output=tmp_path / "broken")
    train(settings, overrides=overrides, output=tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_every_epoch_has_its_own_order_and_every_query_once(settings, tmp_path, monkeypatch):
    from shortlist.training.batches import BatchBuilder

    seen = []
    original = BatchBuilder.__call__
    monkeypatch.setattr(BatchBuilder, "__call__", lambda self, items: seen.extend(items) or original(self, items))
    train(settings, overrides=["training.max_steps=9"], output=tmp_path / "out")
    orders = [[index for epoch, index in seen if epoch == number] for number in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_resume_before_the_first_checkpoint_starts_over(settings, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        kill_at(patch, 2)
        with pytest.raises(Killed):
            train(settings, output=tmp_path / "out")
    train(settings, output=tmp_path / "out", resume=True)
    assert "no checkpoint yet" in caplog.text
    steps = [(line["step"], "dev" in line) for line in read_log(tmp_path / "out/train_log.jsonl")]
    assert len(steps) == len(set(steps))


def test_resume_of_a_finished_run_says_so(settings, tmp_path, caplog):
    first = train(settings, output=tmp_path / "out")
    again = train(settings, output=tmp_path / "out", resume=True)
    assert "is finished (12 steps); there is nothing to resume" in caplog.text
    assert (again.best_step, again.measures) == (first.best_step, first.measures)


def test_resume_with_another_configuration_names_the_key(settings, tmp_path):
    train(settings, output=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"training.batch_size was 4 and is now 5"):
        train(settings, overrides=["training.batch_size=5"], output=tmp_path / "out", resume=True)


def test_resume_on_changed_data_is_refused(settings, tmp_path, toy_beir, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(toy_beir, data)
    overrides = [f"data.path={data}"]
    with monkeypatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            train(settings, overrides=overrides, output=tmp_path / "out")
    with open(data / "corpus.jsonl", "a") as handle:
        handle.write('{"_id": "new", "text": "one more"}\n')
    with pytest.raises(DataError, match="corpus.jsonl has changed since"):
        train(settings, overrides=overrides, output=tmp_path / "out", resume=True)


def test_nothing_to_resume(settings, tmp_path):
    with pytest.raises(MissingInputError, match="holds no training run to resume"):
        train(settings, output=tmp_path / "none", resume=True)


# The output ---------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_refused_and_overwriting_removes_training_outputs_only(settings, tmp_path):
    output = tmp_path / "out"
    train(settings, overrides=["training.max_steps=2"], output=output)
    with pytest.raises(OutputExistsError, match="--resume.*--overwrite"):
        train(settings, output=output)
    train(settings, overrides=["training.max_steps=3"], output=output, overwrite=True)
    assert json.loads((output / "manifest.json").read_text())["steps"] == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputExistsError, match="not an output of shortlist train"):
        train(settings, output=other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="exclude each other"):
        train(settings, output=output, overwrite=True, resume=True)


def test_wrong_input_leaves_the_old_output_alone(settings, tmp_path):
    output = tmp_path / "out"
    train(settings, overrides=["training.max_steps=2"], output=output)
    with pytest.raises(MissingInputError):
        train(settings, overrides=["data.split=nope"], output=output, overwrite=True)
    assert (output / "model.safetensors").is_file()


# Settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind=dual_encodr"], "did you mean 'dual_encoder'"),
        (["loss.name=decoupled_softmx"], "loss: there is no loss 'decoupled_softmx'.*decoupled_softmax"),
        (["loss={name: soft_top_k, kk: 5}"], "loss: loss 'soft_top_k' has no option 'kk'"),
        (["data.path=null"], "data.path is not set"),
        (["data.dev=train"], "the split that is trained on"),
        (["data.negatives=given"], "has no lists of documents"),
        (["loss=kl_divergence"], "needs lists with scores"),
        (["model.lora={r: 2}"], "LoRA needs a transformer"),
        (["training.lr_scheduler_type=sideways"], "expected one of linear"),
        (["training.optim=adamm"], "transformers refuses a setting.*adamm"),
        (["training.warmup_steps=2.5"], "training.warmup_steps is 2.5; expected a whole number"),
        (["training.dtype=float16"], "needs a GPU"),
        (["training.matryoshka=[64]"], "matryoshka has 64"),
        (["training.sample_positives=1", "loss=one_vs_all_bce"], "training.sample_positives: OneVsAllBCE needs every"),
        (["training.head_learning_rate=0.1"], "training.head_learning_rate is set but the model has no free vectors"),
        (
            ["data.propensity_weights=true", "loss=list_net"],
            "list_net', which weighs no positives; use one of info",
        ),
        (["data.propensity_weights=true", "training.sample_positives=1"], "exclude each other"),
        (["data.mining={min_score: 0.9, max_score: 0.1}"], "min_score of the negatives is 0.9, above max_score 0.1"),
        (["data.negatives=mined(2)", "data.mining.index=Bogus"], "Bogus"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(settings, tmp_path, overrides, message):
    if "float16" in overrides[0] and torch.cuda.is_available():
        pytest.skip("float16 works here")
    with pytest.raises(ConfigError, match=message):
        train(settings, overrides=overrides, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.negatives=all"],
        ["data.negatives=all", "loss={name: soft_top_k, k: 3}"],
        ["loss=info_nce", "training.matryoshka=[8, 4]"],
        ["loss=one_vs_all_bce", "data.share_negatives=false", "data.negatives=bm25"],
        ["loss=list_net", "data.graded=true", "data.negatives=all"],
        ["data.title_queries=true", "training.max_positives=1"],
        ["training.dtype=bfloat16", "deterministic=true"],
        ["data.dev=auto", "data.dev_documents=20", "data.dev_queries=2"],
        ["data.path=XC", "data.dev=auto", "data.negatives=all", "training.metric_for_best_model=PSP@3"],
        [
            "data.negatives=all",
            "training.micro_batch_size=3",
            "training.score_memory=1",
            "loss.name=soft_top_k",
        ],
        ["data.negatives=all", "training.sample_positives=1", "training.micro_batch_size=100"],
        ["data.negatives=[sampled(5), bm25(1)]", "training.logit_adjustment=1.0", "training.micro_batch_size=1"],
        [
            "data.path=XC",
            "data.dev=auto",
            "data.negatives=all",
            "model.document_side=vectors",
            "loss=one_vs_all_bce",
            "model.freeze_encoder=true",
            "training.head_learning_rate=0.1",
        ],
        [
            "data.path=XC",
            "data.dev=auto",
            "model.document_side=text_and_vectors",
            "training.head_learning_rate=0.1",
            "training.micro_batch_size=2",
            "training.logit_adjustment=0.5",
        ],
        ["data.path=XC", "data.dev=auto", "data.propensity_weights=true", "data.graded=true"],
    ],
)
def test_variants_train(settings, tmp_path, toy_xc, overrides):
    overrides = [override.replace("=XC", f"={toy_xc}") for override in overrides]
    try:
        result = train(settings, overrides=[*overrides, "training.max_steps=4"], output=tmp_path / "out")
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.steps == 4 and result.measures
    assert all(np.isfinite(loss) for loss in losses(tmp_path / "out").values())


def test_selection_measures_a_label_set_as_it_is_reported(settings, tmp_path, toy_xc, monkeypatch):
    # methods-dexml-lite §4.2: pairs that may not be predicted go before ranking, in selection too; nDCG is binary
    from shortlist.training import evaluation

    folder = shutil.copytree(toy_xc, tmp_path / "xc")
    (folder / "filter_labels_train.txt").write_text("".join(f"{row} 0\n" for row in range(60)))
    asked, measure = [], evaluation.evaluate
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *args, **options: asked.append(options) or measure(*args, **options)
    )
    overrides = [
        f"data.path={folder}",
        "data.dev=auto",
        "training.max_steps=1",
        "training.metric_for_best_model=nDCG@3",
    ]
    train(settings, overrides=overrides, output=tmp_path / "out")
    assert asked and all(options["filters"]["tr0"] == {"astronomy"} and options["binary_gain"] for options in asked)


def test_bm25_negatives_are_mined_once_and_kept_beside_the_output(settings, tmp_path, toy):
    from shortlist.data import read_lists

    train(settings, overrides=["data.negatives=bm25", "training.max_steps=2"], output=tmp_path / "out")
    lists = list(read_lists(tmp_path / "out/negatives.jsonl.gz", corpus=toy.corpus, queries=toy.all_queries()))
    assert {item.query_id for item in lists} == set(toy.queries("train"))
    for item in lists:
        assert not {doc.id for doc in item.negatives} & set(toy.qrels("train").relevant(item.query_id))
    # The file is a list file that trains by itself.
    overrides = ["data.negatives=given", f"data.lists={tmp_path / 'out/negatives.jsonl.gz'}", "training.max_steps=2"]
    assert train(settings, overrides=overrides, output=tmp_path / "again").steps == 2


def test_distillation_from_lists_with_scores(settings, tmp_path, toy):
    lists = tmp_path / "lists.jsonl"
    ids = list(toy.corpus.ids)
    with open(lists, "w") as handle:
        for query, text in toy.queries("train").items():
            good = list(toy.qrels("train").relevant(query))
            others = [id for id in ids if id not in good][:4]
            line = {
                "query": text,
                "pos": [toy.corpus[id].joined() for id in good],
                "neg": [toy.corpus[id].joined() for id in others],
                "pos_scores": [5.0] * len(good),
                "neg_scores": [1.0, 0.5, 0.0, -1.0],
            }
            handle.write(json.dumps(line) + "\n")
    overrides = [
        f"data.path={lists}", "data.negatives=given", "data.dev=auto", "loss=kl_divergence", "training.temperature=1",
    ]  # fmt: skip
    result = train(settings, overrides=overrides, output=tmp_path / "out")
    assert losses(tmp_path / "out")[12] < losses(tmp_path / "out")[1]
    assert result.steps == 12


# LoRA, precision, non-finite losses ---------------------------------------------------------------------


def test_lora_trains_adapters_only_and_the_output_opens_with_every_tensor(settings, tmp_path, tiny_transformer):
    # user-reports B.57, B.58: after load every saved tensor is used; the folder names its base model
    overrides = [f"model.path={tiny_transformer}", "model.lora={r: 2, alpha: 4}", "training.learning_rate=1e-2"]
    output = tmp_path / "out"
    result = train(settings, overrides=overrides, output=output)
    state = load_file(checkpoints.checkpoint_path(output, result.best_step) / "state" / "weights.safetensors")
    assert state and all("lora_" in name for name in state)
    base = DualEncoder.from_pretrained(tiny_transformer)
    trained = DualEncoder.from_pretrained(output)
    texts = ["the moon has phases", "bread"]
    assert np.abs(trained.encode_queries(texts) - base.encode_queries(texts)).max() > 1e-3
    # What was saved is what was trained: the adapter of the checkpoint, put on the base again, gives these vectors.
    again = DualEncoder.from_pretrained(tiny_transformer).add_lora(rank=2, alpha=4)
    checkpoints.load_weights(again, checkpoints.checkpoint_path(output, result.best_step) / "state/weights.safetensors")
    assert np.allclose(again.eval().encode_queries(texts), trained.encode_queries(texts), atol=1e-5)


def test_two_towers_train_apart(settings, tmp_path, tiny_transformer):
    overrides = [f"model.path={tiny_transformer}", "model.shared=false", "training.max_steps=3"]
    train(settings, overrides=[*overrides, "training.learning_rate=1e-3"], output=tmp_path / "out")
    trained = DualEncoder.from_pretrained(tmp_path / "out")
    assert not trained.shared
    assert not np.allclose(trained.encode_queries(["moon"]), trained.encode_documents(["moon"]))


def test_gradient_checkpointing_changes_no_loss(settings, tmp_path, tiny_transformer, deterministic_threads):
    overrides = [f"model.path={tiny_transformer}", "training.max_steps=2", "data.dev=none"]
    train(settings, overrides=overrides, output=tmp_path / "plain")
    train(settings, overrides=[*overrides, "training.gradient_checkpointing=true"], output=tmp_path / "checkpointed")
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "checkpointed"), rel=1e-5)


def test_bfloat16_keeps_float32_weights(settings, tmp_path, tiny_transformer):
    # user-reports B.50: master weights stay float32
    overrides = [f"model.path={tiny_transformer}", "training.dtype=bfloat16", "training.max_steps=2"]
    train(settings, overrides=overrides, output=tmp_path / "out")
    state = load_file(checkpoints.checkpoint_path(tmp_path / "out", 2) / "state" / "weights.safetensors")
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}


class ExplodingLoss(torch.nn.Module):
    """Finite for six steps, then not."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, scores, positives, valid=None):
        self.calls += 1
        return scores.mean() * (float("nan") if self.calls > 6 else 1.0)


def test_a_loss_that_is_not_finite_stops_and_no_later_checkpoint_is_written(settings, tmp_path, monkeypatch):
    # user-reports B.49, and an import path as the name of a loss
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_losses.py").write_text(f"from {__name__} import ExplodingLoss as Mine\n")
    with pytest.raises(NonFiniteError, match="loss of step 7 is nan"):
        train(settings, overrides=["loss=my_losses:Mine"], output=tmp_path / "out")
    assert checkpoints.checkpoint_steps(tmp_path / "out") == [4]
    assert not (tmp_path / "out" / "model.safetensors").exists()


# Gradient cache, label side, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["static", "transformer"])
def test_micro_batches_change_no_step(settings, tmp_path, tiny_transformer, model, deterministic_threads):
    overrides = [
        "data.negatives=all",
        "training.max_steps=4",
        "data.dev=none",
        "training.gradient_accumulation_steps=2",
    ]
    if model == "transformer":
        # Without dropout: micro-batches draw other random numbers than the whole batch.
        config = json.loads((tiny_transformer / "config.json").read_text())
        shutil.copytree(tiny_transformer, tmp_path / "model")
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        overrides += [f"model.path={tmp_path / 'model'}", "training.learning_rate=1e-3"]
    train(settings, overrides=overrides, output=tmp_path / "whole")
    train(settings, overrides=[*overrides, "training.micro_batch_size=3"], output=tmp_path / "cached")
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_free_vectors_have_their_own_learning_rate(settings, tmp_path, toy_xc):
    from shortlist.commands.train_dual_encoder import DualEncoderJob
    from shortlist.training.trainer import RetrievalTrainer

    overrides = [
        f"data.path={toy_xc}", "data.dev=none", "model.document_side=vectors", "training.head_learning_rate=0.2",
        "training.weight_decay=0.01",
    ]  # fmt: skip
    config = load_config(settings, overrides)
    job = DualEncoderJob(config)
    trainer = RetrievalTrainer(
        job.encoder, job._batches(), job.objective, config=config, plan=job.plan, output=tmp_path / "out"
    )
    rates = {
        id(parameter): group["lr"] for group in trainer.create_optimizer().param_groups for parameter in group["params"]
    }
    head = job.encoder.document_tower.head_parameters()
    text = [parameter for parameter in job.encoder.parameters() if not any(parameter is own for own in head)]
    assert {rates[id(parameter)] for parameter in head} == {0.2}
    assert text and {rates[id(parameter)] for parameter in text} == {0.05}
    assert len(rates) == len(head) + len(text)


def test_logit_adjustment_is_the_frequency_among_the_training_positives(settings, toy_xc):
    from shortlist.commands.train_dual_encoder import DualEncoderJob

    job = DualEncoderJob(load_config(settings, [f"data.path={toy_xc}", "data.dev=none", "training.logit_adjustment=2"]))
    qrels = job.collection.qrels("train")
    counts = {label: 0 for label in job.collection.corpus.ids}
    for query in qrels:
        for label in qrels.relevant(query):
            counts[label] += 1
    total = sum(counts.values()) + len(counts)
    # Equal texts are one document, at the first of their rows.
    for row in job.documents.unique_rows().tolist():
        equal = [other for other, first in enumerate(job.documents.first_rows.tolist()) if first == row]
        if len(equal) == 1:
            count = counts[job.collection.corpus.ids[row]]
            assert float(job.objective.bias[row]) == pytest.approx(2 * np.log((count + 1) / total), abs=1e-4)
            assert bool(np.isfinite(float(job.objective.bias[row])))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_running_out_of_memory_names_the_settings_that_bound_it(settings, tmp_path, monkeypatch, error):
    from shortlist.errors import ShortlistError
    from shortlist.training import trainer

    def too_large(*arguments, **options):
        raise error

    monkeypatch.setattr(trainer, "batch_loss", too_large)
    with pytest.raises(ShortlistError, match="step 1 does not fit.*training.micro_batch_size.*training.score_memory"):
        train(settings, output=tmp_path / "out")


# Dry run ------------------------------------------------------------------------------------------------


def test_dry_run_prints_steps_memory_and_what_is_missing_and_writes_nothing(settings, tmp_path, capsys):
    report = train(settings, dry_run=True)
    assert report["steps"] == 12 and report["missing"] == []
    printed = capsys.readouterr().out
    assert "steps per epoch" in printed and "total:" in printed and "missing" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["msmarco-dual-encoder", "minilm-dual-encoder", "medquad-dual-encoder"])
def test_recipes_that_cannot_run_here_are_estimated(name, capsys):
    report = train(name, dry_run=True)
    assert any(item.startswith("data") for item in report["missing"]) or name == "minilm-dual-encoder"
    if name == "msmarco-dual-encoder":
        assert report["steps"] > 20_000 and report["parameters"].startswith("66,362,880")
        assert any("is not on this disk" in item for item in report["missing"])

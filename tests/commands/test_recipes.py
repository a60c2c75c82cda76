"""The packaged recipes for extreme classification: each loads, says what it would take, and those for here train."""

import pytest

from shortlist.commands.train import train
from shortlist.config import load_config, packaged_configs

PUBLISHED = ["eurlex-4k", "lf-amazontitles-131k", "lf-wikipedia-500k", "lf-amazontitles-1.3m"]
STATIC = ["xc-static", "yso-titles-static", "reuters21578-static"]
TRANSFORMER = ["xc-transformer", "yso-titles-transformer", "reuters21578-transformer"]
TWO_STEPS = ["training.max_steps=2", "training.batch_size=8", "training.logging_steps=1"]


def test_the_recipes_are_there():
    assert set(PUBLISHED + STATIC + TRANSFORMER) <= set(packaged_configs())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_are_estimated_without_data_or_model(name, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    report = train(name, dry_run=True)
    expected = load_config(name).expected
    assert report["documents"] == expected.documents and report["training queries"] == expected.queries
    assert report["processes"] == 4 and report["steps"] == 100 * report["steps per epoch"]
    assert any(line.startswith("activations") for line in report["memory per device"])
    assert any(item.startswith("data: ") and "shortlist data download" in item for item in report["missing"])
    assert any(item.startswith("model: distilbert") for item in report["missing"])
    printed = capsys.readouterr().out
    assert "memory per device" in printed and "total:" in printed
    monkeypatch.setenv("RANK", "1")
    train(name, dry_run=True)
    assert capsys.readouterr().out == ""


def test_published_recipes_hold_the_released_hyper_parameters():
    # From the released configurations: (tokens, batch, micro-batch, learning rate, temperature, normalised).
    released = {
        "eurlex-4k": (128, 512, 4096, 5e-5, 0.05, True),
        "lf-amazontitles-131k": (32, 3000, 3000, 3e-4, 0.05, True),
        "lf-wikipedia-500k": (128, 768, 512, 7e-5, 1.0, False),
        "lf-amazontitles-1.3m": (32, 3000, 3000, 3e-4, 1.0, False),
    }
    for name, values in released.items():
        config = load_config(name)
        model, training = config.model, config.training
        assert (
            model.doc_max_length, training.batch_size, training.micro_batch_size, training.learning_rate,
            training.temperature, model.normalise,
        ) == values, name  # fmt: skip
        assert model.query_max_length == model.doc_max_length and model.pooling == "cls"
        assert (training.num_train_epochs, training.warmup_steps, training.weight_decay) == (100, 0.1, 0.01)
        assert training.sample_positives == 1 and config.data.negatives == "all"
        # user-reports B: a checkpoint is never chosen on the split that is reported.
        assert config.data.dev == "auto" and training.metric_for_best_model == "nDCG@5"


def test_hard_negatives_by_the_overrides_that_the_recipes_name():
    config = load_config(
        "lf-wikipedia-500k",
        ["data.negatives=mined(5)", "data.mining.start_epoch=6", "training.max_positives=1"],
    )
    assert [str(source) for source in config.data.sources] == ["mined(5)"]
    assert config.data.mining.depth == 100 and config.data.mining.refresh_epochs == 5


@pytest.mark.parametrize("name", ["xc-static", "xc-transformer"])
@pytest.mark.parametrize(
    "loss",
    [
        ["loss.name=decoupled_softmax"],
        ["loss.name=info_nce"],
        ["loss.name=soft_top_k", "loss.k=5"],
        ["loss.name=one_vs_all_bce"],
    ],
)
def test_every_loss_of_the_family_trains_two_steps(name, loss, tmp_path, toy_xc, tiny_static, tiny_transformer):
    model = tiny_static if name == "xc-static" else tiny_transformer
    overrides = [f"data.path={toy_xc}", f"model.path={model}", *TWO_STEPS, *loss]
    if name == "xc-transformer":
        overrides += ["model.query_max_length=16", "model.doc_max_length=16", "data.negatives=[in_batch, sampled(4)]",
                      "training.micro_batch_size=4"]  # fmt: skip
    result = train(name, overrides=overrides, output=tmp_path / "out")
    assert result.steps == 2 and 0 <= result.measures["nDCG@5"] <= 1


@pytest.mark.parametrize("name", [*STATIC[1:], *TRANSFORMER[1:]])
def test_recipes_of_data_sets_train_two_steps(name, tmp_path, toy_xc, tiny_static, tiny_transformer):
    model = tiny_static if name in STATIC else tiny_transformer
    overrides = [f"data.path={toy_xc}", f"model.path={model}", *TWO_STEPS]
    if name in TRANSFORMER:  # the tiny model has positions for 64 tokens
        overrides.append("model.query_max_length=32")
    result = train(name, overrides=overrides, output=tmp_path / "out")
    assert result.steps == 2 and (tmp_path / "out" / "shortlist.json").is_file()


def test_a_dry_run_knows_the_sizes_of_data_that_is_there(toy_xc, tiny_static):
    report = train("xc-static", overrides=[f"data.path={toy_xc}", f"model.path={tiny_static}"], dry_run=True)
    assert report["documents"] == 12 and report["training queries"] == 57
    assert report["steps"] == 3 and report["missing"] == []


def test_a_step_that_does_not_fit_says_what_would_help(monkeypatch):
    monkeypatch.setattr("shortlist.commands.dry_run._free_memory", lambda: 2**20)
    report = train("yso-titles-transformer", overrides=["training.micro_batch_size=null"], dry_run=True)
    assert any("set training.micro_batch_size" in item for item in report["missing"])
    report = train("yso-titles-transformer", dry_run=True)
    assert any("lower training.micro_batch_size" in item for item in report["missing"])

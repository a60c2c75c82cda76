"""Configuration: layers, overrides, the messages of its errors, and the dump that can be fed back."""

import subprocess
import sys

import pytest
import yaml

from shortlist.config import (
    apply_overrides,
    build_config,
    differing_keys,
    dump_config,
    load_config,
    packaged_configs,
    parse_overrides,
    write_config,
)
from shortlist.errors import ConfigError, MissingInputError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_config_does_not_import_torch():
    code = "import sys, shortlist.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", packaged_configs())
def test_every_packaged_recipe_loads_and_its_dump_gives_it_back(name, tmp_path):
    config = load_config(name)
    write_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_packaged_recipes_are_there():
    assert {"scifact-dual-encoder", "medquad-dual-encoder", "msmarco-dual-encoder", "minilm-dual-encoder"} <= set(
        packaged_configs()
    )


def test_unknown_recipe_names_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match="did you mean 'scifact-dual-encoder'") as error:
        load_config("scifact-dual-encodr")
    assert "msmarco-dual-encoder" in str(error.value)


def test_missing_file_is_missing_input():
    with pytest.raises(MissingInputError, match="here/none.yaml does not exist"):
        load_config("here/none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {learning_rat: 1}", "unknown key training.learning_rat; did you mean 'learning_rate'"),
        ("trainin: {}", "unknown key trainin; did you mean 'training'"),
        ("model: {lora: {rank_of_it: 2}}", "unknown key model.lora.rank_of_it; model.lora takes r, alpha"),
        ("training: {batch_size: many}", "training.batch_size: expected integer, found the text 'many'"),
        ("training: {batch_size: 0}", "training.batch_size: expected greater than or equal to 1, found the number 0"),
        ("training: {drop_last: 1}", "training.drop_last: expected boolean, found the number 1"),
        ("data: {negatives: bm52}", "found the text 'bm52'; did you mean 'bm25'?"),
        ("data: {negatives: sampled}", "sampled needs the number of documents a batch"),
        ("data: {negatives: all(3)}", "all takes no number"),
        ("data: {negatives: [in_batch, mined(0)]}", "draws no document"),
        ("data: {negatives: [mined(2), mined(3)]}", "has 'mined' twice"),
        ("data: {negatives: [all, sampled(9)]}", "keep 'all' alone"),
        ("data: {negatives: sampled(9), share_negatives: false}", "exclude each other"),
        ("data: {negatives: mined(2), num_negatives: 3}", "has no use for it"),
        ("data: {num_negatives: 3}", "data.num_negatives is 3 but data.negatives is 'in_batch'"),
        ("data: {negatives: all, share_negatives: false}", "exclude each other"),
        ("seed: 1\nseed: 2", "key 'seed' is there twice"),
        ("- a\n- b", "expected sections .* found a list"),
        ("training: {batch_size: [}", "line 1: not valid YAML"),
    ],
)
def test_mistakes_in_a_file_name_file_key_and_remedy(tmp_path, text, message):
    path = write(tmp_path / "mine.yaml", text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_mistake_in_an_inherited_file_names_that_file(tmp_path):
    base = write(tmp_path / "below.yaml", "training: {batch_sise: 3}")
    path = write(tmp_path / "above.yaml", "base: below.yaml")
    with pytest.raises(ConfigError, match="batch_sise; did you mean 'batch_size'") as error:
        load_config(path)
    assert str(base) in str(error.value)


def test_later_layers_win_and_the_rest_is_inherited(tmp_path):
    write(tmp_path / "below.yaml", "training: {batch_size: 8, learning_rate: 1e-3}\nseed: 1")
    path = write(tmp_path / "above.yaml", "base: below.yaml\ntraining: {batch_size: 16}")
    config = load_config(path, ["seed=3"])
    assert (config.training.batch_size, config.training.learning_rate, config.seed) == (16, 1e-3, 3)


def test_base_may_be_a_packaged_name_and_a_circle_is_refused(tmp_path):
    path = write(tmp_path / "above.yaml", "base: scifact-dual-encoder\nseed: 7")
    assert load_config(path).data.path == "scifact"
    write(tmp_path / "a.yaml", "base: b.yaml")
    write(tmp_path / "b.yaml", "base: a.yaml")
    with pytest.raises(ConfigError, match="break the circle"):
        load_config(tmp_path / "a.yaml")


def test_numbers_without_a_dot_are_numbers_and_words_stay_words():
    # YAML 1.1 reads 1e-4 as text and `no` as false.
    values = parse_overrides(["training.learning_rate=1e-4", "data.dev=no", "training.drop_last=true", "seed=007"])
    assert values == {"training": {"learning_rate": 1e-4, "drop_last": True}, "data": {"dev": "no"}, "seed": "007"}


@pytest.mark.parametrize("override", ["seed", "=3", "training.=3", "a..b=1"])
def test_override_of_another_form_is_refused(override):
    with pytest.raises(ConfigError, match="section.key=value"):
        parse_overrides([override])


def test_loss_shorthand_and_options(tmp_path):
    assert build_config({"loss": "soft_top_k"}).loss.name == "soft_top_k"
    path = write(tmp_path / "a.yaml", "loss: {name: soft_top_k, k: 5}")
    assert load_config(path, ["loss.k=7"]).loss.options == {"k": 7}
    assert load_config(path, ["loss.sharpness=1.5"]).loss.options == {"k": 5, "sharpness": 1.5}
    # The options of one loss are not those of another.
    assert load_config(path, ["loss.name=info_nce"]).loss.options == {}
    assert load_config(path, ["loss=one_vs_all_bce"]).loss.name == "one_vs_all_bce"
    assert load_config(path, ["loss.name=soft_top_k", "loss.k=9"]).loss.options == {"k": 9}


def test_negatives_that_sample_none_drop_the_number_of_a_lower_layer(tmp_path):
    path = write(tmp_path / "a.yaml", "base: scifact-dual-encoder\ndata: {negatives: all}")
    assert load_config(path).data.num_negatives is None
    assert load_config("scifact-dual-encoder", ["data.negatives=in_batch"]).data.num_negatives is None
    assert load_config("scifact-dual-encoder", ["data.negatives=given"]).data.num_negatives == 8
    with pytest.raises(ConfigError, match="leave data.num_negatives out"):
        load_config(path, ["data.negatives=all", "data.num_negatives=8"])


def test_overrides_on_a_resolved_configuration():
    config = build_config({"loss": {"name": "soft_top_k", "k": 5}})
    assert apply_overrides(config, ["loss.k=6", "seed=1"]).loss.options == {"k": 6}
    assert apply_overrides(config, []) == config


def test_differing_keys_are_dotted():
    first, second = build_config({}), build_config({"training": {"batch_size": 5}, "loss": {"name": "x", "k": 1}})
    assert differing_keys(first, second) == {
        "training.batch_size": (32, 5), "loss.name": ("info_nce", "x"), "loss.k": (None, 1),
    }  # fmt: skip


def test_dump_is_plain_yaml_that_keeps_small_numbers():
    config = build_config({"training": {"learning_rate": 1e-5}, "data": {"path": "1e-4"}})
    text = dump_config(config)
    assert "learning_rate: 1.0e-05" in text or "learning_rate: 1e-05" in text
    assert yaml.safe_load(text)["seed"] == 42


@pytest.mark.parametrize(
    "override", ["training.num_train_epochs=.inf", "training.weight_decay=.inf", "seed=4294967296"]
)
def test_numbers_that_no_run_can_use_are_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0] + ": expected"):
        load_config("scifact-dual-encoder", [override])


def test_an_empty_section_in_an_override_keeps_the_files_settings():
    assert load_config("scifact-dual-encoder", ["training="]) == load_config("scifact-dual-encoder")


def test_negatives_may_be_a_mixture_of_sources():
    config = load_config("scifact-dual-encoder", ["data.negatives=[in_batch, mined(5), sampled(1000)]"])
    assert [str(source) for source in config.data.sources] == ["in_batch", "mined(5)", "sampled(1000)"]
    assert config.data.num_negatives is None
    assert [str(source) for source in load_config("scifact-dual-encoder").data.sources] == ["bm25(8)"]
    assert load_config("scifact-dual-encoder", ["data.negatives=mined"]).data.sources[0].count == 8

"""Runs that could not learn anything are refused before they begin, by the key that is at fault."""

import pytest

from shortlist.commands.train_dual_encoder import DualEncoderJob
from shortlist.config import load_config
from shortlist.data import load_collection
from shortlist.errors import ConfigError, DataError


def job(model, data, *overrides):
    common = [f"model.path={model}", f"data.path={data}", "data.dev=none", "training.max_steps=1"]
    return DualEncoderJob(load_config("scifact-dual-encoder", [*common, *overrides]))


@pytest.mark.parametrize("negatives", ["all", "in_batch"])
def test_a_k_of_all_labels_is_refused(tiny_static, toy_xc, negatives):
    labels = len(set(load_collection(toy_xc).corpus.texts()))
    options = ["loss.name=soft_top_k", f"data.negatives={negatives}"]
    for k in (labels, 500):
        with pytest.raises(ConfigError, match=f"loss.k is {k} and the corpus has {labels} documents"):
            job(tiny_static, toy_xc, *options, f"loss.k={k}")
    job(tiny_static, toy_xc, *options, f"loss.k={labels - 1}")
    job(tiny_static, toy_xc, *options, "loss.k=num_pos")


def test_a_corpus_of_one_text_is_refused(tiny_static, tmp_path):
    (tmp_path / "qrels").mkdir()
    lines = {
        "corpus.jsonl": ['{"_id": "a", "text": "same"}', '{"_id": "b", "text": "same "}'],
        "queries.jsonl": ['{"_id": "q", "text": "one"}', '{"_id": "r", "text": "two"}'],
        "qrels/train.tsv": ["query-id\tcorpus-id\tscore", "q\ta\t1", "r\tb\t1"],
    }
    for name, content in lines.items():
        (tmp_path / name).write_text("\n".join(content) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="1 document with a text of its own.*nothing to learn"):
        job(tiny_static, tmp_path, "data.negatives=all")


def test_propensity_weights_of_two_queries_are_refused_by_their_key(tiny_static, toy_xc):
    options = ["data.propensity_weights=true", "data.title_queries=false", "loss.name=decoupled_softmax"]
    with pytest.raises(ConfigError, match="data.propensity_weights needs at least 3 training queries.*there are 2"):
        job(tiny_static, toy_xc, *options, "data.max_queries=2")
    assert job(tiny_static, toy_xc, *options, "data.max_queries=3").positive_weights is not None

"""`index --frequency-prior` and `search --frequency-bias`: scores by hand, with and without an index, and refusals."""

import json
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest

from shortlist import load_collection
from shortlist.commands.encode import encode
from shortlist.commands.index import index
from shortlist.commands.search import search
from shortlist.errors import ConfigError, MissingInputError
from shortlist.indexes import ExactIndex, FrequencyPrior, open_index
from shortlist.metrics import count_labels
from shortlist.retrieval import DualEncoder, LexicalRetriever, Retriever

TEMPERATURE = 0.05


@pytest.fixture
def trained(xc_model, tmp_path):
    """A model that knows the temperature it was trained with."""
    encoder = DualEncoder.from_pretrained(xc_model)
    encoder.temperature = TEMPERATURE
    return encoder.save_pretrained(tmp_path / "trained")


def by_hand(model, data, tau, temperature=TEMPERATURE):
    """Query id → {label: q·d + tau * T * log pi}, from the model's vectors and a loop over the labels."""
    encoder, collection = DualEncoder.from_pretrained(model), load_collection(data)
    ids = list(collection.corpus.ids)
    documents = encoder.encode_documents(dict(zip(ids, collection.corpus.texts(encoder.template), strict=True)))
    queries = dict(collection.queries("test"))
    vectors = encoder.encode_queries(queries)
    counts = dict.fromkeys(ids, 0)
    for judged in collection.qrels("train").values():
        for label, grade in judged.items():
            counts[label] += grade >= 1
    total = sum(counts.values()) + len(ids)
    prior = {label: temperature * math.log((count + 1) / total) for label, count in counts.items()}
    left_out = collection.filters("test") or {}
    return {
        query: {
            label: float(vector.astype(np.float64) @ document.astype(np.float64)) + tau * prior[label]
            for label, document in zip(ids, documents, strict=True)
            if label not in left_out.get(query, ())
        }
        for query, vector in zip(queries, vectors, strict=True)
    }


def assert_run(run, expected):
    assert list(run) == list(expected)
    for query, scores in expected.items():
        found = dict(run[query])
        assert found == pytest.approx({label: scores[label] for label in found}, abs=1e-5)
        # Whatever is not in the list scores no more than its last.
        rest = [score for label, score in scores.items() if label not in found]
        assert not rest or max(rest) <= min(found.values()) + 1e-5


@pytest.mark.parametrize("tau", [-1.0, -0.5, 0.5, 2.0])
def test_scores_are_those_by_hand_with_and_without_an_index(trained, toy_xc, tmp_path, tau):
    expected = by_hand(trained, toy_xc, tau)
    index(model=trained, data=toy_xc, output=tmp_path / "exact", frequency_prior="train")
    index(model=trained, data=toy_xc, output=tmp_path / "hnsw", index="HNSW16", frequency_prior="train")
    options = {"data": toy_xc, "split": "test", "top_k": 5, "frequency_bias": tau, "overwrite": True}
    direct = search(model=trained, output=tmp_path / "direct.run", **options)
    assert_run(direct, expected)
    for kind in ("exact", "hnsw"):
        run = search(index=tmp_path / kind, output=tmp_path / f"{kind}.run", **options)
        assert_run(run, expected)
        assert {query: list(run[query]) for query in run} == {query: list(direct[query]) for query in direct}


@pytest.mark.parametrize("bias", [None, 0.0])
def test_without_a_bias_the_ranking_is_the_plain_one(trained, toy_xc, tmp_path, bias):
    index(model=trained, data=toy_xc, output=tmp_path / "plain")
    index(model=trained, data=toy_xc, output=tmp_path / "prior", frequency_prior="train")
    plain = search(index=tmp_path / "plain", data=toy_xc, split="test", output=tmp_path / "a.run")
    prior = search(index=tmp_path / "prior", data=toy_xc, split="test", output=tmp_path / "b.run", frequency_bias=bias)
    assert {query: list(plain[query]) for query in plain} == {query: list(prior[query]) for query in prior}
    for query in plain:
        assert dict(prior[query]) == pytest.approx(dict(plain[query]), abs=1e-6)


def test_a_negative_bias_brings_rare_labels_forward(trained, toy_xc, tmp_path):
    collection = load_collection(toy_xc)
    counts = count_labels(collection.qrels("train"))

    def mean_count(tau):
        run = search(
            model=trained, data=toy_xc, split="test", top_k=3, frequency_bias=tau, output=tmp_path / f"{tau}.run"
        )
        return np.mean([counts.get(label, 0) for documents in run.values() for label in documents])

    assert mean_count(-5.0) < mean_count(0.0) < mean_count(5.0)


def test_the_manifest_and_the_log_say_what_the_prior_is(trained, toy_xc, tmp_path, caplog):
    caplog.set_level("INFO", logger="shortlist")
    index(model=trained, data=toy_xc, output=tmp_path / "index", frequency_prior="train")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["metric"] == "ip" and manifest["dim"] == manifest["model"]["dim"] + 1
    assert manifest["frequency_prior"]["split"] == "train"
    assert manifest["frequency_prior"]["temperature"] == TEMPERATURE
    assert "60 queries (split train), 12 of 12 documents have one, temperature 0.05" in caplog.text
    search(index=tmp_path / "index", data=toy_xc, output=tmp_path / "a.run", frequency_bias=-0.5)
    assert "frequency bias -0.5 of the prior with split 'train'" in caplog.text


def test_a_model_without_a_temperature_counts_as_trained_at_one(xc_model, toy_xc, tmp_path, caplog):
    caplog.set_level("INFO", logger="shortlist")
    options = {"data": toy_xc, "split": "test", "top_k": 5, "frequency_bias": 0.1, "frequency_prior": "train"}
    run = search(model=xc_model, output=tmp_path / "a.run", **options)
    assert_run(run, by_hand(xc_model, toy_xc, 0.1, temperature=1.0))
    assert "does not record the temperature" in caplog.text


def test_encoded_vectors_get_the_prior_of_their_model(trained, toy_xc, tmp_path):
    encode(model=trained, data=toy_xc, output=tmp_path / "vectors")
    index(model=trained, data=toy_xc, output=tmp_path / "a", frequency_prior="train")
    index(model=trained, data=toy_xc, output=tmp_path / "b", vectors=tmp_path / "vectors", frequency_prior="train")
    a, b = open_index(tmp_path / "a"), open_index(tmp_path / "b")
    assert a.manifest == b.manifest
    assert np.array_equal(np.concatenate(list(a.vectors())), np.concatenate(list(b.vectors())))


def test_the_retriever_takes_the_bias_in_python(trained, toy_xc):
    encoder, collection = DualEncoder.from_pretrained(trained), load_collection(toy_xc)
    counts = count_labels(collection.qrels("train"))
    prior = FrequencyPrior(counts, len(collection.corpus), TEMPERATURE, {"split": "train"})
    built = ExactIndex.build(encoder, collection.corpus, frequency_prior=prior)
    queries = dict(collection.queries("test"))
    for tau in (-1.0, 0.5):
        retriever = Retriever(encoder, built, frequency_bias=tau)
        run = retriever.search(queries, 4, filters=collection.filters("test"))
        assert_run(run, by_hand(trained, toy_xc, tau))
        query = next(iter(queries))
        ranked = [result.id for result in retriever.rank(queries[query], 4)]
        assert ranked == list(retriever.search({"0": queries[query]}, 4)["0"])
    for bias in (float("nan"), float("-inf"), 1e39, -1e31):  # finite in float64 is not enough
        with pytest.raises(ConfigError, match="expected a number such as -0.5, and at most 1e[+]30"):
            Retriever(encoder, built, frequency_bias=bias)


def test_an_index_without_a_prior_refuses_a_bias_and_says_what_to_do(trained, toy_xc, tmp_path):
    index(model=trained, data=toy_xc, output=tmp_path / "plain")
    with pytest.raises(ConfigError, match="has none; build it again with `shortlist index --frequency-prior train`"):
        search(index=tmp_path / "plain", data=toy_xc, output=tmp_path / "a.run", frequency_bias=-0.5)
    assert not (tmp_path / "a.run").exists()


def test_combinations_that_mean_nothing_are_refused(trained, toy_xc, tmp_path):
    options = {"data": toy_xc, "output": tmp_path / "a.run"}
    with pytest.raises(ConfigError, match="pass both, or neither"):
        search(model=trained, frequency_prior="train", **options)
    with pytest.raises(ConfigError, match="BM25 has none"):
        search(bm25=True, frequency_bias=-0.5, **options)
    LexicalRetriever.build(load_collection(toy_xc).corpus).save(tmp_path / "bm25")
    with pytest.raises(ConfigError, match="BM25 has none"):
        search(index=tmp_path / "bm25", frequency_bias=-0.5, **options)
    index(model=trained, data=toy_xc, output=tmp_path / "index", frequency_prior="train")
    with pytest.raises(ConfigError, match="an index holds its own frequency prior"):
        search(index=tmp_path / "index", frequency_bias=-0.5, frequency_prior="train", **options)
    with pytest.raises(MissingInputError, match="none"):
        search(model=trained, frequency_bias=-0.5, frequency_prior="none", **options)
    assert not (tmp_path / "a.run").exists()


def test_a_factory_that_normalises_and_an_unknown_split_fail_before_any_encoding(
    trained, toy_xc, tmp_path, monkeypatch
):
    from shortlist.commands import index as module

    monkeypatch.setattr(module, "encode_corpus", lambda *a, **k: pytest.fail("work was begun"))
    for options, error, message in [
        (
            {"index": "L2norm,Flat", "frequency_prior": "train"},
            ConfigError,
            "NormalizationTransform",
        ),
        ({"frequency_prior": "trian"}, MissingInputError, "trian"),
    ]:
        with pytest.raises(error, match=message):
            index(model=trained, data=toy_xc, output=tmp_path / "index", **options)
        assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("side", ["vectors", "text_and_vectors"])
def test_a_label_side_of_free_vectors_takes_a_prior_too(trained, toy_xc, tmp_path, side):
    import torch

    text = DualEncoder.from_pretrained(trained)
    ids = list(load_collection(toy_xc).corpus.ids)
    vectors = torch.randn(len(ids), text.dim, generator=torch.Generator().manual_seed(1))
    biases = torch.linspace(-1, 1, len(ids)) if side == "vectors" else None
    model = text.with_document_vectors(ids, side, vectors=vectors, biases=biases).save_pretrained(tmp_path / "model")
    index(model=model, data=toy_xc, output=tmp_path / "index", frequency_prior="train")
    run = search(index=tmp_path / "index", data=toy_xc, split="test", output=tmp_path / "a.run", frequency_bias=-0.5)
    assert_run(run, by_hand(model, toy_xc, -0.5))


def test_the_commands_of_the_method_page_run(trained, toy_xc, tmp_path, monkeypatch):
    # user-reports H.174
    from shortlist.cli import main

    page = (Path(__file__).parents[2] / "docs" / "methods" / "logit-adjustment.md").read_text(encoding="utf-8")
    lines = re.findall(r"^shortlist (.*)$", page, flags=re.M)
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("shortlist")
    kept = logger.handlers[:], logger.propagate, logger.level
    try:
        for line in lines:
            words = line.replace("MODEL", str(trained)).replace("XC", str(toy_xc)).split()
            with pytest.raises(SystemExit) as stop:
                main([*words, "--overwrite"])
            assert not stop.value.code
    finally:  # the command line sets logging up, which other tests must not see
        logger.handlers[:], logger.propagate = kept[:2]
        logger.setLevel(kept[2])
    assert open_index(tmp_path / "IDX").frequency_prior and (tmp_path / "out.run.gz").is_file()

"""`shortlist tune`: settings are stored, the table says what was measured, `--rebuild` lets the kind change."""

import json

import numpy as np
import pytest

from shortlist.commands import tune as module
from shortlist.commands.index import index
from shortlist.commands.tune import tune
from shortlist.errors import ConfigError, IndexMismatchError, MissingInputError
from shortlist.indexes import build_index, open_index
from shortlist.indexes.auto import Choice


@pytest.fixture
def built(tmp_path, toy_beir, model):
    index(model=model, data=toy_beir, output=tmp_path / "index", index="IVF1,Flat+rescore")
    return tmp_path / "index"


def test_tuning_is_stored_and_printed_as_json(built, toy_beir, capsys):
    before = {file: file.stat().st_mtime_ns for file in built.glob("segment-*/*")}
    result = tune(index=built, data=toy_beir, split="test", recall=0.9, k=5, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(result)) and printed["spec"] == "IVF1,Flat+rescore"
    assert (printed["k"], printed["target"], printed["recall"]) == (5, 0.9, 1.0)
    opened = open_index(built)
    assert opened.tuning == {key: value for key, value in printed.items() if key not in ("index", "spec")}
    assert opened.settings.record() == printed["settings"] and opened.settings.nprobe == 1
    assert before == {file: file.stat().st_mtime_ns for file in built.glob("segment-*/*")}


def test_a_file_of_queries_and_the_table(built, tmp_path, capsys):
    (tmp_path / "queries.tsv").write_text("q1\tone query\nq2\tanother one\nq3\tand a third\n")
    tune(index=built, queries=tmp_path / "queries.tsv")
    printed = capsys.readouterr().out
    assert "3 queries of queries.tsv; one thread" in printed and "nprobe 1" in printed and "recall@10" in printed


def test_without_queries_it_is_said(built, caplog):
    with caplog.at_level("INFO", logger="shortlist"):
        tune(index=built)
    assert "stored vectors were searched, each without itself" in caplog.text


def test_rebuild_lets_the_kind_change_and_keeps_the_rest(built, toy_beir, toy, monkeypatch, caplog):
    with caplog.at_level("INFO", logger="shortlist"):
        result = tune(index=built, data=toy_beir, rebuild=True)
    assert result["spec"] == "exact" and "becomes exact (it was IVF1,Flat+rescore)" in caplog.text
    opened = open_index(built)
    assert opened.kind == "exact" and list(opened.ids) == list(toy.corpus.ids)
    assert opened.document(toy.corpus.row(0).id)["text"] == toy.corpus.row(0).text
    assert opened.model["path"] == "../model" and opened.tuning["build_seconds"] > 0
    monkeypatch.setattr(module, "choose", lambda *a, **k: Choice("IVF1,Flat+rescore", "it is a test.", 1))
    assert tune(index=built, data=toy_beir, rebuild=True)["spec"] == "IVF1,Flat+rescore"
    assert open_index(built).tuning["choice"] == "it is a test."


def test_more_memory_than_allowed_is_said(tmp_path, caplog):
    vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    build_index(tmp_path / "index", [([str(row) for row in range(500)], vectors)], dim=8, spec="flat")
    result = tune(index=tmp_path / "index", memory="1kB")
    assert not result["met"] and "more than the 1,000 allowed" in caplog.text


def test_queries_of_another_model_are_refused(built, toy_beir, other_model):
    with pytest.raises(IndexMismatchError, match="use the model of the index"):
        tune(index=built, data=toy_beir, model=other_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "dev"}, "pass --data too"),
        ({"data": "x", "queries": "y"}, "pass one of them"),
        ({"latency": "fast"}, "such as 5ms"),
        ({"recall": 0.0}, "above 0"),
    ],
)
def test_wrong_options_are_named(built, options, message):
    with pytest.raises(ConfigError, match=message):
        tune(index=built, **options)


def test_a_missing_index_is_named(tmp_path):
    with pytest.raises(MissingInputError, match="no index"):
        tune(index=tmp_path / "nothing")

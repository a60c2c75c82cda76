"""The demo: training on the embedded collection helps, and the command runs on other data and models."""

import json

import pytest

from shortlist import Collection
from shortlist.commands.demo import demo, unseen_queries
from shortlist.errors import MissingInputError, OutputExistsError


@pytest.mark.slow
def test_training_lifts_the_embedded_encoder_by_at_least_five_points(tmp_path):
    lexical, untrained, trained = demo(output=tmp_path / "demo")
    assert trained.measures["nDCG@10"] >= untrained.measures["nDCG@10"] + 0.05
    assert lexical.measures["nDCG@10"] >= 0.67 and untrained.measures["nDCG@10"] >= 0.53


def test_the_demo_runs_on_other_data_and_keeps_its_outputs(toy_beir, tiny_static, tmp_path, capsys):
    output = tmp_path / "demo"
    rows = demo(output=output, data=str(toy_beir), model=str(tiny_static), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in answer["rows"]] == [row.system for row in rows]
    assert rows[2].train_seconds is not None and all(row.index_bytes > 0 for row in rows)
    assert {"demo.json", "model", "trained-index", "bm25.run.gz"} <= {path.name for path in output.iterdir()}
    with pytest.raises(OutputExistsError):
        demo(output=output, data=str(toy_beir), model=str(tiny_static))


def test_the_demo_prints_one_table_and_the_next_steps(toy_beir, tiny_static, capsys):
    demo(data=str(toy_beir), model=str(tiny_static))
    printed = capsys.readouterr().out
    for word in ("BM25", "encoder, trained", "nDCG@10", "R@100", "index bytes", "shortlist train"):
        assert word in printed


def test_queries_whose_documents_were_trained_on_are_told_apart():
    qrels = {"train": {"t": {"a": 1, "b": 0}}, "test": {"1": {"a": 1, "c": 1}, "2": {"b": 1}, "3": {"a": 0, "d": 2}}}
    collection = Collection.from_parts(dict.fromkeys("abcd", "text"), dict.fromkeys("t123", "text"), qrels=qrels)
    assert unseen_queries(collection, "test") == ["2", "3"]


def test_a_collection_without_a_train_split_is_refused(toy_beir, tmp_path):
    import shutil

    data = shutil.copytree(toy_beir, tmp_path / "data")
    (data / "qrels" / "train.tsv").unlink()
    with pytest.raises(MissingInputError, match="train"):
        demo(data=str(data))

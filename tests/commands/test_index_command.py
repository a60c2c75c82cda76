"""`shortlist index`: a directory that search opens, restartable to the same bytes, nothing lost."""

import json
import logging

import numpy as np
import pytest

from shortlist.commands import index as module
from shortlist.commands.encode import encode
from shortlist.commands.index import index
from shortlist.errors import ConfigError, DataError, IndexMismatchError, OutputExistsError
from shortlist.indexes import open_index
from shortlist.retrieval import encode as encode_module
from shortlist.retrieval.dual_encoder import DualEncoder


def contents(path):
    """All files but the one that holds times."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "provenance.json")
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize(("spec", "kind"), [("exact", "exact"), ("flat", "faiss")])
def test_index_writes_a_directory_that_opens(spec, kind, tmp_path, toy, toy_beir, model, caplog):
    # user-reports C.85, C.89
    with caplog.at_level(logging.INFO, logger="shortlist"):
        result = index(model=model, data=toy_beir, output=tmp_path / "index", index=spec)
    assert result["documents"] == len(toy.corpus) and result["dim"] == 32
    assert result["bytes"] == sum(file.stat().st_size for file in (tmp_path / "index").rglob("*") if file.is_file())
    # conventions 11: one summary line a phase
    assert "none truncated" in caplog.text and "documents a second" in caplog.text
    opened = open_index(tmp_path / "index")
    assert list(opened.ids) == list(toy.corpus.ids) and opened.kind == kind
    encoder = DualEncoder.from_pretrained(model)
    assert opened.model["fingerprint"] == encoder.fingerprint and opened.model["normalise"] is True
    first = toy.corpus.row(0)
    assert opened.document(first.id)["text"] == first.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "model"]
    provenance = json.loads((tmp_path / "index" / "provenance.json").read_text())
    assert provenance["versions"]["shortlist"] and provenance["checksums"]


def test_the_manifest_points_at_the_model_relatively(tmp_path, toy_beir, model):
    # user-reports C.71
    index(model=model, data=toy_beir, output=tmp_path / "index", store_documents=False)
    manifest = (tmp_path / "index" / "manifest.json").read_text()
    assert json.loads(manifest)["model"]["path"] == "../model" and str(tmp_path) not in manifest
    assert open_index(tmp_path / "index").documents is None


def test_an_interrupted_index_goes_on_and_gives_the_same_bytes(tmp_path, toy_beir, model, monkeypatch):
    monkeypatch.setattr(encode_module, "SHARD_SIZE", 16)
    index(model=model, data=toy_beir, output=tmp_path / "whole")

    class Killed(BaseException):
        pass

    written = []
    finish = encode_module.VectorStore.write_ids

    def kill_in_the_third_shard(store, number, ids):
        if len(written) == 2:
            raise Killed
        written.append(number)
        finish(store, number, ids)

    with monkeypatch.context() as patch:
        patch.setattr(encode_module.VectorStore, "write_ids", kill_in_the_third_shard)
        with pytest.raises(Killed):
            index(model=model, data=toy_beir, output=tmp_path / "killed")
    assert not (tmp_path / "killed").exists() and (tmp_path / "killed.partial").is_dir()

    # Then once more while the index is put together.
    with monkeypatch.context() as patch:
        patch.setattr("shortlist.indexes.directory.write_json", lambda *arguments: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            index(model=model, data=toy_beir, output=tmp_path / "killed")
    assert not (tmp_path / "killed").exists() and (tmp_path / "killed.partial").is_dir()

    (tmp_path / ".killed.tmp.left").mkdir()
    index(model=model, data=toy_beir, output=tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "model", "whole"]
    assert len(list((tmp_path / "killed").rglob("vectors-*"))) == 4


def test_unfinished_vectors_of_another_model_are_not_mixed_in(tmp_path, toy, toy_beir, model, other_model):
    encode(model=other_model, data=toy_beir, output=tmp_path / "index.partial")
    with pytest.raises(ConfigError, match="index.partial was begun with other settings.*delete it"):
        index(model=model, data=toy_beir, output=tmp_path / "index")
    index(model=model, data=toy_beir, output=tmp_path / "index", overwrite=True)
    assert open_index(tmp_path / "index").model["fingerprint"] == DualEncoder.from_pretrained(model).fingerprint


def test_an_existing_output_is_refused_before_any_work(tmp_path, toy_beir, model, monkeypatch):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "precious").write_text("x")
    monkeypatch.setattr(module, "load_collection", lambda *a, **k: pytest.fail("work was begun"))
    with pytest.raises(OutputExistsError, match="--overwrite"):
        index(model=model, data=toy_beir, output=tmp_path / "index")
    assert (tmp_path / "index" / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"index": "annoy"}, "'annoy' is unknown"), ({"index": "Flatt"}, "Flatt")],
)
def test_a_wrong_kind_fails_before_any_work(tmp_path, toy_beir, model, monkeypatch, options, message):
    monkeypatch.setattr(module, "load_collection", lambda *a, **k: pytest.fail("work was begun"))
    with pytest.raises(ConfigError, match=message):
        index(model=model, data=toy_beir, output=tmp_path / "index", **options)


def test_encoded_vectors_give_the_index_of_the_model(tmp_path, toy_beir, model):
    encode(model=model, data=toy_beir, output=tmp_path / "vectors")
    before = contents(tmp_path / "vectors")
    index(model=model, data=toy_beir, output=tmp_path / "a", vectors=tmp_path / "vectors")
    index(model=model, data=toy_beir, output=tmp_path / "b")
    a, b = open_index(tmp_path / "a"), open_index(tmp_path / "b")
    assert a.model == b.model
    assert np.array_equal(np.concatenate(list(a.vectors())), np.concatenate(list(b.vectors())))
    assert contents(tmp_path / "vectors") == before
    shared = {file.stat().st_ino for file in (tmp_path / "vectors").iterdir()}
    assert not shared & {file.stat().st_ino for file in (tmp_path / "a").iterdir()}


def test_vectors_of_another_model_are_told_apart(tmp_path, toy_beir, model, other_model, caplog):
    encode(model=other_model, data=toy_beir, output=tmp_path / "vectors")
    index(model=model, data=toy_beir, output=tmp_path / "a", vectors=tmp_path / "vectors")
    assert "were not made by" in caplog.text and "--model" in caplog.text
    record = open_index(tmp_path / "a").model
    assert record["name"] is None and record["fingerprint"] == DualEncoder.from_pretrained(other_model).fingerprint


def test_vectors_of_queries_or_of_another_corpus_are_refused(tmp_path, toy_beir, toy_xc, model):
    encode(model=model, data=toy_beir, output=tmp_path / "queries", side="queries")
    with pytest.raises(DataError, match="vectors of queries"):
        index(model=model, data=toy_beir, output=tmp_path / "a", vectors=tmp_path / "queries")
    encode(model=model, data=toy_xc, output=tmp_path / "labels")
    with pytest.raises(DataError, match="same order"):
        index(model=model, data=toy_beir, output=tmp_path / "a", vectors=tmp_path / "labels")
    assert not (tmp_path / "a").exists()


def test_auto_chooses_tunes_and_puts_the_choice_into_the_manifest(tmp_path, toy_beir, model, capsys, caplog):
    with caplog.at_level(logging.INFO, logger="shortlist"):
        result = index(model=model, data=toy_beir, output=tmp_path / "index", index="auto", tune_split="test")
    assert result["index"] == "exact" and "index auto: exact: scanning all" in caplog.text
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    tuning = manifest["tuning"]
    assert manifest["spec"] == "exact" and tuning["choice"].startswith("scanning all")
    assert (tuning["k"], tuning["target"], tuning["recall"], tuning["met"]) == (10, 0.95, 1.0, True)
    assert tuning["source"].endswith("queries of split test") and tuning["build_seconds"] > 0
    printed = capsys.readouterr().out
    for word in ("recall@10", "recall@100", "bytes a vector", "build seconds", "median ms", "queries/s"):
        assert word in printed


def test_a_chosen_kind_is_tuned_where_a_target_is_given(tmp_path, toy_beir, model, caplog):
    index(model=model, data=toy_beir, output=tmp_path / "index", index="IVF1,Flat", recall=0.9)
    opened = open_index(tmp_path / "index")
    assert opened.settings.nprobe == 1 and "stored vectors" in opened.tuning["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": "exact", "memory": "4GB"}, "--memory is what --index auto chooses by"),
        ({"index": "auto", "memory": "four"}, "is not a size"),
        ({"index": "auto", "latency": "5"}, "is not a time"),
        ({"index": "auto", "recall": 95}, "at most 1"),
    ],
)
def test_a_wrong_target_fails_before_any_work(tmp_path, toy_beir, model, monkeypatch, options, message):
    monkeypatch.setattr(module, "load_collection", lambda *a, **k: pytest.fail("work was begun"))
    with pytest.raises(ConfigError, match=message):
        index(model=model, data=toy_beir, output=tmp_path / "index", **options)


def test_a_memory_that_nothing_fits_in_fails_before_encoding(tmp_path, toy_beir, model, monkeypatch):
    monkeypatch.setattr(module, "_encode", lambda *a, **k: pytest.fail("encoding was begun"))
    with pytest.raises(ConfigError, match="memory|fits"):
        index(model=model, data=toy_beir, output=tmp_path / "index", index="auto", memory="100")
    assert not (tmp_path / "index").exists()


def test_queries_to_tune_with_need_the_model_of_the_vectors(tmp_path, toy_beir, model, other_model):
    encode(model=other_model, data=toy_beir, output=tmp_path / "vectors")
    with pytest.raises(IndexMismatchError, match="cannot encode the queries to tune with"):
        index(
            model=model, data=toy_beir, output=tmp_path / "a", vectors=tmp_path / "vectors", index="auto",
            tune_split="test",
        )  # fmt: skip

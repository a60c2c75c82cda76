"""`shortlist index --index bm25`, and `search` over several indexes: fused, weighted, rolled up."""

import json

import pytest

from shortlist import LexicalRetriever, fuse, open_index, roll_up, tune_weights
from shortlist.cli import main
from shortlist.commands.index import index
from shortlist.commands.index_bm25 import index_bm25
from shortlist.commands.search import search
from shortlist.commands.update import update
from shortlist.data import read_run
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError


@pytest.fixture
def dense(tmp_path, toy_beir, model):
    index(model=model, data=toy_beir, output=tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def lexical(tmp_path, toy_beir):
    index_bm25(data=toy_beir, output=tmp_path / "lexical")
    return tmp_path / "lexical"


def lists(run):
    return {query: list(documents) for query, documents in run.items()}


# The BM25 index


def test_a_bm25_index_is_searched_like_any_other(tmp_path, lexical, toy, toy_beir, caplog, capsys):
    caplog.set_level("INFO", logger="shortlist")
    direct = search(bm25=True, data=toy_beir, split="test", output=tmp_path / "a.run")
    stored = search(index=lexical, data=toy_beir, split="test", output=tmp_path / "b.run")
    assert dict(stored) == dict(direct)
    assert any("BM25 with k1 0.9" in record.message and "'english'" in record.message for record in caplog.records)
    # user-reports C.89: titles and texts from the index alone
    document = toy.corpus.row(0)
    found = search(index=lexical, query=document.joined(), top_k=1)
    assert found[0].document == document and document.id in capsys.readouterr().out


def test_language_stemmer_and_stop_words_are_options(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text('{"_id": "a", "text": "die Häuser"}\n{"_id": "b", "text": "das"}\n')
    (tmp_path / "words.txt").write_text("häuser\nund\n")
    options = {"data": tmp_path / "data", "output": tmp_path / "index", "overwrite": True}
    for given, expected in (
        ({"language": "german"}, ("german", "german", "de")),
        ({"language": "german", "stemmer": "none", "stopwords": "en"}, ("german", None, "en")),
        ({"language": "none"}, (None, None, None)),
        ({"stopwords": "none"}, ("english", "english", None)),
        ({"language": "de", "stopwords": str(tmp_path / "words.txt")}, ("german", "german", ["häuser", "und"])),
    ):
        index_bm25(**options, **given)
        settings = LexicalRetriever.open(tmp_path / "index").settings()
        assert (settings["language"], settings["stemmer"], settings["stopwords"]) == expected


def test_documents_are_removed_from_a_bm25_index(tmp_path, lexical, toy):
    document = toy.corpus.row(0)
    (tmp_path / "ids.txt").write_text(document.id + "\n")
    assert update(index=lexical, remove=tmp_path / "ids.txt")["removed"] == 1
    assert document.id not in [result.id for result in search(index=lexical, query=document.joined(), top_k=100)]
    with pytest.raises(ConfigError, match="only --remove works"):
        update(index=lexical, compact=True)
    with pytest.raises(DataError, match="is a BM25 index; expected an index of vectors"):
        open_index(lexical)


def test_the_command_line_builds_and_searches(tmp_path, toy_beir, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        return end.value.code

    built = tmp_path / "index"
    assert run("index", "--index", "bm25", "--data", toy_beir, "-o", built, "--language", "english") == 0
    assert run("search", "--index", built, "--bm25", "--data", toy_beir, "--fuse", "rrf", "-o", tmp_path / "x.run") == 0
    assert run("index", "--language", "german", "--data", toy_beir, "-o", tmp_path / "other") == 2
    assert "--index bm25" in capsys.readouterr().err
    assert run("index", "--index", "bm25", "--frequency-prior", "train", "--data", toy_beir, "-o", tmp_path / "o") == 2
    capsys.readouterr()
    assert run("index", "--index", "bm25", "--engine", "ray", "--data", toy_beir, "-o", tmp_path / "o") == 2
    assert "--engine is for an index of vectors" in capsys.readouterr().err


def test_a_wrong_language_or_an_existing_output_fails_before_reading(tmp_path):
    with pytest.raises(ConfigError, match="klingon"):
        index_bm25(data=tmp_path / "nothing", output=tmp_path / "index", language="klingon")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputExistsError):
        index_bm25(data=tmp_path / "nothing", output=tmp_path / "file")


# Fusion


def test_two_indexes_are_fused(tmp_path, dense, lexical, toy_beir, caplog):
    caplog.set_level("INFO", logger="shortlist")
    runs = [
        search(index=path, data=toy_beir, top_k=9, output=tmp_path / "part.run", overwrite=True)
        for path in (dense, lexical)
    ]
    for options in ({}, {"fuse": "z-score"}, {"weights": "0.3,0.7"}, {"fuse": "rrf", "weights": [1, 0]}):
        caplog.clear()
        fused = search(
            index=[dense, lexical],
            data=toy_beir,
            top_k=5,
            depth=9,
            output=tmp_path / "f.run",
            overwrite=True,
            **options,
        )
        weights = options.get("weights")
        weights = [0.3, 0.7] if isinstance(weights, str) else weights
        method = options.get("fuse") or ("rrf" if weights is None else "min-max")
        assert lists(fused) == lists(fuse(runs, method=method, weights=weights).top(5))
        messages = " ".join(record.message for record in caplog.records)
        assert f"fused by {method}" in messages and "9 documents of each list" in messages
        assert "dense: encoded with fingerprint" in messages and "lexical: BM25 with" in messages
    assert lists(read_run(tmp_path / "f.run")) == lists(fused)


def test_a_collection_is_fused_without_any_index(tmp_path, dense, lexical, toy_beir, model):
    stored = search(index=[lexical, dense], data=toy_beir, output=tmp_path / "a.run")
    direct = search(bm25=True, model=model, fuse="rrf", data=toy_beir, output=tmp_path / "b.run")
    mixed = search(index=dense, bm25=True, fuse="rrf", data=toy_beir, output=tmp_path / "c.run")
    assert lists(stored) == lists(direct) == lists(mixed)


def test_weights_are_tuned_on_another_split(tmp_path, dense, lexical, toy, toy_beir, caplog):
    caplog.set_level("INFO", logger="shortlist")
    options = {"data": toy_beir, "top_k": 20}
    dev = [
        search(index=path, split="dev", output=tmp_path / f"{path.name}.dev", **options) for path in (dense, lexical)
    ]
    found = tune_weights(dev, toy.qrels("dev"), measure=toy.measures[0])
    test = [
        search(index=path, split="test", output=tmp_path / f"{path.name}.test", **options) for path in (dense, lexical)
    ]
    fused = search(
        index=[dense, lexical], split="test", tune_weights="dev", depth=20, output=tmp_path / "f.run", **options
    )
    assert lists(fused) == lists(fuse(test, method="min-max", weights=found.values).top(20))
    assert any("alone" in record.message and "with equal weights" in record.message for record in caplog.records)
    assert not any("do not report" in record.message for record in caplog.records)
    search(index=[dense, lexical], split="dev", tune_weights="dev", output=tmp_path / "d.run", **options)
    assert any("do not report" in record.message for record in caplog.records)


def test_one_query_shows_the_rank_in_each_index(dense, lexical, toy, capsys):
    document = toy.corpus.row(0)
    found = search(index=[dense, lexical], query=document.title, top_k=3, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert [result["id"] for result in printed["results"]] == [result.id for result in found]
    assert all(set(result["ranks"]) == {"dense", "lexical"} for result in printed["results"])
    first = printed["results"][0]
    assert first["score"] == pytest.approx(
        sum(1 / (60 + rank) for rank in first["ranks"].values() if rank is not None), rel=1e-5
    )
    assert found[0].document is not None and first["text"] == found[0].document.text


def test_indexes_of_one_name_are_told_apart(tmp_path, toy, toy_beir, capsys):
    for folder in ("one", "two"):
        index_bm25(data=toy_beir, output=tmp_path / folder / "bm25")
    search(
        index=[tmp_path / "one" / "bm25", tmp_path / "two" / "bm25"],
        query=toy.corpus.row(0).title,
        top_k=1,
        as_json=True,
    )
    assert set(json.loads(capsys.readouterr().out)["results"][0]["ranks"]) == {"bm25", "bm25-2"}


def test_the_querys_own_document_is_left_out_of_every_list(tmp_path, dense, lexical, toy, toy_beir):
    # user-reports E.107
    own = toy.corpus.row(0)
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": own.id, "text": own.joined()}) + "\n")
    options = {"index": [dense, lexical], "queries": tmp_path / "queries.jsonl", "overwrite": True}
    assert own.id in search(**options, output=tmp_path / "a.run")[own.id]
    assert own.id not in search(**options, output=tmp_path / "a.run", exclude_self="true")[own.id]


# Roll-up


@pytest.fixture
def passages(tmp_path):
    """Documents d0 … d5, the first cut into 30 passages that hold the word of every query."""
    folder = tmp_path / "passages"
    folder.mkdir()
    rows = [{"_id": f"d0#{number}", "text": "tea " * (number + 1), "page": "zero"} for number in range(30)]
    rows += [
        {"_id": f"d{number}#1", "text": "tea and coffee " + "x" * number, "page": f"p{number}"}
        for number in range(1, 6)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.tsv").write_text("q\ttea\nd0\ttea\n")
    return folder


def test_passages_become_k_documents(tmp_path, passages, capsys):
    index_bm25(data=passages, output=tmp_path / "index")
    queries = {"queries": passages / "queries.tsv", "index": tmp_path / "index", "overwrite": True}
    whole = search(**queries, top_k=100, output=tmp_path / "a.run")
    for how in ("max", "first", "mean", "mean(40)"):
        rolled = search(**queries, top_k=6, roll_up=how, parent="#", output=tmp_path / "b.run")
        way, top = ("mean", 40) if how == "mean(40)" else (how, 3)
        assert set(rolled["q"]) == {f"d{number}" for number in range(6)}
        if how != "mean":
            assert dict(rolled) == dict(roll_up(whole, "#", how=way, top=top))
    # few documents were asked for, and the first thirty passages are one document's
    assert len(search(**queries, top_k=3, roll_up="max", parent="#", output=tmp_path / "c.run")["q"]) == 3
    left = search(**queries, top_k=6, roll_up="max", parent="#", exclude_self="true", output=tmp_path / "c.run")
    assert "d0" not in left["d0"] and len(left["d0"]) == 5 and "d0" in left["q"]
    by_field = search(**queries, top_k=6, roll_up="max", parent="page", output=tmp_path / "c.run")
    assert set(by_field["q"]) == {"zero", *(f"p{number}" for number in range(1, 6))}
    capsys.readouterr()
    search(index=tmp_path / "index", query="tea", top_k=2, roll_up="max", parent="#", as_json=True)
    first = json.loads(capsys.readouterr().out)["results"][0]
    assert first["id"] == "d0" and first["passage"].startswith("d0#") and first["text"].startswith("tea")


def test_passages_are_rolled_up_before_they_are_fused(tmp_path, passages, toy_beir, model):
    index_bm25(data=passages, output=tmp_path / "cut")
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{n}", "text": "tea"}) + "\n" for n in range(6)))
    index_bm25(data=whole, output=tmp_path / "documents")
    fused = search(
        index=[tmp_path / "cut", tmp_path / "documents"], queries=passages / "queries.tsv", roll_up="max", parent="#",
        output=tmp_path / "a.run",
    )  # fmt: skip
    assert set(fused["q"]) == {f"d{number}" for number in range(6)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": "rrf", "index": "i"}, "--fuse is for fusing"),
        ({"weights": "1,2", "index": "i"}, "--weights is for fusing"),
        ({"depth": 5, "index": "i"}, "--depth is for fusing"),
        ({"fuse": "sum"}, "rrf, min-max, z-score"),
        ({"weights": "1"}, "1 weights for 2"),
        ({"weights": "a,b"}, "one number an index"),
        ({"weights": "1,-1"}, "weight -1"),
        ({"weights": "1,1", "tune_weights": "dev", "data": "d"}, "pass one of them"),
        ({"tune_weights": "dev"}, "split of --data"),
        ({"depth": 0}, "at least 1"),
        ({"model": "m"}, "leave out --model"),
        ({"roll_up": "max"}, "go together"),
        ({"parent": "#"}, "go together"),
        ({"roll_up": "sum", "parent": "#"}, "max, first, mean"),
        ({"roll_up": "max(3)", "parent": "#"}, "mean\\(m\\)"),
        ({"roll_up": "mean(0)", "parent": "#"}, "top 0"),
        ({"frequency_bias": 1.0}, "for one index"),
        ({"bm25": True, "fuse": "rrf"}, "--bm25 searches --data itself"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        search(**{"index": ["i", "j"], "query": "q", **options})


def test_an_index_that_is_not_there_is_named(tmp_path, lexical):
    with pytest.raises(MissingInputError, match="no index at .*nothing"):
        search(index=[lexical, tmp_path / "nothing"], query="tea")

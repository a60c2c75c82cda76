"""`shortlist search`: runs for a collection, a table for one query, and the ways in which it refuses."""

import json
import shutil

import pytest

from shortlist.commands.index import index
from shortlist.commands.search import search
from shortlist.commands.search_output import snippet
from shortlist.data import read_run
from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError, OutputExistsError
from shortlist.retrieval import LexicalRetriever


@pytest.fixture
def built(tmp_path, toy_beir, model):
    index(model=model, data=toy_beir, output=tmp_path / "index")
    return tmp_path / "index"


def test_a_run_is_written_for_the_queries_of_a_split(built, tmp_path, toy, toy_beir):
    run = search(index=built, data=toy_beir, split="test", top_k=7, output=tmp_path / "out.run.gz")
    assert list(run) == list(toy.queries("test")) and run.name == "out"
    written = read_run(tmp_path / "out.run.gz")
    assert {query: list(documents) for query, documents in written.items()} == {
        query: list(documents) for query, documents in run.items()
    }
    assert all(len(documents) == 7 for documents in written.values())


def test_what_can_move_a_score_is_printed_with_every_run(built, tmp_path, toy_beir, caplog):
    # user-reports E.130
    caplog.set_level("INFO", logger="shortlist")
    search(index=built, data=toy_beir, output=tmp_path / "out.run")
    (line,) = [record.message for record in caplog.records if "encoded with fingerprint" in record.message]
    for name in ("prompts", "query_max_length", "doc_max_length", "normalise", "dtype"):
        assert name in line


def test_without_an_index_the_collection_is_encoded_on_the_fly(built, tmp_path, toy_beir, model):
    stored = search(index=built, data=toy_beir, top_k=9, output=tmp_path / "a.run")
    direct = search(model=model, data=toy_beir, top_k=9, output=tmp_path / "b.run")
    assert {query: list(documents) for query, documents in stored.items()} == {
        query: list(documents) for query, documents in direct.items()
    }


def test_more_than_the_corpus_gives_the_whole_corpus(built, tmp_path, toy, toy_beir):
    run = search(index=built, data=toy_beir, top_k=1000, output=tmp_path / "a.run")
    assert {len(documents) for documents in run.values()} == {len(toy.corpus)}


def test_bm25_searches_a_collection_or_a_saved_index(tmp_path, toy, toy_beir):
    run = search(bm25=True, data=toy_beir, split="test", top_k=5, output=tmp_path / "bm25.run.gz")
    assert run.name == "bm25" and list(run) == list(toy.queries("test"))
    LexicalRetriever.build(toy.corpus).save(tmp_path / "bm25")
    again = search(index=tmp_path / "bm25", data=toy_beir, split="test", top_k=5, output=tmp_path / "b.run")
    assert dict(again) == dict(run)
    with pytest.raises(ConfigError, match="BM25 index; leave out --model"):
        search(index=tmp_path / "bm25", model="m", query="tea")


def test_one_query_prints_a_table_with_titles_and_text(built, toy, capsys):
    document = toy.corpus.row(0)
    results = search(index=built, query=document.joined(), top_k=3)
    assert [result.rank for result in results] == [1, 2, 3] and results[0].id == document.id
    assert results[0].document == document
    out, err = capsys.readouterr()
    assert "rank" in out and document.id in out and document.title.split()[0] in out and err == ""


def test_one_query_as_json(built, toy, capsys):
    document = toy.corpus.row(0)
    search(index=built, query=document.joined(), top_k=2, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["query"] == document.joined() and len(printed["results"]) == 2
    assert printed["results"][0] == {
        "rank": 1, "id": document.id, "score": pytest.approx(1.0, abs=1e-5), "title": document.title,
        "text": document.text, "fields": {},
    }  # fmt: skip


def test_brackets_in_a_document_are_no_markup(tmp_path, model, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text(
        '{"_id": "[bold]x[/]", "title": "[red]", "text": "see [/wrong] t"}\n'
    )
    search(model=model, data=tmp_path / "data", query="see", top_k=1)
    out = capsys.readouterr().out
    assert "[bold]x[/]" in out and "[red]" in out and "[/wrong]" in out


def test_bm25_answers_one_query_with_titles(toy, toy_beir, capsys):
    document = toy.corpus.row(0)
    results = search(bm25=True, data=toy_beir, query=document.joined(), top_k=1)
    assert results[0].id == document.id and results[0].document == document
    assert document.id in capsys.readouterr().out


def test_titles_come_from_the_collection_if_the_index_has_none(tmp_path, toy, toy_beir, model):
    index(model=model, data=toy_beir, output=tmp_path / "bare", store_documents=False)
    document = toy.corpus.row(0)
    assert search(index=tmp_path / "bare", query=document.joined(), top_k=1)[0].document is None
    assert search(index=tmp_path / "bare", data=toy_beir, query=document.joined(), top_k=1)[0].document == document


def test_queries_come_from_a_file(built, tmp_path):
    (tmp_path / "queries.tsv").write_text("q7\tgreen tea\nq3\tbread\n")
    run = search(index=built, queries=tmp_path / "queries.tsv", top_k=2, output=tmp_path / "a.run", format="msmarco")
    assert list(run) == ["q7", "q3"]
    assert (tmp_path / "a.run").read_text().splitlines()[0].split("\t")[0::2] == ["q7", "1"]


def test_model_and_index_can_move_together(built, tmp_path, toy_beir):
    # user-reports C.71
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(built, moved / "index")
    with pytest.raises(MissingInputError, match="model 'model'.*was not found.*--model"):
        search(index=moved / "index", query="tea", top_k=1)
    shutil.move(tmp_path / "model", moved / "model")
    assert search(index=moved / "index", query="tea", top_k=1)


def test_another_model_is_refused_naming_both(built, toy_beir, model, other_model):
    # user-reports C.70
    with pytest.raises(IndexMismatchError, match=r"built with model.*encoded by .*other-model"):
        search(index=built, model=other_model, query="tea")


def test_self_retrieval_follows_the_data_set(built, tmp_path, toy, toy_beir, monkeypatch):
    from shortlist.commands import search as module

    own = toy.corpus.row(0)
    toy.exclude_self = True
    monkeypatch.setattr(module, "load_collection", lambda path: toy)
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": own.id, "text": own.joined()}) + "\n")
    options = {"index": built, "data": toy_beir, "queries": tmp_path / "queries.jsonl", "top_k": 5, "overwrite": True}
    kept = search(**options, output=tmp_path / "a.run", exclude_self="false")
    left_out = search(**options, output=tmp_path / "a.run")
    assert next(iter(kept[own.id])) == own.id
    assert own.id not in left_out[own.id] and len(left_out[own.id]) == 5
    assert search(**options, output=tmp_path / "a.run", exclude_self="true") == left_out


def test_the_filter_file_of_a_split_is_applied_before_the_list_is_cut(tmp_path, toy_xc, model, caplog):
    # issue 3, item 7: every list has k labels, none of them forbidden
    from shortlist import load_collection

    caplog.set_level("INFO", logger="shortlist")
    collection = load_collection(toy_xc)
    filters = collection.filters("test")
    run = search(model=model, data=toy_xc, split="test", top_k=11, output=tmp_path / "a.run")
    for query, labels in run.items():
        assert not filters.get(query, set()) & set(labels)
        assert len(labels) == 11
    assert any("leaves 3 pairs out" in record.message for record in caplog.records)
    assert len(search(model=model, data=toy_xc, split="train", top_k=12, output=tmp_path / "b.run")["tr0"]) == 12


def test_an_existing_output_is_refused_before_any_work(tmp_path, toy_beir):
    (tmp_path / "a.run").write_text("precious")
    with pytest.raises(OutputExistsError):
        search(bm25=True, data=toy_beir, output=tmp_path / "a.run")
    assert (tmp_path / "a.run").read_text() == "precious"
    search(bm25=True, data=toy_beir, output=tmp_path / "a.run", overwrite=True)


def test_a_split_that_is_not_there_lists_those_that_are(tmp_path, toy_beir):
    with pytest.raises(MissingInputError, match="'tset'; it has train, dev, test"):
        search(bm25=True, data=toy_beir, split="tset", output=tmp_path / "a.run")


def test_an_id_with_a_blank_is_searched_but_not_written_to_a_run(tmp_path, model):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text('{"_id": "a b", "text": "tea"}\n')
    (tmp_path / "queries.tsv").write_text("q\ttea\n")
    index(model=model, data=tmp_path / "data", output=tmp_path / "index")
    assert search(index=tmp_path / "index", query="tea")[0].id == "a b"
    with pytest.raises(DataError, match="'a b'"):
        search(index=tmp_path / "index", queries=tmp_path / "queries.tsv", output=tmp_path / "a.run")
    assert not (tmp_path / "a.run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to search"),
        ({"index": "i", "bm25": True, "data": "d", "query": "q"}, "leave out --index"),
        ({"model": "m", "bm25": True, "data": "d", "query": "q"}, "leave out --model"),
        ({"index": "i"}, "no queries"),
        ({"index": "i", "data": "d"}, "-o FILE"),
        ({"index": "i", "query": "q", "split": "test"}, "leave out --split"),
        ({"index": "i", "queries": "f", "split": "test", "output": "o"}, "one of them"),
        ({"index": "i", "query": " "}, "--query is empty"),
        ({"index": "i", "query": "caf\udce9"}, "is not UTF-8"),
        ({"index": "i", "query": "q", "top_k": 0}, "k is 0"),
        ({"index": "i", "query": "q", "format": "csv"}, "trec or msmarco"),
        ({"index": "i", "query": "q", "tag": "two words"}, "one word"),
        ({"data": "scifact", "output": "o", "exclude_self": "maybe"}, "auto, true or false"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        search(**options)


def test_an_index_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(MissingInputError, match="no index at .*shortlist index"):
        search(index=tmp_path / "nothing", query="tea")


def test_a_snippet_is_one_line_cut_at_a_word():
    assert snippet("a  b\nc") == "a b c"
    assert snippet("alpha beta gamma", 12) == "alpha beta…"
    assert snippet("x" * 20, 5) == "xxxxx…"

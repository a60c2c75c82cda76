"""`shortlist search --filter`: over an index, over BM25, over a collection without an index, and fused."""

import json

import pytest
from typer.testing import CliRunner

from shortlist.cli import app
from shortlist.commands.index import index
from shortlist.commands.search import search
from shortlist.data import read_run
from shortlist.errors import ConfigError
from shortlist.retrieval.lexical import LexicalRetriever

WORDS = ["moon", "garden", "engine"]


def fields(row):
    return {"year": 2000 + row, "lang": ["en", "de"][row % 2], "draft": row % 3 == 0, "tags": [f"t{row % 4}", "all"]}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for row in range(30):
            text = f"the {WORDS[row % 3]} of the garden {row}"
            # Both ways in which BEIR corpora hold fields.
            extra = fields(row) if row % 2 else {"metadata": fields(row)}
            file.write(json.dumps({"_id": f"d{row}", "title": f"Title {row}", "text": text, **extra}) + "\n")
    lines = [json.dumps({"_id": f"q{row}", "text": f"a {word}"}) for row, word in enumerate(WORDS)]
    (folder / "queries.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td1\t1\nq2\td2\t1\n")
    return folder


@pytest.fixture
def built(data, tiny_static, tmp_path):
    index(model=tiny_static, data=data, output=tmp_path / "vectors")
    return tmp_path / "vectors"


EXPRESSION = "2005 <= year < 2020 and lang == 'en' and not draft"
PASSING = {f"d{row}" for row in range(5, 20) if row % 2 == 0 and row % 3}


def ways(built, data, tiny_static, tmp_path):
    """Everything that can be searched, by name."""
    lexical = tmp_path / "bm25"
    LexicalRetriever.build(json.loads(line) for line in open(data / "corpus.jsonl", encoding="utf-8")).save(lexical)
    return {
        "index": {"index": built, "data": data},
        "bm25 index": {"index": lexical, "data": data},
        "bm25": {"bm25": True, "data": data},
        "model": {"model": tiny_static, "data": data},
        "fused": {"index": [built, lexical], "data": data, "fuse": "rrf"},
    }


def test_runs_hold_exactly_what_passes(built, data, tiny_static, tmp_path):
    for name, options in ways(built, data, tiny_static, tmp_path).items():
        output = tmp_path / f"{name}.run"
        search(**options, filter=EXPRESSION, top_k=100, output=output)
        run = read_run(output)
        # The query "a garden" shares a word with every document.
        assert set(run["q1"]) == PASSING, name
        for query in run:
            assert set(run[query]) <= PASSING, name
            if name in ("index", "model"):
                assert set(run[query]) == PASSING, name
        # Cut after filtering, not before.
        search(**options, filter="year == 2028", top_k=1, output=output, overwrite=True)
        assert set(read_run(output)["q1"]) == {"d28"}, name


def test_the_best_of_what_passes_come_in_the_order_of_an_unfiltered_run(built, data, tmp_path):
    search(index=built, data=data, top_k=100, output=tmp_path / "all.run")
    search(index=built, data=data, top_k=4, output=tmp_path / "some.run", filter=EXPRESSION)
    everything, some = read_run(tmp_path / "all.run"), read_run(tmp_path / "some.run")
    for query in some:
        assert list(some[query]) == [id for id in everything[query] if id in PASSING][:4]


def test_one_query_shows_fields(built, capsys):
    search(index=built, query="a garden", filter="year == 2007", as_json=True)
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["id"] == "d7" and result["fields"] == fields(7)
    search(index=built, query="a garden", filter="id in ['d7']", top_k=3)
    printed = " ".join(capsys.readouterr().out.split())
    assert "d7" in printed and "year 2007 · lang de · draft False · tags t3, all" in printed and "d8" not in printed


def test_the_command_line_takes_a_filter_and_refuses_one_in_a_sentence(built):
    runner = CliRunner()
    done = runner.invoke(app, ["search", "--index", str(built), "--query", "x", "--filter", "year > 2027", "--json"])
    assert [result["id"] for result in json.loads(done.stdout)["results"]] != [] and done.exit_code == 0
    assert {result["id"] for result in json.loads(done.stdout)["results"]} == {"d28", "d29"}


def test_what_is_no_filter_fails_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="equality is written =="):
        search(index=tmp_path / "absent", query="x", filter="year = 3")


@pytest.mark.parametrize("name", ["index", "bm25 index", "bm25", "model"])
def test_unknown_fields_are_named(built, data, tiny_static, tmp_path, name):
    options = ways(built, data, tiny_static, tmp_path)[name]
    with pytest.raises(ConfigError, match=r"no field 'yaer'; did you mean 'year'\?"):
        search(**options, filter="yaer > 3", output=tmp_path / "x.run")
    assert not (tmp_path / "x.run").exists()


def test_an_index_without_documents_has_ids_to_filter_by(data, tiny_static, tmp_path):
    index(model=tiny_static, data=data, output=tmp_path / "bare", store_documents=False)
    search(index=tmp_path / "bare", data=data, filter="id in ['d3', 'd5']", output=tmp_path / "x.run")
    assert set(read_run(tmp_path / "x.run")["q0"]) == {"d3", "d5"}
    with pytest.raises(ConfigError, match="no fields, only ids; build it with its documents stored"):
        search(index=tmp_path / "bare", data=data, filter="year > 3", output=tmp_path / "y.run")

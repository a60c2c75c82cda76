"""A collection: splits, judged queries, and a development part that never shares a page with training."""

import json

import pytest

from shortlist.data import Collection, Corpus, Document, RankedList, load_collection
from shortlist.data.label_qrels import LabelQrels
from shortlist.data.splits import split_off_dev
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.types import Qrels


def beir(tmp_path, *, corpus, queries, qrels, name="set"):
    path = tmp_path / name
    (path / "qrels").mkdir(parents=True, exist_ok=True)
    for file, records in (("corpus", corpus), ("queries", queries)):
        (path / f"{file}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for split, rows in qrels.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        (path / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return path


DOCUMENTS = [{"_id": "d1", "text": "x"}, {"_id": "d2", "text": "y"}]


def test_the_toy_collection(toy):
    assert (toy.name, toy.kind, len(toy.corpus), toy.splits) == ("beir", "beir", 60, ["train", "dev", "test"])
    assert toy.default_split == "test" and toy.measures == ["nDCG@10", "R@100"] and not toy.exclude_self
    assert list(toy.queries()) == ["q1", "q3", "q7", "q13", "q14", "q20"]
    assert len(toy.all_queries()) == 20 and toy.queries("dev")["q2"] == "how do I bake bread with sourdough"
    judged = [set(toy.qrels(split)) for split in toy.splits]
    assert sum(map(len, judged)) == len(set.union(*judged)) == 20, "no query in two splits"
    assert dict(toy.qrels("test")["q1"]) == {"astro1": 3, "astro2": 1, "geo5": 0}
    assert list(toy.lists("train")) == [] and toy.filters("test") == {} and toy.propensity is None


def test_the_embedded_scifact():
    collection = load_collection("scifact")
    assert len(collection.corpus) == 5183 and len(collection.all_queries()) == 1109
    counts = {
        split: (len(collection.qrels(split)), collection.qrels(split).num_judgements) for split in collection.splits
    }
    assert counts == {"train": (723, 825), "dev": (86, 94), "test": (300, 339)}
    assert collection.name == "scifact" and len(collection.queries("test")) == 300


def test_unknown_split_names_those_there_are(toy):
    with pytest.raises(MissingInputError, match="has no split 'eval'; it has train, dev, test"):
        toy.qrels("eval")
    with pytest.raises(ConfigError, match="split is 3"):
        toy.queries(3)


def test_judged_documents_that_are_absent_are_counted_and_stay(tmp_path, caplog):  # user-reports A.10
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": "q", "text": "?"}],
                qrels={"test": [("q", "d1", 1), ("q", "gone", 2), ("q", "lost", 1)]})  # fmt: skip
    collection = load_collection(path)
    assert dict(collection.qrels()["q"]) == {"d1": 1, "gone": 2, "lost": 1}
    assert "2 judged documents are not in the corpus; they stay in the ideal ranking: 'gone', 'lost'" in caplog.text
    caplog.clear()
    collection.qrels()
    assert not caplog.text, "told once"


def test_judged_queries_without_text_are_listed(tmp_path, caplog):  # user-reports A.11
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": "q", "text": "?"}],
                qrels={"test": [("q", "d1", 1), ("p", "d2", 1)]})  # fmt: skip
    assert load_collection(path).queries("test") == {"q": "?"}
    assert "1 judged queries are not in the queries file and are left out: 'p'" in caplog.text


def test_no_judged_query_is_refused_showing_both_sides(tmp_path):  # user-reports E.119
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": "1", "text": "?"}], qrels={"test": [("q1", "d1", 1)]})
    with pytest.raises(DataError, match="no query of .* is judged in split 'test': .* such as '1', the qrels 'q1'"):
        load_collection(path).queries("test")


def test_integer_query_ids_and_order_of_the_file(tmp_path):  # user-reports A.17
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": 9, "text": "b"}, {"_id": 1, "text": "a"}],
                qrels={"test": [(1, "d1", 1), (9, "d1", 1)]})  # fmt: skip
    assert list(load_collection(path).queries().items()) == [("9", "b"), ("1", "a")]


def test_duplicate_query_ids_name_both_lines_even_when_skipping(tmp_path):
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": "q", "text": "a"}, {"_id": "q", "text": "b"}],
                qrels={"test": [("q", "d1", 1)]})  # fmt: skip
    with pytest.raises(DataError, match="query id 'q' occurs twice, in lines 1 and 2"):
        load_collection(path, on_error="skip").queries()


def test_ms_marco_is_judged_on_dev_and_arguana_excludes_self(tmp_path):  # user-reports A.13, E.107, E.109
    rows = {"dev": [("q", "d1", 1)], "test": [("q", "d1", 1)]}
    queries = [{"_id": "q", "text": "?"}]
    assert (
        load_collection(beir(tmp_path, corpus=DOCUMENTS, queries=queries, qrels=rows, name="msmarco")).default_split
        == "dev"
    )
    arguana = load_collection(beir(tmp_path, corpus=DOCUMENTS, queries=queries, qrels=rows, name="arguana"))
    assert arguana.exclude_self and arguana.default_split == "test"
    assert not load_collection(beir(tmp_path, corpus=DOCUMENTS, queries=queries, qrels=rows, name="other")).exclude_self


def test_from_parts_takes_plain_values():
    collection = Collection.from_parts(
        {"a": "x", 2: "y"}, {"q": "?", 7: "!"}, qrels={"train": {7: {2: 1}}, "test": {"q": {"a": 1.0}}}, name="mine"
    )
    assert collection.splits == ["train", "test"] and collection.queries("train") == {"7": "!"}
    assert dict(collection.qrels("train")["7"]) == {"2": 1} and collection.path is None
    one = Collection.from_parts([("a", "x")], {"q": "?"}, qrels={"q": {"a": 1}})
    assert one.splits == ["test"]
    assert Collection.from_parts([("a", "x")], {"q": "?"}, qrels=Qrels({"q": {"a": 1}})).default_split == "test"
    bare = Collection.from_parts(Corpus.from_documents([("a", "x")]), {"q": "?"})
    assert bare.splits == [] and bare.queries() == {"q": "?"}
    with pytest.raises(MissingInputError, match="no judgements"):
        bare.qrels()


def test_from_parts_serves_lists_again_and_again():
    lists = [RankedList("q", "?", [Document("a", "", "x")], [1.0])]
    collection = Collection.from_parts([("a", "x")], {"q": "?"}, lists={"train": lists})
    assert list(collection.lists()) == list(collection.lists("train")) == lists and collection.list_splits == ["train"]


@pytest.mark.parametrize(
    "queries, qrels, said",
    [
        (["?"], None, "queries are a mapping of id to text; found list"),
        ({"q": None}, None, "the text of query 'q' is a NoneType"),
        ({"q": "?"}, ["q"], "qrels are a mapping"),
        ({"q": "?"}, {"test": {"q": ["a"]}}, "expected a mapping of document id to grade"),
        ({"q": "?"}, {"test": {"q": {"a": 0.5}}}, "expected a whole number"),
        ({"": "?"}, None, "query id is empty"),
    ],
)
def test_parts_of_wrong_types_get_a_sentence(queries, qrels, said):
    with pytest.raises(DataError, match=said):
        Collection.from_parts([("a", "x")], queries, qrels=qrels)


def test_own_dev_split_is_used_unless_it_is_reported(toy):
    train, dev = toy.dev_split()
    assert set(train) == set(toy.qrels("train")) and set(dev) == set(toy.qrels("dev"))
    train, dev = toy.dev_split(reserve=["dev", "test"])
    assert set(train) | set(dev) == set(toy.qrels("train")) and not set(train) & set(dev) and len(dev) == 1


def test_dev_that_is_the_reported_split_is_not_touched(tmp_path):
    rows = [(f"q{i}", "d1", 1) for i in range(40)]
    path = beir(tmp_path, corpus=DOCUMENTS, queries=[{"_id": f"q{i}", "text": "?"} for i in range(50)],
                qrels={"train": rows, "dev": [("q45", "d1", 1)]}, name="msmarco")  # fmt: skip
    train, dev = load_collection(path).dev_split()
    assert set(train) | set(dev) == {row[0] for row in rows} and len(dev) == 4


def test_development_part_depends_on_ids_alone():
    judgements = {f"q{i}": {"d": 1} for i in range(200)}
    train, dev = split_off_dev(Qrels(judgements))
    again = split_off_dev(Qrels(dict(reversed(judgements.items()))))
    assert set(dev) == set(again[1]) and len(dev) == 20 and list(train) == [q for q in judgements if q not in dev]


def test_no_page_is_on_both_sides():
    """Parts of a page have one title; queries of one page and of one document stay together."""
    documents = [Document(f"p{page}_{part}", f"Page {page}", "x") for page in range(100) for part in range(4)]
    qrels = Qrels({f"q_{d.id}": {d.id: 1} for d in documents} | {f"again_{d.id}": {d.id: 1} for d in documents[::5]})
    train, dev = split_off_dev(qrels, corpus=Corpus.from_documents(documents))

    def pages(part):
        return {document.split("_")[0] for query in part for document in part[query]}

    assert not pages(train) & pages(dev)
    assert 0.05 * len(qrels) < len(dev) <= 0.1 * len(qrels) + 1


def test_group_field_of_the_queries_file_decides(tmp_path):
    queries = [{"_id": f"q{i}", "text": "?", "page": f"p{i // 5}"} for i in range(100)]
    queries[7] = {"_id": "q7", "text": "?", "metadata": {"group": "p19"}}
    path = beir(tmp_path, corpus=[{"_id": f"d{i}", "text": "x"} for i in range(100)], queries=queries,
                qrels={"train": [(f"q{i}", f"d{i}", 1) for i in range(100)]})  # fmt: skip
    group = {q["_id"]: q.get("page") or q["metadata"]["group"] for q in queries}
    train, dev = load_collection(path).dev_split()
    assert len(dev) in range(5, 12) and not {group[q] for q in train} & {group[q] for q in dev}


def test_hub_documents_do_not_tie_everything_together():
    corpus = Corpus.from_documents([(f"d{i}", "x") for i in range(300)] + [("hub", "y")])
    qrels = Qrels({f"q{i}": {f"d{i}": 1, "hub": 1} for i in range(300)})
    assert len(split_off_dev(qrels, corpus=corpus)[1]) == 30


def test_development_part_needs_two_queries():
    with pytest.raises(DataError, match="at least two"):
        split_off_dev(Qrels({"q": {"d": 1}}))
    with pytest.raises(DataError, match="in one group"):
        split_off_dev(Qrels({"q": {"d": 1}, "p": {"d": 1}}), groups={"q": "g", "p": "g"})
    with pytest.raises(ConfigError, match="fraction is 1.5"):
        split_off_dev(Qrels({"q": {"d": 1}, "p": {"d": 1}}), fraction=1.5)


def test_xc_collection_is_split_by_point_and_stays_sparse(toy_xc):
    collection = load_collection(toy_xc)
    assert collection.kind == "xc" and len(collection.corpus) == 12 and collection.splits == ["train", "test"]
    assert collection.measures[0] == "P@1" and collection.propensity == (0.55, 1.5)
    assert collection.corpus["law"].joined() == "law rights and contracts"
    assert collection.filters("test") == {"te0": {"history"}, "te6": {"gardening"}, "te11": {"finance"}}
    assert collection.filters("train") == {}
    train, dev = collection.dev_split()
    assert isinstance(train, LabelQrels) and len(train) == 54 and len(dev) == 6
    for part in (train, dev):
        for query in part:
            assert part[query] == collection.qrels("train")[query]
    assert collection.queries("test")["te3"] == "Cooking with herbs from the garden"
    assert len(collection.all_queries()) == 80


def test_the_collection_imports_light():
    import subprocess
    import sys

    code = (
        "import sys; from shortlist.data import read_run, Document; "
        "print([m for m in ('pyarrow', 'scipy', 'datasets', 'torch') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )

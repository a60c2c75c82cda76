"""MS MARCO's tab-separated files: no quoting, ids as strings, lists from triples and top1000."""

import gzip

import pytest

from shortlist.data import load_collection
from shortlist.errors import DataError

COLLECTION = '0\tone "quoted\n10\ttwo\n20\tthree\'s\n30\tfour "\n'


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "marco"
    path.mkdir()
    (path / "collection.tsv").write_text(COLLECTION)
    (path / "queries.train.tsv").write_text('1\tfirst "query\n2\tsecond\n')
    (path / "queries.dev.small.tsv.gz").write_bytes(gzip.compress(b"3\tthird\n4\tunjudged\n"))
    (path / "qrels.train.tsv").write_text("1\t0\t10\t1\n2\t0\t20\t1\n")
    (path / "qrels.dev.small.tsv").write_text("3 0 30 1\n")
    return path


def test_folder(folder):  # user-reports A.13, A.18, A.21
    collection = load_collection(folder)
    assert collection.kind == "msmarco" and collection.splits == ["train", "dev"] and collection.default_split == "dev"
    assert collection.measures == ["RR@10", "R@1000"]
    assert len(collection.corpus) == COLLECTION.count("\n") == 4 and collection.corpus["0"].text == 'one "quoted'
    assert collection.queries() == {"3": "third"}
    assert collection.queries("train") == {"1": 'first "query', "2": "second"}
    assert list(collection.all_queries()) == ["1", "2", "3", "4"]
    assert len(collection.checksums()) == 5


def test_triples_of_ids(folder):
    (folder / "qidpidtriples.train.full.tsv").write_text("1\t10\t0\n2\t20\t99\n9\t0\t10\n")
    first, second = load_collection(folder).lists("train")
    assert (first.query_id, first.query) == ("1", 'first "query')
    assert [d.text for d in first.documents] == ["two", 'one "quoted'] and first.grades == [1, 0]
    assert [d.id for d in second.documents] == ["20"], "an unknown document is left out and counted"


def test_json_lists_beside_the_collection(folder):
    (folder / "train.jsonl").write_text('{"qid": 1, "pos": [10], "neg": {"bm25": [0, 30]}}\n[2, 20, 0]\n')
    first, second = load_collection(folder).lists("train")
    assert [d.id for d in first.documents] == ["10", "0", "30"] and [d.id for d in second.documents] == ["20", "0"]


def test_triples_of_texts(tmp_path):
    path = tmp_path / "triples.train.small.tsv"
    path.write_text('a "query\tpositive text\tnegative "text\nb query\tnegative "text\tthird text\n')
    collection = load_collection(path)
    assert collection.kind == "lists" and collection.splits == ["train"]
    assert list(collection.corpus.texts()) == ["positive text", 'negative "text', "third text"]
    first, second = collection.lists()
    assert first.query == 'a "query' and first.grades == [1, 0] and first.documents[1].id == second.documents[0].id
    assert len(collection.qrels("train")) == 2
    path.write_text("1\t2\t3\n")
    with pytest.raises(DataError, match=r"holds ids \(query, positive, negative\) and no texts"):
        load_collection(path)


@pytest.mark.parametrize("with_collection", [True, False])
def test_top1000_lines_in_any_order(folder, with_collection):
    rows = ['3\t30\tthird\tfour "', '4\t0\tunjudged\tone "quoted', '3\t0\tthird\tone "quoted']
    (folder / "top1000.dev.tsv").write_text("\n".join(rows) + "\n")
    if not with_collection:
        (folder / "collection.tsv").unlink()
        (folder / "queries.dev.small.tsv.gz").unlink()
    collection = load_collection(folder)
    third, unjudged = collection.lists("dev")
    assert [d.id for d in third.documents] == ["30", "0"] and third.grades == [1, 0]
    assert unjudged.query == "unjudged" and unjudged.grades == [None]
    assert len(collection.corpus) == (4 if with_collection else 2)
    assert collection.queries("dev") == {"3": "third"}


def test_a_single_collection_file(tmp_path):
    (tmp_path / "docs.tsv").write_text("a\tx\nb\ty\n")
    collection = load_collection(tmp_path / "docs.tsv")
    assert list(collection.corpus.texts()) == ["x", "y"] and collection.splits == []


def test_documents_with_url_title_and_body(tmp_path):
    (tmp_path / "corpus.tsv").write_text("D1\thttp://x\tTitle\tBody\n")
    document = load_collection(tmp_path).corpus["D1"]
    assert (document.title, document.text, document.metadata) == ("Title", "Body", {"url": "http://x"})


def test_a_line_with_other_columns_is_refused_or_skipped(folder, caplog):
    (folder / "collection.tsv").write_text("0\tone\n1\ttwo\tthree\n2 four\n3\tfive\n")
    with pytest.raises(DataError, match=r"collection\.tsv, line 2: 3 tab-separated fields; expected id<TAB>text"):
        load_collection(folder)
    assert list(load_collection(folder, on_error="skip").corpus.ids) == ["0", "3"]
    assert "2 lines skipped" in caplog.text


def test_duplicate_ids_and_bytes_that_are_not_utf8(folder):
    (folder / "collection.tsv").write_text("0\tone\n1\ttwo\n0\tthree\n")
    with pytest.raises(DataError, match="document id '0' occurs twice: line 1 and line 3"):
        load_collection(folder)
    (folder / "collection.tsv").write_bytes("0\tone\n1\tcafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"collection\.tsv, line 2: byte 0xe9"):
        load_collection(folder)


def test_trec_deep_learning_judgements(folder):
    (folder / "2019qrels-pass.txt").write_text("3 Q0 30 3\n3 Q0 10 0\n")
    collection = load_collection(folder)
    assert collection.splits == ["train", "dev", "2019"] and dict(collection.qrels("2019")["3"]) == {"30": 3, "10": 0}
    assert collection.queries("2019") == {"3": "third"}

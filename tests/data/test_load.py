"""Formats are told from content; what is not known is described; written folders open again."""

import gzip
import json
import shutil
import sys

import pytest

from shortlist.data import Collection, load_collection, read_queries, write_beir
from shortlist.errors import ConfigError, DataError, MissingExtraError, MissingInputError, OutputExistsError


def test_compressed_beir_folder_is_the_same(tmp_path, toy_beir, toy):
    for source in toy_beir.rglob("*.*"):
        target = tmp_path / "set" / source.relative_to(toy_beir)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name(target.name + ".gz").write_bytes(gzip.compress(source.read_bytes()))
    again = load_collection(tmp_path / "set")
    assert again.corpus.fingerprint == toy.corpus.fingerprint and again.all_queries() == toy.all_queries()
    assert all(again.qrels(split) == toy.qrels(split) for split in toy.splits)


def test_bom_crlf_and_line_separators_change_nothing(tmp_path):  # user-reports A.22
    text = "one\u2028two\x85three"
    (tmp_path / "qrels").mkdir()
    for name, content in {
        "corpus.jsonl": json.dumps({"_id": "d", "text": text}, ensure_ascii=False) + "\r\n",
        "queries.jsonl": json.dumps({"_id": "q", "text": text}, ensure_ascii=False) + "\r\n",
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\r\nq\td\t1\r\n",
    }.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    collection = load_collection(tmp_path)
    assert collection.corpus["d"].text == collection.queries()["q"] == text
    assert dict(collection.qrels()["q"]) == {"d": 1}


def test_corpus_alone_can_be_opened(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"id": 1, "contents": "x"}\n')
    collection = load_collection(tmp_path / "docs.jsonl")
    assert collection.corpus["1"].text == "x" and collection.splits == [] and collection.name == "docs"


def test_cqadupstack_expands_to_its_folders(tmp_path, toy_beir):  # user-reports A.15
    for name in ("android", "english"):
        shutil.copytree(toy_beir, tmp_path / "cqadupstack" / name)
    collection = load_collection(tmp_path / "cqadupstack")
    assert list(collection.subsets) == ["android", "english"] and collection.splits == ["train", "dev", "test"]
    assert len(collection.subsets["english"].queries("test")) == 6
    for use in (lambda: collection.corpus, lambda: collection.queries("test"), lambda: collection.qrels()):
        with pytest.raises(DataError, match=r"holds 2 collections \(android, english\).*cqadupstack/android"):
            use()


def test_unknown_folder_says_what_it_holds_and_what_is_accepted(tmp_path):
    with pytest.raises(DataError, match="it holds nothing; accepted are a BEIR folder"):
        load_collection(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match=r"it holds notes\.txt, sub/; accepted are a BEIR folder .*collection\.tsv"):
        load_collection(tmp_path)


@pytest.mark.parametrize(
    "content, said",
    [("", "the file is empty"), ("hello\n", "its first line is 'hello'"), ('{"a": 1}\n', "its first line has 'a'")],
)
def test_unknown_file_is_described(tmp_path, content, said):
    (tmp_path / "x").write_text(content)
    with pytest.raises(DataError, match=said):
        load_collection(tmp_path / "x")


def test_missing_path_gets_a_hint(tmp_path, monkeypatch):
    with pytest.raises(MissingInputError, match="does not exist.*come with the package: scifact"):
        load_collection(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shortlist.data.irds.knows", lambda text: False)
    with pytest.raises(MissingInputError, match="shortlist data download nfcorpus"):
        load_collection("nfcorpus")


def test_an_existing_folder_wins_over_the_embedded_name(tmp_path, monkeypatch, toy_beir):
    shutil.copytree(toy_beir, tmp_path / "scifact")
    monkeypatch.chdir(tmp_path)
    assert len(load_collection("scifact").corpus) == 60


@pytest.mark.parametrize("bad", [None, 3, "", ["x"]])
def test_wrong_type_of_path(bad):
    with pytest.raises(ConfigError, match="by its path or name"):
        load_collection(bad)


def test_options_are_checked(toy_beir, toy):
    for option in ({"on_error": "ignore"}, {"on_empty": "drop"}, {"template": "nothing"}):
        with pytest.raises(ConfigError):
            load_collection(toy_beir, **option)
    assert load_collection(toy) is toy
    assert next(load_collection(toy_beir, template="{text} ({title})").corpus.texts()).endswith(
        "(Why the Moon has phases)"
    )


def test_write_beir_round_trip_keeps_metadata(tmp_path, toy):
    corpus = [{"_id": "a b", "title": None, "text": "x\u2028y", "metadata": {"k": "ü"}}, {"_id": 2, "text": ""}]
    collection = Collection.from_parts(corpus, {"q": "?\u2028"}, qrels={"test": {"q": {"a b": 2, "2": -1}}})
    write_beir(collection, tmp_path / "out")
    assert "\u2028" not in (tmp_path / "out" / "corpus.jsonl").read_text(encoding="utf-8")
    again = load_collection(tmp_path / "out")
    assert again.corpus.fingerprint == collection.corpus.fingerprint
    assert again.qrels("test") == collection.qrels("test") and again.all_queries() == {"q": "?\u2028"}
    with pytest.raises(OutputExistsError, match="exists already"):
        write_beir(toy, tmp_path / "out")
    write_beir(toy, tmp_path / "out", splits=["test"], overwrite=True)
    assert load_collection(tmp_path / "out").splits == ["test"]


def test_judgements_beside_the_corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "x"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "?"}\n')
    (tmp_path / "qrels.tsv").write_text("q 0 d 1\n")
    (tmp_path / "qrels.dev.tsv.gz").write_bytes(gzip.compress(b"q\td\t1\n"))
    assert load_collection(tmp_path).splits == ["dev", "test"]
    (tmp_path / "qrels.tsv.gz").write_bytes(gzip.compress(b"q\td\t1\n"))
    with pytest.raises(DataError, match="has qrels.tsv and qrels.tsv.gz for one split"):
        load_collection(tmp_path)


def test_metadata_that_json_cannot_carry_is_refused(tmp_path):
    collection = Collection.from_parts([{"_id": "d", "text": "x", "n": float("nan")}], {})
    with pytest.raises(DataError, match="NaN"):
        write_beir(collection, tmp_path / "out")


def test_a_failed_write_leaves_the_old_folder(tmp_path, toy):
    write_beir(toy, tmp_path / "out")
    with pytest.raises(MissingInputError):
        write_beir(toy, tmp_path / "out", splits=["none"], overwrite=True)
    assert load_collection(tmp_path / "out").splits == toy.splits and len(list(tmp_path.iterdir())) == 1


def test_queries_files(tmp_path, caplog):
    (tmp_path / "q.tsv").write_text('1\twhat is "it\n2\twhy\n')
    assert read_queries(tmp_path / "q.tsv") == {"1": 'what is "it', "2": "why"}
    (tmp_path / "q.jsonl").write_text('{"_id": 1, "text": "a"}\nbroken\n{"query_id": "x", "query": " "}\n')
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        read_queries(tmp_path / "q.jsonl")
    assert read_queries(tmp_path / "q.jsonl", on_error="skip") == {"1": "a", "x": " "}
    assert "1 lines skipped" in caplog.text and "1 queries have no text" in caplog.text
    (tmp_path / "bad").write_text("just a question\n")
    with pytest.raises(DataError, match="line 1: 1 tab-separated fields"):
        read_queries(tmp_path / "bad")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="holds no query"):
        read_queries(tmp_path / "empty")


class _Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def default_text(self):
        return f"{self.title} {self.body}"


class _Irds:
    """The members of an ir_datasets data set that are used."""

    def has_docs(self):
        return True

    has_queries = has_qrels = has_docs

    def docs_iter(self):
        yield _Record(doc_id=1, title="T", text="x")
        yield _Record(doc_id="b", title="U", body="y")

    def queries_iter(self):
        yield _Record(query_id=5, text="?")

    def qrels_iter(self):
        yield _Record(query_id="5", doc_id="b", relevance=2)


def _fake_irds(monkeypatch):
    module = type(sys)("ir_datasets")

    def load(id):
        if id != "fake/set/dev":
            raise KeyError(id)
        return _Irds()

    module.load = load
    monkeypatch.setitem(sys.modules, "ir_datasets", module)
    monkeypatch.setattr("shortlist.data.irds.is_installed", lambda: True)


@pytest.mark.parametrize("name", ["irds:fake/set/dev", "fake/set/dev"])
def test_ir_datasets_ids(monkeypatch, name):
    _fake_irds(monkeypatch)
    collection = load_collection(name)
    assert (collection.kind, collection.name, collection.splits) == ("irds", "fake/set/dev", ["dev"])
    assert list(collection.corpus.texts()) == ["T x", "U y"] and collection.queries() == {"5": "?"}
    assert dict(collection.qrels("dev")["5"]) == {"b": 2}
    with pytest.raises(MissingInputError, match="no data set 'none'"):
        load_collection("irds:none")


def test_ir_datasets_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr("shortlist.data.irds.is_installed", lambda: False)
    with pytest.raises(MissingExtraError, match=r"shortlist\[irds\]"):
        load_collection("irds:beir/scifact/test")
    with pytest.raises(MissingInputError, match=r"install the extra.*shortlist\[irds\]"):
        load_collection("vaswani/unknown")

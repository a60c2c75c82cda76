"""The corpus: ids are strings, documents survive normalisation, look-up and order are exact, memory is bounded."""

import gc
import json
import multiprocessing
import pickle
import random
from datetime import date

import numpy as np
import pytest

from shortlist.data import Corpus, Document, load_collection
from shortlist.data import store as store_module
from shortlist.errors import ConfigError, DataError


def folder(tmp_path, lines, name="c"):
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "corpus.jsonl").write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8"
    )
    return path


def test_missing_and_null_title_are_the_empty_string(tmp_path):  # user-reports A.1, A.2, A.3
    path = folder(tmp_path, [{"_id": "a", "text": "x"}, {"_id": "b", "title": None, "text": "y"}])
    corpus = load_collection(path).corpus
    assert [(d.title, d.text) for d in corpus] == [("", "x"), ("", "y")]
    assert list(corpus.texts()) == ["x", "y"], "no leading blank"
    assert corpus.counts["without_title"] == 2
    assert Corpus.from_documents([{"_id": "a", "text": "x"}]).row(0).title == ""


def test_metadata_from_data_frames_keeps_its_numbers():
    metadata = {"year": np.int64(2010), "flag": np.bool_(True), "list": np.array([1, 2]), "day": date(2024, 2, 29)}
    (document,) = Corpus.from_documents([Document("a", "", "x", metadata)])
    assert document.metadata == {"year": 2010, "flag": True, "list": [1, 2], "day": "2024-02-29"}


def test_metadata_is_kept_as_it_was(tmp_path):  # user-reports A.3
    metadata = {"url": "http://x", "n": [1, None, "ü"]}
    path = folder(tmp_path, [{"_id": "a", "text": "x", "metadata": metadata, "year": 1999}, {"_id": "b", "text": "y"}])
    first, second = load_collection(path).corpus
    assert first.metadata == {**metadata, "year": 1999}
    assert second.metadata is None


def test_integer_ids_become_strings(tmp_path):  # user-reports A.17, A.18
    corpus = load_collection(folder(tmp_path, [{"_id": 7, "text": "x"}, {"_id": "08", "text": "y"}])).corpus
    assert list(corpus.ids) == ["7", "08"]
    assert corpus["7"].text == "x"
    with pytest.raises(DataError, match=r"document id 7 is a int; ids are strings"):
        corpus[7]


def test_ids_with_a_blank_are_legal(tmp_path):
    corpus = load_collection(folder(tmp_path, [{"_id": "doc 1", "text": "x"}, {"_id": "doc  1", "text": "y"}])).corpus
    assert corpus["doc 1"].text == "x" and corpus["doc  1"].text == "y"


@pytest.mark.parametrize("bad", ["", " ", None, 1.5, True, "a\tb", "a\nb", ["a"]])
def test_ids_that_cannot_be_ids_are_refused(tmp_path, bad):
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 2: "):
        load_collection(folder(tmp_path, [{"_id": "a", "text": "x"}, {"_id": bad, "text": "y"}]))


def test_duplicate_ids_are_refused_naming_the_id_and_both_lines(tmp_path):
    lines = [
        {"_id": "a", "text": "1"},
        "",
        {"_id": "b", "text": "2"},
        {"_id": "c", "text": "3"},
        {"_id": "b", "text": "4"},
    ]
    with pytest.raises(DataError, match=r"document id 'b' occurs twice: line 3 and line 5; ids must be unique"):
        load_collection(folder(tmp_path, lines))
    with pytest.raises(DataError, match=r"document id 'a' occurs twice: item 1 and item 3"):
        Corpus.from_documents([("a", "x"), ("b", "y"), ("a", "z")])


def test_lines_of_duplicates_are_right_when_lines_were_skipped(tmp_path):
    lines = ["broken", {"_id": "a", "text": "1"}, {"_id": "e", "text": ""}, {"_id": "a", "text": "2"}]
    with pytest.raises(DataError, match=r"line 2 and line 4"):
        load_collection(folder(tmp_path, lines), on_error="skip", on_empty="skip")


def test_empty_documents_are_kept_skipped_or_refused_with_counts(tmp_path, caplog):  # user-reports A.5, A.6, A.7
    lines = [
        {"_id": "a", "text": "x"},
        {"_id": "b", "text": " \t"},
        {"_id": "c", "title": "", "text": None},
        {"_id": "d", "title": "title only", "text": ""},
        {"_id": "e", "text": "y"},
    ]
    path = folder(tmp_path, lines)
    kept = load_collection(path).corpus
    assert list(kept.ids) == list("abcde") and kept.counts["empty"] == 2
    assert list(kept.texts()) == ["x", "", "", "title only", "y"], "blanks are the same as nothing"
    assert "2 documents have neither title nor text and are kept: 'b', 'c'" in caplog.text
    skipped = load_collection(path, on_empty="skip").corpus
    assert list(skipped.ids) == ["a", "d", "e"] and skipped["e"].text == "y", "ids travel with their texts"
    assert skipped.counts["skipped_empty"] == 2 and skipped.counts["empty"] == 0
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 2: document 'b' has neither title nor text"):
        load_collection(path, on_empty="error")
    with pytest.raises(ConfigError, match="on_empty is 'drop'"):
        load_collection(path, on_empty="drop")


def test_counts_are_told_again_when_the_cache_is_used(tmp_path, caplog):
    path = folder(tmp_path, [{"_id": "a", "text": "x"}, {"_id": "b", "text": ""}])
    load_collection(path)
    caplog.clear()
    load_collection(path)
    assert caplog.text.count("1 documents have neither title nor text") == 1


def test_broken_lines_fail_or_are_skipped_with_counts(tmp_path, caplog):
    lines = [
        {"_id": "a", "text": "x"},
        '{"_id": "b", "te',
        '["list"]',
        {"_id": "c"},
        {"_id": "d", "text": ["z"]},
        {"_id": "e", "text": "y"},
    ]
    path = folder(tmp_path, lines)
    with pytest.raises(
        DataError, match=r'line 2: not valid JSON \(.*\); expected one JSON object a line, such as \{"_id"'
    ):
        load_collection(path)
    corpus = load_collection(path, on_error="skip").corpus
    assert list(corpus.ids) == ["a", "e"] and corpus.counts["skipped_lines"] == 4
    assert "4 lines skipped" in caplog.text and "line 2" in caplog.text


def test_a_document_without_text_field_lists_its_fields(tmp_path):
    with pytest.raises(DataError, match=r"line 1: a document without \"text\"; it has '_id', 'abstract'"):
        load_collection(folder(tmp_path, [{"_id": "a", "abstract": "x"}]))


def test_nothing_usable_is_refused(tmp_path):
    with pytest.raises(DataError, match="no document was found; expected at least one"):
        load_collection(folder(tmp_path, []))
    with pytest.raises(DataError, match=r"no document was found \(2 lines could not be used"):
        load_collection(folder(tmp_path, ["x", "y"]), on_error="skip")
    with pytest.raises(DataError, match="no document was found"):
        Corpus.from_documents([])


def test_python_values_of_every_shape():
    mapping = Corpus.from_documents({"a": "x", 2: {"title": "t", "text": "y"}, "c": Document("c", "", "z")})
    assert [(d.id, d.title, d.text) for d in mapping] == [("a", "", "x"), ("2", "t", "y"), ("c", "", "z")]
    mixed = Corpus.from_documents(iter([Document("a", "t", "x"), ("b", "y"), {"id": 3, "text": "z", "k": 1}]))
    assert [d.joined() for d in mixed] == ["t x", "y", "z"] and mixed["3"].metadata == {"k": 1}


@pytest.mark.parametrize(
    "bad, said", [("text", "not from a str"), (["just text"], "item 1"), ([("a", 1, 2)], "item 1"), (5, "int")]
)
def test_wrong_types_get_a_sentence(bad, said):
    with pytest.raises(DataError, match=said):
        Corpus.from_documents(bad)


def test_half_a_surrogate_pair_is_refused_naming_the_document():
    with pytest.raises(DataError, match=r"item 2: document 'b' holds half of a surrogate pair"):
        Corpus.from_documents([("a", "x"), ("b", "bad \ud83d")])


def test_rows_slices_ids_and_lookup_agree_over_batches(monkeypatch):
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 7)
    names = [f"id {number * 37 % 101}" for number in range(101)]
    corpus = Corpus.from_documents([(name, f"text of {name}") for name in names])
    assert len(corpus) == 101 and list(corpus.ids) == names and corpus.ids == names
    assert [corpus.row(i).id for i in range(101)] == names
    assert corpus.ids[-1] == names[-1] and corpus.ids[5:23] == names[5:23] and corpus.ids[::-10] == names[::-10]
    assert [d.id for d in corpus.slice(6, 30)] == names[6:30] and len(corpus.slice(95)) == 6
    assert list(corpus.texts(start=20, stop=22)) == [f"text of {name}" for name in names[20:22]]
    order = random.Random(0).sample(names, 101)
    assert corpus.positions([*order, "unknown"]).tolist() == [*(names.index(name) for name in order), -1]
    assert corpus.ids.index("id 37") == 1 and "id 37" in corpus and "id 370" not in corpus and 3 not in corpus
    assert corpus.get("nope") is None
    with pytest.raises(DataError, match=r"no document 'nope' among the 101"):
        corpus["nope"]
    for outside in (101, -1):
        with pytest.raises(DataError, match="outside the corpus"):
            corpus.row(outside)


def test_equal_hashes_are_told_apart_by_the_id(monkeypatch):
    def poor(ids):
        return np.array([len(id) for id in ids], np.uint64)

    monkeypatch.setattr(store_module, "hash_ids", poor)
    monkeypatch.setattr("shortlist.data.corpus.hash_ids", poor)
    corpus = Corpus.from_documents([("a", "1"), ("b", "2"), ("cc", "3"), ("d", "4")])
    assert [corpus[id].text for id in ("a", "b", "cc", "d")] == ["1", "2", "3", "4"]
    assert corpus.positions(["d", "x", "b", "ee"]).tolist() == [3, -1, 1, -1]


def test_fingerprint_is_about_content_only(tmp_path, monkeypatch):
    lines = [{"_id": str(i), "text": f"t{i}"} for i in range(30)]
    one = load_collection(folder(tmp_path, lines, "one")).corpus
    two = load_collection(folder(tmp_path, lines, "two")).corpus
    assert one.fingerprint == two.fingerprint and len(one.fingerprint) == 64
    assert one.fingerprint != Corpus.from_documents([(str(i), f"t{i}") for i in reversed(range(30))]).fingerprint
    assert Corpus.from_documents([("a", "bc")]).fingerprint != Corpus.from_documents([("ab", "c")]).fingerprint


def test_template_joins_title_and_text():
    corpus = Corpus.from_documents(
        [Document("a", "T{text}", "x {title}"), Document("b", "", "y")], template="{title}. {text}"
    )
    assert list(corpus.texts()) == ["T{text}. x {title}", ". y"]
    assert list(corpus.texts("{text}")) == ["x {title}", "y"]
    assert Document("a", "T", "x").joined() == "T x"


def test_hugging_face_view_has_the_same_rows(toy):
    dataset = toy.corpus.dataset
    assert dataset.column_names == ["id", "title", "text", "metadata"] and dataset["id"][:] == list(toy.corpus.ids)


def test_corpus_goes_to_worker_processes(toy):
    copy = pickle.loads(pickle.dumps(toy.corpus))
    assert list(copy) == list(toy.corpus)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(len, (toy.corpus,)) == 60


def test_temporary_files_go_with_the_corpus():
    corpus = Corpus.from_documents([("a", "x")])
    directory = corpus.directory
    assert directory.is_dir()
    del corpus
    gc.collect()
    assert not directory.exists()


def test_a_forked_child_does_not_delete_what_the_parent_maps():
    corpus = Corpus.from_documents([("a", "x")])
    with multiprocessing.get_context("fork").Pool(1, initializer=corpus._entry._finalizer) as pool:
        assert pool.apply(len, (corpus,)) == 1
    assert corpus["a"].text == "x" and corpus.directory.exists()


def _anonymous_megabytes():
    with open("/proc/self/status", encoding="ascii") as handle:
        return next(int(line.split()[1]) for line in handle if line.startswith("RssAnon")) / 1024


@pytest.mark.slow
def test_a_large_corpus_does_not_grow_the_process(tmp_path):
    path = tmp_path / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as handle:
        for number in range(300_000):
            handle.write(f'{{"_id": "document-{number:09d}", "title": "t{number}", "text": "{"word " * 60}"}}\n')
    Corpus.from_documents([("a", "x")])  # imports and pools are not the corpus's
    before = _anonymous_megabytes()
    corpus = load_collection(path).corpus
    assert sum(len(document.text) for document in corpus) == 300 * 300_000
    assert corpus["document-000123456"].title == "t123456" and sum(1 for _ in corpus.ids) == 300_000
    assert _anonymous_megabytes() - before < 150

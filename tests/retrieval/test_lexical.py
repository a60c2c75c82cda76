"""BM25: the formula, plain-text queries, exact ties, and an index directory that is whole or refused."""

import json
import logging
import math
import os
from collections import Counter

import numpy as np
import pytest

from shortlist.data import Corpus
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError, ShortlistError
from shortlist.retrieval.analysis import Analyzer
from shortlist.retrieval.lexical import LexicalRetriever

DOCUMENTS = {
    "cats": {"title": "Cats", "text": "A cat sleeps. Cats sleep by day and hunt at night."},
    "dogs": {"title": None, "text": "The dog sleeps at night."},
    "tea": {"title": "Tea", "text": "Green tea and black tea."},
    "empty": {"title": "", "text": ""},
}


@pytest.fixture(scope="module")
def retriever():
    return LexicalRetriever.build(DOCUMENTS)


def test_scores_are_lucenes_bm25(retriever):
    """A slow loop over the formula, with the defaults k1 0.9 and b 0.4."""
    analyzer = Analyzer()
    texts = {id: f"{value['title'] or ''} {value['text']}".strip() for id, value in DOCUMENTS.items()}
    terms = {id: Counter(analyzer(text)) for id, text in texts.items()}
    mean = sum(sum(count.values()) for count in terms.values()) / len(terms)
    for query in ("cat night", "sleeping dogs", "black tea tea"):
        found = retriever.search({"q": query}, 10)["q"]
        for id, count in terms.items():
            score = 0.0
            for term in analyzer(query):
                frequency = sum(term in other for other in terms.values())
                inverse = math.log(1 + (len(terms) - frequency + 0.5) / (frequency + 0.5))
                length = sum(count.values())
                score += inverse * count[term] / (count[term] + 0.9 * (1 - 0.4 + 0.4 * length / mean))
            assert found.get(id, 0.0) == pytest.approx(score, rel=1e-5)


def test_only_documents_with_a_query_term_are_ranked(retriever):
    # bm25s pads its lists with zero scores
    assert list(retriever.search("tea", k=4)["0"]) == ["tea"]
    assert set(retriever.search("sleep", k=100)["0"]) == {"cats", "dogs"}


def test_titles_are_searched_and_may_be_null(retriever):
    # user-reports A.1, A.2: a null title crashed the string addition
    assert list(retriever.search("cat", 1)["0"]) == ["cats"]
    assert list(LexicalRetriever.build({"a": {"text": "no title"}}).search("title", 1)["0"]) == ["a"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("{braces} don't-matter", "english"),
        ('"quoted AND (brackets OR title:x)^2~', "quotes"),
        ("l'été à Genève", "french"),
        ("поиск документов", "russian"),
        ("検索エンジン", "japanese"),
        ("vitamin 25-hydroxy +d -e", "numbers"),
        ("naïve café", "accents"),
    ],
)
def test_queries_are_plain_text(query, expected):
    # user-reports A.23: no query language
    corpus = {
        "english": "braces don t matter",
        "quotes": "a quoted text with brackets or a title",
        "french": "L'été est chaud à Genève",
        "russian": "Поиск документов в корпусе",
        "japanese": "検索エンジン の 評価",
        "numbers": "25 hydroxy vitamin levels",
        "accents": "Naïve Café",
    }
    assert next(iter(LexicalRetriever.build(corpus).search(query, 10)["0"])) == expected


def test_queries_without_a_term_get_an_empty_list_and_are_counted(retriever, caplog):
    # user-reports A.23: an empty query after tokenising
    with caplog.at_level(logging.WARNING):
        run = retriever.search({"a": "", "b": "the of", "c": "zebra", "d": "cat", "e": "{!?}"}, 5)
    assert list(run) == ["a", "b", "c", "d", "e"]
    assert [len(run[query]) for query in run] == [0, 0, 0, 1, 0]
    assert len(caplog.records) == 1 and "4 of 5" in caplog.text and "'a'" in caplog.text


def test_ties_at_the_cut_go_by_document_id_descending():
    # user-reports E.111, E.113: one rule, also where k cuts a group of equal scores
    corpus = {f"d{number:02}": "same words here" for number in range(20)} | {"best": "words words words"}
    ranked = list(LexicalRetriever.build(corpus).search("words", 4)["0"])
    assert ranked == ["best", "d19", "d18", "d17"]
    shuffled = LexicalRetriever.build(dict(reversed(corpus.items())))
    assert list(shuffled.search("words", 4)["0"]) == ranked


def test_exclude_self_removes_the_querys_own_document_only_when_asked():
    # user-reports E.107, E.109
    corpus = {"a": "tax on sugar", "b": "sugar tax", "c": "sugar"}
    retriever = LexicalRetriever.build(corpus)
    assert "a" in retriever.search({"a": "sugar tax"}, 2)["a"]
    assert list(retriever.search({"a": "sugar tax"}, 2, exclude_self=True)["a"]) == ["b", "c"]
    assert len(retriever.search({"x": "sugar tax"}, 2, exclude_self=True)["x"]) == 2


def test_filtered_documents_are_replaced_by_the_next_best():
    corpus = {"a": "tax on sugar", "b": "sugar tax", "c": "sugar"}
    retriever = LexicalRetriever.build(corpus)
    assert list(retriever.search({"x": "sugar tax"}, 2, filters={"x": {"b"}})["x"]) == ["a", "c"]
    assert list(retriever.search({"a": "sugar tax"}, 2, exclude_self=True, filters={"a": {"b"}})["a"]) == ["c"]


def test_k_is_checked(retriever):
    # user-reports D.93
    assert len(retriever.search("night", 1000)["0"]) == 2
    for k in (0, -1, 1.5):
        with pytest.raises(ConfigError):
            retriever.search("night", k)


def test_every_shape_of_corpus_gives_the_same_index():
    texts = ["green tea", "black tea", "coffee"]
    expected = dict(LexicalRetriever.build(texts).search("tea coffee", 3)["0"])
    assert set(expected) == {"0", "1", "2"}
    named = {str(position): text for position, text in enumerate(texts)}
    shapes = (
        named,
        list(named.items()),
        [{"_id": id, "text": text} for id, text in named.items()],
        Corpus.from_documents(named),
        (text for text in texts),
    )
    for shape in shapes:
        assert LexicalRetriever.build(shape).search("tea coffee", 3)["0"] == expected


def test_ids_travel_with_their_texts():
    # user-reports A.6, A.18: empty documents shift no id; any string is an id
    corpus = {"doc one": "alpha", "empty": " ", "9": "beta", "ключ": "gamma"}
    retriever = LexicalRetriever.build(corpus)
    for word, id in (("alpha", "doc one"), ("beta", "9"), ("gamma", "ключ")):
        assert list(retriever.search(word, 5)["0"]) == [id]
    assert len(retriever) == 4


def test_bad_corpora_are_refused():
    with pytest.raises(DataError, match="word"):
        LexicalRetriever.build({"a": "", "b": "the"})
    with pytest.raises(DataError):
        LexicalRetriever.build({})
    with pytest.raises(DataError, match="one string"):
        LexicalRetriever.build("just a text")
    with pytest.raises(DataError, match="NoneType"):
        LexicalRetriever.build(None)
    with pytest.raises(DataError, match="'a'"):
        LexicalRetriever.build([("a", "x1"), ("a", "x2")])


def test_bad_queries_are_refused(retriever):
    # user-reports F.142: validate types at the boundary
    with pytest.raises(DataError, match="'q'"):
        retriever.search({"q": None}, 3)
    with pytest.raises(DataError, match="NoneType"):
        retriever.search(None, 3)
    with pytest.raises(DataError, match="'1' is there twice"):
        retriever.search({1: "a", "1": "b"}, 3)


def test_settings_are_checked():
    for options in (
        {"k1": -1},
        {"b": 1.5},
        {"k1": math.nan},
        {"k1": "x"},
        {"stemmer": "klingon"},
        {"stopwords": "klingon"},
        {"stopwords": ["a", 1]},
        {"language": "klingon"},
        {"language": "thai"},
    ):
        with pytest.raises(ConfigError):
            LexicalRetriever.build({"a": "text"}, **options)


def test_stems_and_stop_words_are_options():
    assert Analyzer()("The Running of the dogs") == ["run", "dog"]
    assert Analyzer(stemmer=None, stopwords=None)("The dogs") == ["the", "dogs"]
    assert Analyzer(stemmer="german", stopwords=["der"])("der Hunde") == ["hund"]
    assert list(LexicalRetriever.build({"a": "dogs"}, stemmer=None).search("dog", 1)["0"]) == []


@pytest.mark.parametrize(
    ("language", "document", "query", "stopword"),
    [
        ("german", "Die Häuser der Städte", "haus stadt", "der"),
        ("fr", "Les chevaux mangeaient", "cheval manger", "les"),
        ("finnish", "talossa", "talo", None),
        ("Russian", "документы корпуса", "документ", None),
    ],
)
def test_one_name_of_a_language_sets_stems_and_stop_words(language, document, query, stopword):
    retriever = LexicalRetriever.build({"a": document, "b": "other"}, language=language)
    assert list(retriever.search(query, 5)["0"]) == ["a"]
    assert stopword is None or retriever.analyzer(stopword) == []
    assert Analyzer(language=language).settings()["language"] == retriever.analyzer.language


def test_stemmer_and_stop_words_can_be_set_apart_from_the_language():
    assert Analyzer(language="german", stemmer=None)("der Häuser") == ["häuser"]
    assert Analyzer(language="german", stopwords=["häuser"])("der Häuser") == ["der"]
    assert Analyzer(language="german", stopwords="en")("der the") == ["der"]
    assert Analyzer(language=None)("The dogs") == ["the", "dogs"]
    assert Analyzer(language="japanese").settings() == {"language": "japanese", "stemmer": None, "stopwords": None}


def test_text_without_spaces_is_found_by_pairs_of_characters():
    cut = "検索 索エ エン ンジ ジン 線 2020 年 茶".split()
    assert Analyzer().words("検索エンジンX線 2020年 茶") == cut
    corpus = {"search": "情報検索システムの評価", "tea": "緑茶と紅茶", "mixed": "BM25による検索 (retrieval)"}
    retriever = LexicalRetriever.build(corpus)
    assert set(retriever.search("検索", 5)["0"]) == {"search", "mixed"}
    assert list(retriever.search("紅茶", 5)["0"]) == ["tea"]
    assert list(retriever.search("retrieval", 5)["0"]) == ["mixed"]


def test_the_calls_of_the_dense_retriever(retriever):
    ranked = retriever.rank("cat night", 2)
    assert [(result.rank, result.id) for result in ranked] == [(1, "cats"), (2, "dogs")]
    assert ranked[0].score == retriever.search("cat night")["0"]["cats"]
    assert ranked[0].document.title == "Cats" and retriever.document("nothing") is None
    stats = retriever.stats()
    assert (stats["kind"], stats["count"], stats["removed"], stats["language"]) == ("bm25", 4, 0, "english")
    assert stats["postings"] > stats["terms"] > 0 and stats["bytes"] > 0
    with pytest.raises(ConfigError, match="cannot be added.*index --index bm25"):
        retriever.add(["x"], ["text"])
    with pytest.raises(DataError, match="rank takes one text"):
        retriever.rank(["a", "b"])


def test_removed_documents_are_never_returned_and_the_others_keep_their_scores():
    retriever = LexicalRetriever.build(DOCUMENTS)
    before = retriever.search("cat dog night", 10)["0"]
    assert retriever.remove(["dogs", "dogs", "unknown"]) == 1 and retriever.remove("dogs") == 0
    assert retriever.search("cat dog night", 10)["0"] == {id: before[id] for id in before if id != "dogs"}
    assert len(retriever) == 3 and retriever.stats()["removed"] == 1
    with pytest.raises(DataError, match="'dogs' is not among the 3"):
        retriever.score("dog", ["dogs"])


def test_removals_are_committed_and_travel_with_a_copy(tmp_path):
    queries = {"1": "cat night", "2": "tea"}
    LexicalRetriever.build(DOCUMENTS).save(tmp_path / "bm25")
    first, second = LexicalRetriever.open(tmp_path / "bm25"), LexicalRetriever.open(tmp_path / "bm25")
    first.remove("cats")
    assert len(LexicalRetriever.open(tmp_path / "bm25")) == 4
    assert first.commit() == 2
    opened = LexicalRetriever.open(tmp_path / "bm25")
    assert dict(opened.search(queries)) == dict(first.search(queries)) and len(opened) == 3
    assert opened.document("cats") is None and opened.document("tea").title == "Tea"
    # whoever opened before keeps what it opened, and may not overwrite what it has not seen
    assert "cats" in second.search(queries)["1"]
    second.remove("tea")
    with pytest.raises(ShortlistError, match="generation 2, opened was 1"):
        second.commit()
    opened.save(tmp_path / "copy")
    copy = LexicalRetriever.open(tmp_path / "copy")
    assert dict(copy.search(queries)) == dict(opened.search(queries)) and copy.document("tea").title == "Tea"
    copy.remove("tea")
    assert copy.commit() == 2
    assert len(list((tmp_path / "copy").glob("removed-*.npy"))) == 1
    with pytest.raises(ConfigError, match="save it first"):
        LexicalRetriever.build(DOCUMENTS).commit()


def test_a_second_writer_is_told(tmp_path):
    from shortlist.indexes.directory import lock_directory

    retriever = LexicalRetriever.build(DOCUMENTS)
    retriever.save(tmp_path / "bm25")
    retriever.remove("cats")
    handle = lock_directory(tmp_path / "bm25")
    try:
        with pytest.raises(ShortlistError, match="another process is writing"):
            retriever.commit()
    finally:
        os.close(handle)
    assert retriever.commit() == 2


def test_a_crash_before_the_manifest_leaves_the_old_index(tmp_path, monkeypatch):
    from shortlist.retrieval import lexical_files

    retriever = LexicalRetriever.build(DOCUMENTS)
    retriever.save(tmp_path / "bm25")
    retriever.remove("cats")

    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(lexical_files, "write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        retriever.commit()
    assert len(LexicalRetriever.open(tmp_path / "bm25")) == 4
    monkeypatch.undo()
    assert retriever.commit() == 2 and len(LexicalRetriever.open(tmp_path / "bm25")) == 3


def test_documents_are_stored_unless_they_are_not_wanted(tmp_path):
    # user-reports C.89: an index that can return the text
    corpus = {"a": {"text": "green tea", "title": "Tea", "year": 2001}, "b": {"text": "coffee"}}
    retriever = LexicalRetriever.build(corpus)
    retriever.save(tmp_path / "with")
    retriever.save(tmp_path / "without", documents=False)
    found = LexicalRetriever.open(tmp_path / "with").rank("tea", 1)[0].document
    assert (found.id, found.title, found.text, found.metadata) == ("a", "Tea", "green tea", {"year": 2001})
    assert LexicalRetriever.open(tmp_path / "without").rank("tea", 1)[0].document is None
    assert not list((tmp_path / "without").glob("docs*"))
    opened = LexicalRetriever.open(tmp_path / "with")
    for searched in (retriever, opened):
        assert list(searched.search("tea coffee", filter="year >= 2000")["0"]) == ["a"]
        assert list(searched.search("tea coffee", filter={"b", "x"})["0"]) == ["b"]
    opened.remove("a")
    assert list(opened.search("tea coffee", filter="year >= 2000")["0"]) == []


def test_the_settings_of_the_language_travel_with_the_index(tmp_path):
    LexicalRetriever.build({"a": "Häuser"}, language="german", stopwords=["und"]).save(tmp_path / "bm25")
    opened = LexicalRetriever.open(tmp_path / "bm25")
    assert opened.settings() == {
        "k1": 0.9, "b": 0.4, "language": "german", "stemmer": "german", "stopwords": ["und"],
        "template": "{title} {text}",
    }  # fmt: skip
    assert list(opened.search("und haus")["0"]) == ["a"]


def test_a_saved_index_opens_to_the_same_run(tmp_path, retriever):
    queries = {"1": "cat night", "2": "tea", "3": "nothing"}
    retriever.save(tmp_path / "bm25")
    opened = LexicalRetriever.open(tmp_path / "bm25")
    assert dict(opened.search(queries, 3)) == dict(retriever.search(queries, 3))
    assert isinstance(opened._scorer.scores["data"], np.memmap)
    assert (len(opened), opened.k1, opened.b, opened.template) == (4, 0.9, 0.4, "{title} {text}")
    with pytest.raises(OutputExistsError):
        retriever.save(tmp_path / "bm25")
    opened.save(tmp_path / "bm25", overwrite=True)
    again = LexicalRetriever.open(tmp_path / "bm25")
    assert dict(again.search(queries, 3)) == dict(retriever.search(queries, 3))
    assert not [file for file in tmp_path.iterdir() if file.name != "bm25"]


def test_a_damaged_index_is_refused_by_the_name_of_the_file(tmp_path, retriever):
    # issue 2, done item 7
    with pytest.raises(MissingInputError, match="nowhere"):
        LexicalRetriever.open(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="not a BM25 index"):
        LexicalRetriever.open(tmp_path / "other")
    retriever.save(tmp_path / "cut")
    file = tmp_path / "cut" / "data.csc.index.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"data\.csc\.index\.npy has \d+ bytes"):
        LexicalRetriever.open(tmp_path / "cut")
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        LexicalRetriever.open(tmp_path / "cut")
    retriever.save(tmp_path / "changed")
    file = tmp_path / "changed" / "vocab.index.json"
    file.write_bytes(file.read_bytes().replace(b"tea", b"eat"))
    with pytest.raises(DataError, match=r"content of .*vocab\.index\.json was changed"):
        LexicalRetriever.open(tmp_path / "changed")
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(json.dumps({"format": "shortlist-bm25", "format_version": 99}))
    with pytest.raises(DataError, match="upgrade"):
        LexicalRetriever.open(tmp_path / "other")


def test_nothing_is_pickled(tmp_path, retriever):
    retriever.save(tmp_path / "bm25")
    for file in (tmp_path / "bm25").glob("*.npy"):
        np.load(file, allow_pickle=False)
    assert {file.suffix for file in (tmp_path / "bm25").iterdir()} <= {".npy", ".json", ".jsonl", ".utf8"}


def test_the_toy_collection_is_found(toy_beir):
    from shortlist.data import load_collection

    collection = load_collection(toy_beir)
    retriever = LexicalRetriever.build(collection.corpus)
    run = retriever.search(collection.queries("test"), 10)
    qrels = collection.qrels("test")
    assert list(run) == list(collection.queries("test"))
    assert sum(any(document in run[query] for document in qrels.relevant(query)) for query in qrels) >= len(qrels) / 2

"""BM25: the formula, plain-text queries, exact ties, and an index directory that is whole or refused."""

import json
import logging
import math
from collections import Counter

import numpy as np
import pytest

from shortlist.data import Corpus
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError
from shortlist.retrieval.lexical import Analyzer, LexicalRetriever

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
    ):
        with pytest.raises(ConfigError):
            LexicalRetriever.build({"a": "text"}, **options)


def test_stems_and_stop_words_are_options():
    assert Analyzer()("The Running of the dogs") == ["run", "dog"]
    assert Analyzer(stemmer=None, stopwords=None)("The dogs") == ["the", "dogs"]
    assert Analyzer(stemmer="german", stopwords=["der"])("der Hunde") == ["hund"]
    assert list(LexicalRetriever.build({"a": "dogs"}, stemmer=None).search("dog", 1)["0"]) == []


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
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(json.dumps({"format": "shortlist-bm25", "format_version": 99, "files": {}}))
    with pytest.raises(DataError, match="upgrade"):
        LexicalRetriever.open(tmp_path / "other")


def test_nothing_is_pickled(tmp_path, retriever):
    retriever.save(tmp_path / "bm25")
    for file in (tmp_path / "bm25").glob("*.npy"):
        np.load(file, allow_pickle=False)
    assert {file.suffix for file in (tmp_path / "bm25").iterdir()} <= {".npy", ".json", ".utf8"}


def test_the_toy_collection_is_found(toy_beir):
    from shortlist.data import load_collection

    collection = load_collection(toy_beir)
    retriever = LexicalRetriever.build(collection.corpus)
    run = retriever.search(collection.queries("test"), 10)
    qrels = collection.qrels("test")
    assert list(run) == list(collection.queries("test"))
    assert sum(any(document in run[query] for document in qrels.relevant(query)) for query in qrels) >= len(qrels) / 2

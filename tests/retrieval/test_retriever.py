"""`Retriever`: queries in, run out, and only with the model that built the index."""

import logging

import numpy as np
import pytest

from shortlist import ExactIndex, FaissIndex, Retriever
from shortlist.data import Corpus, Document
from shortlist.errors import ConfigError, DataError, IndexMismatchError
from shortlist.indexes import build_index, open_index
from shortlist.types import rank_order

LETTERS = "abcdefgh"


class LetterEncoder:
    """Counts letters: a vector one can compute by eye."""

    dim = len(LETTERS)
    fingerprint = "letters-1"
    source = "letters"

    def encode_queries(self, texts):
        return np.array([[text.count(letter) for letter in LETTERS] for text in texts], np.float32)

    encode_documents = encode_queries

    def settings(self):
        return {"dtype": "float32", "query_max_length": 8, "device": "cpu"}


TEXTS = {"d1": "abc", "d2": "aab", "d3": "hhh", "d4": "abc", "b c": "ddda"}


@pytest.fixture(params=[ExactIndex, FaissIndex])
def retriever(request):
    encoder = LetterEncoder()
    return Retriever(encoder, request.param.build(encoder, TEXTS))


def expected(query, k, without=()):
    ids = [id for id in TEXTS if id not in without]
    vectors = LetterEncoder().encode_documents([TEXTS[id] for id in ids])
    scores = vectors @ LetterEncoder().encode_queries([query])[0]
    return {ids[row]: float(scores[row]) for row in rank_order(ids, scores)[:k]}


def test_a_mapping_keeps_its_ids_and_order(retriever):
    run = retriever.search({"q2": "a", "q1": "ch"}, 3)
    assert list(run) == ["q2", "q1"] and run.name == "dense"
    assert dict(run["q2"]) == expected("a", 3) and dict(run["q1"]) == expected("ch", 3)
    assert list(run["q2"]) == list(expected("a", 3))


def test_a_list_or_a_text_gets_positions_as_ids(retriever):
    assert list(retriever.search(["a", "b"], 1, name="mine")) == ["0", "1"]
    assert dict(retriever.search("a", 2)["0"]) == expected("a", 2)
    assert len(retriever.search([], 2)) == 0 and len(retriever.search({}, 2)) == 0


def test_k_beyond_the_index_and_none_give_all(retriever):
    # user-reports D.93
    assert dict(retriever.search("a", 99)["0"]) == expected("a", 99)
    assert dict(retriever.search("a", None)["0"]) == expected("a", 99)
    for k in (0, -1):
        with pytest.raises(ConfigError, match="at least 1"):
            retriever.search("a", k)


def test_the_own_document_is_left_out_and_the_list_stays_full(retriever):
    run = retriever.search({"d2": "aab", "other": "aab"}, 3, exclude_self=True)
    assert dict(run["d2"]) == expected("aab", 3, without=["d2"]) and len(run["d2"]) == 3
    assert dict(run["other"]) == expected("aab", 3)


def test_filtered_documents_are_left_out_and_the_list_stays_full(retriever):
    # methods-dexml-lite §4.2: the pairs are removed before ranking, not from a list that is cut already
    filters = {"q": {"d2", "d1"}, "nobody": {"d3"}}
    run = retriever.search({"q": "aab", "other": "aab"}, 3, filters=filters)
    assert dict(run["q"]) == expected("aab", 3, without=["d2", "d1"]) and len(run["q"]) == 3
    assert dict(run["other"]) == expected("aab", 3)
    both = retriever.search({"d3": "aab"}, 2, exclude_self=True, filters={"d3": ["d2"]})
    assert dict(both["d3"]) == expected("aab", 2, without=["d2", "d3"])


def test_a_query_that_is_no_text_is_named(retriever):
    with pytest.raises(DataError, match="'q1'"):
        retriever.search({"q1": None}, 1)
    with pytest.raises(DataError, match="texts is NoneType"):
        retriever.search(None, 1)
    with pytest.raises(DataError, match="query is list; rank takes one text"):
        retriever.rank(["a", "b"])


@pytest.mark.parametrize("results", [1, 7, 1 << 20])
def test_results_do_not_depend_on_how_queries_are_sliced(retriever, results, monkeypatch):
    # user-reports C.67
    from shortlist.retrieval import search

    queries = {f"q{number}": LETTERS[number % 8] * (1 + number % 3) for number in range(50)}
    whole = retriever.search(queries, 4)
    monkeypatch.setattr(search, "_SLICE", 7)
    monkeypatch.setattr(search, "_RESULTS", results)
    assert dict(retriever.search(queries, 4)) == dict(whole)


def test_another_model_is_refused_naming_both(retriever):
    # user-reports C.69, C.70
    other = LetterEncoder()
    other.fingerprint, other.source = "letters-2", "their/letters"
    with pytest.raises(IndexMismatchError, match=r"letters \(fingerprint letters-1\).*their/letters.*letters-2"):
        Retriever(other, retriever.index)
    other.dim = 9
    with pytest.raises(IndexMismatchError, match="9 dimensions, the index has 8"):
        Retriever(other, retriever.index)


def test_an_index_without_a_fingerprint_passes():
    index = ExactIndex(8)
    index.add(list(TEXTS), LetterEncoder().encode_documents(TEXTS.values()))
    assert dict(Retriever(LetterEncoder(), index).search("a", 2)["0"]) == expected("a", 2)


def test_settings_that_differ_are_noted(retriever, caplog):
    retriever.index.model["query_max_length"] = 512
    with caplog.at_level(logging.INFO, logger="shortlist"):
        Retriever(LetterEncoder(), retriever.index)
    assert "query_max_length was 512, is 8" in caplog.text


def test_any_index_with_the_protocol_will_do():
    class ListIndex:
        dim = 8

        def __len__(self):
            return 2

        def search(self, vectors, k):
            return [[("x", 1.0), ("y", 0.5)][:k] for _ in vectors]

    retriever = Retriever(LetterEncoder(), ListIndex())
    assert dict(retriever.search(["a"], 5)["0"]) == {"x": 1.0, "y": 0.5}
    assert [result.id for result in retriever.rank("a", 1)] == ["x"]


def test_rank_brings_the_documents(tmp_path, retriever):
    # user-reports C.89
    assert [(result.id, result.rank, result.document) for result in retriever.rank("a", 1)] == [("d2", 1, None)]
    corpus = Corpus.from_documents(TEXTS)
    assert Retriever(LetterEncoder(), retriever.index, corpus=corpus).rank("a", 1)[0].document.text == "aab"
    vectors = LetterEncoder().encode_documents(TEXTS.values())
    documents = [Document(id, f"Title of {id}", text) for id, text in TEXTS.items()]
    build_index(tmp_path / "index", [(list(TEXTS), vectors)], dim=8, documents=documents)
    results = Retriever(LetterEncoder(), open_index(tmp_path / "index")).rank("d", 2)
    assert results[0].document == Document("b c", "Title of b c", "ddda") and len(results) == 2


def test_a_filter_limits_search_and_rank():
    encoder = LetterEncoder()
    documents = [Document(f"d{row}", "", "a" * row, {"year": 2000 + row}) for row in range(20)]
    index = ExactIndex(encoder.dim)
    vectors = encoder.encode_documents([document.text for document in documents])
    index.add([document.id for document in documents], vectors, documents=documents)
    retriever = Retriever(encoder, index)
    run = retriever.search({"q": "a", "d18": "a"}, k=3, filter="year < 2019", exclude_self=True)
    assert list(run["q"]) == ["d18", "d17", "d16"] and list(run["d18"]) == ["d17", "d16", "d15"]
    assert list(retriever.search("a", None, filter={"d3", "d5", "x"})["0"]) == ["d5", "d3"]
    (best,) = retriever.rank("a", 5, filter="id == 'd7'")
    assert best.document.metadata == {"year": 2007} and best.rank == 1
    with pytest.raises(ConfigError, match="did you mean 'year'"):
        retriever.search("a", filter="yer > 3")
    with pytest.raises(ConfigError, match="did you mean 'year'"):
        retriever.rank("a", filter="yer > 3")


def test_an_index_of_ones_own_gets_the_filter():
    class Own:
        dim = 2

        def __len__(self):
            return 3

        def search(self, vectors, k, filter=None):
            return [[("a", 1.0)] if filter is None or "a" in filter.wanted else []] * len(vectors)

    class Encoder:
        dim, fingerprint = 2, "x"

        def encode_queries(self, texts):
            return np.zeros((len(texts), 2), np.float32)

    retriever = Retriever(Encoder(), Own())
    assert list(retriever.search("x", 1)["0"]) == ["a"]
    assert list(retriever.search("x", 1, filter={"b"})["0"]) == []

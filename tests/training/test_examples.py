"""What counts as a positive and what may be a negative: by id and by text, for equal queries too."""

import logging

import numpy as np
import pytest

from shortlist.data import Corpus, Document, RankedList
from shortlist.errors import DataError
from shortlist.training.examples import Documents, build_examples, examples_from_lists
from shortlist.training.negatives import mine_negatives, read_negatives, with_negatives
from shortlist.types import Run

CORPUS = {
    "d0": "the moon has phases",
    "d1": "bread needs flour",
    "d2": "the moon has phases",  # the text of d0 under another id
    "d3": "fever and cough",
    "d4": "volcanoes erupt",
}


@pytest.fixture
def documents():
    return Documents(Corpus.from_documents(CORPUS))


def test_several_positives_of_a_query_stay_in_one_example(documents):
    found = build_examples({"q": "moon"}, {"q": {"d0": 1, "d3": 2, "d4": 0}}, documents)
    assert len(found) == 1
    (example,) = found
    assert example.positives.tolist() == [0, 3]
    assert example.grades.tolist() == [1.0, 2.0]
    assert example.negatives.tolist() == [4]


def test_given_negatives_that_are_positives_by_id_or_by_text_are_removed(documents):
    # user-reports B.33: equal documents and known positives are handled by the data, whatever the file says
    found = build_examples({"q": "moon"}, {"q": {"d0": 1}}, documents, negatives={"q": ["d0", "d2", "d3"]})
    assert found.examples[0].negatives.tolist() == [3]


def test_queries_of_equal_text_share_their_positives(documents):
    # user-reports B.34: similar queries in one batch become false negatives
    found = build_examples({"a": "moon", "b": " moon "}, {"a": {"d0": 1}, "b": {"d3": 1}}, documents)
    assert found.known[0] == found.known[1]
    assert set(found.known[0]) == {documents.key(0), documents.key(3)}


def test_judgements_that_point_nowhere_are_counted_and_left_out(documents, caplog):
    with caplog.at_level(logging.WARNING):
        found = build_examples(
            {"q": "moon", "r": "bread"}, {"q": {"d0": 1, "gone": 1}, "r": {"lost": 1}, "untold": {"d1": 1}}, documents
        )
    assert [example.query_id for example in found] == ["q"]
    assert "2 judged or given documents are not in the corpus" in caplog.text
    assert "2 judged queries have no text or no positive" in caplog.text


def test_no_training_query_at_all_is_an_error(documents):
    # user-reports B.53
    with pytest.raises(DataError, match="no training query has a positive document"):
        build_examples({"q": "moon"}, {"q": {"gone": 1}}, documents)


def test_titles_become_queries_for_their_own_document():
    corpus = Corpus.from_documents(
        [Document("a", "Moon", "it has phases"), Document("b", "", "no title"), Document("c", "Title only", "")]
    )
    found = build_examples({"q": "bread"}, {"q": {"b": 1}}, Documents(corpus), title_queries=True)
    assert [(example.query_id, example.query) for example in found] == [("q", "bread"), ("title:a", "Moon")]
    assert found.examples[1].positives.tolist() == [0]


def test_lists_give_positives_negatives_and_teacher_scores(documents):
    ranked = RankedList(
        "q", "moon", [Document("d0"), Document("d2"), Document("d3"), Document("d4")], [1, 0, 0, None], [9, 8, 1, 2]
    )
    (example,) = examples_from_lists([ranked], documents)
    assert example.positives.tolist() == [0]
    assert example.negatives.tolist() == [3]  # d2 has the text of d0; d4 is not judged
    (taught,) = examples_from_lists([ranked], documents, teacher=True)
    assert set(taught.negatives.tolist()) == {3, 4}
    assert taught.teacher == {0: 9.0, 2: 8.0, 3: 1.0, 4: 2.0}


def test_lists_without_scores_cannot_teach(documents):
    ranked = RankedList("q", "moon", [Document("d0"), Document("d3")], [1, 0])
    with pytest.raises(DataError, match="has 0 teacher scores"):
        examples_from_lists([ranked], documents, teacher=True)


def test_lists_with_unknown_documents_and_no_lists_are_refused(documents):
    with pytest.raises(DataError, match="names document 'x'"):
        examples_from_lists([RankedList("q", "moon", [Document("x")], [1])], documents)
    with pytest.raises(DataError, match="no list with a positive"):
        examples_from_lists([], documents)


def test_mined_negatives_are_without_known_positives_by_id_and_by_text(documents, tmp_path):
    examples = build_examples({"a": "moon", "b": "bread"}, {"a": {"d0": 1}, "b": {"d1": 1}}, documents)
    asked = {}

    def search(queries, depth):
        asked.update(queries=dict(queries), depth=depth)
        return Run({query: {"d0": 5.0, "d1": 4.0, "d2": 3.0, "d3": 2.0} for query in queries})

    path = tmp_path / "negatives.jsonl.gz"
    mine_negatives(path, examples, search, depth=4)
    assert asked == {"queries": {"a": "moon", "b": "bread"}, "depth": 4}
    negatives = read_negatives(path, documents)
    assert {query: rows.tolist() for query, rows in negatives.items()} == {"a": [1, 3], "b": [0, 2, 3]}
    assert with_negatives(examples, negatives).examples[0].negatives.tolist() == [1, 3]
    other = Documents(Corpus.from_documents({"d1": "bread"}))
    with pytest.raises(DataError, match="line 1: document 'd3' is not in the corpus"):
        read_negatives(path, other)


def test_unique_rows_keep_the_first_of_equal_texts(documents):
    assert documents.unique_rows().tolist() == [0, 1, 3, 4]
    assert documents.unique_rows().dtype == np.int32

"""What counts as a positive and what may be a negative: by id and by text, for equal queries too."""

import logging

import numpy as np
import pytest
import scipy.sparse

from shortlist.data import Corpus, Document, RankedList
from shortlist.data.label_qrels import LabelQrels
from shortlist.errors import DataError
from shortlist.training.documents import Documents
from shortlist.training.examples import build_examples, examples_from_lists
from shortlist.training.weights import propensity_weights

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


def known(examples, index):
    return examples.known.row(examples.groups[index]).tolist()


def test_several_positives_of_a_query_stay_in_one_example(documents):
    found = build_examples({"q": "moon"}, {"q": {"d0": 1, "d3": 2, "d4": 0}}, documents)
    assert len(found) == 1
    (example,) = found
    assert example.positives.tolist() == [0, 3]
    assert example.grades.tolist() == [1.0, 2.0]
    assert example.negatives["given"].tolist() == [4]


def test_given_negatives_that_are_positives_by_id_or_by_text_are_removed(documents):
    # user-reports B.33: equal documents and known positives are handled by the data, whatever the file says
    found = build_examples({"q": "moon"}, {"q": {"d0": 1}}, documents, negatives={"q": ["d0", "d2", "d3"]})
    assert found[0].negatives["given"].tolist() == [3]


def test_copies_of_a_positive_are_one_positive_with_the_highest_grade(documents):
    found = build_examples({"q": "moon"}, {"q": {"d2": 3, "d0": 1}}, documents)
    assert found[0].positives.tolist() == [0] and found[0].grades.tolist() == [3.0]
    assert found.judged.row(0).tolist() == [0, 2]  # what the judgements name is kept beside it


def test_rows_are_documents_of_their_own_where_each_has_a_free_vector():
    documents = Documents(Corpus.from_documents(CORPUS), by_row=True)
    found = build_examples({"q": "moon"}, {"q": {"d2": 1}}, documents, negatives={"q": ["d0"]})
    assert found[0].positives.tolist() == [2] and found[0].negatives["given"].tolist() == [0]
    assert documents.unique_rows().tolist() == [0, 1, 2, 3, 4]


def test_queries_of_equal_text_share_their_positives(documents):
    # user-reports B.34: similar queries in one batch become false negatives
    found = build_examples({"a": "moon", "b": " moon ", "c": "bread"}, {"a": {"d2": 1}, "b": {"d3": 1}, "c": {"d1": 1}},
                           documents)  # fmt: skip
    assert known(found, 0) == known(found, 1) == [0, 3]
    assert found[0].positives.tolist() == [0] and known(found, 2) == [1]
    mask = found.is_known(np.array([0, 0, 1, 2, 2]), np.array([2, 3, 2, 3, 1]))
    assert mask.tolist() == [True, True, True, False, True]


def test_judgements_that_point_nowhere_are_counted_and_left_out(documents, caplog):
    with caplog.at_level(logging.WARNING):
        found = build_examples(
            {"q": "moon", "r": "bread"}, {"q": {"d0": 1, "gone": 1}, "r": {"lost": 1}, "untold": {"d1": 1}}, documents
        )
    assert [example.query_id for example in found] == ["q"]
    assert "2 judged documents are not in the corpus" in caplog.text
    assert "2 judged queries have no text or no positive" in caplog.text


def test_no_training_query_at_all_is_an_error(documents):
    # user-reports B.53
    with pytest.raises(DataError, match="no training query has a positive document"):
        build_examples({"q": "moon"}, {"q": {"gone": 1}}, documents)


def test_the_first_usable_queries_are_kept_under_a_limit(documents):
    qrels = {"a": {"gone": 1}, "b": {"d1": 1}, "c": {"d3": 1}, "d": {"d4": 1}}
    found = build_examples({query: query for query in qrels}, qrels, documents, limit=2)
    assert [example.query_id for example in found] == ["b", "c"]


def test_titles_become_queries_for_their_own_document():
    corpus = Corpus.from_documents(
        [Document("a", "Moon", "it has phases"), Document("b", "", "no title"), Document("c", "Title only", "")]
    )
    found = build_examples({"q": "bread"}, {"q": {"b": 1}}, Documents(corpus), title_queries=True)
    assert [(example.query_id, example.query) for example in found] == [("q", "bread"), ("title:a", "Moon")]
    assert found[1].positives.tolist() == [0]
    assert found.num_titles == 1


def test_a_label_matrix_gives_what_its_dictionary_gives(documents):
    random = np.random.default_rng(0)
    matrix = scipy.sparse.random(30, 5, density=0.4, format="csr", dtype=np.float32, random_state=1)
    matrix.data[:] = random.integers(0, 4, len(matrix.data))
    qrels = LabelQrels([f"q{row}" for row in range(30)], ["d3", "d0", "d2", "d1", "d4"], matrix)
    queries = {f"q{row}": f"text {row % 25}" for row in range(30)}
    ours = build_examples(queries, qrels, documents)
    plain = build_examples(queries, {query: dict(qrels[query]) for query in qrels}, documents)
    assert ours.query_ids == plain.query_ids
    for one, other in zip(ours, plain, strict=True):
        assert one.positives.tolist() == other.positives.tolist() and one.grades.tolist() == other.grades.tolist()
    for index in range(len(ours)):
        assert known(ours, index) == known(plain, index)


def test_real_relevance_of_a_label_matrix_is_kept(documents):
    matrix = scipy.sparse.csr_matrix(np.array([[0.5, 0, 0, 0.25, 0]], np.float32))
    found = build_examples({"q": "moon"}, LabelQrels(["q"], list(CORPUS), matrix), documents)
    assert found[0].positives.tolist() == [0, 3] and found[0].grades.tolist() == [0.5, 0.25]


def test_lists_give_positives_negatives_and_teacher_scores(documents):
    ranked = RankedList(
        "q", "moon", [Document("d0"), Document("d2"), Document("d3"), Document("d4")], [1, 0, 0, None], [9, 8, 1, 2]
    )
    (example,) = examples_from_lists([ranked], documents)
    assert example.positives.tolist() == [0]
    assert example.negatives["given"].tolist() == [3]  # d2 has the text of d0; d4 is not judged
    (taught,) = examples_from_lists([ranked], documents, teacher=True)
    assert set(taught.negatives["given"].tolist()) == {3, 4}
    assert taught.teacher == {0: 9.0, 3: 1.0, 4: 2.0}  # of copies the higher score


def test_what_the_qrels_judge_relevant_is_no_negative_of_a_list(documents, caplog):
    # user-reports B.33, B.37: d2 is a copy of d0, which is judged; the list of the other query brings d4
    lists = [
        RankedList("a", "moon", [Document("d1"), Document("d2"), Document("d3")], [1, 0, 0]),
        RankedList("b", "lava", [Document("d4"), Document("d3"), Document("d1")], [1, 0, 0]),
        RankedList("c", " moon ", [Document("d1"), Document("d4")], [1, 0]),
    ]
    qrels = {"a": {"d0": 1, "d4": 2, "d3": 0, "gone": 1}, "elsewhere": {"d3": 1}}
    with caplog.at_level(logging.INFO):
        found = examples_from_lists(lists, documents, qrels=qrels)
    assert [example.negatives["given"].tolist() for example in found] == [[3], [1, 3], []]
    assert "2 given negatives are known positives (by id or by text) and were removed." in caplog.text
    assert known(found, 0) == [0, 1, 4] and known(found, 1) == [4] and known(found, 2) == [0, 1, 4]
    assert found.known.weights(int(found.groups[0])).tolist() == [1.0, 1.0, 2.0]
    assert [example.positives.tolist() for example in found] == [[1], [4], [1]]
    without = examples_from_lists(lists, documents)
    assert without[0].negatives["given"].tolist() == [0, 3] and known(without, 0) == [1]


def test_a_list_of_a_teacher_stays_whole_whatever_the_qrels_say(documents):
    ranked = RankedList("q", "moon", [Document("d0"), Document("d1"), Document("d3")], [1, None, None], [9, 8, 1])
    found = examples_from_lists([ranked], documents, qrels={"q": {"d1": 1}}, teacher=True)
    assert found[0].negatives["given"].tolist() == [1, 3] and found[0].teacher == {0: 9.0, 1: 8.0, 3: 1.0}
    assert known(found, 0) == [0, 1]


def test_lists_without_scores_cannot_teach(documents):
    ranked = RankedList("q", "moon", [Document("d0"), Document("d3")], [1, 0])
    with pytest.raises(DataError, match="has 0 teacher scores"):
        examples_from_lists([ranked], documents, teacher=True)


def test_lists_with_unknown_documents_and_no_lists_are_refused(documents):
    with pytest.raises(DataError, match="names document 'x'"):
        examples_from_lists([RankedList("q", "moon", [Document("x")], [1])], documents)
    with pytest.raises(DataError, match="no list with a positive"):
        examples_from_lists([], documents)


def test_unique_rows_keep_the_first_of_equal_texts(documents):
    assert documents.unique_rows().tolist() == [0, 1, 3, 4]
    assert documents.unique_rows().dtype == np.int32


def test_propensity_weights_are_those_of_psp_with_mean_one(documents):
    qrels = {f"q{number}": {"d0": 1} for number in range(8)} | {"r": {"d1": 1}, "s": {"d1": 1, "d3": 1}}
    found = build_examples({query: query for query in qrels}, qrels, documents)
    weights = propensity_weights(found, propensity=(0.55, 1.5))
    counts = np.array([8, 2, 0, 1, 0])
    expected = 1 + (np.log(10) - 1) * 2.5**0.55 * (counts + 1.5) ** -0.55
    assert np.allclose(weights / weights[0], expected / expected[0], rtol=1e-5)
    assert np.isclose((weights * counts).sum() / counts.sum(), 1, atol=1e-6)

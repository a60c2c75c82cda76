"""Runs, qrels and the one tie rule."""

import numpy as np
import pytest

from shortlist import Qrels, Run
from shortlist.errors import ConfigError, DataError
from shortlist.types import check_k, rank_order, strictly_decreasing


def slow_order(ids, scores):
    values = [np.float32(score) for score in scores]
    order = sorted(range(len(ids)), key=lambda i: ids[i], reverse=True)
    return sorted(order, key=lambda i: -values[i])


def test_rank_order_equals_the_slow_rule_with_many_ties():
    generator = np.random.default_rng(0)
    for size in [0, 1, 2, 7, 200]:
        ids = [f"d{number}" for number in generator.permutation(size)]
        scores = generator.integers(0, 5, size) / 7
        assert rank_order(ids, scores).tolist() == slow_order(ids, scores)


def test_ties_are_broken_by_document_id_descending():
    # user-reports E.111: what trec_eval does; "9" is above "10" because ids are strings
    assert list(Run({"q": {"10": 1.0, "9": 1.0, "a": 1.0}})["q"]) == ["a", "9", "10"]


def test_scores_that_differ_beyond_float32_are_ties():
    # user-reports J: float32 inside
    assert list(Run({"q": {"a": 16777217.0, "b": 16777216.0}})["q"]) == ["b", "a"]


def test_insertion_order_does_not_matter():
    # user-reports E.114: stable total order
    forward = Run({"q": {str(i): 1.0 for i in range(50)}})
    backward = Run({"q": {str(i): 1.0 for i in reversed(range(50))}})
    assert forward.ranking("q")[0] == backward.ranking("q")[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_a_non_finite_score_is_refused_by_query_and_document(bad):
    with pytest.raises(DataError, match="query 'q7'.*document 'd2'.*finite"):
        Run({"q7": {"d1": 1.0, "d2": bad}})


def test_a_repeated_document_is_refused():
    # user-reports A.31
    with pytest.raises(DataError, match="document 'd' is ranked twice for query 'q'"):
        Run({"q": [("d", 1.0), ("e", 0.5), ("d", 0.2)]})


def test_written_scores_are_strictly_decreasing():
    # user-reports E.115
    scores, nudged = strictly_decreasing([1.0, 1.0, 1.0, 0.5, 0.5, -2.0])
    assert nudged == 3 and (np.diff(scores) < 0).all() and scores.dtype == np.float32
    assert strictly_decreasing([3.0, 2.0])[1] == 0
    assert strictly_decreasing([])[1] == 0
    zeros, _ = strictly_decreasing([0.0] * 1000)
    assert (np.diff(zeros) < 0).all() and np.abs(zeros).max() < 1e-30


def test_ids_are_strings_at_the_door():
    # user-reports A.17, E (integer ids)
    run, qrels = Run({1: {2: 0.5}}), Qrels({1: {2: 1}})
    assert run["1"] == {"2": 0.5} and qrels["1"] == {"2": 1}


def test_scores_at_the_lowest_float32_are_told_apart_without_an_infinity():
    lowest = np.finfo(np.float32).min
    scores, _ = strictly_decreasing([1.0, lowest, lowest, lowest])
    assert np.isfinite(scores).all() and (np.diff(scores) < 0).all() and scores[0] == 1


@pytest.mark.parametrize("id", [1.0, None, True, b"d"])
def test_an_id_that_is_no_string_or_integer_is_refused(id):
    for make in (lambda: Run({"q": {id: 1}}), lambda: Run({id: {"d": 1}}), lambda: Qrels({"q": {id: 1}})):
        with pytest.raises(DataError, match="expected a string or an integer"):
            make()


@pytest.mark.parametrize("qrels", [{1: {"a": 1}, "1": {"b": 1}}, {"q": {1: 1, "1": 0}}])
def test_ids_that_become_equal_as_strings_are_refused_not_merged(qrels):
    with pytest.raises(DataError, match="equal as strings"):
        Qrels(qrels)


@pytest.mark.parametrize("scored", [["a", "b"], {"a": "high"}, {"a": 1 + 2j}, [("a", 1, 2)]])
def test_scores_of_another_shape_are_refused_by_query(scored):
    with pytest.raises(DataError, match="query 'q'"):
        Run({"q": scored})


@pytest.mark.parametrize("grade", ["x", 1.5, None, float("nan"), 2**31, 10**400])
def test_a_grade_that_is_no_whole_number_is_refused(grade):
    with pytest.raises(DataError, match="grade .* of document 'd' for query 'q'"):
        Qrels({"q": {"d": grade}})


def test_qrels_keep_negative_grades_and_do_not_call_them_relevant():
    qrels = Qrels({"q": {"a": -1, "b": 0, "c": 2.0}})
    assert qrels.relevant("q") == {"c": 2} and qrels["q"]["a"] == -1 and qrels.relevant("unknown") == {}


def test_run_top_and_ranking():
    run = Run({"q": {"a": 3, "b": 2, "c": 1}}, name="r")
    assert list(run.top(2)["q"]) == ["a", "b"] and run.top(2).name == "r"
    assert run.ranking("unknown")[0] == []
    with pytest.raises(DataError, match="k is 0"):
        run.top(0)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None, "5", float("nan"), float("inf")])
def test_k_below_one_is_refused(k):
    # user-reports D.93
    with pytest.raises(ConfigError, match="k is"):
        check_k(k)

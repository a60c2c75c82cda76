"""Extreme classification: propensities, PSP@k as a ratio of two means, filters before ranking."""

import math

import numpy as np
import pytest

from shortlist.errors import ConfigError
from shortlist.metrics import count_labels, evaluate, inverse_propensities

QRELS = {"t1": {"l1": 1, "l2": 1}, "t2": {"l3": 1}, "t3": {"l1": 1, "l2": 1, "l3": 1}}
RUN = {"t1": {"l1": 3, "l3": 2, "l2": 1}, "t2": {"l1": 2, "l3": 1}, "t3": {"l2": 3, "l3": 2, "l1": 1}}
COUNTS = {"l1": 50, "l2": 5, "l3": 1}


def inverse(label, a=0.55, b=1.5, n=100):
    return 1 + (math.log(n) - 1) * (b + 1) ** a * (COUNTS.get(label, 0) + b) ** -a


def psp(k, **constants):
    """The formula of the method page, as a slow loop."""
    gained, ideal = [], []
    for query, labels in QRELS.items():
        ranked = sorted(RUN[query], key=RUN[query].get, reverse=True)[:k]
        gained.append(sum(inverse(label, **constants) for label in ranked if label in labels) / k)
        best = sorted((inverse(label, **constants) for label in labels), reverse=True)[:k]
        ideal.append(sum(best) / k)
    return np.mean(gained) / np.mean(ideal)


def test_psp_is_a_ratio_of_two_means():
    result = evaluate(QRELS, RUN, ["PSP@1", "PSP@3", "P@1"], train_counts=COUNTS, num_train=100)
    assert result.mean["PSP@1"] == pytest.approx(psp(1)) and result.mean["PSP@3"] == pytest.approx(psp(3))
    assert np.mean([values["PSP@1"] for values in result.per_query.values()]) == pytest.approx(result.mean["PSP@1"])
    assert result.mean["P@1"] == pytest.approx(2 / 3)


def test_the_propensity_family_is_used_and_printed():
    # conventions §3: print which was used
    amazon = evaluate(QRELS, RUN, ["PSP@3"], train_counts=COUNTS, num_train=100, propensity=(0.6, 2.6))
    assert amazon.mean["PSP@3"] == pytest.approx(psp(3, a=0.6, b=2.6))
    assert amazon.settings["propensity"] == {"A": 0.6, "B": 2.6, "num_train": 100, "family": "amazon"}
    assert "A=0.6, B=2.6 (family amazon)" in str(amazon)


def test_a_perfect_run_has_psp_one():
    perfect = {query: {label: inverse(label) for label in labels} for query, labels in QRELS.items()}
    result = evaluate(QRELS, perfect, ["PSP@1", "PSP@5"], train_counts=COUNTS, num_train=100)
    assert result.mean == pytest.approx({"PSP@1": 1.0, "PSP@5": 1.0})


def test_a_label_never_seen_in_training_weighs_most():
    weights = inverse_propensities(["l1", "l3", "new"], COUNTS, num_train=100, propensity=(0.55, 1.5))
    assert weights["new"] > weights["l3"] > weights["l1"] > 1
    assert weights["new"] == pytest.approx(1 + (math.log(100) - 1) * 2.5**0.55 * 1.5**-0.55)


def test_psp_without_training_counts_says_what_is_needed():
    with pytest.raises(ConfigError, match="train_counts"):
        evaluate(QRELS, RUN, ["PSP@1"])
    with pytest.raises(ConfigError, match="too few"):
        evaluate(QRELS, RUN, ["PSP@1"], train_counts=COUNTS, num_train=1)


def test_training_counts_count_positive_grades():
    assert count_labels({"a": {"x": 1, "y": 0}, "b": {"x": 2}}) == {"x": 2}


def test_filtered_labels_are_removed_before_ranking():
    # methods-dexml-lite §4.1: without this the Amazon numbers are wrong
    plain = evaluate(QRELS, RUN, ["P@1", "R@2"])
    result = evaluate(QRELS, RUN, ["P@1", "R@2", "SetP"], filters={"t2": {"l1"}, "t1": ["l3", "never ranked"]})
    assert plain.per_query["t2"]["P@1"] == 0.0 and result.per_query["t2"]["P@1"] == 1.0
    assert plain.per_query["t1"]["R@2"] == 0.5 and result.per_query["t1"]["R@2"] == 1.0
    assert result.per_query["t2"]["SetP"] == 1.0
    assert result.counts["filtered"] == 2 and "filters" in str(result)


def test_defaults_are_the_xc_measures_when_training_counts_are_given():
    result = evaluate(QRELS, RUN, train_counts=COUNTS, num_train=100)
    assert result.measures == ["P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100"]


def test_many_labels_and_graded_relevance_count_as_binary_in_p():
    labels = {f"l{number}": 1 + number % 2 for number in range(300)}
    run = {f"l{number}": float(-number) for number in range(400)}
    result = evaluate({"t": labels}, {"t": run}, ["P@100", "R@100", "nDCG@400"])
    assert result.mean["P@100"] == 1.0 and result.mean["R@100"] == pytest.approx(1 / 3)


def test_lists_that_the_filters_leave_too_short_are_counted():
    # issue 3, item 7: a run cut at k and filtered afterwards has fewer than k
    result = evaluate(QRELS, RUN, ["P@3"], filters={"t1": {"l3"}, "t3": {"never ranked"}})
    assert result.counts["cut_short"] == 1 and "1 queries have too few documents left" in str(result)
    assert evaluate(QRELS, RUN, ["P@2"], filters={"t1": {"l3"}}).counts["cut_short"] == 0
    own = evaluate(
        {"a": {"b": 1}}, {"a": {"a": 2, "b": 1}}, ["P@2"], exclude_self=True, filters={"a": {"a"}}
    )  # one document, taken out once
    assert (own.counts["self_excluded"], own.counts["filtered"], own.counts["cut_short"]) == (1, 0, 1)


def test_points_without_labels_are_zero_and_counted():
    # methods-dexml-lite §3.5, pitfall 7
    qrels = QRELS | {"empty": {}}
    result = evaluate(qrels, RUN | {"empty": {"l1": 1}}, ["R@3", "nDCG@3", "PSP@3"], train_counts=COUNTS, num_train=100)
    assert result.per_query["empty"] == {"R@3": 0.0, "nDCG@3": 0.0, "PSP@3": 0.0}
    assert result.counts["without_relevant"] == 1
    plain = evaluate(QRELS, RUN, ["R@3", "PSP@3"], train_counts=COUNTS, num_train=100)
    assert result.mean["R@3"] == pytest.approx(plain.mean["R@3"] * 3 / 4)
    assert result.mean["PSP@3"] == pytest.approx(plain.mean["PSP@3"])  # nothing in either of the two means


def test_a_propensity_is_a_family_or_two_numbers():
    from shortlist.metrics.xc import parse_propensity, propensity_name

    assert parse_propensity("Amazon") == (0.6, 2.6) and parse_propensity("wikipedia") == (0.5, 0.4)
    assert parse_propensity("0.7, 1") == (0.7, 1.0) and propensity_name((0.7, 1.0)) == "own"
    for text in ("amazn", "0.5", "1,2,3", "0.5,0", "-1,1", "nan,1", "0.5,inf", "2,1e308", "1e308,1", "100,1e-300"):
        with pytest.raises(ConfigError, match="expected other, amazon, wikipedia"):
            parse_propensity(text)


def test_no_constants_that_are_taken_overflow():
    for a, b in [(5.0, 0.001), (5.0, 1000.0), (0.0, 0.001)]:
        weights = inverse_propensities(["l1", "new"], COUNTS, num_train=10**9, propensity=(a, b))
        assert all(np.isfinite(np.float32(weight)) for weight in weights.values())
    with pytest.raises(ConfigError, match="B from 0.001 to 1000"):
        evaluate(QRELS, RUN, ["PSP@1"], train_counts=COUNTS, num_train=100, propensity=(2.0, 1e308))

"""Measures by training frequency: hand-counted deciles, parts that add up, zero-shot labels apart."""

import numpy as np
import pytest

from shortlist.errors import ConfigError
from shortlist.metrics import evaluate

# Ten trained labels, one a decile: l0 has 10 training points, l9 has one; `new` has none.
COUNTS = {f"l{number}": 10 - number for number in range(10)} | {"new": 0}
QRELS = {
    "a": {"l0": 1, "l1": 1, "new": 1},
    "b": {"l0": 1, "l9": 1},
    "c": {"l5": 1},
    "none": {"l3": 0},
}
RUN = {
    "a": {"l0": 9, "new": 8, "l5": 7, "l1": 6},
    "b": {"l9": 9, "l1": 8, "l0": 7},
    "c": {"l0": 9, "l2": 8, "l5": 7},
    "none": {"l3": 1},
}
MEASURES = ["P@1", "P@2", "R@2", "R@3", "nDCG@2", "PSP@2", "RR"]
OPTIONS = {"train_counts": COUNTS, "num_train": 100, "by_frequency": True}


@pytest.fixture(scope="module")
def groups():
    return {group.name: group for group in evaluate(QRELS, RUN, MEASURES, **OPTIONS).by_frequency}


def test_the_groups_are_hand_counted(groups):
    assert list(groups) == [f"decile {n}" for n in range(1, 11)] + ["head", "torso", "tail", "zero-shot"]
    head, torso, tail, zero = (groups[name] for name in ("head", "torso", "tail", "zero-shot"))
    assert (head.labels, head.training_points, head.training_positives) == (1, (10, 10), 10)
    assert (torso.labels, torso.training_points, torso.training_positives) == (4, (6, 9), 30)
    assert (tail.labels, tail.training_points, tail.training_positives) == (5, (1, 5), 15)
    assert (zero.labels, zero.training_points, zero.training_positives) == (1, (0, 0), 0)
    assert [group.test_positives for group in (head, torso, tail, zero)] == [2, 1, 2, 1]
    assert [group.test_queries for group in (head, torso, tail, zero)] == [2, 1, 2, 1]
    assert groups["decile 10"].training_points == (1, 1) and groups["decile 10"].test_positives == 1


def test_recall_is_over_the_queries_that_have_a_label_of_the_group(groups):
    # head: a finds l0 in the top 2, b only at rank 3; tail: b finds l9, c finds l5 at rank 3
    assert groups["head"].values["R@2"] == 0.5 and groups["head"].values["R@3"] == 1.0
    assert groups["torso"].values["R@3"] == 0.0  # l1 of a stands at rank 4
    assert groups["tail"].values["R@2"] == 0.5 and groups["tail"].values["R@3"] == 1.0
    assert groups["zero-shot"].values["R@2"] == 1.0
    assert groups["decile 4"].values["R@2"] is None  # l3 is judged, and not relevant


def test_precision_is_the_summand_of_the_group(groups):
    # four queries, two places each: l0 (head) and new (zero-shot) of a, l9 (tail) of b
    assert [groups[name].values["P@2"] for name in ("head", "torso", "tail", "zero-shot")] == [0.125, 0, 0.125, 0.125]
    assert [groups[name].values["P@1"] for name in ("head", "torso", "tail", "zero-shot")] == [0.25, 0, 0.25, 0]


def test_what_cannot_be_split_is_left_out(groups):
    assert list(groups["head"].values) == MEASURES[:-1]
    with pytest.raises(ConfigError, match="holds none of these"):
        evaluate(QRELS, RUN, ["RR", "AP"], **OPTIONS)
    with pytest.raises(ConfigError, match="train_counts"):
        evaluate(QRELS, RUN, ["P@1"], by_frequency=True)


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_measures_of_the_run(seed):
    rng = np.random.default_rng(seed)
    labels = [f"l{number}" for number in range(47)]
    counts = {label: int(rng.integers(0, 6)) for label in labels[:-3]}  # three labels that training does not know
    qrels = {
        f"q{row}": {labels[i]: int(rng.integers(1, 4)) for i in rng.choice(47, rng.integers(0, 6), replace=False)}
        for row in range(30)
    }
    run = {query: {labels[i]: float(rng.random()) for i in rng.choice(47, 12, replace=False)} for query in qrels}
    measures = ["P@1", "P@5", "PSP@3", "nDCG@5", "nDCG@20"]
    result = evaluate(qrels, run, measures, train_counts=counts, num_train=80, by_frequency=True)
    *deciles, head, torso, tail, zero = result.by_frequency
    for measure in measures:
        parts = [group.values[measure] for group in (*deciles, zero)]
        assert sum(parts) == pytest.approx(result.mean[measure])
        assert sum(group.values[measure] for group in (head, torso, tail, zero)) == pytest.approx(result.mean[measure])
    trained = sorted((count for count in counts.values() if count), reverse=True)
    assert sum(group.labels for group in deciles) == len(trained)
    assert max(group.labels for group in deciles) - min(group.labels for group in deciles) <= 1
    bounds = [bound for group in deciles for bound in reversed(group.training_points)]
    assert bounds == sorted(bounds, reverse=True)
    assert zero.labels >= sum(count == 0 for count in counts.values())


def test_recall_of_a_group_equals_recall_with_the_judgements_cut_to_it():
    rng = np.random.default_rng(7)
    labels = [f"l{number}" for number in range(20)]
    counts = {label: 20 - number for number, label in enumerate(labels)}
    qrels = {f"q{row}": {labels[i]: 1 for i in rng.choice(20, 4, replace=False)} for row in range(25)}
    run = {query: {labels[i]: float(rng.random()) for i in rng.choice(20, 9, replace=False)} for query in qrels}
    groups = {
        group.name: group
        for group in evaluate(qrels, run, ["R@5"], train_counts=counts, by_frequency=True).by_frequency
    }
    for name, members in (("head", labels[:2]), ("torso", labels[2:10]), ("tail", labels[10:])):
        cut = {query: {label: 1 for label in judged if label in members} for query, judged in qrels.items()}
        cut = {query: judged for query, judged in cut.items() if judged}
        alone = evaluate(cut, {query: run[query] for query in cut}, ["R@5"])
        assert groups[name].values["R@5"] == pytest.approx(alone.mean["R@5"])


def test_fewer_labels_than_deciles_leave_some_empty():
    groups = {
        group.name: group
        for group in evaluate(
            {"q": {"x": 1}}, {"q": {"x": 1}}, ["R@1"], train_counts={"x": 2, "y": 1}, by_frequency=True
        ).by_frequency
    }
    assert sum(groups[f"decile {n}"].labels for n in range(1, 11)) == 2
    assert groups["head"].labels == 0 and groups["head"].values == {"R@1": None}
    assert groups["torso"].labels == 1 and groups["torso"].values == {"R@1": 1.0}


def test_the_table_is_part_of_the_text():
    printed = str(evaluate(QRELS, RUN, ["P@1", "R@2"], train_counts=COUNTS, by_frequency=True))
    assert "zero-shot" in printed and "6-9" in printed and "head is decile 1" in printed


def test_equal_counts_do_not_depend_on_the_order_of_the_labels():
    counts = dict.fromkeys((f"l{number}" for number in range(10)), 3)
    turned = dict(reversed(counts.items()))
    one, other = (
        evaluate(QRELS, RUN, MEASURES, **OPTIONS | {"train_counts": given}).by_frequency for given in (counts, turned)
    )
    assert one == other

"""Fusion: the sums of a slow obvious reference, every edge case by value, and weights that never lose on dev."""

import itertools
import logging
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortlist.errors import ConfigError, DataError
from shortlist.metrics import evaluate
from shortlist.retrieval.fusion import METHODS, fuse, normalised
from shortlist.retrieval.fusion_weights import distinct, tune_weights
from shortlist.types import Qrels, Run

# Few scores and few ids, so that ties and overlaps are common.
scores = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0]),
    st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6),
)
lists = st.dictionaries(st.sampled_from([f"d{n}" for n in range(12)]), scores, max_size=8)
runs = st.dictionaries(st.sampled_from(["q1", "q2", "q3"]), lists, max_size=3)


def reference(runs, method, k=60, weights=None, depth=None):
    """query → {document: score} by the definitions, one number at a time."""
    weights = weights or [1] * len(runs)
    mean = math.fsum(weights) / len(weights)
    kept = [(Run(run), weight / mean) for run, weight in zip(runs, weights, strict=True) if weight > 0]
    fused = {}
    for query in dict.fromkeys(itertools.chain.from_iterable(run for run, _ in kept)):
        totals = {id: [] for run, _ in kept for id in run.ranking(query)[0][:depth]}
        for run, weight in kept:
            ids, values = (part[:depth] for part in run.ranking(query))
            values = [float(value) for value in values]
            found = dict(zip(ids, values, strict=True))
            for id in totals:
                totals[id].append(weight * share(method, k, ids, values, found, id))
        fused[query] = {id: math.fsum(parts) for id, parts in totals.items()}
    return fused


def share(method, k, ids, values, found, id):
    if not ids:
        return 0.0
    if method == "rrf":
        return 1 / (k + ids.index(id) + 1) if id in found else 0.0
    if min(values) == max(values):
        return (1.0, 0.0)[id not in found] if method == "min-max" else (0.0, -1.0)[id not in found]
    score = found.get(id, min(values))
    if method == "min-max":
        return (score - min(values)) / (max(values) - min(values))
    return (score - statistics.fmean(values)) / statistics.pstdev(values)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(runs, min_size=1, max_size=4),
    st.sampled_from(METHODS),
    st.sampled_from([None, 1, 3]),
    st.lists(st.sampled_from([0, 0.3, 1, 7]), min_size=4, max_size=4).filter(lambda weights: weights[0] > 0),
)
def test_fused_scores_are_the_sums_of_the_definition(given_runs, method, depth, weights):
    weights = weights[: len(given_runs)]
    fused = fuse(given_runs, method=method, depth=depth, weights=weights)
    expected = reference(given_runs, method, weights=weights, depth=depth)
    assert list(fused) == list(expected)
    for query, totals in expected.items():
        assert fused[query] == pytest.approx(totals, rel=1e-5, abs=1e-5)
        assert set(fused[query]) == set(totals) and np.isfinite(list(fused[query].values())).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(runs, min_size=2, max_size=4), st.sampled_from(METHODS))
def test_the_order_of_the_runs_changes_no_list(given_runs, method):
    expected = fuse(given_runs, method=method)
    for order in itertools.permutations(given_runs):
        fused = fuse(order, method=method)
        for query in expected:
            ids, values = expected.ranking(query)
            assert fused.ranking(query)[0] == ids
            np.testing.assert_array_equal(fused.ranking(query)[1], values)


@settings(max_examples=150, deadline=None)
@given(runs, st.sampled_from(METHODS), st.booleans())
def test_one_run_alone_keeps_its_order(run, method, with_others):
    others = [{"q1": {}}, {"q9": {"x": 1.0}}] if with_others else []
    fused = fuse([run, *others], method=method)
    for query in run:
        assert fused.ranking(query)[0] == Run(run).ranking(query)[0]


def test_scores_that_float32_would_make_equal_stay_in_order():
    run = {"q": {"a": 1e-6, "z": 0.9e-6, "low": -100.0}}
    for method in METHODS:
        assert list(fuse([run], method=method)["q"]) == ["a", "z", "low"]


def test_reciprocal_rank_by_hand():
    first, second = {"q": {"a": 9.0, "b": 5.0, "c": 1.0}}, {"q": {"c": 0.3, "a": 0.2}}
    fused = fuse([first, second])
    assert fused["q"] == pytest.approx({"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62})
    assert list(fused["q"]) == ["a", "c", "b"] and fused.name == "fused"
    assert fuse([first, second], k=0)["q"]["a"] == pytest.approx(1.5)
    # ranks of tied scores are those of the tie rule: id descending
    assert fuse([{"q": {"a": 1.0, "b": 1.0}}])["q"] == pytest.approx({"b": 1 / 61, "a": 1 / 62})


def test_a_single_hit_has_a_defined_value():
    # user-reports D.105: the only hit is the best of its list, and better than what the list lacks
    one, many = {"q": {"x": -3.5}}, {"q": {"a": 4.0, "b": 2.0, "c": 0.0}}
    assert fuse([one], method="min-max")["q"] == {"x": 1.0}
    assert fuse([one, many], method="min-max")["q"] == {"a": 1.0, "x": 1.0, "b": 0.5, "c": 0.0}
    deviation = math.sqrt(8 / 3)
    found = fuse([one, many], method="z-score")["q"]
    assert found == pytest.approx(
        {"x": -2 / deviation, "a": 2 / deviation - 1, "b": -1.0, "c": -2 / deviation - 1}, rel=1e-6
    )
    equal = {"q": {"a": 7.0, "b": 7.0}}
    assert fuse([equal], method="min-max")["q"] == {"b": 1.0, "a": 1.0}
    assert fuse([equal], method="z-score")["q"] == {"b": 0.0, "a": 0.0}


def test_nothing_is_normalised_outside_of_fusion(tmp_path):
    # user-reports D.106: the best of a bad list would look perfect
    from shortlist.retrieval import LexicalRetriever

    retriever = LexicalRetriever.build(["green tea", "black coffee", "coffee with milk"])
    bad, good = retriever.search("milk coffee and bread"), retriever.search("green tea")
    assert max(bad["0"].values()) != 1.0 and max(good["0"].values()) != 1.0
    assert max(fuse([bad], method="min-max")["0"].values()) == 1.0


def test_a_document_that_a_list_lacks_is_never_before_its_last_one():
    # D.106 again: an absent document at z = 0 would pass half of the list
    listed, other = {"q": {"a": 3.0, "b": 2.0, "last": 1.0}}, {"q": {"last": 5.0, "absent": 5.0}}
    for method in METHODS:
        ranked = list(fuse([listed, other], method=method)["q"])
        assert ranked.index("last") < ranked.index("absent")


def test_empty_lists_and_queries_of_one_run_only(caplog):
    first, second = {"q1": {"a": 1.0}, "q2": {}, "q3": {}}, {"q2": {"b": 2.0, "c": 1.0}, "q3": {}, "q4": {"d": 1.0}}
    with caplog.at_level(logging.INFO, logger="shortlist"):
        for method in METHODS:
            fused = fuse([first, second], method=method)
            assert {query: list(documents) for query, documents in fused.items()} == {
                "q1": ["a"], "q2": ["b", "c"], "q3": [], "q4": ["d"],
            }  # fmt: skip
    assert "2 of 4 queries are not in every run" in caplog.text


def test_only_the_ratio_of_weights_counts_and_zero_leaves_a_run_out():
    first, second = {"q": {"a": 2.0, "b": 1.0}}, {"q": {"c": 3.0, "b": 1.0}, "other": {"x": 1.0}}
    for method in METHODS:
        assert dict(fuse([first, second], method=method, weights=[5, 5])) == dict(fuse([first, second], method=method))
        assert dict(fuse([first, second], method=method, weights=[1e-300, 3e-300])) == dict(
            fuse([first, second], method=method, weights=[1e300, 3e300])
        )
        alone = fuse([first, second], method=method, weights=[2, 0])
        assert {query: list(documents) for query, documents in alone.items()} == {"q": ["a", "b"]}
    assert fuse([first, second], method="min-max", weights=[3, 1])["q"] == {"a": 1.5, "c": 0.5, "b": 0.0}


def test_depth_cuts_before_normalising():
    run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    assert fuse([run], method="min-max", depth=2)["q"] == {"a": 1.0, "b": 0.0}


def test_ties_go_by_document_id():
    # user-reports E.113: the one tie rule
    first, second = {"q": {"a": 2.0, "z": 1.0}}, {"q": {"z": 2.0, "a": 1.0}}
    for method in METHODS:
        assert list(fuse([first, second], method=method)["q"]) == ["z", "a"]


def test_normalised_values_stay_finite_at_the_ends_of_float32():
    largest = np.finfo(np.float32).max
    for values in ([largest, -largest], [1e-45, 0.0], [largest, largest / 2, -1e-45]):
        for method in METHODS:
            own, lacking = normalised(np.array(values, np.float32), method)
            assert np.isfinite(own).all() and math.isfinite(lacking) and own[0] > own[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": []}, "no run to fuse"),
        ({"runs": {"q": {"a": 1.0}}}, "list of runs"),
        ({"method": "combmnz"}, "rrf, min-max, z-score"),
        ({"k": -1}, "at least 0"),
        ({"k": math.nan}, "at least 0"),
        ({"weights": [1]}, "1 weights for 2 runs"),
        ({"weights": [1, -0.1]}, "weight -0.1"),
        ({"weights": [1, math.nan]}, "weight nan"),
        ({"weights": [1, math.inf]}, "weight inf"),
        ({"weights": [1, "x"]}, "weight 'x'"),
        ({"weights": [0, 0]}, "all weights are 0"),
        ({"depth": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_fused_is_refused(options, message):
    options = {"runs": [{"q": {"a": 1.0}}, {"q": {"b": 1.0}}], **options}
    with pytest.raises(ConfigError, match=message):
        fuse(options.pop("runs"), **options)


def test_non_finite_scores_are_refused_by_name():
    for value in (math.nan, math.inf):
        with pytest.raises(DataError, match="query 'q'.*'a'"):
            fuse([{"q": {"a": value}}])


# Weights


def judged_runs(seed, runs=2, queries=12):
    """Runs of different quality with coarse scores (ties) and their qrels."""
    random = np.random.default_rng(seed)
    documents = [f"d{number}" for number in range(30)]
    qrels, made = {}, [{} for _ in range(runs)]
    for number in range(queries):
        query = f"q{number}"
        relevant = random.choice(documents, 3, replace=False).tolist()
        qrels[query] = {id: int(grade) for id, grade in zip(relevant, random.integers(-1, 4, 3), strict=True)}
        for quality, run in enumerate(made, 1):
            found = random.choice(documents, int(random.integers(0, 20)), replace=False).tolist()
            run[query] = {id: round(float(random.random() + (id in relevant) * 0.4 * quality), 1) for id in found}
    return [Run(run, name="run") for run in made], Qrels(qrels)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_tuned_weights_report_true_values_and_never_lose(method, seed, count):
    runs, qrels = judged_runs(seed, count)
    for measure in ("nDCG@10", "RR@5"):
        found = tune_weights(runs, qrels, measure=measure, method=method)
        true = evaluate(qrels, fuse(runs, method=method, weights=found.values), [measure]).mean[measure]
        equal = evaluate(qrels, fuse(runs, method=method), [measure]).mean[measure]
        single = [evaluate(qrels, run, [measure]).mean[measure] for run in runs]
        assert found.tuned == pytest.approx(true, abs=1e-12)
        assert found.equal == pytest.approx(equal, abs=1e-12) and found.single == pytest.approx(single)
        assert found.tuned >= max(equal, *single) - 1e-9
        assert sum(found.values) == pytest.approx(1, abs=1e-5) and min(found.values) >= 0
        assert tune_weights(runs, qrels, measure=measure, method=method) == found


def test_two_runs_get_the_best_of_the_whole_grid():
    runs, qrels = judged_runs(4)
    values = {
        share: evaluate(qrels, fuse(runs, method="min-max", weights=[share, 1 - share]), ["nDCG@10"]).mean["nDCG@10"]
        for share in [step / 20 for step in range(21)]
    }
    assert tune_weights(runs, qrels).tuned == pytest.approx(max(values.values()), abs=1e-12)


def test_level_weights_stay_equal():
    run = Run({"q": {"a": 2.0, "b": 1.0}})
    found = tune_weights([run, run], {"q": {"a": 1}})
    assert found.values == (0.5, 0.5) and found.tuned == found.equal == 1.0
    assert found.names == ("shortlist", "shortlist-2") and "with equal weights 1.0000" in str(found)


def test_a_run_of_noise_is_left_out():
    qrels = {f"q{number}": {"good": 1} for number in range(5)}
    good = Run({query: {"good": 1.0, "a": 0.9, "b": 0.0} for query in qrels}, name="good")
    noise = Run({query: {"a": 1.0, "b": 0.5, "good": 0.0} for query in qrels}, name="noise")
    found = tune_weights([noise, good], qrels, measure="RR@10")
    assert found.tuned == 1.0 > found.equal and found.values[1] > 0.9


def test_depth_missing_queries_and_other_measures_are_counted_as_evaluate_does():
    runs, qrels = judged_runs(5)
    partial = [Run({query: runs[0][query] for query in list(runs[0])[:4]}, name="a"), runs[1]]
    for measure in ("P@5", "AP", "Judged@10", "Rprec"):
        found = tune_weights(partial, qrels, measure=measure, depth=7)
        fused = fuse(partial, method="min-max", weights=found.values, depth=7)
        assert found.tuned == pytest.approx(evaluate(qrels, fused, [measure]).mean[measure], abs=1e-9)
        assert found.queries == len(qrels)


def test_many_queries_go_in_blocks(monkeypatch):
    from shortlist.retrieval import fusion_weights

    runs, qrels = judged_runs(6, queries=30)
    expected = tune_weights(runs, qrels)
    monkeypatch.setattr(fusion_weights, "_BLOCK", 40)
    assert tune_weights(runs, qrels) == expected


def test_what_cannot_be_tuned_is_refused():
    runs, qrels = judged_runs(0)
    with pytest.raises(ConfigError, match="two or more"):
        tune_weights(runs[:1], qrels)
    with pytest.raises(ConfigError, match="nDGC"):
        tune_weights(runs, qrels, measure="nDGC@10")
    with pytest.raises(DataError, match="none of the 1 judged queries"):
        tune_weights(runs, {"elsewhere": {"d": 1}})


def test_repeated_names_are_numbered():
    assert distinct(["a", "b", "a", "a"]) == ("a", "b", "a-2", "a-3")

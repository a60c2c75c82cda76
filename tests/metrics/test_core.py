"""The core measures: known answers by hand, and equality with pytrec_eval on random runs."""

import math
import random

import numpy as np
import pytest

from shortlist.metrics import evaluate
from shortlist.metrics.core import HitTable, ndcg, recall

CORE = [
    "nDCG", "nDCG@1", "nDCG@10", "P@1", "P@5", "P(rel=2)@5", "R@5", "R@1000", "R(rel=2)@10", "RR", "RR@3",
    "RR(rel=2)@10", "AP", "AP@5", "AP(rel=2)", "Success@1", "Success@5", "Success(rel=3)@5",
]  # fmt: skip


def random_case(seed):
    """Graded qrels (negative grades, none relevant) and a run with missing, short, empty and unjudged lists."""
    rng = random.Random(seed)
    documents = [f"d{number}" for number in range(40)]
    qrels, run = {}, {}
    for number in range(12):
        query = f"q{number}"
        judged = rng.sample(documents, rng.randint(1, 25))
        qrels[query] = {document: rng.choice([-1, 0, 0, 1, 1, 2, 3]) for document in judged}
        if rng.random() < 0.85:
            # Scores with ties, which our one rule must have settled before either engine sees them.
            run[query] = {document: rng.randint(0, 20) / 4 for document in rng.sample(documents, rng.randint(0, 40))}
    qrels["none"] = dict.fromkeys(documents[:4], 0)
    run["none"] = {document: 1.0 for document in documents[:6]}
    run["unjudged"] = {"d1": 1.0}
    run["q0"] = {"d0": 1.0, "d1": 1.0}
    return qrels, run


@pytest.mark.parametrize("seed", range(40))
def test_equals_pytrec_eval_on_random_runs(seed):
    # user-reports E.125, E.126, H.167: the NumPy measures are the field's
    qrels, run = random_case(seed)
    ours = evaluate(qrels, run, CORE)
    theirs = evaluate(qrels, run, CORE, engine="ir-measures")
    assert ours.counts == theirs.counts
    for measure in CORE:
        assert ours.mean[measure] == pytest.approx(theirs.mean[measure], abs=1e-12), measure
        for query in qrels:
            assert ours.per_query[query][measure] == pytest.approx(theirs.per_query[query][measure], abs=1e-12)


@pytest.mark.slow
def test_equals_pytrec_eval_on_a_thousand_random_runs():
    for seed in range(1000, 2000):
        qrels, run = random_case(seed)
        ours, theirs = evaluate(qrels, run, CORE), evaluate(qrels, run, CORE, engine="ir-measures")
        assert list(ours.mean.values()) == pytest.approx(list(theirs.mean.values()), abs=1e-12), seed


def test_equals_plain_ir_measures_where_there_are_no_ties():
    # issue 2, done item 2
    import ir_measures

    qrels, run = random_case(7)
    rng = random.Random(7)
    run = {query: {document: rng.random() for document in documents} for query, documents in run.items() if documents}
    plain = {
        query: {document: max(grade, 0) for document, grade in documents.items()} for query, documents in qrels.items()
    }
    names = ["nDCG@10", "RR@10", "P@5", "R@100", "AP"]
    expected = ir_measures.calc_aggregate([ir_measures.parse_measure(name) for name in names], plain, run)
    assert evaluate(qrels, run, names).mean == pytest.approx({str(key): value for key, value in expected.items()})


def test_known_answers():
    # user-reports E.126: several relevant documents, one of them not retrieved
    qrels = {"q": {"a": 3, "b": 2, "c": 1, "z": 1, "n": 0}}
    run = {"q": {"n": 5, "b": 4, "x": 3, "a": 2, "c": 1}}
    result = evaluate(
        qrels, run, ["nDCG@5", "AP", "RR", "P@5", "R@5", "R@2", "Success@1", "Judged@5", "P@10", "AP(rel=2)"]
    )
    gained = 2 / math.log2(3) + 3 / math.log2(5) + 1 / math.log2(6)
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4) + 1 / math.log2(5)
    assert result.mean == pytest.approx(
        {
            "nDCG@5": gained / ideal,
            "AP": (1 / 2 + 2 / 4 + 3 / 5) / 4,
            "RR": 1 / 2,
            "P@5": 3 / 5,
            "R@5": 3 / 4,
            "R@2": 1 / 4,
            "Success@1": 0.0,
            "Judged@5": 4 / 5,
            "P@10": 3 / 10,
            "AP(rel=2)": (1 / 2 + 2 / 4) / 2,
        }
    )


def test_the_ideal_comes_from_the_qrels():
    # user-reports E.125: not from the retrieved documents
    assert evaluate({"q": {"a": 1, "b": 1}}, {"q": {"a": 1.0}}, ["nDCG@10"]).mean["nDCG@10"] == pytest.approx(
        1 / (1 + 1 / math.log2(3))
    )


def test_a_relevant_document_outside_the_corpus_stays_in_the_ideal():
    # user-reports A.10: as the official scores do
    result = evaluate({"q": {"there": 1, "nowhere": 1}}, {"q": {"there": 1.0}}, ["R@10", "AP"])
    assert result.mean == {"R@10": 0.5, "AP": 0.5}


def test_binary_ndcg_is_cut_at_the_number_of_labels():
    # methods-dexml-lite §4.3: the XC definition is the same measure
    table = HitTable.build({"q": {"a": 1, "b": 1}}, [("q", ["a", "b", "c", "d", "e"])])
    assert ndcg(table, 5).tolist() == [1.0] and ndcg(table, 1).tolist() == [1.0]
    assert recall(table, 1).tolist() == [0.5]


def test_queries_may_come_in_any_order():
    qrels = {"b": {"x": 1}, "a": {"y": 1}, "c": {"z": 1}}
    table = HitTable.build(qrels, [("c", ["z"]), ("a", ["x", "y"]), ("q", ["x"])])
    assert table.queries == ["b", "a", "c"]
    assert np.array_equal(table.hit_query, [1, 2]) and np.array_equal(table.hit_rank, [2, 1])
    assert np.array_equal(recall(table, 1), [0, 0, 1])

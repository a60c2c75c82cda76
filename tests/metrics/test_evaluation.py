"""`evaluate`: one ranking for all measures, every query counted, refusals that say what and where."""

import itertools
import random

import pytest

from shortlist import Qrels, Run, evaluate
from shortlist.errors import ConfigError, DataError, MissingExtraError

QRELS = {"q1": {"a": 1, "b": 0}, "q2": {"c": 2}, "q3": {"d": 0, "e": -1}, "q4": {"f": 1}}
RUN = {"q1": {"b": 2.0, "a": 1.0}, "q2": {"c": 1.0}, "q3": {"d": 1.0}, "zz": {"a": 1.0}}


def test_every_query_is_counted():
    # user-reports E.117, E.118, J: missing is 0 and listed, unjudged is ignored, all-zero judgements stay in the mean
    result = evaluate(QRELS, RUN, ["P@1", "nDCG@10"])
    assert result.counts == {
        "queries": 4,
        "answered": 3,
        "missing": 1,
        "unjudged": 1,
        "without_relevant": 1,
        "negative_grades": 1,
        "Judged@10": 0.75,
    }
    assert result.mean["P@1"] == 0.25
    assert list(result.per_query) == ["q1", "q2", "q3", "q4"]
    assert result.per_query["q4"] == {"P@1": 0.0, "nDCG@10": 0.0} and result.per_query["q3"]["nDCG@10"] == 0.0
    assert result.missing == ("q4",) and result.unjudged == ("zz",)


def test_a_query_whose_documents_were_all_removed_is_not_called_missing():
    result = evaluate(QRELS, RUN | {"q2": {"q2": 1.0}}, ["P@1"], filters={"q1": ["a", "b"]}, exclude_self=True)
    assert result.missing == ("q4",) and result.emptied == ("q1", "q2")
    assert [result.counts[key] for key in ("queries", "answered", "missing", "emptied")] == [4, 1, 1, 2]
    assert "judged but not in the run, counted as 0: 'q4'." in result.notes()
    assert "in the run, but all their documents were removed, counted as 0: 'q1', 'q2'." in result.notes()
    assert "emptied" not in evaluate(QRELS, RUN, ["P@1"], filters={"q1": ["a"]}).counts


def test_the_table_prints_counts_beside_the_measures():
    printed = str(evaluate(QRELS, RUN, ["ndcg_cut_10"], name="mine"))
    for text in ("mine", "nDCG@10", "queries", "answered", "missing", "Judged@10", "'q4'", "'zz'", "0.4077"):
        assert text in printed


def test_both_engines_count_a_missing_query_as_zero():
    for engine in ("auto", "ir-measures"):
        assert evaluate(QRELS, RUN, ["P@1", "Bpref", "AP"], engine=engine).per_query["q4"] == {
            "P@1": 0.0, "Bpref": 0.0, "AP": 0.0,
        }  # fmt: skip


def test_no_query_in_common_shows_two_ids_of_each_side():
    # user-reports E.119
    with pytest.raises(DataError) as caught:
        evaluate({"1": {"a": 1}, "2": {"a": 1}, "3": {"a": 1}}, {"q1": {"a": 1.0}, "q2": {"a": 1.0}})
    for text in ("'1'", "'2'", "'q1'", "'q2'"):
        assert text in str(caught.value)


@pytest.mark.parametrize("qrels", [{}, {"q": {}}, []])
def test_empty_qrels_are_refused(qrels):
    # user-reports J: ir-measures gives NaN
    with pytest.raises(DataError, match="no judgement"):
        evaluate(qrels, {"q": {"a": 1.0}})


def test_an_empty_run_is_refused_and_an_empty_list_is_not():
    # user-reports J: a low-level error in ranx
    with pytest.raises(DataError, match="no query"):
        evaluate({"q": {"a": 1}}, {})
    result = evaluate({"q": {"a": 1}}, {"q": {}}, ["nDCG@10", "Bpref"])
    assert result.mean == {"nDCG@10": 0.0, "Bpref": 0.0} and result.counts["missing"] == 1


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_score_that_is_not_finite_is_refused(score):
    # user-reports J: RR@10 of 1 beside nDCG@10 of 0.63
    with pytest.raises(DataError, match=r"'q'.*'b'"):
        evaluate({"q": {"a": 1}}, {"q": {"a": 1.0, "b": score}})


def test_all_measures_describe_one_ranking():
    # user-reports J: with tied scores RR@10 was 1.0 and P@1 0.0
    for relevant in ("a", "b"):
        for engine in ("auto", "ir-measures"):
            tied = {"q": {"a": 1.0, "b": 1.0}}
            result = evaluate({"q": {relevant: 1}}, tied, ["RR@10", "RR", "P@1", "nDCG@1", "Success@1"], engine=engine)
            # Equal scores go by document id, descending: b is first.
            expected = 1.0 if relevant == "b" else 0.0
            assert {result.mean[name] for name in ("P@1", "nDCG@1", "Success@1")} == {expected}
            assert result.mean["RR"] == result.mean["RR@10"] == (1.0 if relevant == "b" else 0.5)


@pytest.mark.parametrize(("higher", "lower"), [(16777217.0, 16777216.0), (100000000.1, 100000000.0)])
def test_scores_that_are_equal_in_float32_are_ties_in_every_measure(higher, lower):
    # user-reports J: float32 inside some providers only
    for engine in ("auto", "ir-measures"):
        result = evaluate({"q": {"a": 1}}, {"q": {"a": higher, "b": lower}}, ["RR@10", "P@1", "AP"], engine=engine)
        assert result.mean == {"RR@10": 0.5, "P@1": 0.0, "AP": 0.5}


def test_ties_do_not_depend_on_the_order_of_the_input():
    # user-reports E.111, E.114, J (ranx: insertion order): a constant scorer, shuffled
    rng = random.Random(0)
    documents = [f"d{number:02}" for number in range(30)]
    qrels = {"q": {document: number % 3 for number, document in enumerate(documents)}}
    results = []
    for _ in range(5):
        rng.shuffle(documents)
        results.append(evaluate(qrels, {"q": dict.fromkeys(documents, 0.5)}, ["nDCG@10", "AP", "RR"]).mean)
    assert all(result == results[0] for result in results)
    by_id = {"q": {document: float(document[1:]) for document in documents}}
    assert results[0] == evaluate(qrels, by_id, ["nDCG@10", "AP", "RR"]).mean


def test_evaluating_twice_gives_the_same():
    # user-reports E.121: an evaluator returned zeros the second time
    qrels, run = Qrels(QRELS), Run(RUN)
    measures = ["nDCG@10", "Bpref", "RR@10"]
    assert evaluate(qrels, run, measures) == evaluate(qrels, run, measures)


def test_the_inputs_are_not_edited():
    # user-reports J: BEIR's evaluator edits the results that it is given
    qrels = {query: dict(documents) for query, documents in QRELS.items()}
    run = {query: dict(documents) for query, documents in RUN.items()}
    evaluate(qrels, run, ["nDCG@10"], exclude_self=True, filters={"q1": ["a"]})
    assert qrels == QRELS and run == RUN


def test_generators_are_read_once():
    # user-reports E.122: a generator of judgements is exhausted after the first use
    import ir_measures

    measures = ["nDCG@10", "P(rel=2)@1", "RR@10", "Bpref"]
    expected = evaluate(QRELS, RUN, measures).mean
    rows = [(query, document, grade) for query, documents in QRELS.items() for document, grade in documents.items()]
    scored = [(query, document, score) for query, documents in RUN.items() for document, score in documents.items()]
    assert evaluate(iter(rows), iter(scored), measures).mean == expected
    as_ir_measures = evaluate(
        (ir_measures.Qrel(*row) for row in rows), (ir_measures.ScoredDoc(*row) for row in scored), measures
    )
    assert as_ir_measures.mean == expected


def test_a_document_ranked_twice_is_refused():
    # user-reports A.31, J: measures above 1, or the last line wins
    with pytest.raises(DataError, match="twice"):
        evaluate({"q": {"a": 1}}, [("q", "a", 2.0), ("q", "a", 1.0)])
    with pytest.raises(DataError, match="twice"):
        evaluate({"q": {"a": 1}}, {"q": [("a", 2.0), ("a", 1.0)]})


@pytest.mark.parametrize("qrels, run", [(None, {"q": {"d": 1}}), ({"q": {"d": 1}}, None), ({"q": {"d": 1}}, 5)])
def test_what_is_no_mapping_and_no_rows_is_refused(qrels, run):
    with pytest.raises(DataError, match="expected a mapping"):
        evaluate(qrels, run)


def test_integer_ids_are_strings_at_the_door():
    # user-reports A.17, J: TypeError in ir-measures, low-level error in ranx
    assert evaluate({1: {10: 1}}, {1: {10: 0.5, 11: 0.7}}, ["RR"]).mean == {"RR": 0.5}


def test_integral_float_grades_are_grades():
    assert evaluate({"q": {"a": 2.0}}, {"q": {"a": 1.0}}, ["P(rel=2)@1"]).mean == {"P(rel=2)@1": 1.0}
    with pytest.raises(DataError, match="whole number"):
        evaluate({"q": {"a": 0.5}}, {"q": {"a": 1.0}})


def test_identical_documents_under_other_ids_are_not_merged():
    # user-reports A.25: only the judged one counts
    assert evaluate({"q": {"a": 1}}, {"q": {"a-copy": 1.0}}, ["R@10"]).mean == {"R@10": 0.0}


def test_exclude_self_is_off_by_default_and_said_when_on():
    # user-reports E.107, E.109, E.110
    qrels = {"q": {"q": 1, "a": 1}}
    run = {"q": {"q": 3.0, "a": 2.0, "b": 1.0}}
    plain = evaluate(qrels, run, ["P@1", "R@10"])
    assert plain.mean == {"P@1": 1.0, "R@10": 1.0} and "exclude_self" not in str(plain)
    without = evaluate(qrels, run, ["P@1", "R@10", "RR(judged_only=True)"], exclude_self=True)
    assert without.mean == {"P@1": 1.0, "R@10": 0.5, "RR(judged_only=True)": 1.0}
    assert without.counts["self_excluded"] == 1
    assert "exclude_self" in str(without) and without.settings["exclude_self"]


def test_defaults_and_spellings():
    assert evaluate(QRELS, RUN).measures == ["nDCG@10", "R@100"]
    assert evaluate(QRELS, RUN, "MRR@10").measures == ["RR@10"]
    assert evaluate(QRELS, RUN, ["MRR@10", "RR@10", "ndcg"]).measures == ["RR@10", "nDCG"]
    with pytest.raises(ConfigError, match="nDCG@10"):
        evaluate(QRELS, RUN, ["nDGC@10"])
    with pytest.raises(ConfigError, match="engine"):
        evaluate(QRELS, RUN, engine="perl")


def test_core_measures_work_without_pytrec_eval(monkeypatch):
    # user-reports H.167: no compiler, no wheel
    import ir_measures

    expected = evaluate(QRELS, RUN, ["nDCG@10", "AP", "RR@10", "P@5", "R@5", "Success@1", "Judged@5"]).mean
    monkeypatch.setattr(ir_measures.pytrec_eval, "is_available", lambda: False)
    assert evaluate(QRELS, RUN, list(expected)).mean == expected
    with pytest.raises(MissingExtraError, match="pytrec"):
        evaluate(QRELS, RUN, ["Bpref"])


def test_measures_beyond_the_core_come_from_ir_measures():
    qrels = {"q": {"a": 1, "b": 0, "c": 1}}
    run = {"q": {"x": 4.0, "a": 3.0, "b": 2.0, "c": 1.0}}
    result = evaluate(qrels, run, ["P(judged_only=True)@1", "SetP", "Bpref", "NumRet", "Compat(p=0.8)", "Rprec"])
    assert result.mean["P(judged_only=True)@1"] == 1.0 and result.mean["SetP"] == 0.5
    assert result.mean["NumRet"] == 4.0 and result.mean["Rprec"] == 0.5
    assert 0 < result.mean["Bpref"] < 1 and 0 < result.mean["Compat(p=0.8)"] < 1


def test_a_measure_does_not_depend_on_its_neighbours():
    # ir-measures computed nDCG with the gains, and NumRet with the judged_only, of another measure of the same call
    qrels = {"q": {"a": 1, "b": 2, "c": 0}}
    run = {"q": {"x": 4.0, "a": 3.0, "b": 2.0, "y": 1.0}}
    names = ["nDCG(gains={0:0,1:1,2:9})@3", "nDCG@3", "P(judged_only=True)@1", "NumRet", "Rprec", "nDCG"]
    alone = {name: evaluate(qrels, run, [name], engine="ir-measures").mean for name in names}
    for order in itertools.permutations(names, 3):
        together = evaluate(qrels, run, order, engine="ir-measures")
        for name, measure in zip(order, together.measures, strict=True):
            assert together.mean[measure] == alone[name][measure], order


def test_queries_are_matched_by_id_never_by_position():
    # user-reports J: PyLate's evaluator pairs queries and results by position
    qrels = {"a": {"x": 1}, "b": {"y": 1}, "c": {"z": 1}}
    lists = {"a": {"x": 1.0}, "b": {"y": 1.0}, "c": {"q": 1.0}}
    for order in itertools.permutations(lists):
        result = evaluate(qrels, {query: lists[query] for query in order}, ["P@1"])
        assert [values["P@1"] for values in result.per_query.values()] == [1.0, 1.0, 0.0]

"""Measure names: every spelling of the field, one notation out, and an answer to a misspelling."""

import logging
import re

import pytest

from shortlist.errors import ConfigError
from shortlist.metrics import is_measure, looks_like_measure, parse_measure


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # ir-measures
        ("nDCG@10", "nDCG@10"),
        ("RR", "RR"),
        ("AP(rel=2)", "AP(rel=2)"),
        ("R(rel=2)@1000", "R(rel=2)@1000"),
        ("P(rel=2)@5", "P(rel=2)@5"),
        ("P(cutoff=5)", "P@5"),
        ("P(judged_only=true, rel=2)@5", "P(judged_only=True,rel=2)@5"),
        ("P(rel=2,judged_only=True)@5", "P(judged_only=True,rel=2)@5"),
        ("Success@5", "Success@5"),
        ("Judged@10", "Judged@10"),
        ("Bpref", "Bpref"),
        ("IPrec@0.1", "IPrec@0.1"),
        # trec_eval, in both of its forms
        ("ndcg_cut_10", "nDCG@10"),
        ("ndcg_cut.10", "nDCG@10"),
        ("ndcg", "nDCG"),
        ("recall_100", "R@100"),
        ("recall.1000", "R@1000"),
        ("recip_rank", "RR"),
        ("map", "AP"),
        ("map_cut_100", "AP@100"),
        ("P_5", "P@5"),
        ("success_1", "Success@1"),
        ("Rprec", "Rprec"),
        ("bpref", "Bpref"),
        ("iprec_at_recall_0.10", "IPrec@0.1"),
        # BEIR, ranx, sentence-transformers: user-reports J, `ndcg@10` and `recall_100` are unknown to ir-measures
        ("NDCG@10", "nDCG@10"),
        ("MRR@10", "RR@10"),
        ("Recall@100", "R@100"),
        ("MAP", "AP"),
        ("MAP@100", "AP@100"),
        ("ndcg@10", "nDCG@10"),
        ("precision@5", "P@5"),
        ("hit_rate@10", "Success@10"),
        ("r-precision", "Rprec"),
        # extreme classification
        ("p@1", "P@1"),
        ("psp@5", "PSP@5"),
    ],
)
def test_every_spelling_gives_the_ir_measures_name(name, expected):
    assert parse_measure(name) == expected
    assert parse_measure(expected) == expected
    assert is_measure(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("nDGC@10", "nDCG@10"), ("recal@100", "R@100"), ("sucess@5", "Success@5"), ("ndgc_cut_10", "nDCG@10")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {nearest}?")) as caught:
        parse_measure(name)
    assert name in str(caught.value)
    assert not is_measure(name) and looks_like_measure(name)


@pytest.mark.parametrize(
    "name", ["", "@10", "nDCG@", "P", "R", "nDCG@0", "PSP", "PSP@0", "P(level=2)@5", "P@5@5", "AP rel"]
)
def test_an_incomplete_measure_is_refused(name):
    with pytest.raises(ConfigError):
        parse_measure(name)


def test_measures_that_need_other_programs_are_not_offered():
    # user-reports E.123: perl and a fixed highest grade
    for name in ("ERR@10", "NERR8@10", "nDCG(dcg='exp-log2')@10", "INST", "Accuracy@10"):
        with pytest.raises(ConfigError):
            parse_measure(name)


def test_file_names_do_not_look_like_measures():
    for name in ("out.run", "runs/bm25.run.gz", "test.tsv", "xyz", "qrels.txt", "results"):
        assert not is_measure(name) and not looks_like_measure(name)


def test_no_log_handler_is_attached():
    # conventions §11: ir-measures attaches one at import
    parse_measure("AP")
    assert not logging.getLogger("shortlist").handlers and not logging.getLogger("shortlist.metrics").handlers

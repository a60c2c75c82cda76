"""Roll-up: documents out of passages by the definition, and k of them however many passages they have."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortlist.data.documents import Document
from shortlist.errors import ConfigError, DataError
from shortlist.metrics import evaluate
from shortlist.retrieval.rollup import WAYS, field_parents, roll_up, search_documents
from shortlist.types import Run, left_out, named_queries

PASSAGES = [f"D{document}#{number}" for document in range(6) for number in (0, 1, 2, 10)]


def reference(scored, how, top):
    """{document: score}: all passages of each document, gathered first."""
    groups = {}
    for passage, score in Run({"q": scored})["q"].items():
        document, number = passage.split("#")
        groups.setdefault(document, []).append((score, int(number)))
    if how == "max":
        return {document: max(group)[0] for document, group in groups.items()}
    if how == "first":
        return {document: min(group, key=lambda pair: pair[1])[0] for document, group in groups.items()}
    best = {document: sorted((score for score, _ in group), reverse=True)[:top] for document, group in groups.items()}
    return {document: math.fsum(scores) / len(scores) for document, scores in best.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(PASSAGES), st.sampled_from([3.0, 2.0, 1.0, 0.5, -1.0]), max_size=24),
    st.sampled_from(WAYS),
    st.integers(1, 4),
)
def test_documents_get_the_scores_of_the_definition(scored, how, top):
    rolled = roll_up(Run({"q": scored}, name="passages"), "#", how=how, top=top)
    expected = reference(scored, how, top)
    assert rolled.name == "passages" and rolled["q"] == pytest.approx(expected, abs=1e-6)
    # ranked by the package's rule, ties by the document's id
    ranked = rolled.ranking("q")[0]
    assert ranked == sorted(expected, key=lambda document: (rolled["q"][document], document), reverse=True)


def test_measures_count_a_document_once():
    # user-reports E.127: three hits in one document
    run = Run({"q": {"D1#0": 3.0, "D1#1": 2.0, "D1#2": 1.5, "D2#0": 1.0}})
    qrels = {"q": {"D1": 1, "D2": 1}}
    assert evaluate(qrels, roll_up(run, "#"), ["P@2", "R@2", "AP"]).mean == {"P@2": 1.0, "R@2": 1.0, "AP": 1.0}


def test_parents_are_a_separator_a_mapping_or_a_function():
    run = Run({"q": {"a#b#1": 3.0, "plain": 2.0, "a#b#2": 1.0}})
    expected = {"a#b": 3.0, "plain": 2.0}
    assert roll_up(run, "#")["q"] == expected
    assert roll_up(run, {"a#b#1": "a#b", "a#b#2": "a#b", "plain": "plain"})["q"] == expected
    assert roll_up(run, lambda passage: passage[:3] if "#" in passage else passage)["q"] == expected
    assert roll_up(Run({"q": {"x": 1.0}}), {"x": 7})["q"] == {"7": 1.0}


def test_a_passage_without_a_parent_is_named():
    run = Run({"q": {"p1": 1.0, "#3": 0.5}})
    for parents in ({"#3": "d"}, lambda passage: None if passage == "p1" else "d", {"p1": "", "#3": "d"}):
        with pytest.raises(DataError, match="'p1' has no parent"):
            roll_up(run, parents)
    with pytest.raises(DataError, match="'#3' has no parent"):
        roll_up(run, "#")
    with pytest.raises(DataError, match="'p1'.*float"):
        roll_up(run, {"p1": 1.5, "#3": "d"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "sum"}, "max, first, mean"),
        ({"how": "mean", "top": 0}, "top 0"),
        ({"parents": ""}, "separator"),
        ({"parents": 3}, "int"),
    ],
)
def test_what_cannot_be_rolled_up_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        roll_up(Run({"q": {"a": 1.0}}), **{"parents": "#", **options})


def test_numbers_in_passage_ids_go_by_value():
    run = Run({"q": {"d#10": 3.0, "d#9": 2.0, "d#x": 1.0, f"e#{'9' * 5000}": 1.0, f"e#1{'0' * 5000}": 0.5}})
    assert roll_up(run, "#", how="first")["q"] == {"d": 2.0, "e": 1.0}


def test_empty_lists_stay():
    assert dict(roll_up(Run({"a": {}, "b": {"d#1": 1.0}}), "#")) == {"a": {}, "b": {"d": 1.0}}


class FakeSearcher:
    """Passages with fixed scores, as an index would return them; counts what is asked."""

    def __init__(self, scored):
        self.run = Run(scored)
        self.asked = []

    def search(self, queries, k=100):
        queries = named_queries(queries)
        self.asked.append((list(queries), k))
        return Run({query: dict(list(self.run[query].items())[:k]) for query in queries})

    def document(self, id):
        return Document(id, "t", "", {"url": id.split("#")[0], "year": 1}) if id != "bare" else None


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["q0", "q1", "D1"]),
        st.dictionaries(st.sampled_from(PASSAGES), st.sampled_from([3.0, 2.0, 1.0, 0.5]), max_size=24),
        min_size=1,
    ),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
)
def test_searching_deeper_gives_the_list_of_all_passages(scored, k, exclude_self, depth):
    searcher = FakeSearcher(scored)
    texts = dict.fromkeys(scored, "text")
    filters = {"q0": {"D2"}}
    found = search_documents(
        searcher, texts, k, "#", depth=depth, exclude_self=exclude_self, filters=filters, name="mine"
    )
    whole = roll_up(searcher.run, "#")
    assert list(found) == list(scored) and found.name == "mine"
    for query in scored:
        out = left_out(query, exclude_self, filters)
        expected = {document: score for document, score in whole[query].items() if document not in out}
        assert list(found[query].items()) == list(expected.items())[:k]


def test_only_queries_that_lack_documents_are_asked_again():
    crowded = {f"D1#{number}": 100.0 - number for number in range(40)} | {"D2#0": 1.0, "D3#0": 0.5}
    searcher = FakeSearcher({"easy": {f"D{number}#0": 9.0 - number for number in range(9)}, "hard": crowded})
    found = search_documents(searcher, {"easy": "e", "hard": "h"}, 3, "#")
    assert list(found["hard"]) == ["D1", "D2", "D3"] and list(found["easy"]) == ["D0", "D1", "D2"]
    assert [queries for queries, _ in searcher.asked] == [["easy", "hard"], ["hard"], ["hard"]]


def test_parents_may_be_a_field_of_the_stored_documents():
    searcher = FakeSearcher({"0": {"D1#0": 3.0, "D1#1": 2.0, "D2#0": 1.0}})
    found = search_documents(searcher, "text", 5, field_parents(searcher, "url"))
    assert found["0"] == {"D1": 3.0, "D2": 1.0}
    assert field_parents(searcher, "title")("D1#0") == "t"
    with pytest.raises(DataError, match="no field 'link'; its fields are: title, url, year"):
        field_parents(searcher, "link")("D1#0")
    with pytest.raises(DataError, match="'bare' has no stored document"):
        field_parents(searcher, "url")("bare")

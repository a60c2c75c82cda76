"""Filtered search: exactly the best k of what passes, for every share of documents that passes, in every kind."""

import numpy as np
import pytest

from shortlist.data.documents import Document
from shortlist.errors import ConfigError
from shortlist.indexes import new_index, open_index
from shortlist.indexes.filters import as_filter, field, positions
from shortlist.types import rank_order

DIM, COUNT = 8, 900
RANDOM = np.random.default_rng(7)
VECTORS = RANDOM.standard_normal((COUNT, DIM)).astype(np.float32)
QUERIES = RANDOM.standard_normal((5, DIM)).astype(np.float32)
SHARES = [1, 2, 10, 100, 450, 899, 900]


def fields(row):
    return {
        "row": row,
        "half": row % 2 == 0,
        "lang": ["en", "de", "fr"][row % 3],
        "tags": [f"t{row % 5}", f"u{row % 7}"],
    }


def document(row):
    return Document(f"d{row}", "", f"text {row}", fields(row))


def filled(spec, path):
    """Three segments on disk and a tail in memory; every eleventh document removed."""
    index = new_index(spec, DIM, count=COUNT)
    bounds = [0, 600, 700, 800, COUNT]
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = range(start, stop)
        index.add([f"d{row}" for row in rows], VECTORS[start:stop], documents=[document(row) for row in rows])
        if number == 0:
            index.save(path)
            index = open_index(path)
        elif number < 3:
            index.commit()
            index = open_index(path)
    index.remove([f"d{row}" for row in range(0, COUNT, 11)])
    return index


def expected(rows, query, k):
    rows = [row for row in rows if row % 11]
    scores = VECTORS[rows] @ query
    return [f"d{rows[place]}" for place in rank_order([f"d{row}" for row in rows], scores)[:k]]


@pytest.fixture(scope="module", params=["exact", "exact:int8", "flat", "HNSW16", "IVF16,Flat", "IVF16,SQ8+rescore"])
def index(request, tmp_path_factory):
    return filled(request.param, tmp_path_factory.mktemp("filters") / "index")


@pytest.mark.parametrize("share", SHARES)
def test_k_results_come_wherever_k_documents_pass(index, share):
    passing = sorted(np.random.default_rng(share).permutation(COUNT)[:share].tolist())
    present = sum(row % 11 != 0 for row in passing)
    for chosen in ({f"d{row}" for row in passing}, field("row").isin(passing)):
        for k in (1, 10, 100, 2000):
            for found in index.search(QUERIES, k, chosen):
                assert len(found) == min(k, present)
                assert {id for id, _ in found} <= {f"d{row}" for row in passing if row % 11}
                assert len({id for id, _ in found}) == len(found)


@pytest.mark.parametrize("share", SHARES)
def test_exact_kinds_and_few_passing_documents_give_the_very_best(index, share):
    passing = sorted(np.random.default_rng(share).permutation(COUNT)[:share].tolist())
    # Below some thousand documents every kind that keeps its vectors scans what passes exactly.
    for query, found in zip(QUERIES, index.search(QUERIES, 20, field("row").isin(passing)), strict=True):
        assert [id for id, _ in found] == expected(passing, query, 20)
        rows = [int(id[1:]) for id, _ in found]
        np.testing.assert_allclose([score for _, score in found], VECTORS[rows] @ query, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("row >= 850", lambda row: row >= 850),
        ("595 <= row < 605", lambda row: 595 <= row < 605),
        ("half and lang in ['en', 'de']", lambda row: row % 2 == 0 and row % 3 < 2),
        ("not half or 't3' in tags", lambda row: row % 2 or row % 5 == 3),
        ("tags == 'u6' and id != 'd6'", lambda row: row % 7 == 6 and row != 6),
        ("row is None", lambda row: False),
    ],
)
def test_expressions_are_applied_inside_the_search(index, expression, passes):
    rows = [row for row in range(COUNT) if passes(row)]
    for query, found in zip(QUERIES, index.search(QUERIES, 15, expression), strict=True):
        assert [id for id, _ in found] == expected(rows, query, 15)


def test_filters_by_position_split_a_search_into_ranges(index):
    total = len(index._ids)
    found = []
    for start in range(0, total, 300):
        chosen = positions(start, start + 300)
        places, scores, counts = index.search_arrays(QUERIES[:1], 30, chosen)
        assert ((places[0, : counts[0]] >= start) & (places[0, : counts[0]] < start + 300)).all()
        found += list(zip(index.ids_at(places[0, : counts[0]]), scores[0, : counts[0]].tolist(), strict=True))
    best = [found[place][0] for place in rank_order([id for id, _ in found], [score for _, score in found])[:30]]
    assert best == expected(range(COUNT), QUERIES[0], 30)


def test_what_cannot_be_filtered_by_is_refused_in_a_sentence(index):
    with pytest.raises(ConfigError, match="did you mean 'row'"):
        index.search(QUERIES, 3, "raw > 3")
    with pytest.raises(ConfigError, match="'row' is an int; compare it with a number, not with 'x'"):
        index.search(QUERIES, 3, "row == 'x'")


def test_masks_follow_every_change_of_an_index(tmp_path):
    index = filled("exact", tmp_path / "index")

    def rows(expression):
        return sorted(int(id[1:]) for id, _ in index.search(QUERIES[:1], COUNT, expression)[0])

    late = [row for row in range(890, COUNT) if row % 11]
    assert rows("row >= 890") == late
    index.remove(["d899"])
    assert rows("row >= 890") == late[:-1]
    index.add(["d899", "d900"], VECTORS[:2], documents=[document(899), document(900)])
    assert rows("row >= 890") == [*late, 900]
    # Replaced by a document that does not pass.
    index.add(["d892"], VECTORS[:1], documents=[Document("d892", "", "", {"row": 1})], replace=True)
    late.remove(892)
    assert rows("row >= 890") == [*late, 900]
    index.commit()
    assert rows("row >= 890") == [*late, 900]
    index.compact()
    assert rows("row >= 890") == [*late, 900] and len(index._ids) == len(index)
    index.commit()
    index = open_index(tmp_path / "index")
    assert rows("row >= 890") == [*late, 900] and index.fields.values(0) == fields(1)


def test_documents_may_come_with_some_vectors_only():
    index = new_index("exact", DIM)
    index.add(["a", "b"], VECTORS[:2])
    with pytest.raises(ConfigError, match="no fields, only ids"):
        index.search(QUERIES, 1, "row == 1")
    index.add(["c"], VECTORS[2:3], documents=[{"id": "c", "text": "x", "metadata": {"row": 1}}])
    index.add(["d"], VECTORS[3:4])
    assert [id for id, _ in index.search(QUERIES[:1], 9, "row == 1")[0]] == ["c"]
    assert {id for id, _ in index.search(QUERIES[:1], 9, "not row == 1")[0]} == {"a", "b", "d"}


def test_a_filter_that_nothing_passes_gives_empty_lists(index):
    assert index.search(QUERIES, 5, set()) == [[]] * len(QUERIES)
    assert index.search(QUERIES, 5, "row > 100000") == [[]] * len(QUERIES)
    assert as_filter("row > 100000").mask(index).sum() == 0


@pytest.mark.parametrize("spec", ["HNSW16", "IVF64,Flat"])
@pytest.mark.parametrize("share", [4000, 5000, 6000])
def test_approximate_kinds_give_k_results_that_pass_when_many_do(spec, share):
    # Too many to be scanned one by one: the kind's own scan takes the mask.
    vectors = np.random.default_rng(1).standard_normal((6000, DIM)).astype(np.float32)
    index = new_index(spec, DIM, count=6000)
    index.add([f"d{row}" for row in range(6000)], vectors)
    passing = {f"d{row}" for row in np.random.default_rng(2).permutation(6000)[:share].tolist()}
    for found in index.search(QUERIES, 60, passing):
        assert len({id for id, _ in found}) == 60 and {id for id, _ in found} <= passing
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)

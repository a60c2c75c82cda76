"""Ties: one rule orders equal scores, also at the boundary of the top k and across chunks."""

import numpy as np
import pytest

from shortlist import ExactIndex, FaissIndex
from shortlist.indexes import scan, topk
from shortlist.types import rank_order

KINDS = [ExactIndex, FaissIndex]


def brute_force(ids, documents, query, k):
    scores = documents @ query
    return [(ids[row], float(scores[row])) for row in rank_order(ids, scores)[:k]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waiting", [4, 1 << 20])
def test_ties_at_the_boundary_are_resolved_by_descending_id(kind, waiting, monkeypatch):
    # user-reports J: ties came back in descending position
    monkeypatch.setattr(scan, "_CPU_SCORES", 256)
    monkeypatch.setattr(topk, "_MAX_TIED", waiting)
    generator = np.random.default_rng(3)
    for _ in range(20):
        size, k = int(generator.integers(1, 400)), int(generator.integers(1, 60))
        documents = generator.integers(-1, 2, (size, 3)).astype(np.float32)
        queries = generator.integers(-1, 2, (4, 3)).astype(np.float32)
        ids = [f"d{number}" for number in generator.permutation(size)]
        index = kind(3)
        index.add(ids, documents)
        results = index.search(queries, k)
        assert results == [brute_force(ids, documents, query, k) for query in queries]


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_equal_vectors_returns_the_highest_ids(kind):
    ids = [f"{number:05d}" for number in np.random.default_rng(0).permutation(3000)]
    index = kind(4)
    index.add(ids, np.ones((3000, 4), np.float32))
    (result,) = index.search(np.ones((1, 4), np.float32), 5)
    assert [id for id, _ in result] == ["02999", "02998", "02997", "02996", "02995"]


@pytest.mark.parametrize("queries", [1, 2, 7, 200])
def test_equal_vectors_get_equal_scores_wherever_they_stand(queries, monkeypatch):
    # The same text under many ids must tie, or its order would depend on where a chunk ends.
    monkeypatch.setattr(scan, "_CPU_SCORES", 64 * 40 * queries)
    generator = np.random.default_rng(1)
    base = generator.standard_normal((517, 48)).astype(np.float32)
    index = ExactIndex(48, device="cpu")
    for part in range(20):
        index.add([f"{part}-{row}" for row in range(517)], base)
    for result in index.search(generator.standard_normal((queries, 48)), 20):
        assert len({score for _, score in result}) == 1
        assert len({id.partition("-")[2] for id, _ in result}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_query_ranks_everything_by_id(kind):
    index = kind(2)
    index.add(["a", "c", "b"], np.eye(3, 2, dtype=np.float32))
    assert index.search(np.zeros((1, 2)), 2) == [[("c", 0.0), ("b", 0.0)]]


def test_distances_that_are_rounded_alike_are_ordered_by_id():
    # A long query makes many distances equal in float32 that differ before its length is subtracted.
    generator = np.random.default_rng(0)
    vectors = (1e-3 * generator.standard_normal((300, 4))).astype(np.float32)
    ids = [f"d{row}" for row in range(300)]
    index = FaissIndex(4, factory="IVF16,Flat", metric="l2", device="cpu")
    index.add(ids, vectors)
    assert not index._base_size()
    everything = index.search(np.full((1, 4), 1e3, np.float32), 300)[0]
    assert len({score for _, score in everything}) < 250
    assert everything == sorted(everything, key=lambda found: (found[1], found[0]), reverse=True)
    for k in (1, 10, 100):
        assert index.search(np.full((1, 4), 1e3, np.float32), k)[0] == everything[:k]

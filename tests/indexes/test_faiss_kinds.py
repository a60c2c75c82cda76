"""Every faiss kind through the same life: search, filter, remove, save, open, add; tiny and odd collections."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from shortlist import FaissIndex
from shortlist.indexes.kinds import new_index, open_index
from shortlist.indexes.specs import NAMED
from shortlist.types import rank_order

OTHERS = ["PQ4x4fs", "PQ2", "SQ8", "HNSW16,SQ8", "IVF4,RaBitQ", "IVF4,PQ4x4fs+rescore", "RaBitQfs+rescore"]
EXACT_VECTORS = ["flat", "hnsw", "ivf-flat", "ivf-pq", "opq", "rabitq", "sq8+rescore"]


def clustered(size, dim, seed=0):
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((8, dim))
    vectors = centres[generator.integers(0, 8, size)] + 0.3 * generator.standard_normal((size, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def ranked(ids, vectors, query, k, metric="ip"):
    scores = vectors @ query if metric == "ip" else -np.square(vectors - query).sum(axis=1)
    return [ids[row] for row in rank_order(ids, scores)[:k]]


@pytest.mark.parametrize("spec", [*NAMED, *OTHERS])
def test_the_life_of_an_index(spec, tmp_path):
    # user-reports C.78: delete not implemented; D.90, D.91: -1 never leaves; C.79: string ids
    vectors, ids = clustered(700, 8), [f"d{row:03d}" for row in range(700)]
    queries = clustered(6, 8, seed=1)
    index = new_index(spec, 8, count=700)
    index.add(ids, vectors)
    for k in (1, 10, 1000):
        for found in index.search(queries, k):
            assert len({id for id, _ in found}) == min(k, 700) and found == sorted(found, key=lambda p: -p[1])
    # a filter is applied inside the search: k of what passes, and nothing else
    chosen = set(ids[::3])
    assert all(len(found) == 20 and {id for id, _ in found} <= chosen for found in index.search(queries, 20, chosen))
    assert all(len(found) == 2 for found in index.search(queries, 20, set(ids[5:7])))
    gone = set(ids[:350])
    assert index.remove(sorted(gone)) == 350
    assert all(len(found) == 350 and not gone & {id for id, _ in found} for found in index.search(queries, 700))
    before = index.search(queries, 15), index.search(queries, 15, chosen)
    index.save(tmp_path / "index")
    opened = open_index(tmp_path / "index")
    assert (opened.search(queries, 15), opened.search(queries, 15, chosen)) == before
    assert opened.spec == index.spec and len(opened) == 350
    # what is added to an opened index is found beside it, and by compaction inside it
    far = np.full((1, 8), 3, np.float32)
    opened.add(["new"], far)
    for step in (lambda: None, opened.commit, opened.compact, opened.commit):
        step()
        assert "new" in [id for id, _ in opened.search(far, 20)[0]] and len(opened) == 351
    assert len(open_index(tmp_path / "index").search(queries, 400)[0]) == 351


@pytest.mark.parametrize("spec", EXACT_VECTORS)
def test_results_are_close_to_exact_and_scores_are_those_of_the_vectors(spec):
    # user-reports C.77: too few probes lose recall unnoticed
    vectors, ids = clustered(3000, 16), [f"d{row:04d}" for row in range(3000)]
    queries = clustered(20, 16, seed=2)
    index = new_index(spec, 16, count=3000)
    index.add(ids, vectors)
    found = index.search(queries, 10)
    hits = [
        len({id for id, _ in own} & set(ranked(ids, vectors, q, 10))) for own, q in zip(found, queries, strict=True)
    ]
    assert np.mean(hits) >= 9
    for own, query in zip(found, queries, strict=True):
        for id, score in own:
            assert score == pytest.approx(float(vectors[int(id[1:])] @ query), abs=1e-5)
    assert index.lossless and np.allclose(index.vectors_at(np.array([7, 2999, 0])), vectors[[7, 2999, 0]], atol=0)


@pytest.mark.parametrize("spec", [*NAMED, "IVF4,SQ8", "HNSW16,SQ8"])
@pytest.mark.parametrize("size", [0, 1, 2, 50])
@pytest.mark.parametrize("dim", [1, 3, 7])
def test_tiny_collections_of_odd_dimensions(spec, size, dim, tmp_path):
    # user-reports C.75: fewer vectors than clusters
    vectors = np.random.default_rng(dim).standard_normal((size, dim)).astype(np.float32)
    ids = [f"d{row}" for row in range(size)]
    index = new_index(spec, dim, count=size)
    index.add(ids, vectors)
    queries = np.random.default_rng(9).standard_normal((3, dim)).astype(np.float32)
    results = index.search(queries, 60)
    assert [sorted(id for id, _ in found) for found in results] == [sorted(ids)] * 3
    index.save(tmp_path / "index")
    assert open_index(tmp_path / "index").search(queries, 60) == results


@pytest.mark.parametrize("spec", [*NAMED, "SQ8"])
def test_equal_vectors_are_all_found(spec):
    index = new_index(spec, 4, count=500)
    index.add([f"d{row:03d}" for row in range(500)], np.ones((500, 4), np.float32) / 2)
    (few,), (all_of_them,) = index.search(np.ones((1, 4)), 5), index.search(np.ones((1, 4)), 500)
    assert len({id for id, _ in few}) == 5 and len({id for id, _ in all_of_them}) == 500
    assert [id for id, _ in all_of_them] == sorted((id for id, _ in all_of_them), reverse=True)
    if spec in ("flat", "ivf-flat"):
        # ties at the k-th place go by id, not by where a vector lies
        assert [id for id, _ in few] == ["d499", "d498", "d497", "d496", "d495"]


@pytest.mark.parametrize("spec", ["flat", "hnsw", "ivf-flat", "sq8", "IVF4,PQ4x4fs+rescore"])
def test_l2_is_kept_through_tail_filter_and_rescoring(spec, tmp_path):
    vectors, ids = clustered(600, 8) * 2, [f"d{row:03d}" for row in range(600)]
    index = new_index(spec, 8, metric="l2", count=500)
    index.add(ids[:500], vectors[:500])
    index.save(tmp_path / "index")
    index = open_index(tmp_path / "index")
    index.add(ids[500:], vectors[500:])
    index.settings = replace(index.settings, fetch=20.0)
    hits = 0
    for query in clustered(10, 8, seed=3):
        (found,) = index.search(query, 10)
        hits += len({id for id, _ in found} & set(ranked(ids, vectors, query, 10, "l2")))
        if index.lossless:
            for id, score in found:
                assert score == pytest.approx(-float(np.square(vectors[int(id[1:])] - query).sum()), abs=1e-4)
    assert hits >= 90


def test_an_index_is_exact_until_there_are_enough_to_train(caplog):
    # user-reports C.75
    vectors, ids = clustered(400, 6), [f"d{row:03d}" for row in range(400)]
    index = FaissIndex(6, factory="IVF8,Flat")
    for start in range(0, 300, 100):
        index.add(ids[start : start + 100], vectors[start : start + 100])
    assert index._base_size() == 0
    for query in vectors[:5]:
        assert [id for id, _ in index.search(query, 12)[0]] == ranked(ids[:300], vectors[:300], query, 12)
    index.add(ids[300:], vectors[300:])
    assert index._base_size() == 400 and len(index.search(vectors[:1], 400)[0]) == 400
    assert np.array_equal(index.vectors_at(np.arange(400)), vectors)


def test_clusters_are_clamped_to_what_there_is_and_it_is_said(tmp_path, caplog):
    # user-reports C.75
    from shortlist.indexes.build import build_index

    vectors, ids = clustered(400, 6), [f"d{row:03d}" for row in range(400)]
    with caplog.at_level(logging.WARNING):
        build_index(tmp_path / "index", [(ids, vectors)], dim=6, spec="IVF64,Flat")
    assert "400 vectors are too few for the clusters of IVF64,Flat" in caplog.text
    index = open_index(tmp_path / "index")
    assert index.manifest["factory"] == "IVF64,Flat" and index.manifest["built_as"] == "IVF10,Flat"
    assert len(index.search(vectors[:1], 400)[0]) == 400
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_index(tmp_path / "few", [(ids[:100], vectors[:100])], dim=6, spec="PQ2")
    assert "100 vectors are too few to train PQ2, which needs 256" in caplog.text
    few = open_index(tmp_path / "few")
    assert [id for id, _ in few.search(vectors[:1], 9)[0]] == ranked(ids[:100], vectors[:100], vectors[0], 9)


def test_a_name_grows_with_the_collection(tmp_path):
    vectors, ids = clustered(4000, 4), [f"d{row:04d}" for row in range(4000)]
    index = new_index("ivf-flat", 4, count=200)
    index.add(ids[:200], vectors[:200])
    assert index.factory == "IVF5,Flat"
    index.add(ids[200:], vectors[200:])
    index.compact()
    assert index.factory == "IVF64,Flat" and len(index.search(vectors[:1], 50)[0]) == 50


def test_a_factory_that_faiss_does_not_know_is_named(tmp_path):
    from shortlist.errors import ConfigError

    for factory in ("Flatt", "IVF8,PQ3", "HNSW32,Nothing"):
        with pytest.raises(ConfigError, match=f"faiss cannot make '{factory}' for 8 dimensions: .{{5,}}"):
            new_index(factory, 8)
    with pytest.raises(ConfigError, match="leave IDMap out"):
        new_index("IDMap,Flat", 8)


@pytest.mark.parametrize("spec", ["flat", "Flat+rescore", "hnsw"])
@pytest.mark.parametrize("emptied", [False, True])
def test_an_index_that_was_opened_empty_grows(spec, emptied, tmp_path):
    index = new_index(spec, 4, device="cpu")
    if emptied:
        index.add(["gone"], np.ones((1, 4), np.float32))
    index.save(tmp_path / "index")
    index = open_index(tmp_path / "index", device="cpu")
    if emptied:
        index.remove(["gone"])
        index.compact()
    vectors = np.eye(4, dtype=np.float32)
    for row in range(4):
        index.add([f"d{row}"], vectors[row])
        index.commit()
        for one in (index, open_index(tmp_path / "index", device="cpu")):
            found = [id for id, _ in one.search(vectors[row], 10)[0]]
            assert found == [f"d{n}" for n in reversed(range(row + 1))]

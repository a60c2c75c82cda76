"""Compressed exact search: the very results of float32, whatever the data; codes on disk; copies on a device."""

import numpy as np
import pytest
import torch

from shortlist import ExactIndex
from shortlist.errors import ConfigError, DataError
from shortlist.indexes import compressed, scan
from shortlist.indexes.codes import BOUNDS, CODES, Codes, encode
from shortlist.indexes.kinds import open_index

DTYPES = ["int8", "float16", "bfloat16"]


def near_ties(generator, size, dim):
    """Copies of one vector that differ by less than any code can tell."""
    return generator.standard_normal(dim) + 1e-6 * generator.standard_normal((size, dim))


DATA = {
    "normal": lambda g, size, dim: g.standard_normal((size, dim)),
    "near ties": near_ties,
    "one ulp apart": lambda g, size, dim: np.ones((size, dim)) * (1 + g.integers(0, 3, (size, 1)) * 2.0**-23),
    "of any length": lambda g, size, dim: g.standard_normal((size, dim)) * 10.0 ** g.integers(-25, 15, (size, 1)),
    "whole numbers": lambda g, size, dim: g.integers(-1, 2, (size, dim)),
    "zeros": lambda g, size, dim: np.zeros((size, dim)),
    "one outlier": lambda g, size, dim: g.standard_normal((size, dim)) * np.where(np.arange(dim) == 0, 1e4, 1e-3),
    "repeated": lambda g, size, dim: g.standard_normal((7, dim))[np.arange(size) % 7],
}


def make(dtype, ids, vectors, **options):
    index = ExactIndex(vectors.shape[1], device="cpu", dtype=dtype, **options)
    for start in range(0, len(ids), 150):
        index.add(ids[start : start + 150], vectors[start : start + 150])
    return index


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dim", [1, 7, 32])
def test_results_equal_those_of_float32(data, dim):
    generator = np.random.default_rng(dim)
    vectors = DATA[data](generator, 400, dim).astype(np.float32)
    queries = np.concatenate([generator.standard_normal((3, dim)), vectors[:1], np.zeros((1, dim))]).astype(np.float32)
    ids = [f"d{number}" for number in generator.permutation(400)]
    plain = make("float32", ids, vectors)
    for dtype in DTYPES:
        index = make(dtype, ids, vectors)
        for k in (1, 10, 400):
            assert index.search(queries, k) == plain.search(queries, k)
        assert index.search(queries, 5, set(ids[::3])) == plain.search(queries, 5, set(ids[::3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_holds_for_every_pair(dtype):
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((20, 24)).astype(np.float32)
    for data in DATA.values():
        vectors = data(generator, 200, 24).astype(np.float32)
        codes, bounds = encode(vectors, dtype)
        scale, residual, norm = bounds.T.astype(np.float64)
        decoded = Codes(24, dtype).decoded(torch.from_numpy(codes)).numpy().astype(np.float64) * scale[:, None]
        exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        assert (np.abs(exact - queries @ decoded.T) <= lengths[:, None] * residual * (1 + 1e-9) + 1e-300).all()
        assert (norm >= np.linalg.norm(vectors.astype(np.float64), axis=1)).all()


def test_codes_are_scanned_and_few_vectors_are_scored_again(monkeypatch):
    generator = np.random.default_rng(1)
    vectors = generator.standard_normal((3000, 32)).astype(np.float32)
    index = make("int8", [str(row) for row in range(3000)], vectors)
    read = []
    at = type(index._vectors).at
    monkeypatch.setattr(type(index._vectors), "at", lambda self, rows: read.append(len(rows)) or at(self, rows))
    monkeypatch.setattr(index, "_scan_vectors", lambda *args: pytest.fail("float32 vectors were scanned"))
    index.search(generator.standard_normal((4, 32)), 5)
    assert 0 < sum(read) < 600


def test_vectors_that_codes_cannot_tell_apart_are_scanned_as_float32(monkeypatch):
    monkeypatch.setattr(compressed, "_MAX_CANDIDATES", 64)
    vectors = near_ties(np.random.default_rng(2), 500, 8).astype(np.float32)
    ids = [str(row) for row in range(500)]
    index, plain = make("int8", ids, vectors), make("float32", ids, vectors)
    scanned = []
    inner = index._scan_vectors
    monkeypatch.setattr(index, "_scan_vectors", lambda *args: scanned.append(1) or inner(*args))
    assert index.search(vectors[:3], 10) == plain.search(vectors[:3], 10) and scanned


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_stored_opened_and_kept_through_changes(tmp_path, dtype, monkeypatch):
    generator = np.random.default_rng(3)
    vectors = generator.standard_normal((300, 12)).astype(np.float32)
    ids, queries = [f"d{row}" for row in range(300)], generator.standard_normal((4, 12)).astype(np.float32)
    index = make(dtype, ids, vectors)
    index.remove(ids[100:150])
    expected = index.search(queries, 20)
    index.save(tmp_path / "index")
    assert list((tmp_path / "index").glob(f"*/{CODES}")) and list((tmp_path / "index").glob(f"*/{BOUNDS}"))
    opened = open_index(tmp_path / "index", device="cpu")
    assert opened.dtype == dtype and len(opened._codes) == 250
    with monkeypatch.context() as patch:
        patch.setattr("shortlist.indexes.codes.encode", lambda *_: pytest.fail("the codes were made again"))
        assert opened.search(queries, 20) == expected
    opened.add(ids[100:150], vectors[100:150])
    opened.remove(ids[:10])
    for step in (lambda: None, opened.commit, opened.compact, opened.commit):
        step()
        fresh = make("float32", ids[10:], vectors[10:])
        assert opened.search(queries, 20) == fresh.search(queries, 20)
    again = open_index(tmp_path / "index", device="cpu")
    assert again.search(queries, 20) == fresh.search(queries, 20) and len(again._codes) == 290


def test_codes_of_another_shape_are_refused(tmp_path):
    Codes(4, "int8").write(tmp_path, make("float32", ["a"], np.ones((1, 4), np.float32))._vectors)
    with pytest.raises(DataError, match=r"expected int8 \(2, 4\)"):
        Codes(4, "int8").open(tmp_path, 2)
    (tmp_path / CODES).write_bytes(b"nothing")
    with pytest.raises(DataError, match="build the index again"):
        Codes(4, "int8").open(tmp_path, 1)


def test_an_unknown_dtype_is_a_sentence():
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, int8"):
        ExactIndex(3, dtype="int4")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_vectors_stay_on_the_device_between_searches(dtype, monkeypatch):
    generator = np.random.default_rng(4)
    vectors = generator.standard_normal((500, 6)).astype(np.float32)
    ids, queries = [str(row) for row in range(500)], generator.standard_normal((3, 6)).astype(np.float32)
    index, plain = make(dtype, ids[:300], vectors[:300], resident=True), make("float32", ids[:300], vectors[:300])
    assert index.search(queries, 7) == plain.search(queries, 7)
    with monkeypatch.context() as patch:
        patch.setattr(scan.DeviceBlocks, "_hold", lambda *_: pytest.fail("vectors were sent again"))
        assert index.search(queries, 7) == plain.search(queries, 7)
    # What grows is followed, in the same block and beyond it.
    for start in (300, 301, 450):
        stop = {300: 301, 301: 450, 450: 500}[start]
        for each in (index, plain):
            each.add(ids[start:stop], vectors[start:stop])
        assert index.search(queries, 7) == plain.search(queries, 7)
    for each in (index, plain):
        each.remove(ids[:250])
        each.compact()
    assert index.search(queries, 7) == plain.search(queries, 7)


def test_a_block_that_does_not_fit_is_sent_for_each_search():
    blocks = scan.DeviceBlocks(torch.device("cpu"), keep=True)
    blocks._room = 100
    large, small = np.ones((50, 4), np.float32), np.ones((2, 4), np.float32)
    assert len(blocks.rows(0, large, 10, 30)) == 20 and not blocks._held
    assert len(blocks.rows(1, small, 0, 2)) == 2 and list(blocks._held) == [1]


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_scan_under_a_mask_reads_only_what_is_allowed(metric, monkeypatch):
    monkeypatch.setattr(scan, "_CPU_SCORES", 64 * 5)
    generator = np.random.default_rng(5)
    vectors, queries = generator.standard_normal((1000, 6)), generator.standard_normal((5, 6))
    vectors, queries = vectors.astype(np.float32), queries.astype(np.float32)
    seen = []
    rows = scan.DeviceBlocks.rows
    monkeypatch.setattr(
        scan.DeviceBlocks, "rows", lambda self, *args: seen.append((args[2], args[3])) or rows(self, *args)
    )
    reference = queries @ vectors.T
    if metric == "l2":
        reference = -np.square(queries[:, None] - vectors[None]).sum(axis=2)
    for allowed in (slice(300, 400), slice(0, 1000, 50), slice(999, 1000), slice(0, 900)):
        mask = np.zeros(1000, bool)
        mask[allowed] = True
        seen.clear()
        k = min(10, int(mask.sum()))
        positions, scores, counts = scan.scan(
            queries, k, [vectors[:413], vectors[413:]], lambda p: [str(n) for n in p], allowed=mask, metric=metric
        )
        scored = np.where(mask, reference, -np.inf)
        expected = np.argsort(-scored, axis=1)[:, :k]
        assert (positions == expected).all() and (counts == k).all()
        assert np.allclose(scores, np.take_along_axis(scored, expected, axis=1), atol=1e-4)
        if allowed == slice(300, 400):
            assert sum(stop - start for start, stop in seen) <= 100 + 3 * 64


def test_a_range_of_positions_is_searched_as_an_index_of_it():
    generator = np.random.default_rng(6)
    vectors, queries = generator.standard_normal((700, 9)), generator.standard_normal((3, 9))
    ids = [f"d{row}" for row in range(700)]
    whole, part = ExactIndex(9, device="cpu"), ExactIndex(9, device="cpu")
    whole.add(ids, vectors)
    part.add(ids[200:500], vectors[200:500])
    mask = np.zeros(700, bool)
    mask[200:500] = True
    assert whole.search(queries, 12, mask) == part.search(queries, 12)


@pytest.mark.parametrize(
    "size, query_size", [(1e-25, 1e10), (1e-28, 1e15), (1.0, 1e-42), (1e16, 1e-42), (1e-22, 1e-22)]
)
def test_near_ties_of_tiny_numbers_are_those_of_float32(size, query_size):
    # Squares below 1e-38 are zero in float32, and products below 1e-45: bounds must not vanish with them.
    generator = np.random.default_rng(0)
    ones = 1 + generator.integers(-1, 3, (500, 8)) * 2.0**-23
    vectors = (generator.standard_normal(8) * ones * size).astype(np.float32)
    queries = (generator.standard_normal((5, 8)) * query_size).astype(np.float32)
    ids = [f"d{row}" for row in range(len(vectors))]
    expected = make("float32", ids, vectors).search(queries, 5)
    for dtype in DTYPES:
        assert make(dtype, ids, vectors).search(queries, 5) == expected

"""Contents of both index kinds: ids, refusals, removal, and what leaves a search."""

import logging
import sys

import numpy as np
import pytest

from shortlist import ExactIndex, FaissIndex
from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingExtraError, NonFiniteError
from shortlist.indexes import faiss as faiss_module

KINDS = [ExactIndex, FaissIndex]
pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def index(kind):
    index = kind(2)
    index.add(["north", "east", "north east"], np.array([[0, 1], [1, 0], [0.7, 0.7]]))
    return index


def ids(results):
    return [[id for id, _ in result] for result in results]


def test_search_returns_string_ids_and_float_scores_best_first(index):
    # user-reports C.79
    results = index.search(np.array([[0.0, 1.0], [1.0, 0.1]]), 2)
    assert ids(results) == [["north", "north east"], ["east", "north east"]]
    assert results[0][0] == ("north", 1.0) and isinstance(results[0][1][1], float)


def test_more_than_the_index_holds_returns_fewer_and_never_minus_one(index):
    # user-reports D.90, D.91
    (result,) = index.search(np.array([[0.0, 1.0]]), 10)
    assert [id for id, _ in result] == ["north", "north east", "east"]
    assert min(score for _, score in result) >= 0
    positions, scores, counts = index.search_arrays(np.array([[0.0, 1.0]]), 10)
    assert positions.shape == scores.shape == (1, 3) and counts.tolist() == [3] and positions.min() >= 0
    assert index.ids_at(positions) == ["north", "north east", "east"]


def test_an_empty_index_gives_empty_lists(kind):
    assert kind(3).search(np.zeros((2, 3)), 5) == [[], []]


def test_no_queries_give_no_lists(index):
    assert index.search(np.zeros((0, 2)), 5) == []
    assert index.search([], 5) == []


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_k_below_one_is_refused(index, k):
    # user-reports D.93
    with pytest.raises(ConfigError, match="k is"):
        index.search(np.zeros((1, 2)), k)


def test_a_wrong_dimension_names_both_and_the_model(index):
    # user-reports C.69
    index.model = {"name": "some/model", "fingerprint": "abc123"}
    with pytest.raises(IndexMismatchError, match=r"query vectors have 3 dimensions.*some/model.*abc123.* has 2"):
        index.search(np.zeros((1, 3)), 1)
    with pytest.raises(IndexMismatchError, match="3 dimensions"):
        index.add(["x"], np.zeros((1, 3)))
    with pytest.raises(DataError, match="shape"):
        index.search(np.zeros((1, 1, 2)), 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_vector_that_is_not_finite_is_refused_by_id(index, value):
    # user-reports J: a NaN vector disappears, NaN queries return only -1
    vectors = np.array([[0.0, 1.0], [1.0, value]])
    with pytest.raises(NonFiniteError, match="document 'bad one'"):
        index.add(["good", "bad one"], vectors)
    assert "good" not in index and len(index) == 3
    with pytest.raises(NonFiniteError, match="query at position 1"):
        index.search(vectors, 1)


def test_adding_an_id_that_is_there_changes_nothing(index):
    with pytest.raises(DataError, match="'east'.*nothing was added.*replace=True"):
        index.add(["new", "east"], np.ones((2, 2)))
    assert "new" not in index and len(index) == 3


def test_replacing_an_id_keeps_one_vector(index):
    index.add(["east", "west"], np.array([[5.0, 5.0], [-1.0, 0.0]]), replace=True)
    assert len(index) == 4
    assert ids(index.search(np.array([[1.0, 0.0]]), 10)) == [["east", "north east", "north", "west"]]
    assert sorted(index.ids) == ["east", "north", "north east", "west"]


def test_an_id_given_twice_is_refused(index):
    # user-reports J: duplicate ids are accepted
    with pytest.raises(DataError, match="'w' is given twice"):
        index.add(["w", "v", "w"], np.ones((3, 2)))
    assert len(index) == 3


@pytest.mark.parametrize(
    ("bad", "message"), [([""], "empty"), (["a", "b"], "2 ids for 1 vectors"), (["\ud800"], "surrogate")]
)
def test_ids_that_cannot_be_stored_are_refused(index, bad, message):
    with pytest.raises(DataError, match=message):
        index.add(bad, np.ones((1, 2)))
    assert len(index) == 3


def test_any_text_can_be_an_id(kind):
    names = ["a b", "line\nbreak", "ü", "日本", "0", "null"]
    index = kind(1)
    index.add(names, np.arange(6)[:, None])
    assert ids(index.search(np.ones((1, 1)), 6)) == [names[::-1]]


def test_integer_ids_become_strings(kind):
    index = kind(1)
    index.add([7, 8], np.ones((2, 1)))
    assert ids(index.search(np.ones((1, 1)), 2)) == [["8", "7"]] and index.remove([7]) == 1


def test_removing_counts_what_was_there(index):
    # user-reports C.78, C.81
    assert index.remove(["east", "unknown", "east"]) == 1
    assert len(index) == 2 and "east" not in index
    assert ids(index.search(np.array([[1.0, 0.0]]), 3)) == [["north east", "north"]]
    index.add(["east"], np.array([[0.0, 9.0]]))
    assert ids(index.search(np.array([[0.0, 1.0]]), 1)) == [["east"]]
    assert index.remove(["north", "east", "north east"]) == 3 and index.search(np.zeros((1, 2)), 1) == [[]]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_other_number_types_are_taken_as_float32(kind, dtype):
    index = kind(2)
    index.add(["a"], np.ones((1, 2), dtype))
    assert index.search(np.ones(2, dtype), 1) == [[("a", 2.0)]]


def test_torch_tensors_are_taken(kind):
    import torch

    index = kind(2)
    index.add(["a"], torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True))
    assert index.search(torch.ones(1, 2), 1) == [[("a", 2.0)]]


def test_text_in_place_of_vectors_is_a_sentence(index):
    with pytest.raises(DataError, match="array of numbers"):
        index.search("what is north", 1)


@pytest.mark.parametrize("dim", [0, -3, 1.5, "4", None, 2**31, float("nan")])
def test_a_dimension_that_is_no_count_is_refused(kind, dim):
    with pytest.raises(ConfigError, match="dim is"):
        kind(dim)


def test_an_unknown_metric_is_refused(kind):
    with pytest.raises(ConfigError, match="metric 'cosine'.*normalised"):
        kind(2, metric="cosine")


def test_one_query_scores_as_in_a_batch(kind):
    generator = np.random.default_rng(0)
    index = kind(16)
    index.add([str(row) for row in range(500)], generator.standard_normal((500, 16)))
    queries = generator.standard_normal((40, 16))
    together = index.search(queries, 10)
    for query, expected in zip(queries, together, strict=True):
        (alone,) = index.search(query[None], 10)
        assert [id for id, _ in alone] == [id for id, _ in expected]
        assert np.allclose([score for _, score in alone], [score for _, score in expected], atol=1e-5)


def test_l2_is_a_faiss_metric_with_higher_is_better(kind):
    if kind is ExactIndex:
        with pytest.raises(ConfigError, match="FaissIndex also has 'l2'"):
            kind(2, metric="l2")
        return
    index = kind(2, metric="l2")
    index.add(["near", "far"], np.array([[0.0, 1.0], [5.0, 5.0]]))
    assert index.search(np.array([[0.0, 0.0]]), 2) == [[("near", -1.0), ("far", -50.0)]]


def test_other_factories_remove_and_return_all_that_is_asked_for(kind):
    # user-reports C.78: delete is not implemented for HNSW; D.90: -1
    if kind is ExactIndex:
        return
    index = kind(4, factory="IVF4,Flat")
    generator = np.random.default_rng(0)
    index.add([str(row) for row in range(200)], generator.standard_normal((200, 4)))
    (result,) = index.search(generator.standard_normal((1, 4)), 200)
    assert len(result) == 200 and len({id for id, _ in result}) == 200
    gone = [id for id, _ in result[:5]]
    assert index.remove(gone) == 5
    (rest,) = index.search(generator.standard_normal((1, 4)), 200)
    assert len(rest) == 195 and not set(gone) & {id for id, _ in rest}


def test_a_factory_that_faiss_does_not_know_is_a_sentence(kind):
    if kind is FaissIndex:
        # user-reports C.69
        with pytest.raises(ConfigError, match="'Flatt'"):
            kind(2, factory="Flatt")


def test_a_missing_faiss_points_at_the_exact_index(kind, monkeypatch):
    # user-reports H.163
    if kind is FaissIndex:
        faiss_module.import_faiss.cache_clear()
        monkeypatch.setitem(sys.modules, "faiss", None)
        with pytest.raises(MissingExtraError, match="faiss-cpu.*ExactIndex"):
            kind(2)
        faiss_module.import_faiss.cache_clear()


def test_an_unusable_gpu_is_explained(kind, monkeypatch, caplog):
    # user-reports H.165, H.166
    import torch

    class CardWithoutKernels:
        METRIC_INNER_PRODUCT, StandardGpuResources = 0, object
        get_num_gpus = staticmethod(lambda: 1)
        IndexFlatIP = staticmethod(lambda dim: None)

        @staticmethod
        def index_cpu_to_all_gpus(index):
            raise RuntimeError("Error in f at x.cu:1: Error: 'e' failed: no kernel image is available\nmore")

    faiss_module.gpu_status.cache_clear()
    monkeypatch.setattr(faiss_module, "import_faiss", lambda: CardWithoutKernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO, logger="shortlist"):
        usable, why = faiss_module.gpu_status()
    assert not usable and why.endswith("no kernel image is available")
    assert "ExactIndex searches on the GPU" in caplog.text
    faiss_module.gpu_status.cache_clear()


def test_an_unusable_device_is_refused(kind):
    with pytest.raises(ConfigError, match="device 'cuda:99'"):
        kind(2, device="cuda:99")

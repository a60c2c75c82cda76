"""What an index refuses with a sentence: odd arrays, ids, documents, and numbers that would end the process."""

import numpy as np
import pytest
import torch

from shortlist import ExactIndex, FaissIndex
from shortlist.errors import ConfigError, DataError
from shortlist.indexes.specs import SearchSettings


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        ([[10**400] * 4], "too large"),
        (np.ones((1, 4), complex), "complex128"),
        (np.ones((1, 4), "datetime64[s]"), "datetime64"),
        (np.ma.masked_array(np.ones((1, 4)), [[0, 1, 0, 0]]), "masked"),
        (np.ones((1, 4), [("x", "f4")]), "x"),
        (torch.ones(1, 4).to_sparse(), "array of numbers"),
        (torch.ones(1, 4, device="meta"), "array of numbers"),
        ([["a", "b", "c", "d"]], "array of numbers"),
    ],
)
def test_what_is_no_array_of_real_numbers_is_refused(vectors, words):
    index = ExactIndex(4, device="cpu")
    with pytest.raises(DataError, match=words):
        index.add(["a"], vectors)
    assert len(index) == 0


@pytest.mark.parametrize("id", [None, float("nan"), b"a", 1.5, True])
def test_an_id_that_is_no_string_is_refused_and_a_whole_number_is_one(id):
    index = ExactIndex(2, device="cpu")
    with pytest.raises(DataError, match="expected a string or an integer"):
        index.add([id], np.ones((1, 2), np.float32))
    with pytest.raises(DataError, match="expected a list of strings"):
        index.add(None, np.ones((1, 2), np.float32))
    index.add([7], np.ones((1, 2), np.float32))
    assert list(index.ids) == ["7"]


@pytest.mark.parametrize("documents", [5, [{"id": "a", "metadata": "text"}], [{"id": "a", "metadata": [1]}]])
def test_documents_of_another_shape_are_refused(documents):
    index = ExactIndex(2, device="cpu")
    with pytest.raises(DataError, match="documents are a int|expected a mapping"):
        index.add(["a"], np.ones((1, 2), np.float32), documents=documents)
    assert len(index) == 0


@pytest.mark.parametrize("factory", ["HNSW0", "HNSW1", "HNSW99999", "NSG0", "IVF0,Flat", "IVF999999999,Flat"])
def test_a_factory_that_would_end_the_process_is_refused(factory):
    with pytest.raises(ConfigError, match=r"asks for \d+ (links|clusters)"):
        FaissIndex(8, factory=factory)


def test_a_candidate_list_beyond_what_faiss_counts_is_refused():
    with pytest.raises(ConfigError, match="ef_search is 1000000000000"):
        SearchSettings(ef_search=10**12)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_queries_that_cannot_be_written_to_are_searched_without_a_warning(dtype, recwarn):
    queries = np.eye(4, dtype=np.float32)
    queries.flags.writeable = False
    index = ExactIndex(4, device="cpu", dtype=dtype)
    index.add(["a", "b", "c", "d"], queries)
    assert [found[0][0] for found in index.search(queries, 1)] == ["a", "b", "c", "d"]
    assert not recwarn.list

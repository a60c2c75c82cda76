"""Batches: the pool is without copies, every known positive in it counts, draws depend on seed and epoch alone."""

import numpy as np
import pytest
import torch

from shortlist.data import Corpus
from shortlist.errors import ConfigError
from shortlist.retrieval import DualEncoder
from shortlist.training.batches import BatchBuilder, EpochSampler
from shortlist.training.examples import Documents, build_examples

CORPUS = {
    "d0": "moon phases",
    "d1": "bread flour",
    "d2": "moon phases",  # a copy of d0
    "d3": "fever cough",
    "d4": "volcano",
    "d5": "rain",
}
QUERIES = {"a": "moon", "b": "bread", "c": "moon and fever"}
QRELS = {"a": {"d0": 1}, "b": {"d1": 2, "d2": 1}, "c": {"d0": 1, "d3": 3}}


@pytest.fixture
def encoder(tiny_static):
    return DualEncoder.from_pretrained(tiny_static)


@pytest.fixture
def examples():
    return build_examples(
        QUERIES, QRELS, Documents(Corpus.from_documents(CORPUS)), negatives={"a": ["d3", "d4"], "b": ["d5", "d0"]}
    )


def dense(batch, name="positives"):
    shape = (len(batch["queries"]["offsets"]), len(batch["documents"]["offsets"]))
    return batch[name].dense(shape)


def test_pool_has_no_copies_and_every_known_positive_counts(encoder, examples):
    # user-reports B.33, B.34: in-batch documents that are known positives are not negatives
    batch = BatchBuilder(examples, encoder)([(0, 0), (0, 1), (0, 2)])
    # Columns: d0 (= d2), d1, d3.
    assert dense(batch).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert batch["valid"] is None


def test_grades_are_kept_on_request(encoder, examples):
    batch = BatchBuilder(examples, encoder, graded=True)([(0, 0), (0, 1), (0, 2)])
    assert dense(batch).tolist() == [[1, 0, 0], [1, 2, 0], [1, 0, 3]]


def test_all_documents_are_one_pool_of_distinct_texts(encoder, examples):
    builder = BatchBuilder(examples, encoder, negatives="all")
    batch = builder([(0, 1)])
    assert dense(batch).tolist() == [[1, 1, 0, 0, 0]]
    assert builder([(0, 0)])["documents"] is batch["documents"]  # tokenised once


def test_listed_negatives_join_the_pool_and_are_drawn_by_seed_and_epoch(encoder, examples):
    builder = BatchBuilder(examples, encoder, negatives="given", num_negatives=1, seed=3)
    assert dense(builder([(0, 0)])).shape == (1, 2)
    pools = [builder([(epoch, 0)])["documents"]["input_ids"].tolist() for epoch in range(8)]
    assert pools == [builder([(epoch, 0)])["documents"]["input_ids"].tolist() for epoch in range(8)]
    assert len({tuple(pool) for pool in pools}) == 2
    # A positive of one query that another query brings as a negative counts for the first.
    both = BatchBuilder(examples, encoder, negatives="given")([(0, 0), (0, 2)])
    assert dense(both)[1].sum() == 2


def test_negatives_that_are_not_shared_are_seen_by_their_query_only(encoder, examples):
    # user-reports B.35: classification-like data must not use in-batch negatives
    batch = BatchBuilder(examples, encoder, negatives="given", share_negatives=False)([(0, 0), (0, 1)])
    valid = dense(batch, "valid")
    # Columns: d0, d3, d4, d1, d5; d0 is a positive of b through its copy d2.
    assert valid.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 1, 1]]
    assert bool(((dense(batch) > 0) <= (valid > 0)).all())


def test_max_positives_bounds_the_batch_and_the_rest_are_no_negatives(encoder):
    corpus = Documents(Corpus.from_documents({f"d{number}": f"text {number}" for number in range(50)}))
    found = build_examples(
        {"a": "many", "b": "few"}, {"a": {f"d{number}": 1 for number in range(40)}, "b": {"d3": 1}}, corpus
    )
    builder = BatchBuilder(found, encoder, max_positives=4)
    for epoch in range(5):
        mask = dense(builder([(epoch, 0), (epoch, 1)]))
        assert mask[0].sum() == mask.shape[1] <= 5  # d3 is b's, and a's too
        assert mask[1].sum() == 1
    assert set(builder._draw(found.examples[0], 0, 0)) != set(builder._draw(found.examples[0], 1, 0))


def test_negatives_asked_for_and_not_there_are_an_error(encoder):
    found = build_examples(QUERIES, QRELS, Documents(Corpus.from_documents(CORPUS)))
    with pytest.raises(ConfigError, match="no training query has a negative of its own"):
        BatchBuilder(found, encoder, negatives="given")


def test_order_is_a_function_of_seed_and_epoch():
    sampler = EpochSampler(20, seed=1)
    first = list(sampler)
    assert first == list(sampler) and sorted(index for _, index in first) == list(range(20))
    sampler.epoch = 1
    assert [index for _, index in sampler] != [index for _, index in first]
    assert list(EpochSampler(20, seed=2)) != first


def test_features_equal_those_of_the_encoder(encoder, examples):
    builder = BatchBuilder(examples, encoder)
    batch = builder([(0, 1), (0, 0)])
    with torch.no_grad():
        documents = encoder.embed_documents(batch["documents"]).numpy()
        queries = encoder.embed_queries(batch["queries"]).numpy()
    assert np.array_equal(queries, encoder.encode_queries(["bread", "moon"]))
    assert np.array_equal(documents, encoder.encode_documents(["bread flour", "moon phases"]))

"""Batches: the pool is without copies, every known positive in it counts, draws depend on seed and epoch alone."""

import numpy as np
import pytest
import torch

from shortlist.data import Corpus
from shortlist.errors import ConfigError
from shortlist.retrieval import DualEncoder
from shortlist.settings import negative_sources
from shortlist.training.batches import BatchBuilder, EpochSampler, even_counts
from shortlist.training.documents import Documents
from shortlist.training.examples import build_examples

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


@pytest.fixture
def many():
    """40 queries over 60 documents of different lengths, one to five graded positives each, some queries equal."""
    random = np.random.default_rng(5)
    words = ["moon", "bread", "fever", "rain", "flour", "cough"]
    corpus = {f"d{n}": " ".join(random.choice(words, 1 + n % 7)) + f" {n % 50}" for n in range(60)}
    queries = {f"q{n}": f"moon {n % 35}" for n in range(40)}
    qrels = {
        query: {f"d{n}": int(random.integers(1, 4)) for n in random.choice(60, random.integers(1, 6), replace=False)}
        for query in queries
    }
    return build_examples(queries, qrels, Documents(Corpus.from_documents(corpus)))


def builder(examples, encoder, negatives="in_batch", **options):
    return BatchBuilder(examples, encoder, sources=negative_sources(negatives), **options)


def dense(batch, name="positives"):
    return batch[name].dense((sum(batch["query_counts"]), len(batch["document_rows"])))


def entries(batch, name="positives"):
    """{(query of the batch, corpus row): value}."""
    pairs, rows = batch[name], batch["document_rows"].tolist()
    return {
        (query, rows[column]): value
        for query, column, value in zip(pairs.rows.tolist(), pairs.columns.tolist(), pairs.values.tolist(), strict=True)
    }


def test_pool_has_no_copies_and_every_known_positive_counts(encoder, examples):
    # user-reports B.33, B.34: in-batch documents that are known positives are not negatives
    batch = builder(examples, encoder)([(0, 0), (0, 1), (0, 2)])
    assert batch["document_rows"].tolist() == [0, 1, 3]
    assert dense(batch).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert batch["valid"] is None and batch["left_out"] is None and batch["teacher"] is None


def test_grades_and_weights_are_the_values_on_request(encoder, examples):
    batch = builder(examples, encoder, graded=True)([(0, 0), (0, 1), (0, 2)])
    assert dense(batch).tolist() == [[1, 0, 0], [1, 2, 0], [1, 0, 3]]
    weights = np.array([0.5, 2, 9, 4, 9, 9], np.float32)
    weighed = builder(examples, encoder, graded=True, weights=weights)([(0, 0), (0, 1), (0, 2)])
    assert dense(weighed).tolist() == [[0.5, 0, 0], [0.5, 4, 0], [0.5, 0, 12]]


def test_all_documents_are_one_pool_of_distinct_texts(encoder, examples):
    build = builder(examples, encoder, "all")
    batch = build([(0, 1)])
    assert batch["document_rows"].tolist() == [0, 1, 3, 4, 5]
    assert dense(batch).tolist() == [[1, 1, 0, 0, 0]]
    assert build([(0, 0)])["documents"] is batch["documents"]  # made once


def test_listed_negatives_join_the_pool_and_are_drawn_by_seed_and_epoch(encoder, examples):
    build = builder(examples, encoder, "given(1)", seed=3)
    pools = [tuple(build([(epoch, 0)])["document_rows"].tolist()) for epoch in range(8)]
    assert all(len(pool) == 2 for pool in pools) and len(set(pools)) == 2
    assert pools == [tuple(build([(epoch, 0)])["document_rows"].tolist()) for epoch in range(8)]
    # A positive of one query that another query brings as a negative counts for the first.
    both = builder(examples, encoder, "given")([(0, 0), (0, 2)])
    assert dense(both)[1].sum() == 2


def test_negatives_that_are_not_shared_are_seen_by_their_query_only(encoder, examples):
    # user-reports B.35: classification-like data must not use in-batch negatives
    batch = builder(examples, encoder, "given", share_negatives=False)([(0, 0), (0, 1)])
    # Columns: d0, d1, d3, d4, d5; d0 is a positive of b through its copy d2.
    assert dense(batch, "valid").tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert bool(((dense(batch) > 0) <= (dense(batch, "valid") > 0)).all())


def test_mined_documents_join_the_pool_and_known_positives_among_them_count(encoder, examples):
    build = builder(examples, encoder, "mined(1)")
    assert build([(0, 0), (0, 2)])["document_rows"].tolist() == [0, 3]  # nothing is mined yet
    build.draws.mined = np.array([[4, 5, -1], [-1, -1, -1], [3, -1, -1]], np.int32)
    pools = {tuple(build([(epoch, 0)])["document_rows"].tolist()) for epoch in range(8)}
    assert pools == {(0, 4), (0, 5)}
    assert build([(0, 1)])["document_rows"].tolist() == [0, 1]
    batch = build([(0, 0), (0, 2)])
    assert dense(batch)[1].sum() == 2  # row 3 is a positive of c, whoever brought it


def test_documents_sampled_for_the_batch_are_drawn_over_the_whole_corpus(encoder, many):
    build = builder(many, encoder, "sampled(20)")
    items = [(1, 4), (1, 9)]
    own = set(builder(many, encoder)(items)["document_rows"].tolist())
    first = set(build(items)["document_rows"].tolist())
    assert first == set(build(items)["document_rows"].tolist()) and own <= first
    assert 20 <= len(first) <= 20 + len(own)
    assert first != set(build([(2, 4), (2, 9)])["document_rows"].tolist())
    everything = builder(many, encoder, "sampled(1000)")(items)["document_rows"].tolist()
    assert everything == many.documents.unique_rows().tolist()


def test_mixtures_take_the_union(encoder, examples):
    build = builder(examples, encoder, ["given(1)", "mined(1)", "sampled(1)"])
    build.draws.mined = np.array([[5], [-1], [-1]], np.int32)
    pool = set(build([(0, 0)])["document_rows"].tolist())
    assert {0, 5} <= pool and pool & {3, 4} and len(pool) <= 4


@pytest.mark.parametrize("negatives", ["in_batch", "all", "sampled(30)"])
def test_positives_of_a_pool_are_those_of_a_plain_loop(encoder, many, negatives):
    items = [(0, index) for index in (3, 38, 17, 2, 0, 35)]
    batch = builder(many, encoder, negatives, graded=True)(items)
    pool = set(batch["document_rows"].tolist())
    expected = {}
    for position, (_, index) in enumerate(items):
        for other in many:
            if other.query == many[index].query:
                for row, grade in zip(other.positives.tolist(), other.grades.tolist(), strict=True):
                    if row in pool:
                        expected[position, row] = max(grade, expected.get((position, row), 0))
    assert entries(batch) == expected
    order = list(zip(batch["positives"].rows.tolist(), batch["positives"].columns.tolist(), strict=True))
    assert order == sorted(order)


def test_max_positives_bounds_the_batch_and_the_rest_are_no_negatives(encoder):
    corpus = Documents(Corpus.from_documents({f"d{number}": f"text {number}" for number in range(50)}))
    found = build_examples(
        {"a": "many", "b": "few"}, {"a": {f"d{number}": 1 for number in range(40)}, "b": {"d3": 1}}, corpus
    )
    build = builder(found, encoder, max_positives=4)
    pools = set()
    for epoch in range(5):
        batch = build([(epoch, 0), (epoch, 1)])
        mask = dense(batch)
        assert mask[0].sum() == mask.shape[1] <= 5  # d3 is b's, and a's too
        assert mask[1].sum() == 1
        pools.add(tuple(batch["document_rows"].tolist()))
    assert len(pools) == 5


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_sampled_positives_are_scored_and_the_others_are_left_out(encoder, many, negatives):
    items = [(0, index) for index in range(20)]
    batch = builder(many, encoder, negatives, sample_positives=2)(items)
    whole = builder(many, encoder, negatives)(items) if negatives == "all" else None
    scored, left = entries(batch), entries(batch, "left_out")
    assert not scored.keys() & left.keys()
    for position, (_, index) in enumerate(items):
        available = many.known.row(many.groups[index]) if negatives == "all" else many[index].positives
        assert sum(query == position for query, _ in scored) == min(2, len(available))
    if whole is not None:
        assert scored.keys() | left.keys() == entries(whole).keys()


def test_positives_are_sampled_in_proportion_to_their_grades(encoder):
    corpus = Documents(Corpus.from_documents({f"d{number}": f"text {number}" for number in range(4)}))
    found = build_examples({"a": "moon"}, {"a": {"d0": 1, "d1": 2, "d2": 5}}, corpus)
    build = builder(found, encoder, "all", sample_positives=1)
    drawn = [int(build([(epoch, 0)])["positives"].columns[0]) for epoch in range(4000)]
    assert np.allclose(np.bincount(drawn, minlength=4) / 4000, [1 / 8, 2 / 8, 5 / 8, 0], atol=0.025)


@pytest.mark.parametrize("model", ["tiny_static", "tiny_transformer"])
@pytest.mark.parametrize("negatives", ["sampled(25)", "all"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_build_the_same_pool_and_split_it(many, model, negatives, world, request):
    encoder = DualEncoder.from_pretrained(request.getfixturevalue(model))
    items = [(0, index) for index in (5, 39, 12, 0, 7)]
    options = {"micro_batch_size": 3, "sample_positives": 2, "world": world}
    ranks = [builder(many, encoder, negatives, rank=rank, **options)(items) for rank in range(world)]
    one = builder(many, encoder, negatives, sample_positives=2)(items)
    first = ranks[0]
    for batch in ranks:
        assert batch["document_rows"].tolist() == first["document_rows"].tolist()
        for name in ("positives", "left_out"):
            assert entries(batch, name) == entries(one, name)
    assert first["query_counts"] == even_counts(5, world)
    assert sum(first["document_counts"]) == len(first["document_rows"])
    with torch.no_grad():
        queries = torch.cat([encoder.embed_queries(part) for batch in ranks for part in batch["queries"]])
        documents = torch.cat([encoder.embed_documents(part) for batch in ranks for part in batch["documents"]])
        texts = many.documents.texts(first["document_rows"].numpy())
        assert np.allclose(queries, encoder.encode_queries([many.queries[index] for _, index in items]), atol=1e-5)
        assert np.allclose(documents, encoder.encode_documents(texts), atol=1e-5)


def test_transformer_pools_are_in_order_of_length_on_every_rank(many, tiny_transformer):
    encoder = DualEncoder.from_pretrained(tiny_transformer)
    for rank in range(2):
        batch = builder(many, encoder, "all", rank=rank, world=2, micro_batch_size=4)([(0, 0)])
        widths = [part["input_ids"].shape[1] for part in batch["documents"]]
        assert widths == sorted(widths) and widths[0] < widths[-1]
        assert all(len(part["input_ids"]) <= 4 for part in batch["documents"])


def test_a_rank_without_a_part_has_empty_lists(encoder, examples):
    batch = builder(examples, encoder, rank=2, world=3)([(0, 0)])
    assert batch["query_counts"] == [1, 0, 0] and batch["queries"] == []
    assert batch["document_counts"] == [1, 0, 0] and batch["documents"] == []


def test_rows_go_to_towers_that_have_a_vector_a_document(encoder):
    encoder.document_tower.by_row = True
    found = build_examples(QUERIES, QRELS, Documents(Corpus.from_documents(CORPUS), by_row=True))
    batch = builder(found, encoder, micro_batch_size=2)([(0, 0), (0, 1)])
    # d0 and its copy d2 are two labels now.
    assert batch["document_rows"].tolist() == [0, 1, 2]
    assert [part["rows"].tolist() for part in batch["documents"]] == [[0, 1], [2]]
    assert entries(batch).keys() == {(0, 0), (1, 1), (1, 2)}


def test_negatives_asked_for_and_not_there_are_an_error(encoder):
    found = build_examples(QUERIES, QRELS, Documents(Corpus.from_documents(CORPUS)))
    with pytest.raises(ConfigError, match="no training query has a negative of its own"):
        builder(found, encoder, "given")


def test_order_is_a_function_of_seed_and_epoch():
    sampler = EpochSampler(20, seed=1)
    first = list(sampler)
    assert first == list(sampler) and sorted(index for _, index in first) == list(range(20))
    sampler.epoch = 1
    assert [index for _, index in sampler] != [index for _, index in first]
    assert list(EpochSampler(20, seed=2)) != first


def test_collections_too_large_to_keep_give_the_same_batches(encoder, many, monkeypatch):
    items = [(0, index) for index in range(10)]
    kept = builder(many, encoder, "sampled(9)", micro_batch_size=4)(items)
    monkeypatch.setattr("shortlist.training.batches.KEPT_BYTES", 0)
    anew = builder(many, encoder, "sampled(9)", micro_batch_size=4)(items)
    for side in ("queries", "documents"):
        for one, other in zip(kept[side], anew[side], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_features_equal_those_of_the_encoder(encoder, examples):
    batch = builder(examples, encoder)([(0, 1), (0, 0)])
    with torch.no_grad():
        documents = encoder.embed_documents(batch["documents"][0]).numpy()
        queries = encoder.embed_queries(batch["queries"][0]).numpy()
    assert np.array_equal(queries, encoder.encode_queries(["bread", "moon"]))
    assert np.array_equal(documents, encoder.encode_documents(["moon phases", "bread flour"]))


@pytest.mark.parametrize("negatives", ["all", "in_batch"])
def test_documents_banned_for_a_query_are_neither_its_positives_nor_its_negatives(examples, encoder, negatives):
    # d2 has the text of d0: banning one bans both. Ids without an example, and b's own positive d1, may be listed too.
    banned = examples.with_banned({"a": {"d3", "d4"}, "b": {"d2", "d1"}, "unknown": {"d0"}})
    batch = builder(banned, encoder, negatives)([(0, 0), (0, 1), (0, 2)])
    rows = batch["document_rows"].tolist()
    entries = batch["excluded"]
    found = {(q, rows[c]) for q, c in zip(entries.rows.tolist(), entries.columns.tolist(), strict=True)}
    assert found == {(q, row) for q, row in [(0, 3), (0, 4), (1, 0), (1, 1)] if row in rows}
    positives = batch["positives"]
    kept = {(q, rows[c]) for q, c in zip(positives.rows.tolist(), positives.columns.tolist(), strict=True)}
    assert kept == {(0, 0), (2, 0), (2, 3)}
    assert builder(examples, encoder, negatives)([(0, 0)])["excluded"] is None

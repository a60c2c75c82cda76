"""Searches that mining uses: the exact and the faiss path agree to the byte, scores are the model's own."""

import gzip
import json

import numpy as np
import pytest

from shortlist.data import Corpus
from shortlist.errors import ConfigError, DataError, OutputExistsError
from shortlist.retrieval import DualEncoder
from shortlist.retrieval.lexical import LexicalRetriever
from shortlist.retrieval.mining import DenseCandidates, LexicalCandidates, mine_hard_negatives


@pytest.fixture
def encoder(tiny_static):
    return DualEncoder.from_pretrained(tiny_static)


@pytest.fixture
def queries(toy):
    return toy.all_queries()


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return {line["qid"]: line for line in map(json.loads, handle)}


def test_candidates_are_those_of_a_full_sort(encoder, toy, queries):
    texts = list(queries.values())
    rows, scores, _ = DenseCandidates(encoder, toy.corpus)(texts, 7)
    plain = encoder.encode_queries(texts) @ encoder.encode_documents(list(toy.corpus.texts())).T
    assert np.allclose(scores, -np.sort(-plain, axis=1)[:, :7], atol=1e-6)
    assert np.allclose(np.take_along_axis(plain, rows, axis=1), scores, atol=1e-6)


def test_scores_of_pairs_equal_those_of_candidates_to_the_bit(encoder, toy, queries):
    texts = list(queries.values())
    rows, scores, _ = DenseCandidates(encoder, toy.corpus)(texts, 7)
    owners = np.repeat(np.arange(len(texts)), 7)
    asked = DenseCandidates(encoder, toy.corpus)(texts, 3, (owners, rows.reshape(-1)))[2]
    assert np.array_equal(asked, scores.reshape(-1))


def test_more_than_the_corpus_holds_is_filled_with_nothing(encoder):
    corpus = Corpus.from_documents({"a": "moon", "b": "bread"})
    rows, scores, _ = DenseCandidates(encoder, corpus)(["moon"], 5)
    assert sorted(rows[0, :2].tolist()) == [0, 1] and rows[0, 2:].tolist() == [-1] * (rows.shape[1] - 2)
    assert np.isneginf(scores[0, 2:]).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_the_exact_and_the_faiss_path_write_the_same_bytes(toy, queries, tiny_static, tmp_path, normalise):
    # user-reports B.38: the faiss path of mining returned fewer candidates than the plain path
    # user-reports B.39: mining with un-normalised vectors in faiss gave NaN or huge scores
    encoder = DualEncoder.from_pretrained(tiny_static, normalise=normalise)
    counts = {}
    for index in ("exact", "Flat"):
        counts[index] = mine_hard_negatives(
            toy.qrels("train"), toy.corpus, queries=queries, output=tmp_path / f"{index}.jsonl.gz", model=encoder,
            k=10, index=index, relative_margin=0.05, skip=1,
        )  # fmt: skip
    assert counts["exact"] == counts["Flat"] and counts["exact"].negatives > 0
    assert (tmp_path / "exact.jsonl.gz").read_bytes() == (tmp_path / "Flat.jsonl.gz").read_bytes()
    for line in read(tmp_path / "Flat.jsonl.gz").values():
        (name,) = line["neg"]
        vector = encoder.encode_queries([queries[line["qid"]]])[0]
        documents = encoder.encode_documents([toy.corpus[id].joined(encoder.template) for id in line["neg"][name]])
        assert np.allclose(documents @ vector, line["scores"][name], atol=1e-5)


def test_an_approximate_index_gives_the_scores_of_the_vectors(encoder, toy, queries):
    texts = list(queries.values())
    candidates = DenseCandidates(encoder, toy.corpus, index="PQ4x4")
    rows, scores, _ = candidates(texts, 5)
    plain = encoder.encode_queries(texts) @ encoder.encode_documents(list(toy.corpus.texts())).T
    assert np.allclose(np.take_along_axis(plain, rows, axis=1), scores, atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_bm25_candidates_and_scores_of_pairs(toy, queries):
    texts = list(queries.values())
    retriever = LexicalRetriever.build(toy.corpus)
    rows, scores, _ = LexicalCandidates(toy.corpus, retriever)(texts, 6)
    run = retriever.search(queries, 6)
    for number, query in enumerate(queries):
        ids, values = run.ranking(query)
        assert [toy.corpus.ids[row] for row in rows[number] if row >= 0] == ids
        assert scores[number, : len(ids)].tolist() == values.tolist()
    owners, places = np.nonzero(rows >= 0)
    asked = LexicalCandidates(toy.corpus, retriever)(texts, 1, (owners, rows[owners, places]))[2]
    assert np.allclose(asked, scores[owners, places])


def test_bm25_scores_of_documents_by_id(toy):
    retriever = LexicalRetriever.build(toy.corpus)
    ids, values = retriever.search("moon", 3).ranking("0")
    assert np.allclose(retriever.score("moon", ids), values)
    assert retriever.score("zzz", ids[:1]).tolist() == [0]
    with pytest.raises(DataError, match="document 'gone' is not among"):
        retriever.score("moon", ["gone"])


def test_several_positives_and_a_corpus_from_python(encoder, tmp_path):
    # user-reports B.37: mining must know about several positives per query and an external corpus
    corpus = {"a": "the moon has phases", "b": "the moon is bright", "c": "bread", "d": "the moon has phases"}
    counts = mine_hard_negatives(
        {"q": {"a": 1, "b": 2}}, corpus, queries={"q": "moon phases"}, output=tmp_path / "out.jsonl.gz", model=encoder,
        k=2,
    )  # fmt: skip
    (line,) = read(tmp_path / "out.jsonl.gz").values()
    assert line["pos"] == ["a", "b"] and list(line["neg"].values()) == [["c"]]
    assert (counts.known_by_id, counts.known_by_text, counts.short) == (2, 1, 1)


def test_settings_that_cannot_be_are_refused_before_anything_is_read(encoder, tmp_path):
    ready = {"queries": {"q": "moon"}, "output": tmp_path / "out.jsonl.gz", "model": encoder}
    one = ({"q": {"a": 1}}, {"a": "moon", "b": "bread"})
    with pytest.raises(ConfigError, match="depth is 3, but k=5 after skip=1 needs at least 6"):
        mine_hard_negatives(*one, **ready, k=5, skip=1, depth=3)
    with pytest.raises(ConfigError, match="BM25 takes neither a model nor an index"):
        mine_hard_negatives(*one, **ready, bm25=True)
    with pytest.raises(ConfigError, match="k is 0"):
        mine_hard_negatives(*one, **ready, k=0)
    with pytest.raises(DataError, match="no training query has a positive"):
        mine_hard_negatives({"q": {"gone": 1}}, one[1], **ready)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.jsonl.gz").touch()
    with pytest.raises(OutputExistsError, match="--overwrite"):
        mine_hard_negatives(*one, **ready)

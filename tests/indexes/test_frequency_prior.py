"""The frequency prior: one coordinate that any plain inner-product index serves, and others refuse."""

import json
from dataclasses import replace

import numpy as np
import pytest

from shortlist.errors import ConfigError, DataError, IndexMismatchError
from shortlist.indexes import ExactIndex, FaissIndex, FrequencyPrior, build_index, open_index
from shortlist.indexes.frequency import check_inner_product, with_bias

NUM, DIM = 60, 8
IDS = [f"label {number}" for number in range(NUM)]
COUNTS = {id: (NUM - number) ** 2 // 40 for number, id in enumerate(IDS) if number < 50}
PRIOR = FrequencyPrior(COUNTS, NUM, 0.05, {"split": "train", "queries": 500})


class Fixed:
    """An encoder that knows the vectors of texts "0", "1", …"""

    fingerprint = "f" * 16

    def __init__(self, vectors):
        self.vectors, self.dim = vectors, vectors.shape[1]

    def encode_documents(self, texts):
        return np.stack([self.vectors[int(text)] for text in texts])


@pytest.fixture
def vectors():
    values = np.random.default_rng(0).standard_normal((NUM + 20, DIM)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@pytest.fixture
def build(tmp_path, vectors):
    def build(spec="exact", **options):
        path = tmp_path / spec.replace(",", "_")
        blocks = [(IDS[start : start + 25], vectors[start : min(start + 25, NUM)]) for start in range(0, NUM, 25)]
        build_index(path, blocks, dim=DIM, spec=spec, frequency_prior=PRIOR, **options)
        return open_index(path)

    return build


def scores_by_hand(queries, documents, tau):
    """q·d + tau * T * log pi, with add-one smoothing, in float64 and with loops."""
    total = sum(COUNTS.values()) + NUM
    table = np.zeros((len(queries), NUM))
    for row, query in enumerate(queries.astype(np.float64)):
        for column in range(NUM):
            share = (COUNTS.get(IDS[column], 0) + 1) / total
            table[row, column] = query @ documents[column].astype(np.float64) + tau * 0.05 * np.log(share)
    return table


SPECS = ["exact", "flat", "HNSW32", "IVF4,Flat"]


@pytest.mark.parametrize("tau", [-1.0, -0.25, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("spec", SPECS)
def test_every_inner_product_index_serves_every_strength(build, vectors, spec, tau):
    index = build(spec)
    index.settings = replace(index.settings, nprobe=4)
    queries = vectors[NUM:]
    expected = scores_by_hand(queries, vectors[:NUM], tau)
    for row, found in enumerate(index.search(with_bias(queries, tau), 10)):
        order = np.argsort(-expected[row])[:10]
        assert [id for id, _ in found] == [IDS[place] for place in order]
        np.testing.assert_allclose([score for _, score in found], expected[row][order], atol=1e-5)


def test_a_document_without_a_positive_has_a_finite_prior_below_all_others():
    coordinates = PRIOR.coordinate(IDS)
    assert np.isfinite(coordinates).all() and (np.diff(coordinates) <= 0).all()
    assert len(set(coordinates[-10:].tolist())) == 1 and coordinates[-1] == coordinates.min()
    # A distribution: the shares sum to one.
    assert np.exp(coordinates.astype(np.float64) / 0.05).sum() == pytest.approx(1, abs=1e-5)


def test_the_manifest_says_so_and_a_plain_one_says_nothing(build, vectors, tmp_path):
    index = build()
    assert index.dim == DIM + 1 and index.metric == "ip"
    assert index.frequency_prior == {
        "split": "train", "queries": 500, "positives": sum(COUNTS.values()),
        "seen": sum(count > 0 for count in COUNTS.values()), "smoothing": 1, "temperature": 0.05,
    }  # fmt: skip
    index.remove([IDS[3]])
    index.save(tmp_path / "saved")
    assert open_index(tmp_path / "saved").frequency_prior == index.frequency_prior
    build_index(tmp_path / "plain", [(IDS, vectors[:NUM])], dim=DIM)
    assert "frequency_prior" not in json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert open_index(tmp_path / "plain").frequency_prior is None


def test_built_in_memory_it_is_the_index_on_disk(build, vectors):
    corpus = dict(zip(IDS, map(str, range(NUM)), strict=True))
    index = ExactIndex.build(Fixed(vectors), corpus, frequency_prior=PRIOR)
    stored = build()
    assert index.frequency_prior == stored.frequency_prior
    queries = with_bias(vectors[NUM:], -0.5)
    assert index.search(queries, 7) == stored.search(queries, 7)


@pytest.mark.parametrize("factory", ["L2norm,Flat", "PCA4,Flat", "L2norm,HNSW8", "RR4,Flat", "OPQ2_4,PQ2"])
def test_a_factory_that_normalises_centres_or_shortens_is_refused(build, factory):
    with pytest.raises(ConfigError, match=f"{factory}.*normalises, centres or shortens.*such as Flat, HNSW32"):
        build(factory)


@pytest.mark.parametrize("factory", ["OPQ4_8,PQ4", "RR8,Flat", "SQ8", "IVF4_HNSW,Flat"])
def test_a_factory_of_rotations_and_codes_is_not(factory):
    check_inner_product(FaissIndex(DIM, factory=factory))


def test_a_distance_is_refused(build, tmp_path, vectors):
    # user-reports B.39: what normalisation and metric an index has is part of its manifest
    with pytest.raises(ConfigError, match="metric of the index is 'l2'.*: use ip"):
        build("flat", metric="l2")
    assert not list(tmp_path.iterdir())


def test_vectors_without_the_coordinate_are_refused(build, vectors):
    with pytest.raises(IndexMismatchError, match="8 dimensions.*has 9 with its frequency prior as the last"):
        build().search(vectors[NUM:], 3)


def test_an_edited_prior_is_refused(build, tmp_path):
    build()
    file = tmp_path / "exact" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"frequency_prior": "train"}))
    with pytest.raises(DataError, match="frequency_prior"):
        open_index(tmp_path / "exact")


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_a_number_above_zero(temperature):
    with pytest.raises(ConfigError, match="temperature of a frequency prior"):
        FrequencyPrior({}, 3, temperature, {})


# Menon et al. 2021: what the post-hoc form does ----------------------------------------------------------


def test_on_a_long_tail_the_post_hoc_form_trades_micro_for_macro_recall():
    """A softmax classifier on Zipf labels over Gaussian features: tau = 1 lifts the tail, tau = 0 changes nothing."""
    import torch

    dim, labels, samples = 32, 100, 4000
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, labels + 1)
    share /= share.sum()
    centres = random.standard_normal((labels, dim)) * 0.55
    features, target = [], []
    for _ in ("train", "test"):
        drawn = random.choice(labels, samples, p=share)
        features.append((centres[drawn] + random.standard_normal((samples, dim))).astype(np.float32))
        target.append(drawn)
    weight = torch.zeros(labels, dim, requires_grad=True)
    bias = torch.zeros(labels, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=40, line_search_fn="strong_wolfe")
    inputs, outputs = torch.from_numpy(features[0]), torch.from_numpy(target[0])

    def closure():
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(inputs @ weight.T + bias, outputs) + 1e-3 * (weight**2).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    ids = [f"{label:03d}" for label in range(labels)]
    counts = dict(zip(ids, np.bincount(target[0], minlength=labels).tolist(), strict=True))
    head = torch.cat([weight, bias[:, None]], 1).detach().numpy()
    queries = np.concatenate([features[1], np.ones((samples, 1), np.float32)], 1)
    plain = ExactIndex(dim + 1)
    plain.add(ids, head)
    index = ExactIndex(dim + 2)
    prior = FrequencyPrior(counts, labels, 1.0, {"split": "train"})
    for part, block in prior.extend([(ids, head)]):
        index.add(part, block)

    def top(searched, vectors):
        return np.array([int(found[0][0]) for found in searched.search(vectors, 1)])

    def recalls(predicted):
        hit = predicted == target[1]
        seen = np.bincount(target[1], minlength=labels)
        macro = np.bincount(target[1], hit, minlength=labels)[seen > 0] / seen[seen > 0]
        return float(hit.mean()), float(macro.mean())

    without = top(plain, queries)
    assert (top(index, with_bias(queries, 0.0)) == without).all()
    micro, macro = recalls(without)
    adjusted_micro, adjusted_macro = recalls(top(index, with_bias(queries, -1.0)))
    assert adjusted_macro > macro + 0.1 and adjusted_micro < micro - 0.05

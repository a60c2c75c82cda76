"""napkinXC's measures agree with ours on the same inputs; where its definitions differ, that is pinned here."""

import napkinxc.metrics as napkinxc
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from shortlist.metrics import count_labels, evaluate, inverse_propensities
from shortlist.metrics.xc import PROPENSITY_FAMILIES

POINTS, LABELS, K = 60, 40, 5


def matrices(seed, *, rows_without_labels=5):
    """Training and test relevance and scores, (points, labels), with different numbers of predictions a row."""
    rng = np.random.default_rng(seed)
    popularity = rng.random(LABELS) ** 3 * 0.4
    train = (rng.random((300, LABELS)) < popularity).astype(np.float64)
    test = (rng.random((POINTS, LABELS)) < popularity + 0.03).astype(np.float64)
    test[:rows_without_labels] = 0
    scores = rng.permuted(np.tile(np.arange(1.0, LABELS + 1), (POINTS, 1)), axis=1)  # no ties
    scores[rng.random(scores.shape) < 0.3] = 0  # not predicted
    scores[-1] = 0
    scores[-1, 7] = 1.0  # fewer predictions than k
    return csr_matrix(train), csr_matrix(test), csr_matrix(scores)


def nested(matrix, value=float):
    """Point id → label id → value, of the stored entries."""
    rows = {f"q{row}": {} for row in range(matrix.shape[0])}
    coordinates = matrix.tocoo()
    for row, column, entry in zip(coordinates.row, coordinates.col, coordinates.data, strict=True):
        rows[f"q{row}"][f"l{column:03}"] = value(entry)
    return rows


def ours(train, test, scores, measures, **options):
    counts = count_labels(nested(train, int))
    return evaluate(
        nested(test, int), nested(scores), measures, train_counts=counts, num_train=train.shape[0], **options
    ).mean


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("P", napkinxc.precision_at_k), ("R", napkinxc.recall_at_k), ("nDCG", napkinxc.ndcg_at_k)],
)
def test_precision_recall_and_ndcg_agree(seed, name, theirs):
    train, test, scores = matrices(seed)
    mean = ours(train, test, scores, [f"{name}@{k}" for k in range(1, K + 1)])
    assert list(mean.values()) == pytest.approx(theirs(test, scores, k=K).tolist())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", PROPENSITY_FAMILIES)
def test_propensities_and_propensity_scored_precision_agree(seed, family):
    a, b = PROPENSITY_FAMILIES[family]
    train, test, scores = matrices(seed)
    weights = napkinxc.Jain_et_al_inverse_propensity(train, A=a, B=b)
    labels = [f"l{column:03}" for column in range(LABELS)]
    own = inverse_propensities(labels, count_labels(nested(train, int)), num_train=train.shape[0], propensity=(a, b))
    assert list(own.values()) == pytest.approx(weights.tolist())
    mean = ours(train, test, scores, [f"PSP@{k}" for k in range(1, K + 1)], propensity=(a, b))
    assert list(mean.values()) == pytest.approx(napkinxc.psprecision_at_k(test, scores, weights, k=K).tolist())


def test_points_without_labels_count_as_zero_in_both():
    # methods-dexml-lite 3.5, pitfall 7: released code divides by the number of labels without a guard
    train, test, scores = matrices(9, rows_without_labels=POINTS // 2)
    assert ours(train, test, scores, ["R@5"])["R@5"] == pytest.approx(napkinxc.recall_at_k(test, scores, k=5)[4])
    kept = test[POINTS // 2 :], scores[POINTS // 2 :]
    assert ours(train, *kept, ["R@5"])["R@5"] > ours(train, test, scores, ["R@5"])["R@5"]


def test_napkinxc_sums_relevances_where_the_definition_counts_points():
    # N_l is the number of training points with the label (Jain et al. 2016); napkinXC adds the matrix up
    train = csr_matrix(np.array([[0.5, 1.0], [0.5, 1.0], [0.0, 1.0], [0.0, 1.0]]))
    assert napkinxc.count_labels(train).tolist() == [1.0, 4.0]
    assert count_labels(nested(train, lambda value: int(value > 0))) == {"l000": 2, "l001": 4}


def test_napkinxc_takes_a_stored_zero_as_a_positive():
    # relevance above 0 is a positive; napkinXC reads the pattern of the matrix
    stored = csr_matrix((np.array([0.0, 1.0]), np.array([0, 1]), np.array([0, 2])), shape=(1, 3))
    scores = csr_matrix(np.array([[3.0, 2.0, 1.0]]))
    assert napkinxc.precision_at_k(stored, scores, k=1).tolist() == [1.0]
    assert evaluate(nested(stored, int), nested(scores), ["P@1"]).mean["P@1"] == 0.0


def test_ndcg_of_graded_relevance_is_binary_in_extreme_classification():
    # the method page's nDCG is binary: collections in an XC layout are measured so; elsewhere the grade is the gain
    graded, scores = csr_matrix(np.array([[3.0, 1.0, 0.0]])), csr_matrix(np.array([[1.0, 3.0, 2.0]]))
    discount = 1 / np.log2([2, 3, 4])
    binary = (discount[0] + discount[2]) / discount[:2].sum()
    assert napkinxc.ndcg_at_k(graded, scores, k=3)[2] == pytest.approx(binary)
    flat = evaluate(nested(graded, int), nested(scores), ["nDCG@3", "P(rel=3)@3"], binary_gain=True)
    assert flat.mean == pytest.approx({"nDCG@3": binary, "P(rel=3)@3": 1 / 3}) and "counts as 1" in str(flat)
    (*_, tail, _) = evaluate(
        nested(graded, int), nested(scores), ["nDCG@3"], binary_gain=True, train_counts={"l000": 1, "l001": 1},
        by_frequency=True,
    ).by_frequency  # fmt: skip
    assert tail.values["nDCG@3"] == pytest.approx(discount[0] / discount[:2].sum())
    value = evaluate(nested(graded, int), nested(scores), ["nDCG@3"]).mean["nDCG@3"]
    assert value == pytest.approx((discount[0] + 3 * discount[2]) / (3 * discount[0] + discount[1]))


def test_equal_scores_follow_the_one_tie_rule_whatever_napkinxc_does():
    test, tied = csr_matrix(np.array([[1.0, 0.0]])), csr_matrix(np.array([[0.5, 0.5]]))
    assert napkinxc.precision_at_k(test, tied, k=1)[0] == 1.0  # order of the columns
    assert evaluate(nested(test, int), nested(tied), ["P@1"]).mean["P@1"] == 0.0  # descending id: l001 first

"""The soft top-k operator and loss: sums, exact gradients, and the edges of k."""

import loss_reference as reference
import pytest
import torch

from shortlist.errors import ConfigError, DataError
from shortlist.losses import SoftTopK, soft_top_k
from shortlist.losses.threshold import _Solver


def random_scores(queries, docs, spread=3.0, seed=0, dtype=torch.float64):
    return torch.randn(queries, docs, generator=torch.Generator().manual_seed(seed), dtype=dtype) * spread


@pytest.mark.parametrize("k", [1e-6, 0.3, 1, 2.5, 5, 8, 8.999999])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 10.0])
def test_probabilities_are_those_of_bisection(k, sharpness):
    scores = random_scores(4, 9)
    p = soft_top_k(scores, k, sharpness)
    slow = torch.tensor([reference.top_k_probabilities(row.tolist(), k, sharpness) for row in scores])
    torch.testing.assert_close(p, slow.double(), rtol=1e-5, atol=1e-9)
    assert (p.sum(1) - k).abs().max() <= 1e-10


@pytest.mark.parametrize("docs", [10, 4_000, 20_011])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_sum_to_k_within_the_promised_error(docs, spread, dtype):
    scores = random_scores(2, docs, spread, dtype=dtype)
    for k in (1e-3, 1, 5, 100, docs / 2, docs - 1, docs - 1e-3):
        if k < docs:
            error = (soft_top_k(scores, k).double().sum(1) - k).abs().max().item()
            assert error <= (1e-10 if dtype == torch.float64 else 1e-6 * max(k, 100)), k


def test_rows_sum_to_k_over_a_million_columns_in_a_few_looks(monkeypatch):
    looks = []
    excess = _Solver._excess
    monkeypatch.setattr(_Solver, "_excess", lambda *arguments: looks.append(1) or excess(*arguments))
    scores = random_scores(1, 1_305_265, dtype=torch.float32)
    for k in (1, 5, 100, 652_632.5, 1_305_264, 1_305_264.999):
        looks.clear()
        assert abs(soft_top_k(scores, k).double().sum().item() - k) <= 1e-6 * max(k, 100)
        assert len(looks) <= 8


@pytest.mark.parametrize("k", [1e-4, 1, 2, 6.5, 7.9999])
@pytest.mark.parametrize("masked", [False, True])
def test_operator_gradient_is_exact(k, masked):
    scores = random_scores(3, 8, 1.0, seed=1).requires_grad_()
    valid = torch.rand(3, 8, generator=torch.Generator().manual_seed(2)) < 0.8 if masked else None
    assert torch.autograd.gradcheck(lambda s: soft_top_k(s, k, 2.0, valid), (scores,), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("k", [1e-4, 1, 5, "num_pos", 8.9999])
def test_loss_and_gradient_are_those_of_the_formula(k):
    scores, positives, valid = reference.case(3)
    loss = SoftTopK(k=k)
    expected = reference.by_row(
        lambda s, y: reference.top_k(s, y, sum(g > 0 for g in y) if k == "num_pos" else k), scores, positives, valid
    )
    assert loss(scores, positives, valid).item() == pytest.approx(expected, rel=1e-9)
    slow = reference.central_differences(lambda s: loss(s, positives, valid), scores)
    fast = scores.clone().requires_grad_()
    loss(fast, positives, valid).backward()
    torch.testing.assert_close(fast.grad, slow, rtol=1e-5, atol=1e-8)


def test_loss_is_the_mean_log_probability_of_the_operator():
    scores, positives, valid = reference.case(4)
    a, b = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    positives = positives & valid
    SoftTopK(k=2)(a, positives, valid).backward()
    log_p = soft_top_k(b, 2, valid=valid).clamp(min=1e-300).log().where(positives, 0.0)
    counts = positives.sum(1)
    (-(log_p.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_grades_weight_the_positives_only_on_request():
    scores, positives, valid = reference.case(5)
    grades = positives * (1.0 + torch.arange(positives.shape[1]) % 3)
    weighted = reference.by_row(lambda s, y: reference.top_k(s, y, 3, by_grade=True), scores, grades, valid)
    assert SoftTopK(k=3, weight_by_grade=True)(scores, grades, valid).item() == pytest.approx(weighted, rel=1e-6)
    assert torch.equal(SoftTopK(k=3)(scores, grades, valid), SoftTopK(k=3)(scores, positives, valid))


def test_adding_a_constant_to_a_row_changes_nothing():
    scores = random_scores(3, 50)
    torch.testing.assert_close(soft_top_k(scores, 4), soft_top_k(scores + 7.25, 4), rtol=1e-10, atol=1e-13)


def test_vector_jacobian_products_sum_to_zero():
    scores = random_scores(5, 200).requires_grad_()
    incoming = random_scores(5, 200, seed=3)
    (gradient,) = torch.autograd.grad(soft_top_k(scores, 7), scores, incoming)
    assert gradient.sum(1).abs().max() < 1e-13
    positives = incoming > 3
    (gradient,) = torch.autograd.grad(SoftTopK(k=7)(scores, positives), scores)
    assert gradient.sum(1).abs().max() < 1e-13


def test_each_probability_grows_with_k_and_keeps_the_order_of_the_scores():
    scores = random_scores(2, 30)
    grid = torch.stack([soft_top_k(scores, k) for k in (0.01, 0.5, 1, 2, 5, 15, 29, 29.99)])
    assert (grid.diff(dim=0) > 0).all()
    order = scores.argsort(1)
    assert (soft_top_k(scores, 5).gather(1, order).diff(dim=1) > 0).all()


def test_soft_top_1_is_not_the_softmax():
    scores = random_scores(1, 6, 1.0)
    assert (soft_top_k(scores, 1, 1.0) - scores.softmax(1)).abs().max() > 0.01


def test_a_sharp_operator_is_the_hard_top_k():
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        soft_top_k(scores, 2, 200.0), torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_equal_scores_share_k_evenly():
    scores = torch.full((2, 7), 1e4, requires_grad=True)
    torch.testing.assert_close(soft_top_k(scores, 3), torch.full((2, 7), 3 / 7))
    doubled = random_scores(1, 8).repeat_interleave(2, dim=1)
    p = soft_top_k(doubled, 3)
    assert torch.equal(p[:, ::2], p[:, 1::2])


def test_invalid_columns_get_exactly_nothing():
    scores = random_scores(4, 12).requires_grad_()
    valid = torch.rand(4, 12, generator=torch.Generator().manual_seed(5)) < 0.6
    p = soft_top_k(scores, 2, valid=valid)
    (gradient,) = torch.autograd.grad(p, scores, random_scores(4, 12, seed=6))
    assert (p[~valid] == 0).all() and (gradient[~valid] == 0).all()
    for row in range(4):
        torch.testing.assert_close(p[row][valid[row]], soft_top_k(scores[row : row + 1, valid[row]], 2)[0])
    as_infinity = soft_top_k(scores.masked_fill(~valid, -torch.inf), 2)
    assert torch.equal(as_infinity, p)


def test_k_may_differ_between_rows_and_is_clamped_to_the_valid_columns():
    scores = random_scores(4, 6).requires_grad_()
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[2, 3:] = False
    valid[3] = False
    p = soft_top_k(scores, torch.tensor([1, 6, 5, 2]), valid=valid)
    assert p.sum(1).tolist() == pytest.approx([1, 6, 3, 0])
    assert (p[1] == 1).all() and (p[2, :3] == 1).all() and (p[3] == 0).all()
    (gradient,) = torch.autograd.grad(p, scores, random_scores(4, 6, seed=1))
    assert (gradient[1:] == 0).all() and (gradient[0] != 0).any()
    loss = SoftTopK(k=100)(scores, torch.ones(4, 6), valid)
    loss.backward()
    assert loss == 0 and (scores.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wide_gap_at_rank_k_still_has_its_one_threshold(dtype):
    # The sum of p is flat over the gap: 2 above, 3 far below. By symmetry of the two sides' masses,
    # 2 e^-(a (s - t)) = 3 e^-(a (t - 0)) gives t = (s + log(3 / 2) / a) / 2 for alpha = a.
    scores = torch.tensor([[100.0, 100.0, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    positives = torch.tensor([[False, False, True, False, False]])
    threshold = (100 + torch.tensor(1.5).log().item() / 2) / 2
    loss = SoftTopK(k=2)(scores, positives)
    assert loss.item() == pytest.approx(2 * threshold, rel=1e-6)
    loss.backward()
    # share: half of V lies above, half below.
    expected = torch.tensor([[0.25, 0.25, 1 / 6 - 1, 1 / 6, 1 / 6]], dtype=dtype) * 2
    torch.testing.assert_close(scores.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gap", [3e-9, 1e-3])
def test_k_just_below_the_number_of_columns(gap):
    scores = random_scores(1, 10, 1.0).requires_grad_()
    p = soft_top_k(scores, 10 - gap)
    # 1 - p is the soft top-gap of the negated scores.
    torch.testing.assert_close(1 - p, soft_top_k(-scores, gap), rtol=1e-5, atol=1e-15)
    incoming = random_scores(1, 10, seed=8)
    (a,) = torch.autograd.grad(p, scores, incoming)
    (b,) = torch.autograd.grad(soft_top_k(-scores, gap), scores, -incoming)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-18)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_ten_thousand_stay_finite(dtype):
    scores = torch.tensor([[1e4, -1e4, 1e4, 0.0, 12.0]], dtype=dtype, requires_grad=True)
    p = soft_top_k(scores, 2.5)
    assert p.double().sum().item() == pytest.approx(2.5, abs=1e-4)
    SoftTopK(k=3)(scores, torch.tensor([[1, 1, 0, 0, 0]])).backward()
    assert scores.grad.isfinite().all() and scores.grad.dtype == dtype


def test_a_row_does_not_depend_on_the_rows_of_its_block():
    scores = random_scores(20, 50, 8.0, dtype=torch.float32)
    together = soft_top_k(scores, 3)
    for row in range(20):
        torch.testing.assert_close(together[row : row + 1], soft_top_k(scores[row : row + 1], 3), rtol=1e-6, atol=1e-9)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    scores, positives, valid = reference.case(9, queries=11, docs=40)
    whole = soft_top_k(scores, 3, valid=valid)
    loss = SoftTopK(k=3)(scores, positives, valid)
    monkeypatch.setattr("shortlist.losses.row_statistics.CPU_BLOCK", 100)
    torch.testing.assert_close(whole, soft_top_k(scores, 3, valid=valid), rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, SoftTopK(k=3)(scores, positives, valid), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 1)])
def test_empty_and_narrow_matrices(shape):
    scores = torch.zeros(shape, requires_grad=True)
    p = soft_top_k(scores, 2)
    assert p.shape == shape and (p == 1).all()
    p.sum().backward()
    assert scores.grad.shape == shape


def test_nan_ends_in_nan_and_not_in_a_loop():
    scores = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    p = soft_top_k(scores, 1)
    assert p[0].isnan().all() and p[1].isfinite().all()


@pytest.mark.parametrize("k", [0, -1, float("nan"), torch.tensor([1.0, 0.0])])
def test_k_that_is_not_above_zero_is_refused(k):
    with pytest.raises(ConfigError, match="above 0"):
        soft_top_k(torch.zeros(2, 3), k)


def test_wrong_arguments_are_refused_with_what_was_expected():
    with pytest.raises(ConfigError, match="one value a row"):
        soft_top_k(torch.zeros(2, 3), torch.ones(3))
    with pytest.raises(ConfigError, match="one value a row, got None"):
        soft_top_k(torch.zeros(2, 3), None)
    with pytest.raises(ConfigError, match="sharpness"):
        soft_top_k(torch.zeros(2, 3), 1, sharpness=0)
    for make in (lambda value: SoftTopK(sharpness=value), lambda value: soft_top_k(torch.zeros(2, 3), 1, value)):
        with pytest.raises(ConfigError, match="sharpness of soft_top_k is 1e[+]30; expected at most 10000"):
            make(1e30)


def test_the_largest_sharpness_is_solved_for_scores_of_any_temperature():
    scores = torch.randn(40, 30)
    for scale in (1.0, 100.0, 10_000.0):
        p = soft_top_k(scores * scale, 3, 1e4)
        torch.testing.assert_close(p.sum(dim=1), torch.full((40,), 3.0), rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="num_pos"):
        SoftTopK(k="positives")
    with pytest.raises(ConfigError, match="k of soft_top_k"):
        SoftTopK(k=0)
    with pytest.raises(DataError, match="matrix"):
        soft_top_k(torch.zeros(3), 1)
    with pytest.raises(DataError, match="valid"):
        soft_top_k(torch.zeros(2, 3), 1, valid=torch.ones(2, 3))

"""MarginMSE and KLDivergence towards teacher scores."""

import math

import loss_reference as reference
import pytest
import torch

from shortlist.errors import DataError
from shortlist.losses import KLDivergence, MarginMSE


def teacher_case(seed=0):
    scores, positives, valid = reference.case(seed)
    teacher = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64) * 3
    return scores, teacher, positives, valid


def slow_margin_mse(scores, teacher, positives, valid):
    losses = []
    for s, t, y, keep in zip(scores.tolist(), teacher.tolist(), positives.tolist(), valid.tolist(), strict=True):
        p = [i for i in range(len(s)) if keep[i] and y[i]]
        n = [i for i in range(len(s)) if keep[i] and not y[i]]
        errors = [((s[i] - s[j]) - (t[i] - t[j])) ** 2 for i in p for j in n]
        if p:
            losses.append(sum(errors) / max(1, len(errors)))
    return sum(losses) / len(losses)


def slow_kl(scores, teacher, valid, temperature=1.0):
    losses = []
    for s, t, keep in zip(scores.tolist(), teacher.tolist(), valid.tolist(), strict=True):
        s = [math.exp(x) for x, k in zip(s, keep, strict=True) if k]
        t = [math.exp(x / temperature) for x, k in zip(t, keep, strict=True) if k]
        if s:
            losses.append(sum(b / sum(t) * math.log((b / sum(t)) / (a / sum(s))) for a, b in zip(s, t, strict=True)))
    return sum(losses) / len(losses)


def both(positives):
    return [
        lambda s, t, valid=None: MarginMSE()(s, t, valid, positives=positives),
        lambda s, t, valid=None: KLDivergence()(s, t, valid),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_values_are_the_formulas(masked):
    scores, teacher, positives, valid = teacher_case()
    valid = valid if masked else torch.ones_like(valid)
    margin, kl = both(positives)
    assert margin(scores, teacher, valid).item() == pytest.approx(slow_margin_mse(scores, teacher, positives, valid))
    assert kl(scores, teacher, valid).item() == pytest.approx(slow_kl(scores, teacher, valid))
    soft = KLDivergence(teacher_temperature=4.0)(scores, teacher, valid)
    assert soft.item() == pytest.approx(slow_kl(scores, teacher, valid, 4.0))


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_are_the_finite_differences_and_spare_the_teacher(which):
    scores, teacher, positives, valid = teacher_case(1)
    loss = both(positives)[which]
    slow = reference.central_differences(lambda s: loss(s, teacher, valid), scores)
    fast, teacher = scores.clone().requires_grad_(), teacher.requires_grad_()
    loss(fast, teacher, valid).backward()
    torch.testing.assert_close(fast.grad, slow, rtol=1e-5, atol=1e-7)
    assert teacher.grad is None


@pytest.mark.parametrize("which", [0, 1])
def test_the_teachers_scores_cost_nothing_up_to_a_constant_a_query(which):
    scores, _, positives, valid = teacher_case(2)
    shifted = scores + torch.arange(len(scores))[:, None] * 10
    student = scores.clone().requires_grad_()
    loss = both(positives)[which](student, shifted, valid)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12) and student.grad.abs().max() < 1e-10


@pytest.mark.parametrize("which", [0, 1])
def test_teacher_scores_may_be_missing_where_not_valid(which):
    scores, teacher, positives, valid = teacher_case(3)
    student = scores.clone().requires_grad_()
    holes = teacher.masked_fill(~valid, float("nan"))
    loss = both(positives)[which](student, holes, valid)
    loss.backward()
    assert torch.equal(loss, both(positives)[which](scores, teacher, valid))
    assert student.grad.isfinite().all() and (student.grad[~valid] == 0).all()


def test_margin_mse_of_one_positive_and_one_negative_is_the_papers():
    loss = MarginMSE()(torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 4.0]]), positives=torch.tensor([[1, 0]]))
    assert loss.item() == pytest.approx((2 - 5) ** 2)


def test_margin_mse_is_zero_without_negatives_and_counts_the_query():
    scores = torch.tensor([[3.0, 1.0], [3.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[9.0, 4.0], [9.0, 4.0]])
    loss = MarginMSE()(scores, teacher, positives=torch.tensor([[1, 0], [1, 1]]))
    assert loss.item() == pytest.approx(9 / 2)
    loss.backward()
    assert (scores.grad[1] == 0).all()


def test_kl_may_be_limited_to_queries_with_a_positive():
    scores, teacher, positives, valid = teacher_case(4)
    rows = (positives & valid).any(1)
    limited = KLDivergence()(scores, teacher, valid, positives=positives)
    torch.testing.assert_close(limited, KLDivergence()(scores[rows], teacher[rows], valid[rows]))


def test_kl_takes_a_teacher_that_gives_no_mass():
    scores = torch.zeros(1, 3, requires_grad=True)
    loss = KLDivergence()(scores, torch.tensor([[0.0, 0.0, -torch.inf]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(3 / 2)) and scores.grad.isfinite().all()


def test_nothing_valid_is_zero_with_zero_gradient():
    scores = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for loss in both(torch.ones(2, 3)):
        value = loss(scores, torch.zeros(2, 3), nothing)
        value.backward()
        assert value == 0 and (scores.grad == 0).all()


def test_other_shapes_are_refused():
    with pytest.raises(DataError, match="teacher_scores has shape"):
        KLDivergence()(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(DataError, match="positives has shape"):
        MarginMSE()(torch.zeros(2, 3), torch.zeros(2, 3), positives=torch.zeros(2, 4))

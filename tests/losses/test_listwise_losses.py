"""ListNet, RankNet and ApproxNDCG on graded lists."""

import loss_reference as reference
import pytest
import torch

from shortlist.errors import ConfigError
from shortlist.losses import ApproxNDCG, ListNet, RankNet

FORMULAS = [
    (ListNet(), reference.list_net),
    (ListNet(target_temperature=0.5), lambda s, y: reference.list_net(s, y, 0.5)),
    (RankNet(), reference.rank_net),
    (ApproxNDCG(), reference.approx_ndcg),
    (ApproxNDCG(sharpness=1.0), lambda s, y: reference.approx_ndcg(s, y, 1.0)),
]


def graded_case(seed=0):
    scores, positives, valid = reference.case(seed)
    grades = torch.randint(-1, 4, scores.shape, generator=torch.Generator().manual_seed(seed)).double()
    grades[1] = -(grades[1] > 0).double()  # no positive
    return scores, grades, valid


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
@pytest.mark.parametrize("masked", [False, True])
def test_value_is_the_formula(loss, formula, masked):
    scores, grades, valid = graded_case()
    valid = valid if masked else None
    expected = reference.by_row(formula, scores, grades, valid)
    assert loss(scores, grades, valid).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_is_the_finite_difference(loss, formula, masked):
    scores, grades, valid = graded_case(1)
    valid = valid if masked else None
    slow = reference.central_differences(lambda s: loss(s, grades, valid), scores)
    fast = scores.clone().requires_grad_()
    loss(fast, grades, valid).backward()
    torch.testing.assert_close(fast.grad, slow, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
def test_a_mask_counts_as_grades_of_zero_and_one(loss, formula):
    scores, positives, valid = reference.case(2)
    assert torch.equal(loss(scores, positives, valid), loss(scores, positives.double(), valid))


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
def test_negative_grades_count_as_zero(loss, formula):
    scores, grades, valid = graded_case(3)
    assert torch.equal(loss(scores, grades, valid), loss(scores, grades.clamp(min=0), valid))


def test_list_net_is_least_where_the_scores_are_the_grades():
    grades = torch.tensor([[3.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    scores = grades.clone().requires_grad_()
    ListNet()(scores, grades).backward()
    assert scores.grad.abs().max() < 1e-15


def test_rank_net_ignores_pairs_of_one_grade():
    scores = torch.tensor([[5.0, -5.0]], requires_grad=True)
    loss = RankNet()(scores, torch.ones(1, 2))
    loss.backward()
    assert loss == 0 and (scores.grad == 0).all()


def test_approx_ndcg_tends_to_one_minus_ndcg():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.3]], dtype=torch.float64)
    grades = torch.tensor([[3.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
    discounts = 1 / torch.log2(torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64))
    gained = 7 * discounts[3] + 3 * discounts[0] + 1 * discounts[2]
    ideal = 7 * discounts[0] + 3 * discounts[1] + 1 * discounts[2]
    assert ApproxNDCG(sharpness=1000)(scores, grades).item() == pytest.approx(1 - (gained / ideal).item(), rel=1e-6)
    assert ApproxNDCG(sharpness=1000)(grades, grades).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
def test_a_step_down_the_gradient_mends_a_wrong_order(loss, formula):
    scores = torch.tensor([[0.0, 0.1, 0.05]], requires_grad=True)
    loss(scores, torch.tensor([[2.0, 0.0, 1.0]])).backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]


def test_options_must_be_above_zero():
    with pytest.raises(ConfigError, match="target_temperature"):
        ListNet(target_temperature=0)
    with pytest.raises(ConfigError, match="sharpness"):
        ApproxNDCG(sharpness=float("inf"))

"""Softmax losses: formula, gradient, and what several positives do to each."""

import loss_reference as reference
import pytest
import torch

from shortlist.losses import DecoupledSoftmax, InfoNCE, OneVsAllBCE

FORMULAS = [
    (InfoNCE(), reference.info_nce),
    (InfoNCE(mask_positives=True), reference.decoupled),
    (DecoupledSoftmax(), reference.decoupled),
    (OneVsAllBCE(), reference.bce),
]


def gradient_of(loss, scores, positives, valid=None):
    scores = scores.clone().requires_grad_()
    loss(scores, positives, valid).backward()
    return scores.grad


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
@pytest.mark.parametrize("masked", [False, True])
def test_value_is_the_formula(loss, formula, masked):
    scores, positives, valid = reference.case()
    valid = valid if masked else None
    expected = reference.by_row(formula, scores, positives, valid)
    assert loss(scores, positives, valid).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("loss", "formula"), FORMULAS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_is_the_finite_difference(loss, formula, masked):
    scores, positives, valid = reference.case(1)
    valid = valid if masked else None
    slow = reference.central_differences(lambda s: loss(s, positives, valid), scores)
    torch.testing.assert_close(gradient_of(loss, scores, positives, valid), slow, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", [InfoNCE, DecoupledSoftmax])
def test_grades_weight_the_positives_only_on_request(loss):
    scores, positives, valid = reference.case(2)
    grades = positives * (1 + torch.arange(positives.shape[1]) % 3) - 0.5 * ~positives
    formula = reference.info_nce if loss is InfoNCE else reference.decoupled
    weighted = reference.by_row(lambda s, y: formula(s, y, by_grade=True), scores, grades, valid)
    assert loss(weight_by_grade=True)(scores, grades, valid).item() == pytest.approx(weighted, rel=1e-6)
    assert torch.equal(loss()(scores, grades, valid), loss()(scores, positives, valid))


def test_masking_the_positives_of_info_nce_gives_the_decoupled_loss():
    scores, positives, valid = reference.case(3)
    masked, decoupled = InfoNCE(mask_positives=True), DecoupledSoftmax()
    assert torch.equal(masked(scores, positives, valid), decoupled(scores, positives, valid))
    assert torch.equal(gradient_of(masked, scores, positives, valid), gradient_of(decoupled, scores, positives, valid))


def test_decoupled_is_the_mean_of_single_positive_cross_entropies_with_the_others_masked():
    scores, positives, _ = reference.case(4)
    row, scores_row = positives[3].nonzero().flatten(), scores[3:4]
    single = []
    for column in row:
        others = positives[3].clone()
        others[column] = False
        logits = scores_row.masked_fill(others, -torch.inf)
        single.append(torch.nn.functional.cross_entropy(logits, column[None]))
    loss = DecoupledSoftmax()(scores_row, positives[3:4])
    torch.testing.assert_close(loss, torch.stack(single).mean(), rtol=1e-12, atol=0)


def test_with_one_positive_info_nce_and_decoupled_agree():
    scores, _, valid = reference.case(5)
    positives = torch.zeros_like(valid)
    positives[:, 3] = valid[:, 3] = True
    a, b = InfoNCE(), DecoupledSoftmax()
    torch.testing.assert_close(a(scores, positives, valid), b(scores, positives, valid))
    torch.testing.assert_close(gradient_of(a, scores, positives, valid), gradient_of(b, scores, positives, valid))


def test_an_easy_positive_is_pushed_down_by_info_nce_and_never_by_decoupled():
    # One easy positive with p = 0.97 > 1/3 beside two hard ones.
    scores = torch.tensor([[6.0, 1.0, 0.5, 2.0, 0.0]])
    positives = torch.tensor([[True, True, True, False, False]])
    coupled, decoupled = (gradient_of(loss(), scores, positives) for loss in (InfoNCE, DecoupledSoftmax))
    p = scores.softmax(1)
    assert p[0, 0] > 1 / 3
    assert coupled[0, 0] > 0.5  # gradient descent lowers its score
    torch.testing.assert_close(coupled, p - positives / 3)
    assert (decoupled[positives] <= 0).all() and (decoupled[~positives] > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_decoupled_gradient_is_never_above_zero_on_a_positive_and_sums_to_zero(seed):
    scores, positives, valid = reference.case(seed, queries=20, docs=40, spread=5)
    gradient = gradient_of(DecoupledSoftmax(), scores, positives, valid)
    assert (gradient[positives] <= 0).all() and (gradient[~positives] >= 0).all()
    assert gradient.sum(1).abs().max() < 1e-15


def test_a_copy_of_the_scored_document_is_masked_by_valid():
    # user-reports B.33: equal documents in one batch are no negatives of each other.
    scores = torch.tensor([[3.0, 3.0, 0.0]], dtype=torch.float64)
    positives = torch.tensor([[True, False, False]])
    valid = torch.tensor([[True, False, True]])
    alone = scores[:, [0, 2]]
    for loss in (InfoNCE(), DecoupledSoftmax(), OneVsAllBCE()):
        assert loss(scores, positives, valid) == pytest.approx(loss(alone, positives[:, [0, 2]]).item())
        assert loss(scores, positives, valid) < loss(scores, positives)
        assert gradient_of(loss, scores, positives, valid)[0, 1] == 0


def test_a_known_positive_beside_the_diagonal_is_no_negative():
    # user-reports B.33, B.34: a second positive of the query in the batch is given as a positive.
    scores = torch.tensor([[2.0, 1.9, -1.0]])
    both = torch.tensor([[True, True, False]])
    gradient = gradient_of(DecoupledSoftmax(), scores, both)
    assert (gradient[0, :2] < 0).all()


def test_hundreds_of_positives_and_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("shortlist.losses.row_statistics.CPU_BLOCK", 700)  # three rows a block
    scores, positives, valid = reference.case(6, queries=10, docs=300, rate=0.8)
    for loss, formula in FORMULAS:
        expected = reference.by_row(formula, scores, positives, valid)
        assert loss(scores, positives, valid).item() == pytest.approx(expected, rel=1e-12)
        whole = gradient_of(loss, scores, positives, valid)
        with monkeypatch.context() as context:
            context.setattr("shortlist.losses.row_statistics.CPU_BLOCK", 1 << 18)
            torch.testing.assert_close(whole, gradient_of(loss, scores, positives, valid), rtol=1e-12, atol=0)


def test_a_row_costs_the_same_whatever_the_other_rows_are():
    scores, positives, valid = reference.case(7)
    for loss in (InfoNCE(), DecoupledSoftmax(), OneVsAllBCE()):
        values, counted = loss.per_query(scores, positives, valid)
        for query in range(len(scores)):
            one, _ = loss.per_query(*(m[query : query + 1] for m in (scores, positives, valid)))
            torch.testing.assert_close(values[query : query + 1], one, rtol=1e-13, atol=0)
        torch.testing.assert_close(loss(scores, positives, valid), values.sum() / counted.sum())

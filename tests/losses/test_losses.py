"""What holds for every loss: reduction, dtypes, edges, and the registry."""

import loss_reference as reference
import pytest
import torch

from shortlist.errors import ConfigError, DataError
from shortlist.losses import LOSSES, InfoNCE, SoftTopK, build_loss

HALF_AND_FULL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def call(name, scores, positives, valid=None):
    """Call any loss with positives; the teacher of a distillation loss is a fixed function of the columns."""
    loss = build_loss(name)
    if loss.target == "positives":
        return loss(scores, positives, valid)
    teacher = torch.arange(scores.shape[1]).expand(scores.shape).to(scores.dtype).clone()
    return loss(scores, teacher, valid, positives=positives)


@pytest.fixture(params=list(LOSSES))
def name(request):
    return request.param


def test_the_mean_is_over_the_queries_that_have_a_positive(name):
    scores, positives, valid = reference.case(0)
    has = (positives & valid).any(1)
    assert not has.all()
    torch.testing.assert_close(
        call(name, scores, positives, valid), call(name, scores[has], positives[has], valid[has]), rtol=1e-12, atol=0
    )


def test_queries_without_positives_get_no_gradient(name):
    scores, positives, valid = reference.case(0)
    scores.requires_grad_()
    call(name, scores, positives, valid).backward()
    assert (scores.grad[~(positives & valid).any(1)] == 0).all()
    assert (scores.grad[~valid] == 0).all() and (scores.grad != 0).any()


def test_no_positive_at_all_is_zero_with_a_zero_gradient(name):
    scores = torch.randn(3, 4, requires_grad=True)
    loss = call(name, scores, torch.zeros(3, 4))
    loss.backward()
    assert loss == 0 and loss.requires_grad and (scores.grad == 0).all()


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_half_precision_computes_in_float32_and_returns_its_own_gradient(name, dtype):
    # user-reports B.49: a loss of 0 or NaN under fp16 where fp32 is fine.
    scores, positives, valid = reference.case(1)
    low = scores.to(dtype).requires_grad_()
    loss = call(name, low, positives, valid)
    loss.backward()
    exact = low.detach().double().requires_grad_()
    expected = call(name, exact, positives, valid)
    expected.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss > 0
    assert low.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=1e-6)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    torch.testing.assert_close(low.grad.double(), exact.grad, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("size", [0.0, 1e4])
def test_extreme_scores_give_finite_losses_and_gradients(name, dtype, size):
    # user-reports B.49
    signs = torch.tensor([[1.0, -1, 1, -1], [-1, -1, 1, 1], [1, 1, 1, 1], [-1, 1, -1, 1]])
    positives = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    for mask in (None, valid):
        scores = (signs * size).to(dtype).requires_grad_()
        loss = call(name, scores, positives, mask)
        loss.backward()
        assert loss.isfinite() and scores.grad.isfinite().all()


def test_minus_infinity_is_a_masked_entry(name):
    scores, positives, valid = reference.case(2)
    masked = scores.masked_fill(~valid, -torch.inf).requires_grad_()
    loss = call(name, masked, positives)
    loss.backward()
    torch.testing.assert_close(loss, call(name, scores, positives, valid), rtol=1e-12, atol=1e-15)
    assert masked.grad.isfinite().all() and (masked.grad[~valid] == 0).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1), (4, 1), (1, 4)])
@pytest.mark.parametrize("positive", [True, False])
def test_empty_and_narrow_matrices(name, shape, positive):
    scores = torch.randn(shape, requires_grad=True)
    loss = call(name, scores, torch.full(shape, positive))
    loss.backward()
    assert loss.shape == () and loss.isfinite() and scores.grad.shape == shape and scores.grad.isfinite().all()


def test_rows_that_are_masked_whole_change_nothing(name):
    scores, positives, valid = reference.case(3)
    valid[4] = False
    rest = [0, 1, 2, 3, 5]
    scores.requires_grad_()
    loss = call(name, scores, positives, valid)
    loss.backward()
    torch.testing.assert_close(loss, call(name, scores[rest], positives[rest], valid[rest]), rtol=1e-12, atol=0)
    assert scores.grad.isfinite().all() and (scores.grad[4] == 0).all()


def test_the_arguments_are_left_as_they_were(name):
    scores, positives, valid = reference.case(4)
    copies = scores.clone(), positives.clone(), valid.clone()
    call(name, scores.requires_grad_(), positives, valid).backward()
    assert all(torch.equal(a, b) for a, b in zip(copies, (scores, positives, valid), strict=True))


def test_a_graph_above_and_below_the_loss(name):
    scores, positives, valid = reference.case(5)
    left, right = torch.randn(6, 3, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    left.requires_grad_(), right.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: 3 * call(name, a @ b.T, positives, valid), (left, right))


def test_columns_in_any_memory_layout(name):
    scores, positives, valid = reference.case(6)
    turned = scores.T.contiguous().T.requires_grad_()
    loss = call(name, turned, positives, valid)
    loss.backward()
    plain = scores.clone().requires_grad_()
    call(name, plain, positives, valid).backward()
    torch.testing.assert_close(turned.grad, plain.grad, rtol=1e-9, atol=1e-12)


def test_autocast_does_not_lower_the_precision(name):
    scores, positives, valid = reference.case(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(name, scores.float(), positives, valid)
    torch.testing.assert_close(loss, call(name, scores.float(), positives, valid), rtol=1e-5, atol=1e-6)


def test_wrong_shapes_and_masks_are_refused():
    scores = torch.zeros(2, 3)
    with pytest.raises(DataError, match=r"positives has shape \(3,\) but scores has \(2, 3\)"):
        InfoNCE()(scores, torch.ones(3))
    with pytest.raises(DataError, match="True = keep"):
        InfoNCE()(scores, torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(DataError, match="matrix"):
        InfoNCE()(scores[0], torch.ones(3))
    with pytest.raises(DataError, match="int64"):
        InfoNCE()(scores.long(), torch.ones(2, 3))
    with pytest.raises(DataError, match="positives is list"):
        InfoNCE()(scores, [[1, 0, 0], [0, 1, 0]])


def test_build_by_name_with_options():
    loss = build_loss("soft_top_k", k="num_pos", sharpness=4.0)
    assert isinstance(loss, SoftTopK) and loss.k == "num_pos" and loss.sharpness == 4.0
    assert build_loss(**{"name": "info_nce", "mask_positives": True}).mask_positives


def test_build_by_import_path():
    assert isinstance(build_loss("shortlist.losses:SoftTopK", k=3), SoftTopK)
    assert isinstance(build_loss("torch.nn:MSELoss"), torch.nn.MSELoss)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("decoupled_softmx", {}, "did you mean 'decoupled_softmax'"),
        ("InfoNCE", {}, "there is no loss 'InfoNCE'"),
        ("soft_top_k", {"sharpnes": 1}, "no option 'sharpnes', did you mean 'sharpness'"),
        ("margin_mse", {"k": 1}, "it has no options"),
        ("soft_top_k", {"k": -1}, "above 0"),
        ("no.such.module:Loss", {}, "cannot be imported"),
        ("torch.nn:NoSuchLoss", {}, "cannot be imported"),
        (":", {}, "cannot be imported"),
        ("torch:__version__", {}, "not a class or function"),
    ],
)
def test_what_cannot_be_built_is_named_with_the_remedy(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_loss(name, **options)

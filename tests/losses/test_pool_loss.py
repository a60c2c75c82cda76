"""The loss from vectors, in blocks: the value and the gradients of the plain form, whatever the memory."""

import pytest
import torch

from shortlist.losses import DecoupledSoftmax, InfoNCE, OneVsAllBCE, SoftTopK, pool_loss

LOSSES = {
    "info_nce": InfoNCE(),
    "info_nce, positives masked": InfoNCE(mask_positives=True),
    "info_nce, graded": InfoNCE(weight_by_grade=True),
    "decoupled": DecoupledSoftmax(),
    "decoupled, graded": DecoupledSoftmax(weight_by_grade=True, normalise_weights=False),
    "soft top 3": SoftTopK(k=3),
    "soft top 3, graded": SoftTopK(k=3, weight_by_grade=True),
    "soft top, as many as positives": SoftTopK(k="num_pos"),
    "soft top, k of each row": SoftTopK(k=torch.arange(1.0, 14.0)),
    "soft top, nearly every column": SoftTopK(k=35.5),
    "soft top, above the columns": SoftTopK(k=100),
    "bce": OneVsAllBCE(),
    "bce, graded": OneVsAllBCE(weight_by_grade=True),
}
BUDGETS = {"one block": None, "blocks of rows": 40 * 8 * 3 * 2, "blocks of columns": 700, "one cell": 1}


def case(dtype=torch.float64, seed=0, queries=13, docs=37, dim=6):
    """Vectors, positives as a matrix of grades (one row has none, one many), a bias and pairs to leave out."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(queries, dim, generator=generator, dtype=dtype)
    right = torch.randn(docs, dim, generator=generator, dtype=dtype)
    grades = torch.rand(queries, docs, generator=generator) * (torch.rand(queries, docs, generator=generator) < 0.15)
    grades[4] = 0
    grades[5, :30] = 1
    grades[6, [0, -1]] = 2
    dropped = (torch.rand(queries, docs, generator=generator) < 0.1) & (grades == 0)
    bias = torch.randn(docs, generator=generator, dtype=dtype)
    return left, right, grades.to(dtype), bias, dropped


def plain(loss, queries, documents, grades, temperature, bias=None, dropped=None):
    """The whole matrix, the loss on it, and autograd."""
    queries, documents = queries.clone().requires_grad_(), documents.clone().requires_grad_()
    scores = queries @ documents.T / temperature
    if bias is not None:
        scores = scores + bias
    value = loss(scores, grades, None if dropped is None else ~dropped)
    value.backward()
    return value.detach(), queries.grad, documents.grad


def blocked(loss, queries, documents, grades, temperature, **options):
    queries, documents = queries.clone().requires_grad_(), documents.clone().requires_grad_()
    rows, columns = grades.nonzero(as_tuple=True)
    value = pool_loss(
        loss, queries, documents,
        rows=rows, columns=columns, values=grades[rows, columns], temperature=temperature, **options,
    )  # fmt: skip
    value.backward()
    return value.detach(), queries.grad, documents.grad


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles in every block, and row blocks of a few rows."""
    monkeypatch.setattr("shortlist.losses.row_statistics.CPU_BLOCK", 100)
    monkeypatch.setattr("shortlist.losses.pool.USEFUL_HEIGHT", 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradients_are_those_of_the_whole_matrix(name, budget, with_bias):
    queries, documents, grades, bias, _ = case()
    bias = bias if with_bias else None
    expected = plain(LOSSES[name], queries, documents, grades, 0.7, bias)
    found = blocked(LOSSES[name], queries, documents, grades, 0.7, bias=bias, memory=BUDGETS[budget])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_float32(name, budget):
    queries, documents, grades, bias, _ = case(torch.float32, seed=1)
    expected = plain(LOSSES[name], queries.double(), documents.double(), grades.double(), 0.7, bias.double())
    found = blocked(LOSSES[name], queries, documents, grades, 0.7, bias=bias, memory=BUDGETS[budget])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)

"""What the tests of pool_loss share: losses, vectors, positives, and the plain form on the whole matrix."""

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
BUDGETS = {"one block": None, "blocks of rows": 40 * 8 * 3 * 2, "blocks of columns": 700}


def case(dtype=torch.float64, seed=0, queries=13, docs=37, dim=6):
    """Vectors, positives as a matrix of grades (one row has none, one many), a bias and pairs to leave out."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(queries, dim, generator=generator).to(dtype)
    right = torch.randn(docs, dim, generator=generator).to(dtype)
    grades = torch.rand(queries, docs, generator=generator) * (torch.rand(queries, docs, generator=generator) < 0.15)
    if queries > 8 and docs > 30:
        grades[4] = 0
        grades[5, :30] = 1
        grades[6, [0, -1]] = 2
        grades[8, [0, 4, 5, 18, 19, -1]] = 1  # the first and the last columns of the shards in shard_worker.py
    dropped = (torch.rand(queries, docs, generator=generator) < 0.1) & (grades == 0)
    bias = torch.randn(docs, generator=generator).to(dtype)
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

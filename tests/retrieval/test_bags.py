"""The fast gradient of static embeddings equals torch's own."""

import torch
from torch.nn import functional

from shortlist.retrieval.bags import mean_of_rows


def test_values_and_gradient_equal_torch_with_repeated_tokens_and_an_empty_text():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (200,), generator=generator)
    offsets = torch.tensor([0, 10, 10, 60, 150])
    ours = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.randn(5, 8, generator=generator, dtype=torch.float64)

    first = mean_of_rows(ids, ours, offsets)
    second = functional.embedding_bag(ids, theirs, offsets, mode="mean")
    assert torch.equal(first, second)
    (first * weights).sum().backward()
    (second * weights).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)
    assert not first[1].any()


def test_without_gradients_nothing_is_recorded():
    embedding = torch.randn(5, 3, requires_grad=True)
    with torch.no_grad():
        assert not mean_of_rows(torch.tensor([1, 2]), embedding, torch.tensor([0])).requires_grad

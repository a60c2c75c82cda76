"""The gradient cache: the gradient of the plain graph, with dropout and without, for every loss and any micro-batch."""

import pytest
import torch
from double_encoders import (
    DOCUMENTS,
    PAIRS,
    QUERIES,
    a_batch,
    a_loss,
    assert_equal_gradients,
    chunks_of,
    gradients_of,
    open_double,
)
from torch import nn

from shortlist.losses import LOSSES
from shortlist.retrieval import DualEncoder
from shortlist.training.gradcache import embed
from shortlist.training.objective import Objective
from shortlist.training.step import batch_loss


def plain(encode, chunks):
    return torch.cat([encode(chunk) for chunk in chunks])


def loss_value(name, queries, documents):
    loss = a_loss(name)
    scores = queries @ documents.T / 0.1
    positives = torch.zeros(scores.shape, dtype=scores.dtype)
    for row, column, grade in PAIRS:
        positives[row, column] = grade
    if getattr(loss, "target", "positives") == "teacher":
        teacher = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=scores.dtype)
        return loss(scores, teacher, None, positives=positives)
    return loss(scores, positives)


def gradients(encoder, name, way, sizes, *, seed=3, repeat=1):
    encoder.zero_grad()
    torch.manual_seed(seed)
    for _ in range(repeat):
        documents = way(encoder.embed_documents, chunks_of(encoder.tokenize_documents, DOCUMENTS, sizes[1]))
        queries = way(encoder.embed_queries, chunks_of(encoder.tokenize_queries, QUERIES, sizes[0]))
        loss_value(name, queries, documents).backward()
    return gradients_of(encoder)


@pytest.fixture
def transformer(tiny_transformer):
    return open_double(tiny_transformer)


@pytest.fixture
def static(tiny_static):
    return open_double(tiny_static)


# Micro-batches smaller than the batch with a ragged last one, of one text, equal to it, and larger.
SIZES = [(3, 4), (1, 1), (7, 11), (100, 100), (100, 2), (2, 100)]


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_graph_kept_with_dropout_on(transformer, name):
    # user-reports B.46: copies of GradCache gave wrong gradients
    cached = gradients(transformer, name, embed, (3, 4))
    kept = gradients(transformer, name, plain, (3, 4))
    assert_equal_gradients(cached, kept)
    # Dropout did something: other random numbers give another gradient.
    other = gradients(transformer, name, plain, (3, 4), seed=4)
    assert max(float((other[key] - kept[key]).abs().max()) for key in kept) > 1e-6


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["transformer", "static"])
def test_gradient_is_that_of_the_single_big_batch_without_dropout(request, name, kind):
    # user-reports B.47: a cached loss ignored the offset of the mini-batch
    encoder = request.getfixturevalue(kind).eval()
    whole = gradients(encoder, name, plain, (100, 100))
    for sizes in [(3, 4), (2, 100)]:
        assert_equal_gradients(gradients(encoder, name, embed, sizes), whole)


@pytest.mark.parametrize("sizes", SIZES)
def test_any_micro_batch_on_either_side(transformer, sizes):
    cached = gradients(transformer, "decoupled_softmax", embed, sizes)
    kept = gradients(transformer, "decoupled_softmax", plain, sizes)
    assert_equal_gradients(cached, kept)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_with_micro_batches_is_the_step_without(transformer, name):
    """The whole way from a batch to the gradient: both sides cached, scores in blocks where the loss allows it."""
    encoder = transformer.eval()
    objective = Objective(a_loss(name), temperature=0.1, dim=encoder.dim, normalise=True, matryoshka=[16])
    found = []
    for micro in (None, 3):
        encoder.zero_grad()
        batch_loss(encoder, objective, a_batch(encoder, micro=micro)).backward()
        found.append(gradients_of(encoder))
    assert_equal_gradients(*found)


def test_gradients_accumulate_over_steps(transformer):
    cached = gradients(transformer, "info_nce", embed, (3, 4), repeat=3)
    assert_equal_gradients(cached, gradients(transformer, "info_nce", plain, (3, 4), repeat=3))


def test_a_scaled_loss_gives_scaled_gradients(transformer):
    """What a float16 scaler relies on."""
    documents = chunks_of(transformer.tokenize_documents, DOCUMENTS, 4)
    found = []
    for scale in (1.0, 1024.0):
        transformer.zero_grad()
        torch.manual_seed(0)
        (embed(transformer.embed_documents, documents).pow(3).sum() * scale).backward()
        found.append({key: value / scale for key, value in gradients_of(transformer).items()})
    assert_equal_gradients(*found)


def test_random_numbers_go_on_as_if_the_second_encoding_were_not_there(transformer):
    states = []
    for way in (embed, plain):
        torch.manual_seed(1)
        way(transformer.embed_documents, chunks_of(transformer.tokenize_documents, DOCUMENTS, 4)).sum().backward()
        states.append(torch.rand(3))
    assert torch.equal(*states)


def test_autocast_is_that_of_the_first_encoding(tiny_transformer):
    """Both sides cached or one of them, half-precision copies of the weights never lose their gradient."""
    encoder = DualEncoder.from_pretrained(tiny_transformer).eval()
    found = []
    for way, sizes in ((plain, (3, 4)), (embed, (3, 4)), (embed, (100, 4))):
        encoder.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            documents = way(encoder.embed_documents, chunks_of(encoder.tokenize_documents, DOCUMENTS, sizes[1]))
            queries = way(encoder.embed_queries, chunks_of(encoder.tokenize_queries, QUERIES, sizes[0]))
        loss_value("info_nce", queries, documents).backward()
        found.append(gradients_of(encoder))
    for key, value in found[0].items():
        assert torch.allclose(found[1][key], value, atol=2e-2 * float(value.abs().max()) + 1e-7), key
        assert torch.allclose(found[2][key], value, atol=0.1 * float(value.abs().max()) + 1e-4), key
    assert found[0].keys() == found[1].keys() == found[2].keys()


def test_nothing_to_train_and_no_gradient_wanted():
    frozen = nn.Linear(3, 2).requires_grad_(False)
    chunks = list(torch.randn(5, 3).split(2))
    embed(frozen, chunks).sum().backward()
    assert frozen.weight.grad is None
    with torch.no_grad():
        assert not embed(nn.Linear(3, 2), chunks).requires_grad


def test_vectors_of_tokens_are_cached_too():
    """Any tensor whose first dimension is the texts: late interaction has one vector a token."""
    layer = nn.Linear(4, 3).double()
    chunks = list(torch.randn(5, 6, 4, dtype=torch.float64).split(2))
    weights = torch.randn(5, 6, 3, dtype=torch.float64)
    (embed(layer, chunks) * weights).sum().backward()
    cached, layer.weight.grad = layer.weight.grad, None
    (plain(layer, chunks) * weights).sum().backward()
    assert torch.allclose(cached, layer.weight.grad)


class _LiveBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that graphs hold for their backward pass, now and at most."""

    def __init__(self):
        self.now = self.peak = 0

        def pack(tensor):
            return _Held(self, tensor)

        super().__init__(pack, lambda held: held.tensor)

    def __enter__(self):
        super().__enter__()
        return self


class _Held:
    def __init__(self, counter, tensor):
        # Detached: an output that its own node saves would keep itself alive.
        self.counter, self.tensor, self.size = counter, tensor.detach(), tensor.numel() * tensor.element_size()
        counter.now += self.size
        counter.peak = max(counter.peak, counter.now)

    def __del__(self):
        self.counter.now -= self.size


@pytest.mark.parametrize("way", [embed, plain])
def test_activation_memory_does_not_depend_on_the_number_of_labels(transformer, way):
    peaks = []
    for labels in (16, 64, 128):
        # The same micro-batch again and again, so that what one holds is what each holds.
        chunks = [transformer.tokenize_documents(DOCUMENTS[:8]) for _ in range(labels // 8)]
        with _LiveBytes() as counter:
            vectors = way(transformer.embed_documents, chunks)
            vectors.sum().backward()
        peaks.append(counter.peak)
    if way is plain:
        assert peaks[2] > 7 * peaks[0]
    else:
        assert peaks[0] == peaks[1] == peaks[2] > 0

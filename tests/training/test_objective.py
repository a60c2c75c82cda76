"""Scores and loss of a batch: temperature, float32, Matryoshka, teacher scores, the stop at a non-finite loss."""

import pytest
import torch
from torch.nn import functional

from shortlist.errors import ConfigError, NonFiniteError
from shortlist.losses import DecoupledSoftmax, InfoNCE, KLDivergence, ListNet, MarginMSE, OneVsAllBCE
from shortlist.training.batches import Pairs
from shortlist.training.objective import Objective, check_finite


def pairs(entries):
    rows, columns, values = zip(*entries, strict=True)
    return Pairs(torch.tensor(rows), torch.tensor(columns), torch.tensor(values, dtype=torch.float32))


@pytest.fixture
def vectors():
    generator = torch.Generator().manual_seed(0)
    return (
        functional.normalize(torch.randn(3, 8, generator=generator), dim=-1),
        functional.normalize(torch.randn(5, 8, generator=generator), dim=-1),
    )


BATCH = {"positives": pairs([(0, 0, 1.0), (1, 1, 1.0), (1, 2, 1.0)]), "valid": None, "teacher": None}
MASK = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()


def test_loss_is_that_of_the_scores_over_the_temperature(vectors):
    queries, documents = vectors
    loss = Objective(DecoupledSoftmax(), temperature=0.05, dim=8, normalise=True)(queries, documents, BATCH)
    expected = DecoupledSoftmax()(queries @ documents.T / 0.05, MASK)
    assert torch.allclose(loss, expected, atol=1e-6)


def test_scores_are_float32_whatever_the_vectors_are(vectors):
    # user-reports B.49: loss is 0 under fp16
    queries, documents = (value.to(torch.bfloat16) for value in vectors)
    objective = Objective(InfoNCE(), temperature=0.01, dim=8, normalise=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective(queries, documents, BATCH)
        scores = objective.scores(queries, documents, 8)
    assert loss.dtype == scores.dtype == torch.float32
    assert torch.allclose(scores, queries.float() @ documents.float().T / 0.01, atol=1e-4)


def test_matryoshka_sums_the_losses_of_truncated_and_normalised_vectors(vectors):
    queries, documents = vectors
    loss = Objective(InfoNCE(), temperature=0.1, dim=8, normalise=True, matryoshka=[4, 2])(queries, documents, BATCH)
    expected = sum(
        InfoNCE()(
            functional.normalize(queries[:, :size], dim=-1) @ functional.normalize(documents[:, :size], dim=-1).T / 0.1,
            MASK,
        )
        for size in (8, 4, 2)
    )
    assert torch.allclose(loss, expected, atol=1e-5)
    with pytest.raises(ConfigError, match="matryoshka has 16, but the vectors have 8"):
        Objective(InfoNCE(), temperature=0.1, dim=8, normalise=True, matryoshka=[16])


def test_invalid_entries_do_not_exist(vectors):
    queries, documents = vectors
    visible = pairs([(0, 0, 1.0), (0, 3, 1.0), (1, 1, 1.0), (1, 2, 1.0), (1, 4, 1.0)])
    loss = Objective(InfoNCE(), temperature=0.1, dim=8, normalise=True)(queries, documents, {**BATCH, "valid": visible})
    expected = InfoNCE()(queries @ documents.T / 0.1, MASK, visible.mask((3, 5)))
    assert torch.allclose(loss, expected, atol=1e-6)


@pytest.mark.parametrize("loss", [KLDivergence(), MarginMSE()])
def test_teacher_losses_see_the_scored_documents_only(vectors, loss):
    queries, documents = vectors
    taught = [(0, 0, 3.0), (0, 1, 1.0), (1, 1, 2.0), (1, 2, 1.5), (1, 3, 0.5)]
    batch = {**BATCH, "teacher": pairs(taught)}
    value = Objective(loss, temperature=1.0, dim=8, normalise=True)(queries, documents, batch)
    keep = pairs(taught).mask((3, 5))
    expected = loss(queries @ documents.T, pairs(taught).dense((3, 5)), keep, positives=MASK)
    assert torch.isfinite(value) and torch.allclose(value, expected, atol=1e-6)


@pytest.mark.parametrize("loss", [DecoupledSoftmax(), InfoNCE(), ListNet()])
def test_positives_that_were_not_drawn_are_no_negatives(vectors, loss):
    queries, documents = vectors
    batch = {**BATCH, "positives": pairs([(0, 0, 1.0), (1, 1, 1.0)]), "left_out": pairs([(1, 2, 1.0)])}
    value = Objective(loss, temperature=0.1, dim=8, normalise=True)(queries, documents, batch)
    drawn, keep = MASK.clone(), torch.ones(3, 5).bool()
    drawn[1, 2] = False
    # InfoNCE leaves them in its denominator, as the plain loss and the released code do.
    keep[1, 2] = isinstance(loss, InfoNCE)
    assert torch.allclose(value, loss(queries @ documents.T / 0.1, drawn, keep), atol=1e-5)


@pytest.mark.parametrize("loss", [DecoupledSoftmax(), ListNet()])
def test_the_bias_of_a_document_is_added_to_its_logits(vectors, loss):
    queries, documents = vectors
    bias = torch.linspace(-3, 3, 20)
    batch = {**BATCH, "document_rows": torch.tensor([4, 19, 0, 7, 11])}
    value = Objective(loss, temperature=0.1, dim=8, normalise=True, bias=bias)(queries, documents, batch)
    expected = loss(queries @ documents.T / 0.1 + bias[[4, 19, 0, 7, 11]], MASK)
    assert torch.allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("loss", [DecoupledSoftmax(weight_by_grade=True), OneVsAllBCE(weight_by_grade=True), ListNet()])
def test_values_of_positives_below_one_are_weights_too(vectors, loss):
    queries, documents = vectors
    batch = {**BATCH, "positives": pairs([(0, 0, 0.5), (1, 1, 0.25), (1, 2, 0.75)])}
    value = Objective(loss, temperature=0.1, dim=8, normalise=True)(queries, documents, batch)
    expected = loss(queries @ documents.T / 0.1, batch["positives"].dense((3, 5)))
    assert torch.allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("loss", [DecoupledSoftmax(), InfoNCE(), OneVsAllBCE(), ListNet()])
def test_pairs_of_a_filter_file_do_not_exist(vectors, loss):
    queries, documents = vectors
    objective = Objective(loss, temperature=1.0, dim=8, normalise=True)
    value = objective(queries, documents, BATCH | {"excluded": pairs([(0, 3, 1.0), (1, 0, 1.0)])})
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[0, 3] = valid[1, 0] = False
    torch.testing.assert_close(value, loss(queries @ documents.T, MASK, valid))


def test_a_loss_that_is_not_finite_stops_with_a_hint(tmp_path):
    check_finite(torch.tensor(1.0), step=3, dtype="float32", temperature=0.05, output=tmp_path)
    with pytest.raises(NonFiniteError, match="nan; training stops, no checkpoint was .*lower training.learning_rate"):
        check_finite(torch.tensor(float("nan")), step=3, dtype="float32", temperature=0.05, output=tmp_path)
    state = tmp_path / "checkpoints/step-2/state/trainer_state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    with pytest.raises(NonFiniteError, match="written so far are good.*bfloat16 or float32.*--resume"):
        check_finite(torch.tensor(float("inf")), step=3, dtype="float16", temperature=0.05, output=tmp_path)

"""The loss from vectors, in blocks: the value and the gradients of the plain form, whatever the memory."""

import itertools

import pytest
import torch
from pool_reference import BUDGETS, LOSSES, blocked, case, plain
from torch.utils._python_dispatch import TorchDispatchMode

from shortlist.errors import ConfigError, DataError
from shortlist.losses import (
    DecoupledSoftmax,
    InfoNCE,
    ListNet,
    MarginMSE,
    OneVsAllBCE,
    Shard,
    SoftTopK,
    check_sampled_positives,
    pool_loss,
)


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


class LargestTensor(TorchDispatchMode):
    """Watches every tensor that is made and keeps the largest number of elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("name", LOSSES)
def test_memory_stays_within_the_budget(name, monkeypatch):
    monkeypatch.setattr("shortlist.losses.row_statistics.CPU_BLOCK", 1 << 10)
    queries, documents, grades, bias, _ = case(queries=60, docs=500)
    loss = SoftTopK(k=torch.ones(60)) if name == "soft top, k of each row" else LOSSES[name]
    grades[:, 50:] = 0  # the lists of positives stay short beside the budget
    vectors = documents.numel()
    for memory in (8 * 8000, 8 * 4000):  # blocks of rows, and of columns
        if memory == 8 * 4000:
            monkeypatch.setattr("shortlist.losses.pool.USEFUL_HEIGHT", 16)
        rows, columns = grades.nonzero(as_tuple=True)
        values = grades[rows, columns]
        left, right = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        with LargestTensor() as watched:
            pool_loss(
                loss, left, right, rows=rows, columns=columns, values=values, temperature=0.7, bias=bias, memory=memory
            ).backward()
        assert watched.elements <= max(vectors, memory // 8) < queries.shape[0] * documents.shape[0]


def test_a_budget_that_holds_the_matrix_scores_it_once(monkeypatch):
    queries, documents, grades, _, _ = case()
    calls = []
    product = torch.mm
    monkeypatch.setattr("torch.mm", lambda *a, **k: calls.append(1) or product(*a, **k))
    blocked(DecoupledSoftmax(), queries, documents, grades, 0.7)
    assert len(calls) == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_left_out_positives_leave_the_row_or_stay_in_it(name, budget):
    loss = LOSSES[name]
    queries, documents, grades, _, dropped = case(seed=3)
    if isinstance(loss, OneVsAllBCE):
        with pytest.raises(ConfigError, match="one_vs_all_bce"):
            blocked(loss, queries, documents, grades, 0.7, left_out=dropped.nonzero(as_tuple=True))
        return
    left_out = [indices.flip(0) for indices in dropped.nonzero(as_tuple=True)]  # in any order
    found = blocked(loss, queries, documents, grades, 0.7, left_out=left_out, memory=BUDGETS[budget])
    expected = plain(loss, queries, documents, grades, 0.7, dropped=dropped if loss.drops_left_out else None)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_excluded_pairs_do_not_exist_for_any_loss(name, budget):
    loss = LOSSES[name]
    queries, documents, grades, bias, excluded = case(seed=4)
    found = blocked(
        loss, queries, documents, grades, 0.7,
        bias=bias, excluded=excluded.nonzero(as_tuple=True), memory=BUDGETS[budget],
    )  # fmt: skip
    for a, b in zip(found, plain(loss, queries, documents, grades, 0.7, bias, excluded), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def sampled(loss, scores, grades, drawn):
    """The loss of one row of scores when only `drawn` of its positives were drawn."""
    known = grades.nonzero().flatten()
    rest = known[~torch.isin(known, drawn)]
    zeros = torch.zeros_like
    return pool_loss(
        loss, torch.ones(1, 1, dtype=scores.dtype), scores[:, None],
        rows=zeros(drawn), columns=drawn, values=grades[drawn], temperature=1.0, left_out=(zeros(rest), rest),
    )  # fmt: skip


def test_one_positive_drawn_in_proportion_to_its_grade_is_unbiased_for_the_decoupled_loss():
    scores, grades = torch.randn(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    grades[[1, 4, 5, 9]] = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
    exact = DecoupledSoftmax(weight_by_grade=True)(scores[None], grades[None])
    positives = grades.nonzero().flatten()
    expectation = sum(
        grades[one] / grades.sum() * sampled(DecoupledSoftmax(), scores, grades, one[None]) for one in positives
    )
    torch.testing.assert_close(expectation, exact, rtol=1e-12, atol=0)
    # InfoNCE too: the others stay in its denominator.
    exact = InfoNCE(weight_by_grade=True)(scores[None], grades[None])
    expectation = sum(grades[one] / grades.sum() * sampled(InfoNCE(), scores, grades, one[None]) for one in positives)
    torch.testing.assert_close(expectation, exact, rtol=1e-12, atol=0)


def test_left_out_positives_use_no_mass_of_soft_top_k_and_are_no_negatives():
    scores, grades = torch.randn(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    grades[[1, 4, 5, 9]] = 1
    for drawn in itertools.combinations([1, 4, 5, 9], 2):
        drawn = torch.tensor(drawn)
        there = torch.tensor([i for i in range(12) if not grades[i] or i in drawn])
        for k in (3, 9, "num_pos"):
            loss = SoftTopK(k=k)
            alone = loss(scores[None, there], torch.isin(there, drawn)[None])
            torch.testing.assert_close(sampled(loss, scores, grades, drawn), alone, rtol=1e-12, atol=0)


def test_sampled_positives_are_refused_where_they_mean_nothing():
    for loss in (InfoNCE(), InfoNCE(mask_positives=True), DecoupledSoftmax(), SoftTopK()):
        check_sampled_positives(loss)
    for loss in (OneVsAllBCE(), ListNet(), MarginMSE(), torch.nn.MSELoss()):
        with pytest.raises(ConfigError, match="sample_positives"):
            check_sampled_positives(loss)
    with pytest.raises(ConfigError, match="weight_by_grade"):
        check_sampled_positives(DecoupledSoftmax(weight_by_grade=True))


def test_weights_keep_the_scale_of_the_grades_on_request():
    scores, grades = torch.randn(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    grades[0, [1, 3]] = torch.tensor([4.0, 2.0], dtype=torch.float64)
    grades[1, 2] = 0.5
    for make in (InfoNCE, DecoupledSoftmax, SoftTopK):
        terms = []
        for row, column in [(0, 1), (0, 3), (1, 2)]:
            single = torch.zeros(1, 8, dtype=torch.bool)
            single[0, column] = True
            others = (grades[row] == 0) | single[0] if make is DecoupledSoftmax else torch.ones(8, dtype=torch.bool)
            terms.append(make()(scores[row : row + 1], single, others[None]))
        free = make(weight_by_grade=True, normalise_weights=False)(scores, grades)
        torch.testing.assert_close(free, ((4 * terms[0] + 2 * terms[1]) / 2 + 0.5 * terms[2]) / 2)
        scaled = make(weight_by_grade=True)(scores, grades)
        torch.testing.assert_close(scaled, ((4 * terms[0] + 2 * terms[1]) / 6 + terms[2]) / 2)


def test_grades_of_bce_multiply_the_terms_of_the_positives():
    scores, grades = torch.randn(1, 5, dtype=torch.float64), torch.tensor([[0.0, 3, 0, 0.5, 0]], dtype=torch.float64)
    terms = torch.nn.functional.softplus(torch.where(grades > 0, -scores, scores))
    expected = (terms * torch.where(grades > 0, grades, 1.0)).sum() / 5
    torch.testing.assert_close(OneVsAllBCE(weight_by_grade=True)(scores, grades), expected)
    torch.testing.assert_close(OneVsAllBCE()(scores, grades), terms.sum() / 5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("queries", "docs"), [(0, 5), (13, 0), (0, 0), (13, 1)])
def test_nothing_to_score_is_zero_with_a_zero_gradient(name, queries, docs):
    left, right = torch.randn(queries, 3, requires_grad=True), torch.randn(docs, 3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    value = pool_loss(LOSSES[name], left, right, rows=none, columns=none, values=none.float(), temperature=1.0)
    value.backward()
    assert value == 0 and (left.grad == 0).all() and (right.grad == 0).all()


def test_every_column_a_positive():
    queries, documents, _, _, _ = case(docs=3)
    grades = torch.ones(len(queries), 3, dtype=torch.float64)
    for name, loss in LOSSES.items():
        for budget in BUDGETS.values():
            found = blocked(loss, queries, documents, grades, 0.7, memory=budget)
            expected = plain(loss, queries, documents, grades, 0.7)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_half_precision_vectors_are_scored_in_float32_under_autocast_too():
    # user-reports B.49
    queries, documents, grades, _, _ = case(torch.float32)
    half = queries.bfloat16(), documents.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, left, right = blocked(DecoupledSoftmax(), *half, grades, 0.05)
    expected = plain(DecoupledSoftmax(), half[0].double(), half[1].double(), grades.double(), 0.05)
    assert left.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(right.double(), expected[2], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["decoupled", "soft top 3", "bce"])
def test_blocks_of_a_single_cell(name):
    queries, documents, grades, bias, _ = case(queries=4, docs=9)
    expected = plain(LOSSES[name], queries, documents, grades, 0.7, bias)
    found = blocked(LOSSES[name], queries, documents, grades, 0.7, bias=bias, memory=1)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_a_graph_above_and_below():
    queries, documents, grades, _, _ = case()
    rows, columns = grades.nonzero(as_tuple=True)
    gradients = []
    for whole in (False, True):
        left, right = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        a, b = left * 2, right.tanh()
        if whole:
            value = InfoNCE()(a @ b.T / 0.5, grades)
        else:
            value = pool_loss(
                InfoNCE(), a, b, rows=rows, columns=columns, values=grades[rows, columns], temperature=0.5
            )
        (3 * value.square()).backward()
        gradients.append((left.grad, right.grad))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_gradients_are_handed_out_once():
    queries, documents, grades, _, _ = case()
    rows, columns = grades.nonzero(as_tuple=True)
    options = {"rows": rows, "columns": columns, "values": grades[rows, columns], "temperature": 1.0}
    value = pool_loss(InfoNCE(), queries.requires_grad_(), documents, **options)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        value.backward()


def test_without_gradients_only_the_value_is_made():
    queries, documents, grades, _, _ = case()
    rows, columns = grades.nonzero(as_tuple=True)
    options = {"rows": rows, "columns": columns, "values": grades[rows, columns], "temperature": 1.0}
    with torch.no_grad():
        value = pool_loss(InfoNCE(), queries.requires_grad_(), documents, **options)
    assert not value.requires_grad
    torch.testing.assert_close(value, pool_loss(InfoNCE(), queries, documents, **options).detach())


def test_arguments_that_do_not_fit_are_refused():
    queries, documents, grades, bias, _ = case()
    rows, columns = grades.nonzero(as_tuple=True)
    options = {"rows": rows, "columns": columns, "values": grades[rows, columns], "temperature": 1.0}
    loss = DecoupledSoftmax()
    with pytest.raises(ConfigError, match="ListNet needs a whole score matrix"):
        pool_loss(ListNet(), queries, documents, **options)
    with pytest.raises(DataError, match="vectors of one length"):
        pool_loss(loss, queries[:, :3], documents, **options)
    with pytest.raises(DataError, match="sorted by row"):
        pool_loss(loss, queries, documents, **{**options, "rows": rows.flip(0), "columns": columns.flip(0)})
    with pytest.raises(DataError, match="sorted by row"):
        pool_loss(loss, queries, documents, **{**options, "rows": rows * 0, "columns": columns * 0})
    with pytest.raises(DataError, match="13 rows and 36 columns"):
        pool_loss(loss, queries, documents[:36], **options)
    with pytest.raises(DataError, match="above 0"):
        pool_loss(loss, queries, documents, **{**options, "values": options["values"] * 0})
    for value in (float("inf"), float("nan")):
        with pytest.raises(DataError, match=f"finite and above 0, got {value}"):
            pool_loss(loss, queries, documents, **{**options, "values": options["values"] + value})
    for name in ("rows", "columns"):
        for dtype in (torch.float32, torch.bool):
            with pytest.raises(DataError, match="must be whole numbers"):
                pool_loss(loss, queries, documents, **{**options, name: options[name].to(dtype)})
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature must be a finite number above 0"):
            pool_loss(loss, queries, documents, **{**options, "temperature": temperature})
    for memory in (0, -1):
        with pytest.raises(ConfigError, match=f"number of bytes above 0, got {memory}"):
            pool_loss(loss, queries, documents, memory=memory, **options)
    with pytest.raises(DataError, match="lists of one length"):
        pool_loss(loss, queries, documents, **{**options, "values": options["values"][1:]})
    with pytest.raises(DataError, match="37 columns need one number each"):
        pool_loss(loss, queries, documents, bias=bias[1:], **options)
    with pytest.raises(DataError, match="not finite"):
        pool_loss(loss, queries, documents, bias=bias.log(), **options)
    with pytest.raises(DataError, match="no other process"):
        Shard(0, 5, 10)
    with pytest.raises(DataError, match="37 document vectors, but the shard holds columns"):
        pool_loss(loss, queries, documents, shard=Shard(0, 38, 38), **options)

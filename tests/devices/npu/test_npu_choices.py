"""Masks, layouts and fully masked rows of an NPU's operator where a similar choice would be wrong; costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from by_hand import NONE_IN_ONE, SOME, banded, infinite
from npu_programs import BF16, FP32, FUSION, Tensor, added, calls, flat, reason, reported
from npu_stand_in import FA1, FA3, FIA

import attn_pass
from attn_pass.targets.base import EMPTY_ROWS

HERE: dict[str, Any] = {"device": "Ascend910B"}
LOW = torch.finfo(BF16).min

# ---------------------------------------------------------------- rows that more than one number empties

KEPT = torch.ones(2, 1, 1, 9, dtype=torch.bool)
KEPT[0] = False  # by the first number: all of the first batch
IN = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
IN[0, ..., :4] = True  # by -inf: the end of the first batch
IN[1] = True


def one_matrix(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, inside: Tensor) -> Tensor:
    mask = torch.where(inside, torch.where(keep, 0.0, LOW), NEG_INF).to(q.dtype)
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def filled_over(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, inside: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3 + torch.where(keep, 0.0, LOW).to(q.dtype)
    return scores.masked_fill(~inside, NEG_INF).softmax(-1) @ v


def two_matrices(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, inside: Tensor) -> Tensor:
    masks = (torch.where(keep, 0.0, LOW), torch.where(inside, 0.0, NEG_INF))
    return (q @ k.mT * 0.3 + masks[0].to(q.dtype) + masks[1].to(q.dtype)).softmax(-1) @ v


def by_call(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, inside: Tensor) -> Tensor:
    mask = torch.where(inside, torch.where(keep, 0.0, LOW), NEG_INF).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("fn", [one_matrix, filled_over, two_matrices, by_call])
@pytest.mark.parametrize("rows", [1, 6])
def test_rows_that_several_numbers_empty_are_left(fn: Callable[..., Tensor], rows: int) -> None:
    for target, dtype in ((FIA, BF16), (FUSION, FP32)):
        inputs = (*qkv(2, 4, rows, 9, 16, dtype=dtype), KEPT, IN)
        if dtype == BF16:
            same(fn, *inputs, rewritten=0, targets=(target,), **HERE)
        assert "by several numbers" in reason(fn, *inputs, target=target)
        assert not reason(fn, *inputs, target=target, assume_nonempty_rows=True)


# ---------------------------------------------------------------- fully masked rows


def test_zeros_where_the_program_has_zeros() -> None:
    """The operator knows no zeros for one query row: they are put there, and no mean."""
    for dtype, target in ((BF16, FIA), (FP32, FUSION)):
        inputs = (*qkv(2, 4, 1, 9, 16, dtype=dtype), NONE_IN_ONE)
        call = lambda q, k, v, keep: F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        assert not call(*inputs)[0].any()
        same(call, *inputs, rewritten=1, targets=(target,), **HERE)
        guarded = lambda q, k, v, keep: infinite(q, k, v, keep).nan_to_num(0.0)
        same(guarded, *inputs, targets=(target,), **HERE)


def test_zeros_for_nan_are_told() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    for target in (FIA, FUSION):
        assert reported(infinite, *inputs, NONE_IN_ONE, targets=(target,)).assumptions == (EMPTY_ROWS,)
        assert reported(banded(None, 0), *qkv(2, 4, 9, 6, 16, dtype=BF16), targets=(target,)).assumptions == (
            EMPTY_ROWS,
        )
        assert not reported(added, *inputs, NONE_IN_ONE, targets=(target,)).assumptions  # the mean, as in the program
        assert not reported(banded(None, 0), *inputs, targets=(target,)).assumptions
    zeros = lambda q, k, v, keep: F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    assert not reported(zeros, *inputs, NONE_IN_ONE, targets=(FUSION,)).assumptions


@pytest.mark.parametrize("keys", [9, 1])
@pytest.mark.parametrize("fill", [NEG_INF, -1e9])
def test_bands_of_one_row(keys: int, fill: float) -> None:
    for left, right in ((None, -keys), (-20, 0), (0, -1), (0, 0)):
        given = qkv(2, 4, 1, keys, 16)
        same(banded(left, right, fill), *given, rewritten=None, targets=(FUSION,), poor_cases=(), **HERE)


def test_modes_are_of_the_rows_as_the_program_has_them() -> None:
    """Rows that a batch was folded into are no rows of a causal mask."""
    with torch.device("meta"):
        q = torch.empty(64, 4, 4, 64, dtype=BF16)
        k, v = (torch.empty(1, 4, 2048, 64, dtype=BF16) for _ in range(2))
    for fn in (banded(None, 0), banded(3, 0)):
        folded = reported(fn, q, k, v, targets=(FUSION,), poor_cases=("shared_kv",))
        assert folded.poor_cases == ("shared_kv",)
        (call,) = calls(fn, q, k, v, targets=(FUSION,), poor_cases=("shared_kv",))
        assert call["sparse_mode"] == 0 and call["query"].meta["example_value"].shape[0] == 1
        small = (randn(8, 4, 4, 64, dtype=BF16), *qkv(1, 4, 1, 70, 64, dtype=BF16)[1:])
        same(fn, *small, rewritten=1, targets=(FUSION,), **HERE)


# ---------------------------------------------------------------- layouts


def of_hidden(scale: float = 0.3, factor: bool = False) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        q = q * q.mean(-1, keepdim=True) if factor else q
        return ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return program


@pytest.mark.parametrize(
    "fn, dim, dtype, layout",
    [
        (of_hidden(), 16, BF16, "BSH"),
        (of_hidden(), 17, BF16, "BSND"),  # padded, head by head
        (of_hidden(), 18, FP32, "BSND"),
        (of_hidden(), 20, FP32, "BSH"),
        (of_hidden(-0.3), 16, BF16, "BSND"),  # the query is computed anew: no tensor of the program's
        (of_hidden(factor=True), 16, BF16, "BSND"),
    ],
)
def test_merged_heads_are_the_program_s_own_tensors(
    fn: Callable[..., Tensor], dim: int, dtype: torch.dtype, layout: str
) -> None:
    inputs = flat(6, 9, dtype=dtype, dim=4 * dim)
    target = FIA if dtype == BF16 else FUSION
    assert [c["input_layout"] for c in calls(fn, *inputs, targets=(target,))] == [layout]
    same(fn, *inputs, rewritten=1, targets=(target,), **HERE)


def test_results_of_many_wide_heads_are_turned_by_the_program() -> None:
    """256 heads of 256 are over 65535 for a result with positions first as well."""

    def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q * 0.3, k).softmax(-1), v)

    with torch.device("meta"):
        wide, fits = ([torch.empty(2, heads, 3, 256, dtype=BF16) for _ in range(3)] for heads in (256, 255))
    assert [c["input_layout"] for c in calls(turned, *wide, targets=(FIA,))] == ["BNSD"]
    assert [c["input_layout"] for c in calls(turned, *fits, targets=(FIA,))] == ["BNSD_BSND"]


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("name, family", [("Ascend 910B", "A2"), ("Ascend 910C", "A3"), ("Ascend 950", "950")])
def test_each_family_is_given_what_it_has(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_stand_in, "FAMILY", family)
    for dtype in (BF16, FP32):
        same(infinite, *qkv(2, 4, 6, 9, 16, dtype=dtype), SOME, rewritten=1, device=name)
    report = same(infinite, *qkv(2, 4, 6, 9, 16, grad=True), SOME, rewritten=1, grad=True, device=name)
    assert report.sites[0].target == FUSION
    assert npu_stand_in.SEEN[-1][0] == (FA1 if family == "950" else FA3)


# ---------------------------------------------------------------- exported programs


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Frozen(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    "kind, learns, wants, target",
    [(Layer, True, False, FUSION), (Layer, False, False, FIA), (Layer, False, True, FUSION), (Frozen, True, True, FIA)],
)
def test_an_exported_program_that_may_be_trained(kind: type[Layer], learns: bool, wants: bool, target: str) -> None:
    """Its values do not tell whether gradients are wanted: they are, where a parameter or an input asks for one."""
    model = kind().bfloat16().requires_grad_(learns)
    x = randn(2, 6, 64, dtype=BF16, grad=wants)
    program = torch.export.export(model, (x,))
    (site,) = attn_pass.rewrite(program, choose="fused", on_error="raise", **HERE).sites
    assert site.target == target
    if kind is Layer and target == FUSION:
        assert "requires_grad_(False)" in site.refusals[FIA]
    out = program.module()(x)
    assert (out - model(x)).abs().max() < 0.05
    if target == FUSION:
        leaves = [*model.parameters()] if learns else [x]
        assert any(g is not None for g in torch.autograd.grad(out.sum(), leaves, allow_unused=True))


# ---------------------------------------------------------------- costs


def predicted(fn: Callable[..., Tensor], *inputs: Tensor, target: str = FUSION, **options: Any) -> float:
    return float(reported(fn, *inputs, targets=(target,), **options).predicted_us[target])


def long(rows: int = 4096, *, grad: bool = False) -> list[Tensor]:
    return [torch.empty(2, 8, rows, 128, dtype=BF16, device="meta", requires_grad=grad) for _ in range(3)]


def test_a_window_costs_less_than_all_keys() -> None:
    for target in (FIA, FUSION):
        everything, half, window = (
            predicted(banded(left, 0 if left is not None else right), *long(), target=target)
            for left, right in ((None, None), (None, 0), (255, 0))
        )
        assert window < 0.3 * half < 0.3 * everything


def test_rows_that_are_replaced_cost_more_and_their_gradients_most() -> None:
    keep = torch.ones(2, 1, 1, 4096, dtype=torch.bool, device="meta")

    def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).masked_fill(~keep, torch.finfo(BF16).min).softmax(-1) @ v

    def times(fn: Callable[..., Tensor], grad: bool) -> tuple[float, float]:
        inputs = (*long(grad=grad), keep)
        return predicted(fn, *inputs, assume_nonempty_rows=True), predicted(fn, *inputs)

    kept, replaced = times(masked, False)
    assert kept < replaced
    cut_off, passed_on = (b - a for a, b in (times(masked, True), times(added, True)))
    assert passed_on > 2 * cut_off > 0

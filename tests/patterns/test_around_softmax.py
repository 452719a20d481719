"""Operations around a softmax: subtracted maxima, guards, repeated masks, head masks, uses of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

NEG_INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
OTHER = randn(2, 1, 8, 8, seed=6) > 0
KEEP[0, 0, 3] = False  # a fully masked row
PADDED = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])

Program = Callable[..., Tensor]


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def scored(change: Callable[..., Tensor], scale: float = 0.25) -> Program:
    """A program whose scores are changed before the softmax."""
    return lambda q, k, v, *rest: softmax(change(q @ k.mT * scale, *rest)) @ v


def weighted(change: Callable[..., Tensor]) -> Program:
    """A program whose weights are changed after the softmax."""
    return lambda q, k, v, *rest: change(softmax(q @ k.mT * 0.25), *rest) @ v


def twice(fill: float, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Program:
    """A program that masks its scores and then its weights."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *other: Tensor) -> Tensor:
        weights = softmax((q @ k.mT * 0.25).masked_fill(first(mask), fill))
        return weights.masked_fill(second(*other or (mask,)), 0.0) @ v

    return program


READ: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "a head mask": (weighted(lambda w, m: w * m), (randn(1, 2, 1, 1),)),
    "a head mask on the left": (weighted(lambda w, m: m * w), (randn(2, 1, 1),)),
    "a factor of every row": (weighted(lambda w, m: w / m), (randn(2, 1, 8, 1).abs() + 1,)),
    "a number": (weighted(lambda w: w * 2.0), ()),
    "masked again, -inf": (twice(NEG_INF, torch.logical_not, torch.logical_not), (KEEP,)),
    "masked again, finite": (twice(LOWEST, lambda m: m.eq(0), lambda m: m == 0), (KEEP.long(),)),
    "masked again by a factor": (
        lambda q, k, v, m: (softmax((q @ k.mT).masked_fill(~m, LOWEST)) * m.float()) @ v,
        (KEEP,),
    ),
    "a mask expanded as the scores": (
        scored(lambda s, m: s.masked_fill((m == 0).view(2, 1, 1, 8).expand_as(s), LOWEST)),
        (PADDED,),
    ),
    "a bias shaped as the scores": (scored(lambda s, b: s + b.reshape_as(s)), (randn(2 * 2 * 8 * 8),)),
    "zeros like the scores": (scored(lambda s: s + torch.zeros_like(s)), ()),
    "the row maximum taken off": (scored(lambda s: s - s.max(-1, keepdim=True)[0]), ()),
    "the row maximum, scaled again": (scored(lambda s: (s - s.amax(-1).unsqueeze(-1)) * 32, 1 / 128), ()),
    "the row maximum as large as the scores": (scored(lambda s: s - s.amax(-1, keepdim=True).expand_as(s)), ()),
    "the scores taken off the row maximum": (  # DANet's channels
        scored(lambda s: torch.max(s, -1, keepdim=True)[0].expand_as(s) - s),
        (),
    ),
    "the row maximum expanded by sizes": (scored(lambda s: s - s.amax(-1).detach()[..., None].expand(2, 2, 8, 8)), ()),
    "the maximum of all taken off": (scored(lambda s: s - s.max()), ()),
    "the maximum taken off, then masked": (
        scored(lambda s, m: (s - s.amax(-1, keepdim=True)).masked_fill(~m, LOWEST)),
        (KEEP,),
    ),
}
LEFT: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "a factor that differs from key to key": (weighted(lambda w, m: w * m), (randn(2, 1, 1, 8),)),
    "a number divided by the weights": (weighted(lambda w: 0.5 / (w + 1)), ()),
    "the mask of another": (twice(LOWEST, torch.logical_not, torch.logical_not), (KEEP, OTHER)),
    "the mask inverted": (twice(LOWEST, torch.logical_not, lambda m: m), (KEEP,)),
    "only the weights masked": (weighted(lambda w, m: w * m.float()), (KEEP,)),
    "weakly masked, then zeroed": (twice(-3.0, torch.logical_not, torch.logical_not), (KEEP,)),
    "the maximum over queries taken off": (scored(lambda s: s - s.max(-2, keepdim=True)[0]), ()),
    "the maximum over queries, as large as the scores": (
        scored(lambda s: s.amax(-2, keepdim=True).expand_as(s) - s),
        (),
    ),
    "the maximum of the row that the key is": (scored(lambda s: s - s.amax(-1).unsqueeze(-2).expand_as(s)), ()),
    "the minimum as large as the scores": (scored(lambda s: s * s.amin(-1, keepdim=True).expand_as(s)), ()),
    "multiplied by the maximum as large as the scores": (
        scored(lambda s: s * s.amax(-1, keepdim=True).expand_as(s)),
        (),
    ),
    "multiplied by the maximum": (scored(lambda s: s * s.amax(-1, keepdim=True)), ()),
    "the sum taken off": (scored(lambda s: s - s.sum(-1, keepdim=True)), ()),
    "the scores' own shape as numbers": (scored(lambda s: s + torch.zeros_like(s).cumsum(-1).add_(s.detach())), ()),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("row", list(READ.values()), ids=list(READ))
def test_read_for_what_it_is(row: tuple[Program, tuple[Any, ...]], grad: bool) -> None:
    program, rest = row
    same(program, *qkv(grad=grad), *rest, grad=grad, rewritten=1)


@pytest.mark.parametrize("row", list(LEFT.values()), ids=list(LEFT))
def test_left_for_what_it_is_not(row: tuple[Program, tuple[Any, ...]]) -> None:
    program, rest = row
    same(program, *qkv(), *rest, rewritten=0)


def test_a_head_mask_has_its_gradient() -> None:
    program, _ = READ["a head mask"]
    same(program, *qkv(grad=True), randn(1, 2, 1, 1, grad=True), grad=True, rewritten=1)


def test_masks_that_change_between_scores_and_weights_are_two() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        keep = keep.clone()
        weights = softmax((q @ k.mT).masked_fill(~keep, LOWEST))
        keep[:, :, :, 0] = False
        return weights.masked_fill(~keep, 0.0) @ v

    same(program, *qkv(), KEEP, rewritten=0)


def _zero_where_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = torch.arange(4.0)[:, None]
    return torch.where(c > 0, torch.softmax(q @ k.mT, -1) / c, 0.0) @ v


def _small_then_large(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    small, large = torch.full((4, 1), 1e-4, dtype=q.dtype), torch.full((4, 1), 6e4, dtype=q.dtype)
    return (torch.softmax(q @ k.mT, -1) * small * large) @ (8 * v)


def test_factors_of_rows_are_applied_in_their_order() -> None:
    same(_small_then_large, *qkv(1, 2, 4, 6, dtype=torch.float16), rewritten=1, choose="fused", reference=False)


def test_rows_set_to_zero_after_division_by_zero_are_not_a_factor() -> None:
    same(_zero_where_zero, *qkv(1, 2, 4, 6), rewritten=0, choose="fused", reference=False)


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_guard_may_ask_either_way(zeroes: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        w = torch.softmax((q @ k.mT).masked_fill(m, NEG_INF), -1)
        return (torch.where(torch.isnan(w), 0.0, w) if zeroes else torch.where(~torch.isnan(w), w, 0.0)) @ v

    mask = torch.zeros(1, 1, 4, 6, dtype=torch.bool)
    mask[..., 1, :] = mask[..., 2, 3] = True
    report = same(run, *qkv(1, 2, 4, 6), mask, rewritten=1, choose="fused", reference=False)
    assert any("guard against NaN" in a for a in report.sites[0].assumptions)


def test_dropout_of_unused_weights_still_draws_random_numbers() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            w = torch.softmax(q @ k.mT, -1)
            torch.nn.functional.dropout(w, 0.5)
            return w @ v + torch.rand(1)

    inputs = qkv(1, 2, 4, 6)
    program = torch.export.export(Model(), inputs)
    attn_pass.rewrite(program, choose="fused", on_error="raise")
    torch.manual_seed(3)
    wanted = Model()(*inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(program.module()(*inputs), wanted)


@pytest.mark.parametrize("numerics, rewritten", [("default", 1), ("strict", 0)])
def test_a_weak_fill_whose_weights_are_set_to_zero_is_an_assumption(numerics: str, rewritten: int) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT).masked_fill(m, -10000.0), -1).masked_fill(m, 0.0) @ v

    mask = torch.zeros(1, 1, 4, 6, dtype=torch.bool)
    mask[..., 1, :] = mask[..., 2, 3] = True
    report = same(run, *qkv(1, 2, 4, 6), mask, rewritten=rewritten, choose="fused", numerics=numerics)
    told = report.sites[0].assumptions if rewritten else (report.sites[0].reason,)
    assert any("far above the number that masked ones are filled with" in text for text in told)

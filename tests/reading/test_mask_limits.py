"""Masks at the limits of what can be proven: signs, widths of integers, fills that absorb, shifts that matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from against_eager import FLEX_ON_CPU, randn, same
from torch import Tensor

import attn_pass
from attn_pass.targets.base import CLAMP

LOWEST = torch.finfo(torch.float32).min
Change = Callable[[Tensor], Tensor]
I, J = torch.arange(8)[:, None], torch.arange(8)


def qkv(rows: int = 8, keys: int = 8, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [randn(1, 2, n, 16, seed=s, dtype=dtype, grad=grad) for s, n in enumerate((rows, keys, keys))]


def attend(q: Tensor, k: Tensor, v: Tensor, change: Change) -> Tensor:
    return torch.softmax(change(q @ k.mT / 4), -1) @ v


# ---- numbers that may be negative ----


def below_an_offset(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    return attend(q, k, v, lambda s: s.masked_fill(torch.arange(k.shape[2]) + offset < 0, -math.inf))


def diagonal(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    return attend(q, k, v, lambda s: s.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(offset), -1e9))


def positions_from(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    return attend(q, k, v, lambda s: s.masked_fill(torch.arange(8) > torch.arange(offset, offset + 8)[:, None], -1e9))


@pytest.mark.parametrize("program", [below_an_offset, diagonal, positions_from])
def test_an_integer_argument_may_be_negative(program: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    run = torch.compile(
        program, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise"), dynamic=True
    )
    for offset in (3, -2, 5, -1):
        torch.testing.assert_close(run(*qkv(), offset), program(*qkv(), offset))


def test_a_quotient_of_sizes_may_be_negative() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, keys = q.shape[2], k.shape[2]
        keep = torch.ones(rows, keys, dtype=torch.bool).tril((rows - keys) // 2 + 2)
        return attend(q, k, v, lambda s: s.masked_fill(~keep, -1e9))

    torch._dynamo.reset()
    run = torch.compile(
        program, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise"), dynamic=True
    )
    for sizes in ((4, 8), (2, 9), (9, 3)):
        torch.testing.assert_close(run(*qkv(*sizes)), program(*qkv(*sizes)))


# ---- integers that wrap around ----

NARROW: dict[str, Change] = {
    "uint8, below zero": lambda s: s.masked_fill((J.to(torch.uint8) - I.to(torch.uint8)) > 0, -math.inf),
    "arange of uint8": lambda s: s.masked_fill(
        (torch.arange(8, dtype=torch.uint8) - torch.arange(8, dtype=torch.uint8)[:, None]) > 0, -1e9
    ),
    "arange of int8": lambda s: s.masked_fill(
        torch.arange(8, dtype=torch.int8) * 40 > torch.arange(8, dtype=torch.int8)[:, None] * 40, -1e9
    ),
    "ones of uint8": lambda s: s.masked_fill((torch.ones(8, 8, dtype=torch.uint8).tril() - 1) > 0, -1e9),
}


@pytest.mark.parametrize("change", list(NARROW.values()), ids=list(NARROW))
def test_narrow_integers_wrap_around(change: Change) -> None:
    same(lambda q, k, v: attend(q, k, v, change), *qkv())


# ---- rows that are filled ----

FILLED: dict[str, Change] = {
    "rows lowered by a matrix": lambda s: s + torch.where(torch.arange(8)[:, None] >= 4, LOWEST, 0.0),
    "causal, and rows lowered": lambda s: (
        s
        + torch.where(torch.arange(8) <= torch.arange(8)[:, None], 0.0, LOWEST)
        + torch.where(torch.arange(8)[:, None] >= 4, LOWEST, 0.0)
    ),
    "all lowered": lambda s: s + LOWEST,
    "all lowered a little less": lambda s: s - 1e9,
    "rows replaced": lambda s: s.masked_fill(torch.arange(8)[:, None] >= 4, LOWEST),
    "replaced, then others lowered": lambda s: (
        s.masked_fill(torch.arange(8) >= torch.arange(8)[:, None], -1e9)
        + torch.where(torch.arange(8) <= torch.arange(8)[:, None] + 2, 0.0, -1e9)
    ),
}


@pytest.mark.parametrize("change", list(FILLED.values()), ids=list(FILLED))
def test_rows_that_are_filled_keep_what_they_give(change: Change) -> None:
    same(lambda q, k, v: attend(q, k, v, change), *qkv(), reference=False)


def test_a_call_with_rows_lowered() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(torch.arange(8)[:, None] >= 4, LOWEST, 0.0) + torch.zeros(8, 8)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    same(program, *qkv(), reference=False)


def test_a_row_of_two_fills_is_the_mean_over_the_higher() -> None:
    mask = torch.zeros(8, 8)
    mask[2, :4], mask[2, 4:] = -1e9, -2e9
    inputs = qkv(grad=True)
    torch._dynamo.reset()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s: s + mask)

    out = torch.compile(
        program, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    )(*inputs)
    torch.testing.assert_close(out, program(*inputs), atol=1e-5, rtol=1e-5)


def test_float64_scores_are_not_absorbed_by_a_billion() -> None:
    mask = torch.zeros(8, 8, dtype=torch.float64)
    mask[2] = -1e9

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s: s + mask)

    first, second = qkv(dtype=torch.float64, grad=True), qkv(dtype=torch.float64, grad=True)
    torch._dynamo.reset()
    out = torch.compile(
        program, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    )(*first)
    wanted = program(*second)
    torch.testing.assert_close(out, wanted)
    for got, want in zip(torch.autograd.grad(out.sum(), first), torch.autograd.grad(wanted.sum(), second), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_a_weak_fill_beside_a_maximum_taken_off() -> None:
    def change(s: Tensor) -> Tensor:
        s = s - s.amax(-1, keepdim=True)
        return s.masked_fill(torch.arange(8) > torch.arange(8)[:, None], -2.0)

    same(lambda q, k, v: attend(q, k, v, change), *qkv())


@pytest.mark.parametrize(("dtype", "keys"), [(torch.bfloat16, 600), (torch.float16, 5000)])
def test_an_integer_bias_is_not_rounded_to_half(dtype: torch.dtype, keys: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT / 4 + torch.arange(k.shape[2])
        return torch.softmax(scores, -1).to(v.dtype) @ v

    same(program, *qkv(8, keys, dtype), rewritten=1, twice=3.0)


TRIANGLE = torch.ones(8, 8, dtype=torch.uint8).tril()
WRAPS: dict[str, Callable[[], Tensor]] = {
    "-uint8": lambda: (-TRIANGLE) == 255,
    "uint8 filled with -1": lambda: TRIANGLE.masked_fill(TRIANGLE.bool(), -1) > 1,
    "uint8 against 257": lambda: ~(TRIANGLE < 257),
    "int32 against 2**32": lambda: TRIANGLE.int() == 2**32,
    "int32 positions, far apart": lambda: (
        (torch.arange(8, dtype=torch.int32) * 700_000_000)[:, None]
        < (torch.arange(8, dtype=torch.int32) * 700_000_000)[None]
    ),
}


@pytest.mark.parametrize("name", list(WRAPS))
def test_integers_that_wrap_around_are_not_numbers(name: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).masked_fill(WRAPS[name](), -1e9).softmax(-1) @ v

    report = same(program, *qkv(), reference=False)
    assert "causal" not in report.sites[0].mask and report.sites[0].mask != "none"


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9, -1e12])
@pytest.mark.parametrize("fill", [-1e9, -1e12, torch.finfo(torch.float32).min])
def test_a_matrix_of_fills_is_added_and_another_fill_replaces(low: float, fill: float) -> None:
    """In a fully masked row the keys of the higher fill count, alone."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = torch.ones(4, 4, dtype=torch.bool).tril(-1)
        matrix = torch.zeros(4, 4).masked_fill(~past, low)
        return (q @ k.mT + matrix).masked_fill(past, fill).softmax(-1) @ v

    with torch.no_grad():
        same(fn, *qkv(4, 4), reference=False)


def filled_and_added(fill: float, added: Tensor) -> Callable[..., Tensor]:
    """Scores of hundreds, in rows of which the first is fully masked; ``added`` comes after the fill."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = torch.ones(8, 8, dtype=torch.bool).tril(-1)
        return ((q @ k.mT * 32).masked_fill(~past, fill) + added).softmax(-1) @ v

    return fn


@pytest.mark.parametrize("targets", [None, ("sdpa",), ("flex",), ("cpu_kernel",)], ids=str)
def test_no_score_shows_beside_a_fill_to_which_a_mask_is_added(targets: tuple[str, ...] | None) -> None:
    """-1e9 of float32 leaves multiples of 64 of a score, in rows where what follows masks some of their keys again."""
    added = torch.zeros(8, 8).masked_fill(torch.arange(8) % 3 == 0, -1e9)
    with torch.no_grad():
        same(filled_and_added(-1e9, added), *qkv(), reference=False, rewritten=None, targets=targets)
        strong = same(filled_and_added(-1e30, added), *qkv(), reference=False, rewritten=None)
    assert "additive" in strong.sites[0].mask, "a fill that absorbs any score is a mask as before"


def test_a_guard_against_nan_of_scores_that_become_infinite() -> None:
    """Minus the mask's -inf is inf, whose row is NaN in the program and guarded to 0."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(8, 8, dtype=torch.bool).tril()
        return (q @ k.mT).masked_fill(~keep, float("-inf")).neg().softmax(-1).nan_to_num(0.0) @ v

    with torch.no_grad():
        same(fn, *qkv(), rewritten=0)


@pytest.mark.parametrize("number", [-0.5, 0.5])
def test_a_guard_against_nan_of_a_mask_and_a_bias_that_are_turned(number: float) -> None:
    """The same with a bias between; times a positive number the guard is one of fully masked rows."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf")) - bias
        return (scores * number).softmax(-1).nan_to_num(0.0) @ v

    with torch.no_grad():
        same(fn, *qkv(), torch.rand(8, 8), rewritten=int(number > 0))


def test_a_guard_against_nan_of_a_mask_that_is_turned_in_one_of_two_forms() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT
        return torch.where(torch.arange(8) < 4, -scores, -(scores + mask)).softmax(-1).nan_to_num(0.0) @ v

    with torch.no_grad():
        same(fn, *qkv(), torch.full((8, 8), -math.inf).triu(1), rewritten=0)


@pytest.mark.parametrize("grad", [False, True])
def test_numbers_below_half_of_float16_that_do_not_mask(grad: bool) -> None:
    """In a row of nothing else the highest counts alone in float16."""
    added = torch.linspace(-60000, -40000, 64, dtype=torch.float16).view(8, 8)
    inputs = qkv(dtype=torch.float16, grad=grad)
    same(lambda q, k, v, added: (q @ k.mT + added).softmax(-1) @ v, *inputs, added, rewritten=1, grad=grad)


def test_a_lowest_number_of_float16_and_something_small_beside_it() -> None:
    """Something below 16 is rounded away beside -65504, so that a row of nothing else is the mean of the values."""
    mask, bias = torch.zeros(2, 1, 8, 8).half(), torch.linspace(-7, 7, 8).half()
    mask[0] = torch.finfo(torch.float16).min
    inputs = (*qkv(dtype=torch.float16), bias, mask)
    with torch.no_grad():
        same(lambda q, k, v, b, m: (q @ k.mT / 4 + b + m).softmax(-1) @ v, *inputs, rewritten=1, reference=False)


def test_a_matrix_of_fills_and_a_fill_that_are_multiplied_stay_equal() -> None:
    """A number times 1e-9 is another one in float64, and in a fully masked row the higher would count alone."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = torch.ones(4, 4, dtype=torch.bool).tril(-1)
        matrix = torch.zeros(4, 4).masked_fill(~past, LOWEST)
        return ((q @ k.mT + matrix).masked_fill(past, LOWEST) * 1e-9).softmax(-1) @ v

    with torch.no_grad():
        same(fn, *qkv(4, 4), rewritten=1, reference=False)


HALF_LOWEST = torch.finfo(torch.float16).min
TURN = torch.tensor([1.0, -1.0]).half().view(2, 1, 1)
MOVED = torch.ones(8, 8, dtype=torch.bool).tril(-1)  # the first row is fully masked
GIVEN = torch.zeros(8, 8).half().masked_fill(~MOVED, HALF_LOWEST)  # a tensor of the program: nobody knows its values


def lowered(s: Tensor, keeps: int = -1, fill: float = HALF_LOWEST) -> Tensor:
    """The scores with a mask added that the program makes itself; -1 masks the first row fully."""
    return s + torch.where(torch.ones(8, 8, dtype=torch.bool).tril(keeps), 0.0, fill).to(s.dtype)


RESCALED: dict[str, tuple[Change, int]] = {  # and whether it is rewritten
    "times 0.3": (lambda s: lowered(s) * 0.3, 1),
    "divided by 8": (lambda s: lowered(s) / 8, 1),
    "-40000, times 0.5": (lambda s: lowered(s, fill=-40000.0) * 0.5, 1),
    "given, times 0.3": (lambda s: (s + GIVEN) * 0.3, 1),
    "given, twice times 0.3": (lambda s: (s + GIVEN) * 0.3 * 0.3, 1),
    "given, times 2 in float32": (lambda s: (s + GIVEN).float() * 2, 1),
    "causal, times 0.3": (lambda s: lowered(s, 0) * 0.3, 1),
    "-inf, times 0.3": (lambda s: lowered(s, fill=-math.inf) * 0.3, 1),
    "-inf, times -0.3": (lambda s: lowered(s, 0, fill=-math.inf) * -0.3, 1),
    "a bias, times a tensor": (lambda s: (s + torch.arange(8).half() * 3) * TURN, 0),
    "times -0.5": (lambda s: lowered(s, 0) * -0.5, 0),
    "given, times -0.5": (lambda s: (s + GIVEN) * -0.5, 0),
    "times a tensor": (lambda s: lowered(s, 0) * TURN, 0),
    "times a number near 0": (lambda s: lowered(s) * 1e-4, 0),
    "times 0.3, then a mask": (lambda s: lowered(lowered(s) * 0.3, 2), 0),
    "a bias, times 0.3, then a mask": (lambda s: lowered((s + (I - J).sin().half()) * 0.3), 1),
    "a bias, times 0.3, then filled": (
        lambda s: ((s + (I - J).sin().half()) * 0.3).masked_fill(~MOVED, HALF_LOWEST),
        1,
    ),
    "filled, and a bias, times 0.3": (
        lambda s: (s.masked_fill(~MOVED, HALF_LOWEST) + (I - J).sin().half()) * 0.3,
        1,
    ),
    "filled, then with -inf, times 0.3": (
        lambda s: s.masked_fill(~MOVED, HALF_LOWEST).masked_fill(torch.arange(8) > 5, -math.inf) * 0.3,
        1,
    ),
    "one of two forms": (
        lambda s: torch.where(torch.arange(8) > 4, s * 0.3, lowered(s, -1) * 0.3),
        1,
    ),
    "one of two forms, turned": (
        lambda s: torch.where(torch.arange(8) > 4, s * -0.3, lowered(s, -1) * -0.3),
        0,
    ),
    "one of two forms, masked before": (
        lambda s: torch.where(torch.arange(8) > 4, s * 0.3, lowered(lowered(s, -1) * 0.3, 2)),
        0,
    ),
    "a bias, times 0.3, then the maximum with the lowest number": (
        lambda s: torch.maximum(lowered(s, fill=-math.inf) * 0.3, torch.tensor(HALF_LOWEST, dtype=torch.float16)),
        1,
    ),
    "a soft cap, a mask, times 0.3": (lambda s: lowered(s.tanh() * 3) * 0.3, 0),
    "filled, turned, and a bias": (
        lambda s: (I - J).sin().half() - s.masked_fill(~MOVED, HALF_LOWEST),
        0,
    ),
    "given, then the absolute value": (lambda s: (s + GIVEN).abs(), 0),
    "a bias, and a weak fill": (
        lambda s: (s + (I - J).sin().half()).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e4),
        int(FLEX_ON_CPU),
    ),
    "a mask under a soft cap": (lambda s: lowered(s).tanh() * 3, int(FLEX_ON_CPU)),
    "a mask, times a mask": (lambda s: lowered(s) * MOVED.flip(0).half(), 0),
}


@pytest.mark.parametrize("name", list(RESCALED))
def test_float16_scores_that_are_multiplied_after_they_were_masked(name: str) -> None:
    """A number that absorbs a score of float16 and is then made smaller is no mask to a kernel, which adds in float32.

    A fully masked row is the mean of the values all the same; times a negative number the masked keys are first.
    """
    change, rewritten = RESCALED[name]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT / 4).softmax(-1).to(v.dtype) @ v

    with torch.no_grad():
        same(fn, *qkv(dtype=torch.float16), rewritten=rewritten, reference=False)


@pytest.mark.parametrize("number", [0.3, 2.0])
def test_float16_scores_that_are_multiplied_under_a_guard(number: float) -> None:
    """Twice the lowest number is -inf, whose row is NaN that the guard sets to zero."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (lowered(q @ k.mT / 4) * number).softmax(-1).nan_to_num(0.0) @ v

    def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT / 4).masked_fill(~MOVED, HALF_LOWEST) * number).softmax(-1).nan_to_num(0.0) @ v

    with torch.no_grad():
        same(fn, *qkv(dtype=torch.float16), rewritten=int(number < 1), reference=False)
        same(filled, *qkv(dtype=torch.float16), rewritten=0 if number > 1 else None, reference=False)


def test_verifying_float16_scores_that_are_multiplied_after_they_were_masked() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (lowered(q @ k.mT / 4) * 0.3).softmax(-1) @ v

    with torch.no_grad():
        same(fn, *qkv(dtype=torch.float16), rewritten=1, reference=False, verify="graph")


@pytest.mark.parametrize("number", [0.3, 0.125])
def test_float16_scores_that_are_multiplied_after_they_were_masked_in_training(number: float) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (lowered(q @ k.mT / 4) * number).softmax(-1) @ v

    same(fn, *qkv(dtype=torch.float16, grad=True), grad=True, rewritten=1, reference=False)


# ---- clamps to a number that masks ----


def clamped(q: Tensor, k: Tensor, v: Tensor, least: float, mask: Change = lambda s: s) -> Tensor:
    """As OPT writes it, with and without a mask before."""
    return attend(q, k, v, lambda s: torch.max(mask(s), torch.tensor(least)))


def masked(s: Tensor) -> Tensor:
    return s + torch.where(J <= I, 0.0, LOWEST)


@pytest.mark.parametrize("mask", [masked, lambda s: s])
def test_a_clamp_to_a_number_that_masks_is_assumed_to_serve_masked_keys(mask: Change) -> None:
    (site,) = same(partial(clamped, least=LOWEST, mask=mask), *qkv(), rewritten=1).sites
    assert CLAMP in site.assumptions
    (site,) = same(partial(clamped, least=LOWEST, mask=mask), *qkv(), rewritten=0, numerics="strict").sites
    assert CLAMP in site.reason


def test_a_clamp_to_minus_infinity_changes_nothing_and_assumes_nothing() -> None:
    (site,) = same(partial(clamped, least=-math.inf, mask=masked), *qkv(), rewritten=1).sites
    assert CLAMP not in site.assumptions


def test_a_clamp_of_a_part_of_the_scores_is_assumed_to_serve_masked_keys() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s: torch.where(J <= I, s, s.clamp(min=LOWEST)))

    (site,) = same(run, *qkv(), rewritten=0, numerics="strict").sites
    assert CLAMP in site.reason

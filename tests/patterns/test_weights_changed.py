"""What changes the weights after the softmax, and looks like what changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same, same_each
from torch import Tensor

import attn_pass

LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(8, 8, dtype=torch.bool).triu(1)
LEFT_PADDING = torch.arange(8) < torch.tensor([3, 0])[:, None, None, None]  # three rows of the first see no key
EMPTY_ROWS = torch.zeros(2, 2, 8, 8, dtype=torch.bool)
EMPTY_ROWS[:, :, 3] = True
EMPTY_ROWS[0, 1, 5] = True


def twice_masked(inner: float, outer: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(CAUSAL, inner).masked_fill(pad, outer)
        return scores.softmax(-1).masked_fill(pad, 0.0) @ v

    return run


@pytest.mark.parametrize("inner, outer", [(-1e9, -1e9), (LOWEST, -1e9), (NEG_INF, -1e9), (-1e9, NEG_INF)])
def test_a_mask_beside_another_that_is_set_to_zero_again(inner: float, outer: float) -> None:
    """Where two numbers mask all keys of a row, what is not set to zero are shares of all keys."""
    report = same(twice_masked(inner, outer), *qkv(), LEFT_PADDING)
    assert bool(report.rewritten) == (NEG_INF in (inner, outer))


def test_a_mask_that_is_added_beside_one_that_is_set_to_zero_again() -> None:
    def given(q: Tensor, k: Tensor, v: Tensor, added: Tensor, pad: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + added).masked_fill(pad, -1e9).softmax(-1).masked_fill(pad, 0.0) @ v

    def computed(q: Tensor, k: Tensor, v: Tensor, table: Tensor, pad: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + q @ table).masked_fill(pad, -1e9).softmax(-1).masked_fill(pad, 0.0) @ v

    added = torch.zeros(8, 8).masked_fill(CAUSAL, -1e9)
    assert not same(given, *qkv(), added, LEFT_PADDING).rewritten
    assert same(computed, *qkv(), randn(16, 8), LEFT_PADDING).rewritten


def guarded(move: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(mask, NEG_INF)
        empty = (scores == NEG_INF).all(-1, keepdim=True)
        return move(move(scores.softmax(-1)).masked_fill(empty, 0.0)) @ v

    return run


GUARDED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w,
    "columns": lambda w: w.mT,
    "batch and heads": lambda w: w.transpose(0, 1),
}


@pytest.mark.parametrize("name", list(GUARDED))
def test_a_guard_is_of_the_row_that_it_is_read_at(name: str) -> None:
    report = same(guarded(GUARDED[name]), *qkv(), EMPTY_ROWS)
    assert bool(report.rewritten) == (name == "rows")


@pytest.mark.parametrize("train", [False, True])
def test_dropout_by_its_own_keyword(train: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout((q @ k.mT * 0.25).softmax(-1), 0.5, train=train) @ v

    if not train:
        same(run, *qkv(), rewritten=1)
    (site,) = attn_pass.explain(run, *qkv(), attn_pass_options={"targets": ("sdpa",)}).sites
    assert ("dropout 0.5" in site.reason) == train


def each_mask_again(inner: float, outer: float, *again: int, joined: bool = False) -> Callable[..., Tensor]:
    """Two masks, and which of them set weights to zero: 2 is a third one."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pad: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        scores = scores.masked_fill(mask | pad, inner) if joined else scores.masked_fill(mask, inner)
        weights = scores.masked_fill(pad, outer).softmax(-1)
        for number in again:
            weights = weights.masked_fill((mask, pad, mask.flip(-1))[number], 0.0)
        return weights @ v

    return run


def factor_and_fill(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, pad: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(keep == 0, -1e9).masked_fill(pad, -1e9)
    return (scores.softmax(-1) * keep).masked_fill(pad, 0.0) @ v


def fill_and_factor(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, pad: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(keep == 0, -1e9).masked_fill(pad, -1e9)
    return (scores.softmax(-1).masked_fill(pad, 0.0) * keep) @ v


ANY_MASK = randn(8, 8, seed=4) > 0.3
EACH_AGAIN: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "causal": (each_mask_again(NEG_INF, NEG_INF, 0, 1), CAUSAL),
    "given": (each_mask_again(NEG_INF, NEG_INF, 0, 1), ANY_MASK),
    "in the other order": (each_mask_again(NEG_INF, NEG_INF, 1, 0), ANY_MASK),
    "one of them twice": (each_mask_again(NEG_INF, NEG_INF, 0, 1, 0), ANY_MASK),
    "one mask of the scores": (each_mask_again(NEG_INF, NEG_INF, 0, 1, joined=True), ANY_MASK),
    "numbers": (each_mask_again(-1e9, LOWEST, 0, 1), ANY_MASK),
    "a number inside": (each_mask_again(-1e9, NEG_INF, 0, 1), ANY_MASK),
    "a number outside": (each_mask_again(NEG_INF, -1e9, 0, 1), ANY_MASK),
    "a factor and a number": (factor_and_fill, ANY_MASK),
    "a number and a factor": (fill_and_factor, ANY_MASK),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(EACH_AGAIN))
def test_two_masks_that_are_set_to_zero_again(name: str, grad: bool) -> None:
    """SpeechBrain's chunks and padding; rows without a key are zero, and so is their gradient."""
    program, mask = EACH_AGAIN[name]
    report = same(program, *qkv(grad=grad), mask, LEFT_PADDING, grad=grad, rewritten=1, targets=("cpu_kernel", "sdpa"))
    assert not program(*qkv(), mask, LEFT_PADDING).isnan().any(), report


@pytest.mark.parametrize(
    "program",
    [
        each_mask_again(NEG_INF, NEG_INF, 0),
        each_mask_again(NEG_INF, NEG_INF, 0, 1, 2),
        each_mask_again(NEG_INF, NEG_INF, 2, 1),
        each_mask_again(-1e9, -1e9, 1),
        each_mask_again(-1e9, -1e9, 0),
        each_mask_again(-3.0, NEG_INF, 0, 1),
        each_mask_again(NEG_INF, -3.0, 0, 1),
    ],
)
def test_masks_that_are_not_those_of_the_scores_are_left(program: Callable[..., Tensor]) -> None:
    same(program, *qkv(), ANY_MASK, LEFT_PADDING, rewritten=0)


ZEROED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times not": lambda w, m: w * ~m,
    "not, times": lambda w, m: ~m * w,
    "times not, as floats": lambda w, m: w * (~m).float(),
    "times not, as integers": lambda w, m: w * torch.logical_not(m).long(),
    "times not, of the shape of the weights": lambda w, m: w * (~m).expand_as(w).type_as(w),
    "times not, in place": lambda w, m: w.mul_(~m),
    "times equals zero": lambda w, m: w * (m == 0),
    "times one less": lambda w, m: w * (1.0 - m.to(w.dtype)),
    "times one less, of integers": lambda w, m: torch.mul(w, 1 - m.int()),
    "where": lambda w, m: torch.where(m, 0, w),
    "where not": lambda w, m: torch.where(~m, w, 0.0),
    "where, as a method": lambda w, m: w.where(~m, torch.zeros_like(w)),
    "where equals zero": lambda w, m: torch.where(m == 0, w, 0.0),
}
BROADCAST = {
    "full": randn(2, 2, 8, 8, seed=5) > 0.5,
    "of all heads": randn(2, 1, 8, 8, seed=6) > 0.5,
    "a matrix": CAUSAL,
    "an expanded one": ANY_MASK.expand(2, 2, 8, 8),
    "a permuted one": (randn(8, 2, 2, 8, seed=7) > 0.5).permute(1, 2, 0, 3),
    "padding": LEFT_PADDING,
    "keys alone": torch.arange(8) < 3,
}


def zeroed_again(fill: float, name: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ZEROED[name]((q @ k.mT * 0.25).masked_fill(mask, fill).softmax(-1), mask) @ v

    return run


@pytest.mark.parametrize("name", list(ZEROED))
def test_the_mask_negated_is_a_factor_of_the_weights(name: str) -> None:
    """Whatever the fill and the mask's shape: it sets to zero what is zero already, but in rows without a key."""
    fills = (NEG_INF, LOWEST, -1e9)
    cases = {
        f"{fill} {mask}": (zeroed_again(fill, name), (*qkv(), BROADCAST[mask])) for fill in fills for mask in BROADCAST
    }
    same_each(cases, rewritten=1)


@pytest.mark.parametrize("name", ["times not", "times one less", "where not"])
def test_the_mask_negated_is_a_factor_of_the_weights_in_training(name: str) -> None:
    for mask in ("a matrix", "padding"):
        for fill in (LOWEST, -1e9):
            same(zeroed_again(fill, name), *qkv(grad=True), BROADCAST[mask], grad=True, rewritten=1)


OTHERWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the mask itself": lambda w, m: w * m,
    "the mask of other keys": lambda w, m: w * ~m.flip(-1),
    "the mask of other rows": lambda w, m: w * ~m.roll(1, -2),
    "the mask transposed": lambda w, m: w * ~m.mT,
    "a factor of two": lambda w, m: w * (2 - 2 * m.float()),
    "a sign": lambda w, m: w * (1 - 2 * m.float()),
    "one more": lambda w, m: w * (1 + m.float()),
    "a divisor": lambda w, m: w / (1 + m.float()),
    "part of it": lambda w, m: w * ~(m & m.roll(1, -1)),
    "one instead of zero": lambda w, m: torch.where(~m, w, 1.0),
}


@pytest.mark.parametrize("name", list(OTHERWISE))
def test_another_factor_is_left(name: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return OTHERWISE[name]((q @ k.mT * 0.25).masked_fill(mask, NEG_INF).softmax(-1), mask) @ v

    same(run, *qkv(), ANY_MASK, rewritten=0)


def test_a_mask_that_is_written_between_is_left() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pad: Tensor) -> Tensor:
        weights = (q @ k.mT * 0.25).masked_fill(mask, NEG_INF).masked_fill(pad, NEG_INF).softmax(-1)
        mask[:, :4] = False
        return weights.masked_fill(mask, 0.0).masked_fill(pad, 0.0) @ v

    same(run, *qkv(), ANY_MASK, torch.zeros(2, 1, 1, 8, dtype=torch.bool), rewritten=0)


def _with_a_diagonal(q: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(False)
    return mask.eq(0), mask.eq(0)


def _into_itself(q: Tensor) -> tuple[Tensor, Tensor]:
    """ESPnet's, and WeNet's."""
    ones = torch.ones(8, 8, dtype=torch.bool)
    mask = torch.tril(ones, out=ones)
    return mask.eq(0), mask.eq(0)


def _written_before_the_second(q: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(False)
    first = mask.eq(0)
    mask[:, 3] = False
    return first, mask.eq(0)


def _second_of_a_view(q: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(False)
    view = mask[2:]
    first = mask.eq(0)
    view[:, 0] = False
    return first, mask.eq(0)


def _at_places_of_the_query(q: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(False)
    first = mask.eq(0)
    mask[q[0, 0, :2, 0].long().abs() % 8] = False
    return first, mask.eq(0)


@pytest.mark.parametrize(
    "masks, named",
    [
        (_at_places_of_the_query, None),
        (_with_a_diagonal, "dense"),
        (_into_itself, "causal"),
        (_written_before_the_second, None),
        (_second_of_a_view, None),
    ],
)
def test_a_mask_that_is_written_before_it_is_read(masks: Callable[[Tensor], Any], named: str | None) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = masks(q)
        return (q @ k.mT * 0.25).masked_fill(first, NEG_INF).softmax(-1).masked_fill(second, 0.0) @ v

    report = same(run, *qkv(), rewritten=int(named is not None), reference=False)
    assert named is None or report.sites[0].mask == named

"""Terms added to the scores, choices between scores, and fills, in any order and dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import FLEX_ON_CPU, NEG_INF, qkv, randn, same, same_each

Tensor = torch.Tensor
I, J = torch.arange(8)[:, None], torch.arange(8)[None]
LOWEST = torch.finfo(torch.float32).min


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


def times(factor: Tensor, s: Tensor) -> Tensor:
    return torch.where(J < 4, (s + 2.0) * factor, s * factor)


# Each is a function of the scores, which are one product: what `where` chooses between has to be the same one.
REWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a penalty in one branch": lambda s: torch.where(J <= I, s, s - 10000.0),
    "a bonus in one branch, then causal": lambda s: torch.where(J < 4, s + 2.0, s).masked_fill(J > I, NEG_INF),
    "a bonus in both branches": lambda s: torch.where(J < 4, s + 2.0, s + 2.0).masked_fill(J > I, NEG_INF),
    "a bonus in one branch, halved": lambda s: torch.where(J < 4, (s + 2.0) * 0.5, s * 0.5),
    "a bonus of a branch times a factor of the row": lambda s: times(I.float(), s),
    "large scores under a fill, then -inf": lambda s: torch.where(J < 6, torch.where(I > 2, s * 400, -1e9), NEG_INF),
    "-inf, then clamped to a fill": lambda s: torch.where(I > 2, s * 400, NEG_INF).clamp(min=-1e9),
    "a row constant whose product is a fill": lambda s: s + ((I < 3).float() * -1e5) * 1e5,
}


@pytest.mark.parametrize("name", list(REWRITTEN))
def test_order_is_kept(name: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(REWRITTEN[name](scores(q, k)), v)

    report = same(program, *qkv(), rewritten=1, reference=False, targets=("sdpa",))
    assert report.sites[0].target == "sdpa"


def test_two_fills_are_not_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).masked_fill(J < 4, LOWEST)
        return attend(s.masked_fill((J >= 4) & (I < 3), -1e9), v)

    report = same(program, *qkv(), targets=("sdpa",), rewritten=0, reference=False)
    assert "filled with" in report.sites[0].reason
    same(program, *qkv(), targets=("flex",), rewritten=int(FLEX_ON_CPU), reference=False)


FILLED = {
    "masked_fill": lambda s, drop: s.masked_fill(drop, -1e30),
    "where": lambda s, drop: torch.where(drop, -1e30, s),
    "where, a tensor": lambda s, drop: torch.where(~drop, s, torch.full_like(s, -1e30)),
    "where, a tensor of another type": lambda s, drop: s.where(~drop, torch.tensor(-1e30)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_number_in_two_spellings_is_one_fill(dtype: torch.dtype) -> None:
    """It is rounded to the scores' type in all of them: in fully masked rows both count the same."""

    def program(first: str, second: str) -> Callable[..., Tensor]:
        return lambda q, k, v, drop: attend(FILLED[second](FILLED[first](q @ k.mT, drop), I > J), v)

    inputs = (*qkv(dtype=dtype), randn(8, 8, seed=9) > -0.3)
    programs = {f"{first}, {second}": (program(first, second), inputs) for first in FILLED for second in FILLED}
    report = same_each(programs, reference=False)
    assert {site.target for site in report.sites} == {"sdpa"}


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float64).min])
def test_float64_scores_survive_a_fill_that_something_is_added_to(fill: float) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(torch.where(I > 2, scores(q, k), fill) + torch.arange(8) * 0.3, v)

    same(program, *qkv(dtype=torch.float64), rewritten=0)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", ["no", "by a number", "by a tensor"])
def test_narrow_biases_are_added_in_the_scores_dtype(narrow: torch.dtype, scaled: str) -> None:
    first, second = randn(2, 2, 8, 8, dtype=narrow), randn(2, 2, 8, 8, dtype=narrow, seed=1)
    factor = randn(2, 1, 1, dtype=narrow)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k) + first
        s = s * 0.177 if scaled == "by a number" else s * factor if scaled == "by a tensor" else s + second
        return attend(s, v)

    same(program, *qkv(), rewritten=1, reference=False)

"""What is added to the scores, chosen between and filled in, in which order and in which dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same

Tensor = torch.Tensor
I, J = torch.arange(8)[:, None], torch.arange(8)[None]
LOWEST = torch.finfo(torch.float32).min


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


REWRITTEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a penalty in one branch": lambda q, k, v: attend(torch.where(J <= I, scores(q, k), scores(q, k) - 10000.0), v),
    "a bonus in one branch, then causal": lambda q, k, v: attend(
        torch.where(J < 4, scores(q, k) + 2.0, scores(q, k)).masked_fill(J > I, NEG_INF), v
    ),
    "a bonus in both branches": lambda q, k, v: attend(
        torch.where(J < 4, scores(q, k) + 2.0, scores(q, k) + 2.0).masked_fill(J > I, NEG_INF), v
    ),
    "a bonus in one branch, halved": lambda q, k, v: attend(
        torch.where(J < 4, (scores(q, k) + 2.0) * 0.5, scores(q, k) * 0.5), v
    ),
    "a bonus of a branch times a factor of the row": lambda q, k, v: attend(
        torch.where(J < 4, (scores(q, k) + 2.0) * I.float(), scores(q, k) * I.float()), v
    ),
    "large scores under a fill, then -inf": lambda q, k, v: attend(
        torch.where(J < 6, torch.where(I > 2, scores(q, k) * 400, -1e9), NEG_INF), v
    ),
    "-inf, then clamped to a fill": lambda q, k, v: attend(
        torch.where(I > 2, scores(q, k) * 400, NEG_INF).clamp(min=-1e9), v
    ),
    "a row constant whose product is a fill": lambda q, k, v: attend(scores(q, k) + ((I < 3).float() * -1e5) * 1e5, v),
}


@pytest.mark.parametrize("name", list(REWRITTEN))
def test_order_is_kept(name: str) -> None:
    same(REWRITTEN[name], *qkv(), rewritten=1, reference=False)


def test_two_fills_are_not_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).masked_fill(J < 4, LOWEST)
        return attend(s.masked_fill((J >= 4) & (I < 3), -1e9), v)

    report = same(program, *qkv(), targets=("sdpa",), rewritten=0, reference=False)
    assert "filled with" in report.sites[0].reason
    same(program, *qkv(), targets=("flex",), rewritten=1, reference=False)


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

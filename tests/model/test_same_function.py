"""Two descriptions are of one function, or of its neighbours: scales, operands, masks, axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attn_pass.entries.stock_meaning import Forward
from attn_pass.model.same_function import is_same_function
from attn_pass.reading.parts import Described

Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
B, H, S, D = 2, 4, 4, 8
INF = float("inf")


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / 2.0).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.5 + mask).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).masked_fill(mask > 0, -INF).softmax(-1) @ v


SAME: list[tuple[Program, Program]] = [
    (plain, plain),
    (plain, lambda q, k, v, mask: (0.5 * (q @ k.mT)).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: ((q * 0.5) @ k.mT).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: torch.softmax(q @ k.mT / 2.0, -1, torch.float32) @ v),
    (added, lambda q, k, v, mask: (mask + q @ k.mT / 2.0).softmax(-1) @ v),
    (filled, filled),
]
OTHERS: list[tuple[Program, Program]] = [
    (plain, lambda q, k, v, mask: (q @ k.mT / 2.01).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: (q @ k.mT / 2.0).softmax(-1) @ k),
    (plain, lambda q, k, v, mask: (k @ q.mT / 2.0).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: (q @ k.transpose(1, 2).mT / 2.0).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: plain(*(x.transpose(1, 2) for x in (q, k, v)), mask)),
    (plain, lambda q, k, v, mask: (q.flip(2) @ k.mT / 2.0).softmax(-1) @ v),
    (plain, added),
    (added, lambda q, k, v, mask: (q @ k.mT * 0.5 - mask).softmax(-1) @ v),
    (added, lambda q, k, v, mask: (q @ k.mT * 0.5 + mask.mT).softmax(-1) @ v),
    (added, filled),
    (filled, lambda q, k, v, mask: (q @ k.mT * 0.5).masked_fill(mask >= 0, -INF).softmax(-1) @ v),
    (filled, lambda q, k, v, mask: (q @ k.mT * 0.5).masked_fill(mask > 0, -1.0).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: ((q @ k.mT / 2.0).tanh() * 5.0).softmax(-1) @ v),
    (plain, lambda q, k, v, mask: (q.double() @ k.double().mT / 2.0).softmax(-1) @ v.double()),
]


def read(program: Program) -> tuple[Described, dict[str, int]]:
    """The attention of a program, and the sources of its description by the names of what they are."""
    inputs = [torch.randn(B, H, S, D) for _ in range(3)]
    traced = make_fx(program, tracing_mode="fake")(*inputs, torch.randn(B, 1, S, S))
    (site,) = Forward.copied(traced).sites()
    assert site.described is not None and not site.refusal
    return site.described, {node.name: n for n, node in enumerate(site.described.nodes)}


def same(one: Program, other: Program) -> bool:
    (a, number), (b, sources) = read(one), read(other)
    return is_same_function(
        a.attention, b.attention, {n: number[name] for name, n in sources.items() if name in number}
    )


@pytest.mark.parametrize("pair", SAME)
def test_one_function(pair: tuple[Program, Program]) -> None:
    assert same(*pair) and same(*reversed(pair))


@pytest.mark.parametrize("pair", OTHERS)
def test_its_neighbours(pair: tuple[Program, Program]) -> None:
    assert not same(*pair) and not same(*reversed(pair))


def test_a_source_that_the_other_does_not_have() -> None:
    (a, _), (b, _) = read(plain), read(plain)
    assert not is_same_function(a.attention, b.attention, {0: 0, 1: 1})

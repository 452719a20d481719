"""Exponentials that a mask sets to zero before they are summed, each with look-alikes that are other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import attend, exported_each, qkv, randn, same, same_each
from torch import Tensor

Weights = Callable[..., Tensor]
KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[..., 0] = True
OTHER = randn(8, 8, seed=6) > -0.3
OTHER[..., 0] = True
NOTHING = torch.arange(8)[:, None] > torch.zeros(1, 8)  # kept; the first row is fully masked
KEYS = (torch.arange(8) < torch.tensor([5, 3])[:, None])[:, None, None, :]  # kept, the same for all queries


def shifted(s: Tensor) -> Tensor:
    return torch.exp(s - s.amax(-1, keepdim=True))


def share(e: Tensor, added: float = 0.0) -> Tensor:
    total = e.sum(-1, keepdim=True)
    return e / (total + added if added else total)


def behind_a_mask(fill: float, added: float) -> Weights:
    return lambda s, m: share(shifted(s.masked_fill(~m, fill)) * m, added)


def where_zeros(s: Tensor, m: Tensor) -> Tensor:
    e = s.exp()
    return share(torch.where(m, e, torch.zeros_like(e)))


READ: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    "times a mask": (lambda s, m: share(s.exp() * m), (KEEP,)),
    "times a mask as numbers": (lambda s, m: share(m.to(s.dtype) * s.exp()), (KEEP,)),
    "times one less a mask as numbers": (lambda s, m: share(s.exp() * (1 - m.float())), (~KEEP,)),
    "powers of two": (lambda s, m: share(torch.exp2(s) * m), (KEEP,)),
    "filled": (lambda s, m: share(s.exp().masked_fill(~m, 0.0)), (KEEP,)),
    "filled by where": (lambda s, m: share(torch.where(m, shifted(s), 0.0)), (KEEP,)),
    "filled by where, with a tensor of zeros": (where_zeros, (KEEP,)),
    "less the maximum of all": (lambda s, m: share(shifted(s) * m), (KEEP,)),
    "two masks": (lambda s, m, n: share((s.exp() * m).masked_fill(~n, 0.0)), (KEEP, OTHER)),
    "for all queries": (lambda s, m: share(s.exp() * m), (KEYS,)),
    "filled by where, a method": (lambda s, m: share(s.exp().where(m, 0.0)), (KEEP,)),
    "causal": (lambda s: share(s.exp() * torch.ones(8, 8).tril()), ()),
    "by the inverse of the sum": (lambda s, m: (lambda e: e * (1 / e.sum(-1, keepdim=True)))(s.exp() * m), (KEEP,)),
    "a fully masked row, NaN": (lambda s, m: share(s.exp() * m), (NOTHING,)),
    "masked before, too": (behind_a_mask(-1e9, 0.0), (KEEP,)),
    "masked before, and a number": (behind_a_mask(-1e9, 1e-9), (KEEP,)),
    "masked before, and a number, a fully masked row": (behind_a_mask(-1e9, 1e-9), (NOTHING,)),
    "masked before, and a least sum": (
        lambda s, m: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))(shifted(s.masked_fill(~m, -1e9)) * m),
        (NOTHING,),
    ),
    "masked before and afterwards": (
        lambda s, m: share(s.masked_fill(~m, -1e9).exp() * m).masked_fill(~m, 0.0),
        (KEEP,),
    ),
}
SINKS: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    "a number": (lambda s, m: share(s.exp() * m, 1e-6), (KEEP,)),
    "a number, a fully masked row": (lambda s, m: share(s.exp() * m, 1e-6), (NOTHING,)),
    "softmax one": (
        lambda s, m: (lambda e, top: e / (e.sum(-1, keepdim=True) + (-top).exp()))(
            *(lambda top: ((s - top).exp() * m, top))(s.amax(-1, keepdim=True))
        ),
        (KEEP,),
    ),
}
LEFT: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    "the sum alone": (lambda s, m: (lambda e: e / (e * m).sum(-1, keepdim=True))(s.exp()), (KEEP,)),
    "all but the sum": (lambda s, m: (lambda e: e * m / e.sum(-1, keepdim=True))(s.exp()), (KEEP,)),
    "two masks, one in the sum": (
        lambda s, m, n: (lambda e: e * n / e.sum(-1, keepdim=True))(s.exp() * m),
        (KEEP, OTHER),
    ),
    # The largest score may be masked, and the others so small that the number counts.
    "less the maximum of all, and a number": (lambda s, m: share(shifted(s) * m, 1e-9), (KEEP,)),
    "less the maximum of all, and a least sum": (
        lambda s, m: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))(shifted(s) * m),
        (KEEP,),
    ),
    "another mask before, and a number": (
        lambda s, m, n: share(shifted(s.masked_fill(~n, -1e9)) * m, 1e-9),
        (KEEP, OTHER),
    ),
    "times a matrix": (lambda s, w: share(s.exp() * w), (randn(8, 8, seed=7).abs(),)),
    "times twice a mask": (lambda s, m: share(s.exp() * (m + m.float())), (KEEP,)),
    "filled with one": (lambda s, m: share(s.exp().masked_fill(~m, 1.0)), (KEEP,)),
    "filled where the exponential is small": (lambda s: share((lambda e: e.masked_fill(e < 0.5, 0.0))(s.exp())), ()),
    "of columns": (lambda s, m: (lambda e: e / e.sum(-2, keepdim=True))(s.exp() * m), (KEEP,)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_read(grad: bool) -> None:
    programs = {name: (attend(weights), (*qkv(grad=grad), *rest)) for name, (weights, rest) in READ.items()}
    same_each(programs, grad=grad)


def test_read_with_a_sink() -> None:
    same_each({name: (attend(weights), (*qkv(), *rest)) for name, (weights, rest) in SINKS.items()})


def test_left() -> None:
    same_each({name: (attend(weights), (*qkv(), *rest)) for name, (weights, rest) in LEFT.items()}, rewritten=0)


@pytest.mark.parametrize("decompose", [False, True], ids=["export", "decomposed"])
def test_exported(decompose: bool) -> None:
    programs = {name: (attend(weights), (*qkv(), *rest)) for name, (weights, rest) in (READ | SINKS).items()}
    report = exported_each(programs, decompose=decompose)
    assert {n: s.outcome for n, s in zip(programs, report.sites)} == dict.fromkeys(programs, "rewritten"), str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["times a mask", "filled", "less the maximum of all"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    weights, rest = READ[name]
    same(attend(weights), *qkv(dtype=dtype), *rest, rewritten=1, twice=3.0)


@pytest.mark.parametrize("name", ["times a mask", "filled by where", "masked before, and a least sum"])
def test_dynamic(name: str) -> None:
    weights, rest = READ[name]
    same(attend(weights), *qkv(), *rest, dynamic=True, rewritten=1)


AGAIN: dict[str, Weights] = {
    "by the inverse": lambda s, m: share((lambda e: e * (1 / e.sum(-1, keepdim=True)))(shifted(s))),
    "masked": lambda s, m: share(
        (lambda e: e * (1 / e.sum(-1, keepdim=True)))(shifted(s.masked_fill(~m, -1e9))) * m, 1e-13
    ),
    "masked, of a logarithm": lambda s, m: share(s.masked_fill(~m, -1e9).log_softmax(-1).exp() * m, 1e-13),
    "twice": lambda s, m: share((s - s.logsumexp(-1, keepdim=True)).exp() * 2),
}


def test_weights_that_are_divided_by_their_sum_again() -> None:
    """They are no exponentials that are masked; what was read of them before still is."""
    read = {name: (attend(weights), (*qkv(), KEEP)) for name, weights in AGAIN.items() if "masked" not in name}
    same_each(read)
    masked = {name: (attend(weights), (*qkv(), KEEP)) for name, weights in AGAIN.items() if "masked" in name}
    report = same_each(masked, rewritten=None)
    assert not any("exponentials" in site.reason for site in report.sites)


def beside_a_sink(front: bool) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        e = torch.nn.functional.pad(q @ k.mT * 0.25, (1, 0) if front else (0, 1)).exp() * m
        weights = share(e)
        return (weights[..., 1:] if front else weights[..., :-1]) @ v

    return program


@pytest.mark.parametrize("front", [False, True])
def test_a_mask_that_covers_a_sink_is_left(front: bool) -> None:
    mask = randn(2, 1, 8, 9, seed=8) > 0.0
    report = same(beside_a_sink(front), *qkv(), mask, rewritten=0)
    assert "a sink may be masked" in report.left[0].reason
    same(beside_a_sink(front), *qkv(), torch.ones(8, 9).tril(), rewritten=0)


def test_divided_after_the_product() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        e = shifted(q @ k.mT) * m
        return (e @ v) / e.sum(-1, keepdim=True)

    def another_sum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        e = shifted(q @ k.mT)
        return ((e * m) @ v) / e.sum(-1, keepdim=True)

    same(program, *qkv(), KEEP, rewritten=1)
    same(another_sum, *qkv(), KEEP, rewritten=0)


def test_a_causal_mask_is_named() -> None:
    report = same(attend(READ["causal"][0]), *qkv(), rewritten=1)
    assert report.sites[0].mask == "causal"


def test_a_mask_written_in_place_is_left() -> None:
    def behind(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        e = torch.exp(q @ k.mT)
        total = e.sum(-1, keepdim=True)
        e.mul_(m)
        return e / total @ v

    def between(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        kept = m.clone()
        e = torch.exp(q @ k.mT) * kept
        kept.fill_(True)
        total = (torch.exp(q @ k.mT) * kept).sum(-1, keepdim=True)
        return e / total @ v

    for program in (behind, between):
        same(program, *qkv(), KEEP, rewritten=0)


def test_exponentials_that_are_needed_otherwise_stay() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.exp(q @ k.mT * 0.25)
        return share(e * m) @ v, e

    same(program, *qkv(), KEEP, rewritten=None)

"""Attention sinks: a logit joined to the scores whose weight is discarded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same, same_each
from torch import Tensor

import attn_pass

NEG_INF = float("-inf")
KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[0, 0, 3] = False  # a fully masked row
SINK = randn(2, seed=4)
TWO = randn(2, 2, 8, 2, seed=6)
Program = Callable[..., Tensor]


def lowest() -> float:
    """As models write it; a number of the module would be a symbol where sizes are, and all be traced twice."""
    return torch.finfo(torch.float32).min


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def joined(scores: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)], -1)


def softmax_one(scores: Tensor) -> Tensor:
    m = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m))


def in_front(scores: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1), scores], -1)


def transformers(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor | None = None) -> Tensor:
    """As transformers' gpt-oss writes it, grouped heads included."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*q.shape[:2], *x.shape[2:]) for x in (k, v))
    scores = q @ k.mT * 0.25
    logits = joined(scores if mask is None else scores + mask, sink)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return torch.nn.functional.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1] @ v


def zero_like(scores: Tensor, part: slice) -> Tensor:
    return softmax(torch.cat([torch.zeros_like(scores[..., part]), scores], -1))[..., 1:]


def with_bias(bias: Callable[[], Tensor]) -> Program:
    return lambda q, k, v, sink: softmax(joined(q @ k.mT + bias(), sink))[..., :-1] @ v


READ: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "plain": (transformers, (SINK,)),
    "an added mask": (transformers, (SINK, torch.zeros(2, 1, 8, 8).masked_fill(~KEEP, lowest()))),
    "an added mask of -inf": (transformers, (SINK, torch.zeros(2, 1, 8, 8).masked_fill(~KEEP, NEG_INF))),
    "filled": (
        lambda q, k, v, s, m: softmax(joined((q @ k.mT).masked_fill(~m, lowest()), s))[..., :-1] @ v,
        (SINK, KEEP),
    ),
    "causal": (with_bias(lambda: torch.full((8, 8), NEG_INF).triu(1)), (SINK,)),
    "a negative scale": (lambda q, k, v, s: softmax(joined(q @ k.mT * -0.3, s))[..., :-1] @ v, (SINK,)),
    "a bias of zeros": (with_bias(lambda: torch.zeros(8, 8)), (SINK,)),
    "a logit of every row": (
        lambda q, k, v, s: softmax(torch.cat([q @ k.mT, s], -1))[..., :-1] @ v,
        (randn(2, 2, 8, 1),),
    ),
    "a logit in front": (lambda q, k, v, s: softmax(in_front(q @ k.mT, s))[..., 1:] @ v, (SINK,)),
    "a logit in front of masked scores": (
        lambda q, k, v, s, m: softmax(in_front((q @ k.mT).masked_fill(~m, lowest()), s))[..., 1:] @ v,
        (SINK, KEEP),
    ),
    "a zero in front": (
        lambda q, k, v: softmax(torch.cat([torch.zeros_like(q[..., :1]), q @ k.mT], -1))[..., 1:] @ v,
        (),
    ),
    "a logit of the query": (
        lambda q, k, v: softmax(torch.cat([q @ k.mT, q.sum(-1, keepdim=True)], -1))[..., :-1] @ v,
        (),
    ),
}


def added_in_the_product(addend: Tensor) -> Program:
    def program(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = torch.baddbmm(addend.to(q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.25).view(2, 2, 8, 8)
        return softmax(joined(scores, sink))[..., :-1] @ v

    return program


READ |= {
    "two logits": (
        lambda q, k, v, s: softmax(torch.cat([q @ k.mT, s.view(1, 2, 1, 1).expand(2, 2, 8, 2)], -1))[..., :-2] @ v,
        (SINK,),
    ),
    "two logits that differ": (lambda q, k, v, s: softmax(torch.cat([q @ k.mT, s], -1))[..., :-2] @ v, (TWO,)),
    "one of them -inf": (
        lambda q, k, v, s: softmax(torch.cat([q @ k.mT, s], -1))[..., :-2] @ v,
        (TWO.index_fill(-1, torch.tensor([1]), NEG_INF),),
    ),
    "both of them -inf": (lambda q, k, v, s: softmax(torch.cat([q @ k.mT, s], -1))[..., :-2] @ v, (TWO - math.inf,)),
    "one on each side": (lambda q, k, v, s: softmax(in_front(joined(q @ k.mT * 0.3, s), s))[..., 1:-1] @ v, (SINK,)),
    "two zeros and a logit": (
        lambda q, k, v, s: softmax(joined(F.pad(q @ k.mT * 0.3, (2, 0)), s))[..., 2:-1] @ v,
        (SINK,),
    ),
    "two alike, masked scores": (
        lambda q, k, v, s, m: softmax(joined(joined((q @ k.mT).masked_fill(~m, lowest()), s), s))[..., :-2] @ v,
        (SINK, KEEP),
    ),
    "another product's score": (
        lambda q, k, v, s: softmax(joined(torch.cat([q @ k.mT, (k @ q.mT)[..., :1]], -1), s))[..., :-2] @ v,
        (SINK,),
    ),
    "padded by less than nothing": (lambda q, k, v: softmax(F.pad(q @ k.mT, (0, -1)))[..., :] @ v[:, :, 1:], ()),
    "padded in front": (lambda q, k, v: softmax(F.pad(q @ k.mT * 0.3, (1, 0)))[..., 1:] @ v, ()),
    "padded behind": (lambda q, k, v: softmax(F.pad(q @ k.mT * 0.3, (0, 1)))[..., :-1] @ v, ()),
    "padded behind by a number": (
        lambda q, k, v: softmax(F.pad(q @ k.mT, (0, 2, 0, 0), "constant", 1.5))[..., :-2] @ v,
        (),
    ),
    "zeros of their own": (
        lambda q, k, v: softmax(torch.cat([q.new_zeros(2, 2, q.shape[2], 1), q @ k.mT], -1))[..., 1:] @ v,
        (),
    ),
    "zeros like a slice of the scores": (lambda q, k, v: zero_like(q @ k.mT * 0.3, slice(0, 1)) @ v, ()),
    "zeros like the last of the scores": (lambda q, k, v: zero_like(q @ k.mT * 0.3, slice(-1, None)) @ v, ()),
    "numbers like one score": (
        lambda q, k, v: (
            softmax(torch.cat([torch.full_like((x := q @ k.mT)[..., 0], 0.5)[..., None], x], -1))[..., 1:] @ v
        ),
        (),
    ),
    "zeros expanded": (
        lambda q, k, v: softmax(torch.cat([torch.zeros(1).expand(2, 2, q.shape[2], 1), q @ k.mT], -1))[..., 1:] @ v,
        (),
    ),
}


LEFT: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "a slice of the scores themselves": (
        lambda q, k, v: softmax(torch.cat([(x := q @ k.mT)[..., :1], x], -1))[..., 1:] @ v,
        (),
    ),
    "a multiple of zeros like a slice": (
        lambda q, k, v: (
            softmax(torch.cat([torch.zeros_like((x := q @ k.mT)[..., :1]).add_(x[..., 1:2]), x], -1))[..., 1:] @ v
        ),
        (),
    ),
    "one joined, and one in the sum": (
        lambda q, k, v, s: softmax_one(joined(q @ k.mT, s))[..., :-1] @ v,
        (SINK,),
    ),
    "one joined, and another's share": (
        lambda q, k, v, s: (
            (softmax(x := joined(q @ k.mT, s))[..., :-1] @ v) * torch.sigmoid(x.logsumexp(-1, keepdim=True) - 1.0)
        ),
        (SINK,),
    ),
    "one in the sum, and another's share": (
        lambda q, k, v, s: (softmax_one(x := q @ k.mT) @ v) * torch.sigmoid(x.logsumexp(-1, keepdim=True) - s[0]),
        (SINK,),
    ),
    "a number that baddbmm adds": (
        lambda q, k, v, s: added_in_the_product(torch.full((8, 8), 2.0))(q, k, v, s),
        (SINK,),
    ),
    "a number of each row that baddbmm adds": (added_in_the_product(randn(4, 8, 1)), (SINK,)),
    "a number added to the scores alone": (
        lambda q, k, v, s: softmax(joined(q @ k.mT + 1.0, s))[..., :-1] @ v,
        (SINK,),
    ),
    "a tensor added to the scores alone": (
        lambda q, k, v, s, t: softmax(joined(q @ k.mT + t, s))[..., :-1] @ v,
        (SINK, randn(2, 1, 8, 1)),
    ),
    "a matrix of one number added to the scores alone": (with_bias(lambda: torch.full((8, 8), 3.0)), (SINK,)),
    "the maximum taken off the scores alone": (
        lambda q, k, v, s: (lambda x: softmax(joined(x - x.amax(-1, keepdim=True), s))[..., :-1] @ v)(q @ k.mT),
        (SINK,),
    ),
    "the weight of the sink kept": (
        lambda q, k, v, s: softmax(joined(q @ k.mT, s)) @ torch.cat([v, v[:, :, :1]], 2),
        (SINK,),
    ),
    "another weight thrown away": (lambda q, k, v, s: softmax(joined(q @ k.mT, s))[..., 1:] @ v, (SINK,)),
    "padded, another weight thrown away": (lambda q, k, v: softmax(F.pad(q @ k.mT, (1, 0)))[..., :-1] @ v, ()),
    "padded by reflection": (
        lambda q, k, v: softmax(F.pad(q @ k.mT, (1, 0, 0, 0), "reflect"))[..., 1:] @ v,
        (),
    ),
    "a number added to padded scores alone": (lambda q, k, v: softmax(F.pad(q @ k.mT + 1, (1, 0)))[..., 1:] @ v, ()),
    "a row in front": (lambda q, k, v: softmax(F.pad(q @ k.mT, (0, 0, 1, 0)))[..., :-1, 1:] @ v[:, :, 1:], ()),
    "nine logits": (lambda q, k, v: softmax(F.pad(q @ k.mT, (9, 0)))[..., 9:] @ v, ()),
    "two logits, one of them a score": (
        lambda q, k, v, s: (lambda x: softmax(joined(torch.cat([x, x[..., :1]], -1), s))[..., :-2] @ v)(q @ k.mT),
        (SINK,),
    ),
    "two that differ, in a row that may be fully masked": (
        lambda q, k, v, s, m: softmax(torch.cat([(q @ k.mT).masked_fill(~m, lowest()), s], -1))[..., :-2] @ v,
        (TWO, KEEP),
    ),
    "a logit in front, the last weight thrown away": (
        lambda q, k, v, s: softmax(in_front(q @ k.mT, s))[..., :-1] @ v,
        (SINK,),
    ),
    "a number added to the scores behind a logit": (
        lambda q, k, v, s: softmax(in_front(q @ k.mT + 1.0, s))[..., 1:] @ v,
        (SINK,),
    ),
    "the weight of a logit in front kept": (
        lambda q, k, v, s: softmax(in_front(q @ k.mT, s)) @ torch.cat([v[:, :, :1], v], 2),
        (SINK,),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_read(dynamic: bool) -> None:
    same_each({name: (program, (*qkv(), *rest)) for name, (program, rest) in READ.items()}, dynamic=dynamic)


def test_left() -> None:
    report = same_each({n: (program, (*qkv(), *rest)) for n, (program, rest) in LEFT.items()}, rewritten=None)
    for name, site in zip(LEFT, report.sites, strict=True):
        assert site.outcome == "left" or re.search(r"also used by logsumexp(_\d+)?, and stay$", site.reason), name


def test_narrow_values() -> None:
    same(lambda q, k, v, s: softmax(joined(q @ k.mT, s))[..., :-1] @ v[..., :5], *qkv(), SINK, rewritten=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    same(transformers, *qkv(dtype=dtype), SINK.to(dtype), rewritten=1, twice=3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_several_in_any_type(dtype: torch.dtype) -> None:
    program, _ = READ["two logits that differ"]
    same(program, *qkv(dtype=dtype), TWO.to(dtype), rewritten=1)
    same(READ["padded in front"][0], *qkv(dtype=dtype), rewritten=1)
    same(lambda q, k, v: softmax(F.pad(q @ k.mT * 0.3, (3, 0)))[..., 3:] @ v, *qkv(dtype=dtype), rewritten=1)


def test_training_is_left_with_the_reason() -> None:
    report = same(transformers, *qkv(grad=True), randn(2, seed=4, grad=True), grad=True, rewritten=0)
    assert "no gradient" in report.left[0].reason


@pytest.mark.parametrize("decompose", [False, True])
def test_exported(decompose: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            return transformers(q, k, v, sink, torch.full((8, 8), NEG_INF).triu(1))

    inputs = (*qkv(), SINK)
    program = torch.export.export(Module(), inputs)
    if decompose:
        program = program.run_decompositions()
    report = attn_pass.rewrite(program, choose="fused")
    assert [s.outcome for s in report.sites] == ["rewritten"]
    torch.testing.assert_close(program.module()(*inputs), Module()(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [-1, 0])
def test_a_key_without_a_value_that_is_masked_in_an_empty_row(offset: int) -> None:
    """The last key's weight is thrown away; in a fully masked row it takes as much of it as any other."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(4, 4, dtype=torch.bool).tril(offset)
        weights = (q @ k.mT).masked_fill(~keep, torch.finfo(torch.float32).min).softmax(-1)
        return weights[..., :-1] @ v[..., 1:, :]

    with torch.no_grad():
        same(fn, *(randn(1, 2, 4, 8, seed=s) for s in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_float64_beside_a_sink(dtype: torch.dtype) -> None:
    """Float64 scores are shifted to what float32 keeps of them, row by row; the sink is no part of what is shifted."""
    low = torch.full((8, 8), lowest(), dtype=torch.float64).triu(1) + torch.arange(8)
    program = lambda q, k, v, sink: softmax(joined((q @ k.mT).double() + low, sink.double()))[..., :-1].to(v.dtype) @ v
    report = same(program, *qkv(dtype=dtype), SINK, rewritten=0, twice=3.0)
    assert "beside a sink" in report.left[0].reason


def test_scores_of_float64_that_are_filled_beside_a_sink() -> None:
    fill = lambda s: s.double().masked_fill(~KEEP, lowest())
    program = lambda q, k, v, sink: softmax(joined(fill(q @ k.mT), sink.double()))[..., :-1].to(v.dtype) @ v
    same(program, *qkv(), SINK, rewritten=1, reference=False)

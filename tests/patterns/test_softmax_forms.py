"""Spellings of softmax without a call of it, each with look-alikes that are other functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import attend, exported_each, qkv, randn, same, same_each
from read_graphs import captured, inputs_of, reader_of, result_of
from torch import Tensor
from torch.nn import functional as F

from attn_pass.patterns.softmax_forms import FORMS, read_softmax

pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice")
Weights = Callable[..., Tensor]
KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[..., 0] = True
NOTHING = torch.arange(8)[:, None] > torch.zeros(1, 8)  # kept; the first row is fully masked
SINK = randn(2, 1, 1, seed=4)


def maximum(s: Tensor) -> Tensor:
    return s.max(-1, keepdim=True).values


def shifted(s: Tensor) -> Tensor:
    return torch.exp(s - s.amax(-1, keepdim=True))


def over(e: Tensor, total: Tensor) -> Tensor:
    return e / total


def softmax_one(s: Tensor) -> Tensor:
    m = maximum(s)
    e = (s - m).exp()
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m))


def softmax_one_clamped(s: Tensor) -> Tensor:
    """As the "Attention is off by one" post's code writes it: the one more logit of 0 takes part in the maximum."""
    m = s.amax(-1, keepdim=True).clamp(min=0).detach()
    e = torch.exp(s - m)
    return e / (torch.exp(-m) + e.sum(dim=-1, keepdim=True))


def powers_written(s: Tensor) -> Tensor:
    e = shifted(s)
    size = e.abs()
    size.mul_(2.0)
    return e / size.sum(-1, keepdim=True)


def written_behind_a_view(s: Tensor) -> Tensor:
    e = shifted(s)
    total = e.abs().sum(-1, keepdim=True).pow(1.0)
    seen = total.view(total.shape)
    total.mul_(2.0)
    return e / seen


def written_after_the_norm(s: Tensor) -> Tensor:
    e = shifted(s)
    total = e.abs().sum(-1, keepdim=True)
    e.mul_(2.0)
    return e / total


def sinking(s: Tensor, sink: Tensor | float) -> Tensor:
    m = torch.amax(s, dim=-1, keepdim=True)
    e = torch.exp(s - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(sink - m))


def sinking_in_powers_of_two(s: Tensor) -> Tensor:
    m = torch.amax(s, dim=-1, keepdim=True)
    e = torch.exp2(s - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp2(2.0 - m))


READ: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    "minus logsumexp": (lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)), ()),
    "minus logsumexp, unsqueezed": (lambda s: (s - s.logsumexp(dim=-1)[..., None]).exp(), ()),
    "exp of log_softmax": (lambda s: F.log_softmax(s, dim=-1).exp(), ()),
    "exp of log_softmax, a method": (lambda s: s.log_softmax(-1).exp(), ()),
    "times one over the sum": (lambda s: (lambda e: e * (1.0 / e.sum(-1, keepdim=True)))(shifted(s)), ()),
    "times the reciprocal": (lambda s: (lambda e: e.sum(-1, keepdim=True).reciprocal() * e)(shifted(s)), ()),
    "times the sum to the power of -1": (lambda s: (lambda e: e * e.sum(-1, keepdim=True) ** -1)(shifted(s)), ()),
    "exp2": (lambda s: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp2(s - maximum(s))), ()),
    "exp2 with log2(e) in the scale": (
        lambda s: (lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp2(x - maximum(x))))(
            s * math.log2(math.e)
        ),
        (),
    ),
    "normalize": (lambda s: F.normalize(shifted(s), p=1, dim=-1), ()),
    "normalize, p a float": (lambda s: F.normalize(shifted(s), p=1.0, dim=3), ()),
    "a norm by powers": (lambda s: (lambda e: e / (e.abs() ** 1.0).sum(-1, keepdim=True) ** 1.0)(shifted(s)), ()),
    "softmin": (lambda s: F.softmin(s, dim=-1), ()),
    "no dimension named, of two": (lambda s: F.softmax(s.flatten(0, 2)).view_as(s), ()),
    "no dimension named, of three": (
        lambda s: F.softmax(s.flatten(0, 1).permute(2, 0, 1)).permute(1, 2, 0).reshape(s.shape),
        (),
    ),
    "no dimension named, of four": (lambda s: torch.nn.Softmax()(s.transpose(1, 3)).transpose(1, 3), ()),
    "no dimension named, of its logarithm": (lambda s: F.log_softmax(s.flatten(0, 2)).exp().view_as(s), ()),
    "no dimension named, softmin": (lambda s: F.softmin(s.flatten(0, 2)).view_as(s), ()),
    "an epsilon that vanishes": (lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-8))(shifted(s)), ()),
    "a sum that is clamped": (lambda s: (lambda e: e / e.sum(-1, keepdim=True).clamp_min(1e-6))(shifted(s)), ()),
    "the maximum stopped": (
        lambda s: (lambda e: e / e.sum(-1, True))(torch.exp(s - s.max(-1, keepdim=True)[0].detach())),
        (),
    ),
    "masked, minus logsumexp": (
        lambda s, m: (lambda x: (x - x.logsumexp(-1, keepdim=True)).exp())(s.masked_fill(~m, float("-inf"))),
        (KEEP,),
    ),
    "causal by a number, minus logsumexp": (
        lambda s: (lambda x: (x - x.logsumexp(-1, keepdim=True)).exp())(
            s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        ),
        (),
    ),
}
SINKS: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    "softmax one": (softmax_one, ()),
    "softmax one, the maximum clamped": (softmax_one_clamped, ()),
    "one plus the sum": (lambda s: (lambda e: e / (1 + e.sum(-1, keepdim=True)))(torch.exp(s)), ()),
    "a half plus the sum": (lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 0.5))(torch.exp(s)), ()),
    "one plus the sum, exp2": (lambda s: (lambda e: e / (1 + e.sum(-1, keepdim=True)))(torch.exp2(s)), ()),
    "a learned sink": (sinking, (SINK,)),
    "a number as a sink": (lambda s: sinking(s, 2.0), ()),
    "a number as a sink, exp2": (sinking_in_powers_of_two, ()),
    "a sink without a maximum": (
        lambda s, t: (lambda e: e / (e.sum(-1, keepdim=True) + t.exp()))(torch.exp(s)),
        (SINK,),
    ),
}
LEFT: dict[str, tuple[Weights, tuple[Any, ...]]] = {
    # Next to -1e9 the logarithm of how many keys there are is lost: a row of nothing else is the sum of the values.
    "masked by a number, minus logsumexp": (
        lambda s, m: (lambda x: (x - x.logsumexp(-1, keepdim=True)).exp())(s.masked_fill(~m, -1e9)),
        (NOTHING,),
    ),
    "a matrix added, minus logsumexp": (
        lambda s, m: (lambda x: (x - x.logsumexp(-1, keepdim=True)).exp())(s + m),
        (NOTHING.logical_not() * -1e9,),
    ),
    "the logsumexp of the columns": (lambda s: torch.exp(s - torch.logsumexp(s, -2, keepdim=True)), ()),
    "the logsumexp of others": (lambda s: torch.exp(s - torch.logsumexp(s * 2, -1, keepdim=True)), ()),
    "the logsumexp, turned": (lambda s: torch.exp(s - s.logsumexp(-1).unsqueeze(-2)), ()),
    "the logsumexp twice": (lambda s: torch.exp(torch.sub(s, s.logsumexp(-1, keepdim=True), alpha=2)), ()),
    "log_softmax over the queries": (lambda s: s.log_softmax(-2).exp(), ()),
    "no dimension named, of four: the heads": (lambda s: F.softmax(s), ()),
    "no dimension named, of three: the batch": (lambda s: F.softmax(s.flatten(0, 1)).view_as(s), ()),
    "powers of two of log_softmax": (lambda s: s.log_softmax(-1).exp2(), ()),
    "the sum of columns": (lambda s: (lambda e: e * (1 / e.sum(-2, keepdim=True)))(shifted(s)), ()),
    "two over the sum": (lambda s: (lambda e: e * (1 / e.sum(-1, keepdim=True).square()))(shifted(s)), ()),
    "powers of two over powers of e": (lambda s: torch.exp2(s) / torch.exp(s).sum(-1, keepdim=True), ()),
    "normalize with the other norm": (lambda s: F.normalize(shifted(s), p=2, dim=-1), ()),
    "normalize columns": (lambda s: F.normalize(shifted(s), p=1, dim=-2), ()),
    "normalize without a maximum": (lambda s: F.normalize(torch.exp(s), p=1, dim=-1), ()),
    "an epsilon that counts": (lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-3))(shifted(s)), ()),
    "one beside a maximum": (lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1))(shifted(s)), ()),
    "a sum that is clamped high": (lambda s: (lambda e: e / e.sum(-1, keepdim=True).clamp_min(2.0))(shifted(s)), ()),
    "another maximum": (
        lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + torch.exp(-s.amax(-2, keepdim=True))))(shifted(s)),
        (),
    ),
    "the maximum not turned": (
        lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + torch.exp(maximum(s))))(torch.exp(s - maximum(s))),
        (),
    ),
    "one for every key": (
        lambda s, t: (lambda e: e / (e.sum(-1, keepdim=True) + t.exp()))(torch.exp(s)),
        (randn(2, 1, 8, seed=4),),
    ),
    "a sink of every query, of the sums as rows": (
        lambda s, t: (lambda e: e / (e.sum(-1) + t.exp())[..., None])(torch.exp(s)),
        (randn(8, seed=4),),
    ),
    "a square of each": (lambda s: (lambda e: e / (e.abs() ** 2).sum(-1, keepdim=True))(shifted(s)), ()),
    "a square of the sum": (lambda s: (lambda e: e / e.sum(-1, keepdim=True) ** 2.0)(shifted(s)), ()),
    "a root of the sum": (lambda s: (lambda e: e / e.sum(-1, keepdim=True) ** 0.5)(shifted(s)), ()),
    "absolute values of others": (lambda s: shifted(s) / s.abs().sum(-1, keepdim=True), ()),
    "absolute values written over": (powers_written, ()),
    "a norm written over behind a view": (written_behind_a_view, ()),
    "exponentials written after the norm": (written_after_the_norm, ()),
    "a number added beside a sink": (lambda s: softmax_one(s + 1.0), ()),
    "less one": (lambda s: (lambda e: e / (e.sum(-1, keepdim=True) - 1))(torch.exp(s) + 1), ()),
}


def inputs(grad: bool = False) -> tuple[Tensor, ...]:
    """More keys than queries, so that rows and columns are told apart by their size where they should be equal too."""
    return qkv(grad=grad)


# The plainest program of each row of `FORMS`.
SPELLINGS: dict[str, Weights] = {
    "softmax(x)": lambda s: s.softmax(-1),
    "softmax(-x), as softmin(x)": lambda s: F.softmin(s, dim=-1),
    "exp(log_softmax(x))": lambda s: F.log_softmax(s, dim=-1).exp(),
    "exp(x - logsumexp(x))": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "e / sum(e)": lambda s: (lambda e: e / e.sum(-1, keepdim=True))(s.exp()),
    "e * (1 / sum(e))": lambda s: (lambda e: e * (1 / e.sum(-1, keepdim=True)))(s.exp()),
    "normalize(e, p=1)": lambda s: F.normalize(shifted(s), p=1, dim=-1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_read_by_its_row_alone(spelling: str) -> None:
    gm = captured(SPELLINGS[spelling], randn(2, 3, 8))
    reader, node = reader_of(gm), result_of(gm)
    call, scores = reader.call(node), inputs_of(gm)[0]
    assert call is not None
    assert [form.spelling for form in FORMS if form.op == call.op and form.read(reader, node, call)] == [spelling]
    softmax = read_softmax(reader, node)
    assert softmax is not None and (softmax.input, softmax.dim) == (scores, 2)
    assert softmax.scale == (-1 if "softmin" in spelling else 1)


def test_every_row_has_a_program() -> None:
    assert SPELLINGS.keys() == {form.spelling for form in FORMS}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_read(grad: bool) -> None:
    same_each({name: (attend(weights), (*inputs(grad), *rest)) for name, (weights, rest) in READ.items()}, grad=grad)


def test_read_with_a_sink() -> None:
    same_each({name: (attend(weights), (*inputs(), *rest)) for name, (weights, rest) in SINKS.items()})


def test_left() -> None:
    same_each({name: (attend(weights), (*inputs(), *rest)) for name, (weights, rest) in LEFT.items()}, rewritten=0)


def test_a_number_that_the_product_adds_is_not_a_shift_of_softmax_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.baddbmm(torch.full((8, 8), 2.0, dtype=q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.25)
        return softmax_one(s) @ v.flatten(0, 1)

    same(program, *qkv(), rewritten=0)


@pytest.mark.parametrize("decompose", [False, True], ids=["export", "decomposed"])
def test_exported(decompose: bool) -> None:
    programs = {name: (attend(weights), (*inputs(), *rest)) for name, (weights, rest) in (READ | SINKS).items()}
    report = exported_each(programs, decompose=decompose)
    assert {n: s.outcome for n, s in zip(programs, report.sites)} == dict.fromkeys(programs, "rewritten"), str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["minus logsumexp", "normalize", "exp2", "times the reciprocal"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    same(attend(READ[name][0]), *qkv(dtype=dtype), rewritten=1, twice=3.0)


@pytest.mark.parametrize("name", ["minus logsumexp", "exp of log_softmax", "normalize", "softmin"])
def test_dynamic(name: str) -> None:
    same(attend(READ[name][0]), *qkv(), dynamic=True, rewritten=1)


def test_an_epsilon_vanishes_in_one_type_and_counts_in_another() -> None:
    weights = attend(lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-4))(shifted(s)))
    same(weights, *qkv(dtype=torch.bfloat16), rewritten=1, twice=3.0)
    same(weights, *qkv(), rewritten=0)


def test_scores_written_between_the_logarithm_and_the_difference() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        total = s.logsumexp(-1, keepdim=True)
        s.mul_(0.5)
        return torch.exp(s - total) @ v

    same(program, *qkv(), rewritten=0)


def test_a_sink_in_training_is_left_with_the_reason() -> None:
    report = same(attend(softmax_one), *qkv(grad=True), grad=True, rewritten=0)
    assert "no gradient" in report.left[0].reason


def test_the_scores_that_overflow_eager() -> None:
    """Where eager is NaN nothing is asked; where it is not, it is eager's."""
    weights = attend(lambda s: (lambda e: e / (1 + e.sum(-1, keepdim=True)))(torch.exp(s)), scale=30.0)
    report = same(weights, *qkv(), rewritten=1)
    assert report.rewritten

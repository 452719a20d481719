"""Neighbours of attention: what looks like it and is not stays as it is, what does not look like it and is comes out equal.

Every case is run through the pass with the fused targets forced, so that a wrong reading shows in the numbers, and the
report is asked what it made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_pass
from attn_pass.report import Report, SiteReport

Tensor = torch.Tensor
INF = math.inf
torch.set_num_threads(2)


def run(function: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False) -> tuple[Any, Any, Report]:
    """What the function gives in eager mode and after the pass, and the report."""
    torch._dynamo.reset()
    expected = function(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    with attn_pass.record() as report:
        got = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return expected, got, report


def same(expected: Any, got: Any, tolerance: float = 2e-5) -> None:
    if not isinstance(expected, Tensor):
        for a, b in zip(expected, got, strict=True):
            same(a, b, tolerance)
        return
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(lead: tuple[int, ...] = (2, 3), l: int = 6, s: int = 6, d: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Query, key and value, with as many sizes the same as the case can bear."""
    return tuple(numbers(*lead, n, d, seed=i, dtype=dtype) for i, n in enumerate((l, s, s)))


def keep(*shape: int) -> Tensor:
    """A boolean mask that leaves every row a key."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(7)) > 0.5
    mask[..., 0] = True
    return mask


Q, K, V = operands()
QL, KL, VL = operands(s=5)
MASK = keep(2, 1, 6, 6)
WIDE = operands(d=8, s=5)


@dataclass(frozen=True)
class Case:
    """A function, its inputs, and what the report must say: outcome and the beginning of the reason of the last site."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    outcome: str
    reason: str = ""
    kind: str = ""
    tolerance: float = 2e-5


LEFT, REWRITTEN, NO_SITE = "left", "rewritten", "no site"


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


def weak_fill(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, fill), v)


def weak_where(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend(torch.where(m, q @ k.mT, fill), v)


def weak_bias(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend(q @ k.mT + torch.where(m, 0.0, fill), v)


def weights_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ (w @ v)


def weights_for_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ v + w @ (v * 2)


def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = torch.cat([q @ k.mT, sink.expand(2, 3, 6, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def sinks_first(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = torch.cat([sink.expand(2, 3, 6, 1), q @ k.mT], -1)
    return s.softmax(-1)[..., 1:] @ v


def head_mask(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * m) @ v


def topk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    least = s.topk(3, -1).values[..., -1:]
    return attend(s.masked_fill(s < least, -INF), v)


def from_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return attend(torch.where(s > 0, s, -INF), v)


def from_other_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return attend(torch.where(MASK, s, k @ q.mT), v)


def key_of_the_query(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """Relative keys: sum_d q[i, d] * p[i, j, d]."""
    return attend(torch.einsum("bhid,ijd->bhij", q, p), v)


def relative(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """Both products in one sum."""
    return attend(q @ k.mT + torch.einsum("bhid,ijd->bhij", q, p), v)


def value_of_the_query(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("bhij,ijd->bhid", (q @ k.mT).softmax(-1), p)


def talking_heads(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    s = torch.einsum("bhij,hg->bgij", q @ k.mT, mix)
    return attend(s, v)


def talking_weights(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), mix) @ v


def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return attend(s * 0.5, v), s


def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w


def weights_summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w.mean(1)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is written into the scores a slice at a time."""
    s = q @ k.mT
    s[..., 4:] = -INF
    return attend(s, v)


def written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query changes between the two products."""
    s = q @ k.mT
    q.mul_(2)
    return s.softmax(-1) @ v + q


def value_written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    v = v.clone()
    v[..., 0] = 0
    return w @ v


def after_detach(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend((q @ k.mT).detach(), v)


CASES = [
    # the axis
    Case("softmax over the queries", lambda q, k, v: (q @ k.mT).softmax(-2) @ v, (Q, K, V), LEFT, "the softmax runs over another"),
    Case("softmax over the heads", lambda q, k, v: (q @ k.mT).softmax(1) @ v, (*operands((2, 6)),), LEFT, "the softmax runs over"),
    Case("softmax over the batch", lambda q, k, v: (q @ k.mT).softmax(0) @ v, (*operands((6, 6)),), LEFT, "the softmax runs over"),
    Case("the weights are transposed", lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, (Q, K, V), LEFT, "the softmax runs over"),
    Case("scores transposed, then softmax", lambda q, k, v: attend((q @ k.mT).mT, v), (Q, K, V), REWRITTEN),
    # keys permuted where sizes hide it
    Case("key not transposed, L == D", lambda q, k, v: attend(q @ k, v), (Q, K, V), REWRITTEN),
    Case("heads and keys swapped, T == H", lambda q, k, v: attend(torch.einsum("bhid,bjhd->bhij", q, k), v), (*operands((2, 6)),), REWRITTEN),
    Case("permuted keys, T == H", lambda q, k, v: attend(q @ k.permute(0, 2, 3, 1), v), (*operands((2, 6)),), REWRITTEN),
    Case("permuted keys, all dimensions", lambda q, k, v: attend(q @ k.permute(1, 3, 0, 2), v), (*operands((6, 6)),), REWRITTEN),
    Case("value transposed, S == D", lambda q, k, v: attend(q @ k.mT, v.mT), (Q, K, V), REWRITTEN),
    Case("value with heads and keys swapped", lambda q, k, v: attend(q @ k.mT, v.transpose(1, 2)), (*operands((2, 6)),), REWRITTEN),
    # fills that do not mask
    *(Case(f"masked_fill {f:g}", weak_fill(f), (Q, K, V, MASK), LEFT, "masked scores are filled with") for f in (0.0, -5.0, -100.0, -1e4)),
    *(Case(f"where {f:g}", weak_where(f), (Q, K, V, MASK), LEFT, "masked scores are filled with") for f in (0.0, -5.0, -1e4)),
    *(Case(f"bias of {f:g}", weak_bias(f), (Q, K, V, MASK), REWRITTEN) for f in (-5.0, -100.0, -1e4)),
    Case("filled with +inf", weak_fill(INF), (Q, K, V, MASK), LEFT, "masked scores are filled with"),
    Case("filled by a tensor", lambda q, k, v, m, t: attend(torch.where(m, q @ k.mT, t), v), (Q, K, V, MASK, numbers(6, 6)), LEFT, "masked scores are filled with something"),
    Case("filled by an unknown number", lambda q, k, v, m, t: attend((q @ k.mT).masked_fill(m, t), v), (Q, K, V, ~MASK, torch.tensor(-1e9)), LEFT, "masked scores are filled with something"),
    Case("scores of another pair where masked", from_other_scores, (Q, K, V), LEFT, "where chooses between"),
    Case("mask == 1 drops", lambda q, k, v, m: attend((q @ k.mT).masked_fill(m == 1, -INF), v), (Q, K, V, (~MASK).long()), REWRITTEN),
    Case("mask == 0 drops", lambda q, k, v, m: attend((q @ k.mT).masked_fill(m == 0, -INF), v), (Q, K, V, MASK.long()), REWRITTEN),
    # between softmax and values
    Case("mask after the softmax", lambda q, k, v, m: ((q @ k.mT).softmax(-1) * m) @ v, (Q, K, V, MASK), LEFT, "the attention weights are changed"),
    Case("masked_fill after the softmax", lambda q, k, v, m: (q @ k.mT).softmax(-1).masked_fill(~m, 0.0) @ v, (Q, K, V, MASK), LEFT, "the attention weights are changed"),
    Case("head mask", head_mask, (Q, K, V, torch.tensor([1.0, 0.0, 1.0]).view(3, 1, 1)), LEFT, "the attention weights are changed"),
    Case("weights scaled", lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, (Q, K, V), LEFT, "the attention weights are changed"),
    Case("one minus weights", lambda q, k, v: (1 - (q @ k.mT).softmax(-1)) @ v, (Q, K, V), LEFT, "the attention weights are changed"),
    Case("weights plus identity", lambda q, k, v: ((q @ k.mT).softmax(-1) + torch.eye(6)) @ v, (Q, K, V), LEFT, "the attention weights are changed"),
    Case("sigmoid", lambda q, k, v: (q @ k.mT).sigmoid() @ v, (Q, K, V), NO_SITE),
    Case("relu", lambda q, k, v: (q @ k.mT).relu() @ v, (Q, K, V), NO_SITE),
    Case("log_softmax", lambda q, k, v: F.log_softmax(q @ k.mT, -1) @ v, (Q, K, V), NO_SITE),
    Case("softmax twice", lambda q, k, v: attend((q @ k.mT).softmax(-1), v), (Q, K, V), LEFT, ""),
    Case("talking heads before", talking_heads, (Q, K, V, numbers(3, 3)), LEFT, ""),
    Case("talking heads after", talking_weights, (Q, K, V, numbers(3, 3)), LEFT, ""),
    Case("part of the softmax", lambda q, k, v: (q @ k.mT).softmax(-1)[..., :3] @ v[..., :3, :], (Q, K, V), LEFT, "the product does not sum over the whole"),
    Case("part of the softmax, the end", lambda q, k, v: (q @ k.mT).softmax(-1)[..., 2:] @ v[..., 2:, :], (Q, K, V), LEFT, "the product does not sum over the whole"),
    Case("sinks", sinks, (Q, K, V, numbers(1, 3, 1, 1)), LEFT, ""),
    Case("sinks in front", sinks_first, (Q, K, V, numbers(1, 3, 1, 1)), LEFT, ""),
    Case("weights twice in a chain", weights_twice, (Q, K, V), LEFT, "the attention weights are also used"),
    Case("weights for two values", weights_for_two, (Q, K, V), LEFT, "the attention weights are also used"),
    Case("weights returned", weights_returned, (Q, K, V), LEFT, "the attention weights are returned"),
    Case("mean weights returned", weights_summed, (Q, K, V), LEFT, "the attention weights are also used"),
    Case("scores returned", scores_returned, (Q, K, V), LEFT, "the attention scores are returned"),
    # between product and softmax
    Case("tanh soft cap", lambda q, k, v: attend(torch.tanh(q @ k.mT / 5) * 5, v), (Q, K, V), LEFT, "tanh"),
    Case("squared scores", lambda q, k, v: attend((q @ k.mT) ** 2, v), (Q, K, V), LEFT, ""),
    Case("scores times scores", lambda q, k, v: attend((q @ k.mT) * (q @ k.mT), v), (Q, K, V), LEFT, ""),
    Case("absolute scores", lambda q, k, v: attend((q @ k.mT).abs(), v), (Q, K, V), LEFT, "abs"),
    Case("clamped scores", lambda q, k, v: attend((q @ k.mT).clamp(-1, 1), v), (Q, K, V), LEFT, "the scores are clamped|a clamp"),
    Case("mask from the scores", from_scores, (Q, K, V), LEFT, "the mask depends on the scores"),
    Case("top k", topk, (Q, K, V), LEFT, ""),
    Case("divided key by key", lambda q, k, v, t: attend(q @ k.mT / t, v), (Q, K, V, numbers(6).exp()), LEFT, "the scores are multiplied by something"),
    Case("keys divided key by key", lambda q, k, v, t: attend(q @ (k / t).mT, v), (Q, K, V, numbers(6, 1).exp()), REWRITTEN),
    Case("divided by the scores", lambda q, k, v: attend(1 / (q @ k.mT), v), (Q, K, V), LEFT, "something is divided by the scores"),
    Case("times zero", lambda q, k, v: attend((q @ k.mT) * 0, v), (Q, K, V), LEFT, "the scores are multiplied by 0"),
    Case("mask times a weak factor", lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, -1e9) * 1e-9, v), (Q, K, V, MASK), LEFT, "the mask's fill becomes"),
    Case("alpha on the mask", lambda q, k, v, b: attend(torch.add(q @ k.mT, b, alpha=0.25), v), (Q, K, V, numbers(6, 6)), REWRITTEN),
    Case("alpha on the scores", lambda q, k, v, b: attend(torch.add(b, q @ k.mT, alpha=0.25), v), (Q, K, V, numbers(6, 6)), REWRITTEN),
    Case("alpha kills a mask", lambda q, k, v, m: attend(torch.add(q @ k.mT, torch.where(m, 0.0, -1e9), alpha=1e-9), v), (Q, K, V, MASK), REWRITTEN),
    Case("rsub", lambda q, k, v, b: attend(torch.rsub(q @ k.mT, b, alpha=0.5), v), (Q, K, V, numbers(6, 6)), REWRITTEN),
    Case("boolean added", lambda q, k, v, m: attend(q @ k.mT + m, v), (Q, K, V, MASK), REWRITTEN),
    Case("dropped on the scores", lambda q, k, v: attend(F.dropout(q @ k.mT, 0.0, True), v), (Q, K, V), REWRITTEN),
    # what multiplies
    Case("keys of the query", key_of_the_query, (Q, K, V, numbers(6, 6, 6)), LEFT, "the key depends on"),
    Case("relative keys", relative, (Q, K, V, numbers(6, 6, 6)), LEFT, ""),
    Case("values of the query", value_of_the_query, (Q, K, V, numbers(6, 6, 6)), LEFT, "the value depends on"),
    Case("softmax of a linear layer", lambda x, w, v: attend(x @ w, v), (Q, numbers(6, 6), V), REWRITTEN),
    Case("softmax of F.linear", lambda x, w, v: attend(F.linear(x, w), v), (Q, numbers(6, 6), V), NO_SITE),
    Case("a classifier", lambda x, w: (x @ w).softmax(-1), (Q, numbers(6, 4)), LEFT, "the softmax of a product is returned"),
    Case("keys are the queries", lambda q, v: attend(q @ q.mT, v), (Q, V), REWRITTEN),
    Case("everything is one tensor", lambda q: attend(q @ q.mT, q), (Q,), REWRITTEN),
    # sizes
    Case("rank 2", lambda q, k, v: attend(q @ k.mT, v), operands(()), REWRITTEN),
    Case("a query that is a vector", lambda q, k, v: attend(q @ k.mT, v), (numbers(6), K[0, 0], V[0, 0]), REWRITTEN),
    Case("values that are a vector", lambda q, k, v: attend(q @ k.mT, v), (Q[0, 0], K[0, 0], numbers(6)), REWRITTEN),
    Case("all vectors", lambda q, k, v: attend(k @ q, v), (numbers(6), K[0, 0], numbers(6)), REWRITTEN),
    Case("one key", lambda q, k, v: attend(q @ k.mT, v), operands(s=1), REWRITTEN),
    Case("one query", lambda q, k, v: attend(q @ k.mT, v), operands(l=1), REWRITTEN),
    Case("one query, one key", lambda q, k, v: attend(q @ k.mT, v), operands(l=1, s=1), REWRITTEN),
    Case("one query, one key, transposed", lambda q, k, v: attend((k @ q.mT).mT, v), operands(l=1, s=1), REWRITTEN),
    Case("no key", lambda q, k, v: attend(q @ k.mT, v), operands(s=0), LEFT, "a size is 0"),
    Case("no query", lambda q, k, v: attend(q @ k.mT, v), operands(l=0), LEFT, "a size is 0"),
    Case("no batch", lambda q, k, v: attend(q @ k.mT, v), operands((0, 3)), LEFT, "a size is 0"),
    Case("no head dim", lambda q, k, v: attend(q @ k.mT, v), (*operands(d=0)[:2], V), LEFT, "a size is 0"),
    # memory
    Case("written a slice at a time", in_place, (Q, K, V), LEFT, ""),
    Case("query written between", written_between, (Q, K, V), LEFT, ""),
    Case("value written before", value_written_before, (Q, K, V), REWRITTEN),
    Case("detach without gradients", after_detach, (Q, K, V), REWRITTEN),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_neighbour(case: Case) -> None:
    """Same numbers as eager, and the report tells what became of it and why."""
    expected, got, report = run(case.function, case.inputs)
    same(expected, got, case.tolerance)
    if case.outcome == NO_SITE:
        assert not report.sites, report
        return
    site = report.sites[-1]
    assert site.outcome == case.outcome, report

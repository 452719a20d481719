"""Look-alikes of attention are left; attention in unusual spellings is rewritten and equals the program.

Every case is run with the fused targets forced, so that a wrong reading shows in the numbers, and the report is asked
what became of it and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import compiler

import attn_pass
from attn_pass.report.record import Report

Tensor = torch.Tensor
INF = math.inf
OPTIONS: dict[str, Any] = {"choose": "fused", "on_error": "raise"}


def copies(inputs: Sequence[Tensor], grad: bool = False) -> list[Tensor]:
    return [x.clone().requires_grad_(grad and x.is_floating_point()) for x in inputs]


def compiled(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Report]:
    """What the function gives when torch.compile runs the pass, and the report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with attn_pass.record() as report:
        backend = attn_pass.wrap(compiler(any(x.requires_grad for x in inputs)), **OPTIONS)
        got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return got, report


def exported(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Report]:
    """The same for an exported program."""

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return function(*given)

    program = torch.export.export(Model(), tuple(inputs))
    report = attn_pass.rewrite(program, **OPTIONS)
    torch.manual_seed(0)
    return program.module()(*inputs), report


def eager(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    torch.manual_seed(0)
    return function(*inputs)


def same(expected: Any, got: Any, tolerance: float = 2e-5) -> None:
    if not isinstance(expected, Tensor):
        for a, b in zip(expected, got, strict=True):
            same(a, b, tolerance)
        return
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(lead: tuple[int, ...] = (2, 3), q: int = 6, k: int = 6, dim: int = 6) -> tuple[Tensor, ...]:
    """Query, key and value, with as many sizes the same as the case can bear."""
    return tuple(numbers(*lead, n, dim, seed=i) for i, n in enumerate((q, k, k)))


Q, K, V = operands()
MASK = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(7)) > 0.5
MASK[..., 0] = True  # every row keeps a key


@dataclass(frozen=True)
class Case:
    """A function and its inputs; the outcome of the last site, and words its reason must have where it is left."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outcome: str
    reason: str = ""
    exported: str = ""  # the outcome in an exported program, where it is another


LEFT, REWRITTEN, NO_SITE = "left", "rewritten", "no site"
OTHER_AXIS = "the softmax runs over another dimension"
CHANGED = "the attention weights are changed after the softmax"
PART = "the product does not sum over the whole softmax"
WEAK = (0.0, -5.0, -100.0, -1e4, INF)


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


def causally(s: Tensor) -> Tensor:
    return s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -INF)


def masked_fill(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, fill), v)


def where(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend(torch.where(m, q @ k.mT, fill), v)


def added(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: attend(q @ k.mT + torch.where(m, 0.0, fill), v)


def heads_and_keys_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(torch.einsum("bhid,bjhd->bhij", q, k), v)


def filled_by_a_tensor(q: Tensor, k: Tensor, v: Tensor, m: Tensor, t: Tensor) -> Tensor:
    return attend(torch.where(m, q @ k.mT, t), v)


def other_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return attend(torch.where(m, q @ k.mT, k @ q.mT), v)


def weights_scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    w.mul_(2)
    return w @ v


def weights_without_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    w.diagonal(dim1=-2, dim2=-1).zero_()
    return w @ v


def emptied_by_other_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """The guard against fully masked rows tests the scores before they were masked."""
    s = q @ k.mT
    w = s.masked_fill(~m, -INF).softmax(-1)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, w) @ v


def mixed(s: Tensor, m: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", s, m)


def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, sink.expand(2, 3, 6, 1)], -1).softmax(-1)[..., :-1] @ v


def sinks_in_front(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([sink.expand(2, 3, 6, 1), q @ k.mT], -1).softmax(-1)[..., 1:] @ v


def weights_in_a_chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ (w @ v)


def weights_for_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ v + w @ (v * 2)


def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w


def mean_weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w.mean(1)


def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return attend(s * 0.5, v), s


def mask_from_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return attend(torch.where(s > 0, s, -INF), v)


def taken_back(sign: float) -> Callable[..., Tensor]:
    """What absorbed the scores is turned round with them, and added once more: 0 is left of a masked score."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
        return attend((q @ k.mT + mask) * sign + mask, v)

    return program


def top_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return attend(s.masked_fill(s < s.topk(3, -1).values[..., -1:], -INF), v)


def mask_made_weak(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return attend((q @ k.mT).masked_fill(~m, -1e9) * 1e-9, v)


def mask_made_weak_by_alpha(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return attend(torch.add(q @ k.mT, torch.where(m, 0.0, -1e9), alpha=1e-9), v)


def negative_and_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch 2.13's fused CPU kernel gives NaN for a causal call with a negative scale."""
    return attend(causally(q @ k.mT * -0.3), v)


def one_causal_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query sees the first key only, in every head and batch row that shares the keys."""
    return attend(causally(q @ k.mT), v)


def values_of_each_query(q: Tensor, k: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("bhij,ijd->bhid", (q @ k.mT).softmax(-1), p)


def scores_written_in_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s[..., 4:] = -INF
    return attend(s, v)


def every_second_score_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s[..., ::2] = -INF
    return attend(s, v)


def scores_written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s.view(6, 6, 6)[:, :, 3:].fill_(-INF)
    return attend(s, v)


def scores_transposed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s.transpose_(-1, -2)
    return attend(s, v)


def query_written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    q.mul_(2)
    return attend(s, v) + q


def mask_written_after(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    m = m.clone()
    s = q @ k.mT + m
    m.zero_()
    return attend(s, v) + m.sum()


def value_written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    v = v.clone()
    v[..., 0] = 0
    return w @ v


def result_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attend(q @ k.mT, v)
    out += 1
    out.mul_(2)
    return out


def query_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        q = q * 2
    return attend(q @ k.mT, v)


def scores_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        s = q @ k.mT
    return attend(s, v)


CASES = [
    # the axis of the softmax
    Case("softmax over the queries", lambda q, k, v: (q @ k.mT).softmax(-2) @ v, (Q, K, V), LEFT, OTHER_AXIS),
    Case("softmax over the heads", lambda q, k, v: (q @ k.mT).softmax(1) @ v, operands((2, 6)), LEFT, OTHER_AXIS),
    Case("softmax over the batch", lambda q, k, v: (q @ k.mT).softmax(0) @ v, operands((6, 6)), LEFT, OTHER_AXIS),
    Case("weights transposed", lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, (Q, K, V), LEFT, OTHER_AXIS),
    Case("scores transposed, then softmax", lambda q, k, v: attend((q @ k.mT).mT, v), (Q, K, V), REWRITTEN),
    # operands permuted where equal sizes hide it
    Case("key not transposed, L == D", lambda q, k, v: attend(q @ k, v), (Q, K, V), REWRITTEN),
    Case("permuted keys, T == H", lambda q, k, v: attend(q @ k.permute(0, 2, 3, 1), v), operands((2, 6)), REWRITTEN),
    Case("permuted keys, B == D", lambda q, k, v: attend(q @ k.permute(1, 3, 0, 2), v), operands((6, 6)), REWRITTEN),
    Case("heads and keys swapped", heads_and_keys_swapped, operands((2, 6)), REWRITTEN),
    Case("value transposed, S == D", lambda q, k, v: attend(q @ k.mT, v.mT), (Q, K, V), REWRITTEN),
    Case("value permuted, S == H", lambda q, k, v: attend(q @ k.mT, v.transpose(1, 2)), operands((2, 6)), REWRITTEN),
    # fills that do not mask
    *(Case(f"masked_fill {f:g}", masked_fill(f), (Q, K, V, MASK), LEFT, f"filled with {f:g}, which") for f in WEAK),
    *(Case(f"where {f:g}", where(f), (Q, K, V, MASK), LEFT, f"filled with {f:g}, which does not mask") for f in WEAK),
    *(Case(f"added {f:g}", added(f), (Q, K, V, MASK), REWRITTEN) for f in (-5.0, -100.0, -1e4)),
    *(Case(f"masked_fill {f:g}", masked_fill(f), (Q, K, V, MASK), REWRITTEN) for f in (-1e9, -1e30, -INF)),
    Case("filled by a tensor", filled_by_a_tensor, (Q, K, V, MASK, numbers(6, 6)), LEFT, "not a constant"),
    Case("filled by an unknown number", filled_by_a_tensor, (Q, K, V, MASK, torch.tensor(-1e9)), LEFT, "a constant"),
    Case("other scores where masked", other_scores, (Q, K, V, MASK), LEFT, "not a constant|where chooses"),
    Case(
        "mask == 1 drops",
        lambda q, k, v, m: attend((q @ k.mT).masked_fill(m == 1, -INF), v), (Q, K, V, (~MASK).long()), REWRITTEN,
    ),
    Case(
        "mask == 0 drops",
        lambda q, k, v, m: attend((q @ k.mT).masked_fill(m == 0, -INF), v), (Q, K, V, MASK.long()), REWRITTEN,
    ),
    # between the softmax and the values
    Case(
        "mask after the softmax",
        lambda q, k, v, m: ((q @ k.mT).softmax(-1) * m) @ v, (Q, K, V, MASK), LEFT, "not by the mask",
    ),
    Case(
        "masked_fill after the softmax",
        lambda q, k, v, m: (q @ k.mT).softmax(-1).masked_fill(~m, 0.0) @ v, (Q, K, V, MASK), LEFT, "not by the mask",
    ),
    Case("head mask", lambda q, k, v, m: ((q @ k.mT).softmax(-1) * m) @ v, (Q, K, V, numbers(3, 1, 1)), REWRITTEN),
    Case("weights scaled", lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, (Q, K, V), REWRITTEN),
    Case("weights scaled in place", weights_scaled_in_place, (Q, K, V), REWRITTEN),
    Case("weights written in part", weights_without_diagonal, (Q, K, V), LEFT, ""),
    Case("one minus weights", lambda q, k, v: (1 - (q @ k.mT).softmax(-1)) @ v, (Q, K, V), LEFT, CHANGED),
    Case(
        "weights plus identity", lambda q, k, v: ((q @ k.mT).softmax(-1) + torch.eye(6)) @ v, (Q, K, V), LEFT, CHANGED,
    ),
    Case("rows emptied by other scores", emptied_by_other_scores, (Q, K, V, MASK), LEFT, "scores are also used by eq"),
    Case("sigmoid", lambda q, k, v: (q @ k.mT).sigmoid() @ v, (Q, K, V), NO_SITE),
    Case("relu", lambda q, k, v: (q @ k.mT).relu() @ v, (Q, K, V), NO_SITE),
    Case("log_softmax", lambda q, k, v: F.log_softmax(q @ k.mT, -1) @ v, (Q, K, V), NO_SITE),
    Case("softmin", lambda q, k, v: F.softmin(q @ k.mT, -1) @ v, (Q, K, V), REWRITTEN),
    Case("softmax twice", lambda q, k, v: attend((q @ k.mT).softmax(-1), v), (Q, K, V), LEFT, "softmax"),
    Case("heads mixed before", lambda q, k, v, m: attend(mixed(q @ k.mT, m), v), (Q, K, V, numbers(3, 3)), REWRITTEN),
    Case(
        "heads mixed after",
        lambda q, k, v, m: mixed((q @ k.mT).softmax(-1), m) @ v, (Q, K, V, numbers(3, 3)), LEFT, PART,
    ),
    Case("part of the softmax", lambda q, k, v: (q @ k.mT).softmax(-1)[..., :3] @ v[..., :3, :], (Q, K, V), LEFT, PART),
    Case("end of the softmax", lambda q, k, v: (q @ k.mT).softmax(-1)[..., 2:] @ v[..., 2:, :], (Q, K, V), LEFT, PART),
    Case("sinks", sinks, (Q, K, V, numbers(1, 3, 1, 1)), REWRITTEN),
    Case("sinks in front", sinks_in_front, (Q, K, V, numbers(1, 3, 1, 1)), REWRITTEN),
    Case("weights used in a chain", weights_in_a_chain, (Q, K, V), REWRITTEN),
    Case("weights used for two values", weights_for_two, (Q, K, V), REWRITTEN),
    Case("weights returned", weights_returned, (Q, K, V), REWRITTEN),
    Case("mean weights returned", mean_weights_returned, (Q, K, V), REWRITTEN),
    Case("scores returned", scores_returned, (Q, K, V), LEFT, "scores are returned by the model"),
    # between the product and the softmax
    Case("tanh soft cap", lambda q, k, v: attend(torch.tanh(q @ k.mT / 5) * 5, v), (Q, K, V), LEFT, "tanh"),
    Case("squared scores", lambda q, k, v: attend((q @ k.mT) ** 2, v), (Q, K, V), LEFT, "pow"),
    Case("scores times scores", lambda q, k, v: attend((q @ k.mT) * (k @ q.mT), v), (Q, K, V), LEFT, "from key to key"),
    Case("absolute scores", lambda q, k, v: attend((q @ k.mT).abs(), v), (Q, K, V), LEFT, "abs"),
    Case("clamped scores", lambda q, k, v: attend((q @ k.mT).clamp(-1, 1), v), (Q, K, V), LEFT, "clamp"),
    Case(
        "rounded scores",
        lambda q, k, v: attend((q @ k.mT).to(torch.int32).float(), v), (Q, K, V), LEFT, "casts the scores",
    ),
    Case("mask from the scores", mask_from_the_scores, (Q, K, V), LEFT, "mask depends on the scores"),
    Case("top k", top_k, (Q, K, V), LEFT, "scores are also used by topk"),
    Case("a mask that is taken back", taken_back(-1.0), (Q, K, V), LEFT, "is taken away again"),
    Case("a mask twice", taken_back(1.0), (Q, K, V), REWRITTEN),
    Case(
        "scores divided key by key",
        lambda q, k, v, t: attend(q @ k.mT / t, v), (Q, K, V, numbers(6).exp()), LEFT, "from key to key",
    ),
    Case(
        "keys divided key by key",
        lambda q, k, v, t: attend(q @ (k / t).mT, v), (Q, K, V, numbers(6, 1).exp()), REWRITTEN,
    ),
    Case(
        "divided by the scores",
        lambda q, k, v: attend(1 / (q @ k.mT), v), (Q, K, V), LEFT, "divided by the scores|reciprocal",
    ),
    Case("times zero", lambda q, k, v: attend((q @ k.mT) * 0, v), (Q, K, V), LEFT, "multiplied by 0"),
    Case("mask made weak by a factor", mask_made_weak, (Q, K, V, MASK), LEFT, "too weak to mask"),
    Case(
        "alpha of the mask",
        lambda q, k, v, b: attend(torch.add(q @ k.mT, b, alpha=0.25), v), (Q, K, V, numbers(6, 6)), REWRITTEN,
    ),
    Case(
        "alpha of the scores",
        lambda q, k, v, b: attend(torch.add(b, q @ k.mT, alpha=0.25), v), (Q, K, V, numbers(6, 6)), REWRITTEN,
    ),
    Case("mask made weak by alpha", mask_made_weak_by_alpha, (Q, K, V, MASK), REWRITTEN),
    Case(
        "reversed subtraction",
        lambda q, k, v, b: attend(torch.rsub(q @ k.mT, b, alpha=0.5), v), (Q, K, V, numbers(6, 6)), REWRITTEN,
    ),
    Case("boolean mask added", lambda q, k, v, m: attend(q @ k.mT + m, v), (Q, K, V, MASK), REWRITTEN),
    Case("negative scale, causal", negative_and_causal, (Q, K, V), REWRITTEN),
    # what is multiplied
    Case(
        "keys of each query",
        lambda q, v, p: attend(torch.einsum("bhid,ijd->bhij", q, p), v), (Q, V, numbers(6, 6, 6)), REWRITTEN,
    ),
    Case("values of each query", values_of_each_query, (Q, K, numbers(6, 6, 6)), REWRITTEN),
    Case("softmax of a linear layer", lambda x, w, v: attend(x @ w, v), (Q, numbers(6, 6), V), REWRITTEN),
    Case("a classifier", lambda x, w: (x @ w).softmax(-1), (Q, numbers(6, 4)), LEFT, "is returned by the model"),
    Case("keys are the queries", lambda q, v: attend(q @ q.mT, v), (Q, V), REWRITTEN),
    Case("everything is one tensor", lambda q: attend(q @ q.mT, q), (Q,), REWRITTEN),
    Case("an integer temperature", lambda q, k, v, t: attend(q @ k.mT / t, v), (Q, K, V, torch.tensor(2)), REWRITTEN),
    # sizes
    Case("rank 2", lambda q, k, v: attend(q @ k.mT, v), operands(()), REWRITTEN),
    Case("a vector of a query", lambda q, k, v: attend(q @ k.mT, v), (numbers(6), K[0, 0], V[0, 0]), REWRITTEN),
    Case("a vector of values", lambda q, k, v: attend(q @ k.mT, v), (Q[0, 0], K[0, 0], numbers(6)), REWRITTEN),
    Case("one key", lambda q, k, v: attend(q @ k.mT, v), operands(k=1), REWRITTEN),
    Case("one query", lambda q, k, v: attend(q @ k.mT, v), operands(q=1), REWRITTEN),
    Case("one query, causal, shared keys", one_causal_query, (numbers(3, 4, 1, 6), K[:1, :1], V[:1, :1]), REWRITTEN),
    Case("one query, one key, transposed", lambda q, k, v: attend((k @ q.mT).mT, v), operands(q=1, k=1), REWRITTEN),
    Case("no key", lambda q, k, v: attend(q @ k.mT, v), operands(k=0), LEFT, "a size is 0"),
    Case("no query", lambda q, k, v: attend(q @ k.mT, v), operands(q=0), LEFT, "a size is 0"),
    Case("no batch", lambda q, k, v: attend(q @ k.mT, v), operands((0, 3)), LEFT, "a size is 0"),
    Case("no head dim", lambda q, k, v: attend(q @ k.mT, v), (*operands(dim=0)[:2], V), LEFT, "a size is 0"),
    Case(
        "a mask with a batch of its own",
        lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, -INF), v), (Q[0], K[0], V[0], MASK), REWRITTEN,
    ),
    # memory
    Case("scores written in part", scores_written_in_part, (Q, K, V), REWRITTEN),
    Case("every second score written", every_second_score_written, (Q, K, V), LEFT, "written in place"),
    Case("scores written through a view", scores_written_through_a_view, (Q, K, V), LEFT, ""),
    Case("scores transposed in place", scores_transposed_in_place, (Q, K, V), LEFT, ""),
    Case("query written between", query_written_between, (Q, K, V), LEFT, "written in place by mul_"),
    Case("mask written after its use", mask_written_after, (Q, K, V, numbers(2, 1, 6, 6)), REWRITTEN),
    Case("value copied, then written", value_written_before, (Q, K, V), REWRITTEN),
    Case("result written", result_written, (Q, K, V), REWRITTEN),
    Case(
        "detached without a gradient",
        lambda q, k, v: attend((q @ k.mT).detach(), v), (Q, K, V), REWRITTEN, exported=LEFT,
    ),
]  # fmt: skip


def reported(case: Case, report: Report, outcome: str) -> None:
    """The report says what became of the last site, and why where it was left."""
    if outcome == NO_SITE:
        assert not report.sites, str(report)
        return
    site = report.sites[-1]
    if outcome == LEFT and site.target == "flex":  # a score function takes it; no scale and mask do
        assert re.search(case.reason, site.refusals["sdpa"]), site.refusals
        return
    assert site.outcome == outcome, f"{site.outcome}: {site.reason}"
    assert site.target in (("sdpa", "recompute", "single_key") if outcome == REWRITTEN else (None,))
    if outcome == LEFT and case.outcome == LEFT:
        assert re.search(case.reason, site.reason), site.reason


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiled(case: Case) -> None:
    expected = eager(case.function, copies(case.inputs))
    got, report = compiled(case.function, copies(case.inputs))
    same(expected, got)
    reported(case, report, case.outcome)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exported(case: Case) -> None:
    expected = eager(case.function, copies(case.inputs))
    got, report = exported(case.function, copies(case.inputs))
    same(expected, got)
    reported(case, report, case.exported or case.outcome)


# ---------------------------------------------------------------- fully masked rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hide", ["masked_fill", "where", "added", "added input", "float32 softmax"])
def test_a_row_filled_whole_is_the_mean_of_the_values(hide: str, dtype: torch.dtype) -> None:
    """With the lowest number of the type, which absorbs every score (section 4 of the traps)."""
    lowest = torch.finfo(dtype).min
    mask = MASK.clone()
    mask[0, :, 2] = False
    forms: dict[str, Callable[..., Tensor]] = {
        "masked_fill": lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, lowest), v),
        "where": lambda q, k, v, m: attend(torch.where(m, q @ k.mT, lowest), v),
        "added": lambda q, k, v, m: attend(q @ k.mT + (1 - m.to(q.dtype)) * lowest, v),
        "added input": lambda q, k, v, m: attend(q @ k.mT + m, v),
        "float32 softmax": lambda q, k, v, m: (
            F.softmax((q @ k.mT).masked_fill(~m, lowest), -1, dtype=torch.float32).to(q.dtype) @ v
        ),
    }
    given = torch.where(mask, 0.0, lowest).to(dtype) if hide == "added input" else mask
    inputs = [*(x.to(dtype) for x in (Q, K, V)), given]
    got, report = compiled(forms[hide], copies(inputs))
    assert report.sites[-1].outcome == REWRITTEN
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    same(eager(forms[hide], copies(inputs)), got, tolerance)
    torch.testing.assert_close(got[0, :, 2], inputs[2][0].mean(-2), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- training


TRAINED = [
    Case("plain", lambda q, k, v: attend(q @ k.mT * 0.3, v), (Q, K, V), REWRITTEN),
    Case("everything is one tensor", lambda q: attend(q @ q.mT, q), (Q,), REWRITTEN),
    Case("keys for all heads", lambda q, k, v: attend(q @ k.mT, v), (Q, K[:, :1], V[:, :1]), REWRITTEN),
    Case("keys for the whole batch", lambda q, k, v: attend(q @ k.mT, v), (Q, K[:1], V[:1]), REWRITTEN),
    Case(
        "learned temperature", lambda q, k, v, t: attend(q @ k.mT * t, v), (Q, K, V, numbers(3, 1, 1).exp()), REWRITTEN,
    ),
    Case(
        "learned temperature, divided",
        lambda q, k, v, t: attend(q @ k.mT / t, v), (Q, K, V, numbers(3, 1, 1).exp() + 0.5), REWRITTEN,
    ),
    Case("learned number", lambda q, k, v, t: attend(q @ k.mT * t, v), (Q, K, V, torch.tensor(0.3)), REWRITTEN),
    Case("causal", lambda q, k, v: attend(causally(q @ k.mT), v), (Q, K, V), REWRITTEN),
    Case("boolean mask", masked_fill(-INF), (Q, K, V, MASK), REWRITTEN),
    Case(
        "dropout that drops nothing",
        lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.0, True) @ v, (Q, K, V), REWRITTEN,
    ),
    Case("query detached", lambda q, k, v: attend(q.detach() @ k.mT, v), (Q, K, V), REWRITTEN),
    Case("query without gradient", query_without_gradient, (Q, K, V), REWRITTEN),
    Case(
        "learned bias",
        lambda q, k, v, b: attend(q @ k.mT + b, v), (Q, K, V, numbers(3, 6, 6)), REWRITTEN,
    ),
    Case("finite fill", masked_fill(-1e9), (Q, K, V, MASK), REWRITTEN),
    Case("dropout", lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v, (Q, K, V), LEFT, "dropout 0.5"),
    Case(
        "dropout of everything",
        lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 1.0, True) @ v, (Q, K, V), LEFT, "dropout 1",
    ),
    Case(
        "dropout on the scores", lambda q, k, v: attend(F.dropout(q @ k.mT, 0.5, True), v), (Q, K, V), LEFT, "dropout",
    ),
    Case("scores detached", lambda q, k, v: attend((q @ k.mT).detach(), v), (Q, K, V), LEFT, "stops the gradient"),
    Case(
        "weights detached", lambda q, k, v: (q @ k.mT).softmax(-1).detach() @ v, (Q, K, V), LEFT, "stops the gradient",
    ),
    Case("scores without gradient", scores_without_gradient, (Q, K, V), LEFT, "under another context"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINED, ids=lambda c: c.name)
def test_trained(case: Case) -> None:
    """Results and every gradient, the missing ones included."""
    first, second = copies(case.inputs, grad=True), copies(case.inputs, grad=True)
    expected = eager(case.function, first)
    got, report = compiled(case.function, second)
    reported(case, report, case.outcome)
    same(expected.detach(), got.detach())
    ahead = numbers(*expected.shape, seed=9)
    expected.backward(ahead)
    got.backward(ahead)
    for a, b in zip(first, second, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            same(a.grad, b.grad, 1e-4)


def test_a_reason_is_the_same_for_all_layers() -> None:
    """Nodes have numbers and operations have none: the routers of a model are one line of its report."""

    def routed(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            weights, chosen = (x @ w).softmax(-1).topk(2)
            x = x + weights.sum(-1, keepdim=True) * chosen.sum(-1, keepdim=True)
        return x

    def also_used(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        largest = []
        for _ in range(3):
            scores = q @ k.mT
            largest.append(scores.cumsum(-1))
            q = scores.softmax(-1) @ v
        return q, largest

    for program, inputs in ((routed, (numbers(5, 4), numbers(4, 4))), (also_used, (Q, K, V))):
        _, report = compiled(program, inputs)
        assert len(report.sites) == 3
        (reason,) = {re.sub(r" \(.*\)", "", site.reason) for site in report.sites}
        assert "topk comes next" in reason or "also used by cumsum" in reason

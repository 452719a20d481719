"""Exponentials divided by their sum after the product with the values, and a sink's share of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

Program = Callable[..., Tensor]
NEG_INF = float("-inf")
SINKS = randn(2, seed=4)
CAUSAL = torch.full((8, 8), NEG_INF).triu(1)


def raised(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.mT * 0.25
    return torch.exp(s - s.amax(-1, keepdim=True))


def late(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    """A program that divides after the product: ``change(exponentials, their product with the values, scores)``."""
    return lambda q, k, v: (lambda e: change(e, e @ v, q @ k.mT * 0.25))(raised(q, k))


def granite(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None = None) -> Tensor:
    """As transformers' granite_swa writes it, grouped heads included."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*q.shape[:2], *x.shape[2:]) for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    if mask is not None:
        weights = weights + mask
    lse = torch.logsumexp(weights, dim=-1)
    share = (lse - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = torch.nn.functional.dropout(weights, p=0.1, training=False)
    out = torch.matmul(weights, v)
    out = out * share.unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2).contiguous()


def shared(share: Callable[[Tensor, Tensor], Tensor], shift: float = 0.0) -> Program:
    """A program whose result is ``share(scores, sinks)`` of the attention."""

    def program(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        s = q @ k.mT * 0.25 + shift
        return (torch.softmax(s, -1) @ v) * share(s, sinks.view(-1, 1, 1))

    return program


LATE: dict[str, Program] = {
    "divided": late(lambda e, o, s: o / e.sum(-1, keepdim=True)),
    "divided, unsqueezed": late(lambda e, o, s: o / e.sum(-1)[..., None]),
    "times the inverse": late(lambda e, o, s: o * (1.0 / e.sum(dim=-1, keepdim=True))),
    "divided, turned first": late(lambda e, o, s: o.transpose(1, 2) / e.sum(-1).transpose(1, 2)[..., None]),
    "clamped": late(lambda e, o, s: o / e.sum(-1, keepdim=True).clamp(min=1e-6)),
    "without a maximum": lambda q, k, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True))(torch.exp(q @ k.mT)),
    "values first": lambda q, k, v: (lambda e: (v.mT @ e.mT).mT / e.sum(-1, keepdim=True))(raised(q, k)),
    "masked": lambda q, k, v: (lambda e: (e @ v) / e.sum(-1, keepdim=True))(torch.exp(q @ k.mT * 0.25 + CAUSAL)),
}
NOT_LATE: dict[str, Program] = {
    "never divided": late(lambda e, o, s: o * 2.0),
    "divided by the sum of columns": late(lambda e, o, s: o / e.sum(-2)[..., None]),
    "divided by the sums, turned": late(lambda e, o, s: o / e.mT.sum(-1, keepdim=True)),
    "divided by another's sum": late(lambda e, o, s: o / torch.exp(s * 2).sum(-1, keepdim=True)),
    "multiplied by the sum": late(lambda e, o, s: o * e.sum(-1, keepdim=True)),
    "divided by the sum and one": late(lambda e, o, s: o / (e.sum(-1, keepdim=True) + 1)),
    "the values are divided": late(lambda e, o, s: e.sum(-1, keepdim=True) / o),
    "the result is used before it is divided": late(lambda e, o, s: o / e.sum(-1, keepdim=True) + o),
}
SHARES: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "granite": (granite, (SINKS,)),
    "granite, masked": (granite, (SINKS, CAUSAL)),
    "a sigmoid": (shared(lambda s, t: torch.sigmoid(s.logsumexp(-1, keepdim=True) - t)), (SINKS,)),
    "one over one plus": (shared(lambda s, t: 1 / (1 + torch.exp(t - s.logsumexp(-1, keepdim=True)))), (SINKS,)),
}
NO_SHARES: dict[str, Program] = {
    "the sigmoid turned": shared(lambda s, t: torch.sigmoid(t - s.logsumexp(-1, keepdim=True))),
    "the logarithm of columns": shared(lambda s, t: torch.sigmoid(s.logsumexp(-2, keepdim=True).mT - t)),
    "of other scores": shared(lambda s, t: torch.sigmoid((s * 2).logsumexp(-1, keepdim=True) - t)),
    "twice the logarithm": shared(lambda s, t: torch.sigmoid(2 * s.logsumexp(-1, keepdim=True) - t)),
    "the logarithm alone": shared(lambda s, t: s.logsumexp(-1, keepdim=True) - t),
    "two plus": shared(lambda s, t: 1 / (2 + torch.exp(t - s.logsumexp(-1, keepdim=True)))),
    "scores that are shifted": shared(lambda s, t: torch.sigmoid(s.logsumexp(-1, keepdim=True) - t), shift=1.0),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(LATE))
def test_divided_late(name: str, grad: bool) -> None:
    same(LATE[name], *qkv(grad=grad), grad=grad, rewritten=1)


@pytest.mark.parametrize("name", list(NOT_LATE))
def test_not_divided_late(name: str) -> None:
    same(NOT_LATE[name], *qkv(), rewritten=0)


@pytest.mark.parametrize("row", list(SHARES.values()), ids=list(SHARES))
def test_a_sinks_share(row: tuple[Program, tuple[Any, ...]]) -> None:
    program, rest = row
    same(program, *qkv(), *rest, rewritten=1)


@pytest.mark.parametrize("name", list(NO_SHARES))
def test_no_share_of_a_sink(name: str) -> None:
    """The factor stays as it is written, and its log-sum-exp beside the kernel."""
    report = same(NO_SHARES[name], *qkv(), SINKS, rewritten=int(name != "of other scores"))
    assert all("also used by" in site.reason for site in report.sites)


def test_a_softmax_one_divided_late() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * 0.25
        m = s.amax(-1, keepdim=True)
        e = torch.exp(s - m)
        return (e @ v) / (e.sum(-1, keepdim=True) + torch.exp(-m))

    same(program, *qkv(), rewritten=1)


def test_grouped_heads_in_half_precision() -> None:
    same(granite, *qkv(heads=4, kv_heads=2, dtype=torch.bfloat16), randn(4, seed=4), CAUSAL, rewritten=1, twice=3.0)


def test_a_logarithm_that_is_returned_as_well() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT
        lse = s.logsumexp(-1, keepdim=True)
        return (s.softmax(-1) @ v) * torch.sigmoid(lse - sinks.view(-1, 1, 1)), lse

    report = same(program, *qkv(), SINKS, rewritten=1)
    assert report.sites[0].reason.endswith(", and stay")


def test_training_with_a_share_is_left_with_the_reason() -> None:
    report = same(granite, *qkv(grad=True), randn(2, seed=4, grad=True), grad=True, rewritten=0)
    assert "no gradient" in report.left[0].reason


EXPORTED: dict[str, tuple[Program, tuple[Any, ...]]] = {
    **{name: (LATE[name], ()) for name in ("divided", "times the inverse", "values first")},
    **SHARES,
}


@pytest.mark.parametrize("decompose", [False, True], ids=["export", "decomposed"])
@pytest.mark.parametrize("name", list(EXPORTED))
def test_exported(name: str, decompose: bool) -> None:
    program, rest = EXPORTED[name]

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            return program(q, k, v, *rest)

    given = (*qkv(), *rest)
    exported = torch.export.export(Module(), given)
    if decompose:
        exported = exported.run_decompositions()
    report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"], [s.reason for s in report.sites]
    torch.testing.assert_close(exported.module()(*given), Module()(*given), atol=1e-5, rtol=1e-5)

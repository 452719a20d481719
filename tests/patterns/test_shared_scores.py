"""Sites that share a score matrix or their weights: rewritten together, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[..., 0] = True
Program = Callable[..., Any]


def both_ways(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As LightGlue and GroundingDINO attend in both directions: one product, a softmax along each side."""
    s = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
    there, back = s.softmax(-1), s.transpose(-2, -1).softmax(-1)
    return there @ v, back @ w


def both_dims(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT * 0.25
    return torch.softmax(s, -1) @ v, torch.softmax(s, -2).mT @ w


def masked_apart(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.masked_fill(~KEEP, float("-inf")).softmax(-1) @ v, (s * 0.5).softmax(-1) @ w


def two_values(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.25).softmax(-1)
    return weights @ v, weights @ w


def three(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    s = q @ k.mT
    weights = s.softmax(-1)
    return weights @ v + weights @ w + s.mT.softmax(-1) @ v


def mask_added_in_place(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    s += KEEP
    weights = s.softmax(-1)
    return weights[:, :1] @ v[:, :1], weights[:, 1:] @ w[:, 1:]


READ: dict[str, tuple[Program, int]] = {
    "both directions": (both_ways, 2),
    "both dimensions": (both_dims, 2),
    "masked apart": (masked_apart, 2),
    "one softmax, two values": (two_values, 2),
    "three": (three, 3),
    "mask added in place": (mask_added_in_place, 2),
}


def returned_too(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.mT.softmax(-1) @ w, s


def one_is_none(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.sigmoid() @ w


def source_of_another(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The scores of one are the queries of the other: they stay."""
    s = q @ k.mT
    return s.softmax(-1) @ v, (s @ w[..., :8].mT).softmax(-1) @ v


def written_between(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    first = s.softmax(-1) @ v
    s.mul_(2)
    return first, s.mT.softmax(-1) @ w


LEFT: dict[str, Program] = {
    "returned too": returned_too,
    "one is no attention": one_is_none,
    "the source of another": source_of_another,
    "written between": written_between,
}


def inputs(grad: bool = False) -> tuple[Tensor, ...]:
    return (*qkv(grad=grad), randn(2, 2, 8, 16, seed=9, grad=grad))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(READ))
def test_rewritten_together(name: str, grad: bool) -> None:
    program, count = READ[name]
    same(program, *inputs(grad), grad=grad, rewritten=count)


@pytest.mark.parametrize("name", list(LEFT))
def test_left_together(name: str) -> None:
    report = same(LEFT[name], *inputs())
    shared = [s for s in report.sites if any(x in s.reason for x in ("also used", "returned", "is written in place"))]
    assert shared and all(s.outcome == "left" for s in shared), [(s.outcome, s.reason) for s in report.sites]


@pytest.mark.parametrize("name", list(READ))
def test_no_shared_node_is_left(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
            return READ[name][0](q, k, v, w)

    program = torch.export.export(Module(), inputs())
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"] * READ[name][1], [s.reason for s in report.sites]
    names = {str(n.target) for n in program.graph.nodes}
    assert not any("matmul" in n or "softmax" in n or "einsum" in n for n in names), names
    torch.testing.assert_close(program.module()(*inputs()), Module()(*inputs()), atol=1e-5, rtol=1e-5)


def test_one_that_no_target_takes_leaves_the_others() -> None:
    """A target refuses one of them (its bias wants a gradient), so that the matrix would have to stay."""

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT
        return s.softmax(-1) @ v, (s + bias).softmax(-1) @ v

    bias = randn(8, 8, seed=3, grad=True)
    report = same(program, *qkv(grad=True), bias, grad=True, rewritten=0, targets=("sdpa",))
    assert ["attention that is left" in s.reason for s in report.left] == [True, True], [s.reason for s in report.left]


def test_weights_that_are_dropped_out_are_drawn_once() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        weights = torch.nn.functional.dropout((q @ k.mT).softmax(-1), 0.5)
        return weights @ v + weights @ w

    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))(*inputs())
    assert {s.outcome for s in report.sites} == {"left"} and "also used" in report.sites[0].reason


def test_verified() -> None:
    same(both_ways, *inputs(), rewritten=2, verify="graph")

"""The fused forward with a written-out backward: every gradient is eager's, including the mask's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same, same_each
from torch import Tensor

import attn_pass

KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[0, 0, 3] = False  # a fully masked row
PADDED = torch.zeros(2, 1, 1, 8)
PADDED[1] = torch.finfo(torch.float32).min  # a whole sequence that is fully masked

Program = Callable[..., Tensor]


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def bias(*shape: int) -> Tensor:
    return randn(*shape, seed=3, grad=True)


TAKEN: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "a bias of every head": (lambda q, k, v, b: softmax(q @ k.mT * 0.25 + b) @ v, (bias(1, 2, 8, 8),)),
    "a negative scale": (lambda q, k, v, b: softmax(q @ k.mT * -0.25 + b) @ v, (bias(8, 8),)),
    "a bias of every score": (lambda q, k, v, b: softmax(q @ k.mT * 0.25 + b) @ v, (bias(2, 2, 8, 8),)),
    "a bias of every key": (lambda q, k, v, b: softmax(b - q @ k.mT * 0.25) @ v, (bias(2, 1, 1, 8),)),
    "a bias looked up": (
        lambda q, k, v, t: softmax(q @ k.mT + t[(torch.arange(8)[:, None] - torch.arange(8)) + 7].permute(2, 0, 1)) @ v,
        (bias(15, 2),),
    ),
    "padded, the mask added first": (
        lambda q, k, v, b, m: softmax(q @ k.mT + (b + m)) @ v,
        (bias(1, 2, 8, 8), PADDED),
    ),
    "padded, the mask added last": (lambda q, k, v, b, m: softmax(q @ k.mT + b + m) @ v, (bias(1, 2, 8, 8), PADDED)),
    "filled": (
        lambda q, k, v, b, m: softmax((q @ k.mT + b).masked_fill(~m, torch.finfo(torch.float32).min)) @ v,
        (bias(1, 2, 8, 8), KEEP),
    ),
    "filled with -inf": (
        lambda q, k, v, b, m: softmax((q @ k.mT + b).masked_fill(~m, float("-inf"))) @ v,
        (bias(1, 2, 8, 8), KEEP | torch.eye(8, dtype=torch.bool)),
    ),
    "two masks": (lambda q, k, v, m, n: softmax(q @ k.mT + m + n) @ v, (PADDED, PADDED.flip(0))),
    "keys of one head": (
        lambda q, k, v, b: softmax(q @ k[:, :1].mT + b) @ v[:, :1],
        (bias(1, 2, 8, 8),),
    ),
}


def test_gradients() -> None:
    assert targets_of(TAKEN) == dict.fromkeys(TAKEN, "recompute")
    assert targets_of(TAKEN, dynamic=True) == dict.fromkeys(TAKEN, "recompute")


def test_gradients_of_symbolic_sizes_by_aot_autograd() -> None:
    """Where it takes the backward apart: of a bias that is broadcast, of one looked up, and of keys of one head."""
    some = ("a bias of every key", "a bias looked up", "keys of one head")
    assert targets_of(some, dynamic=True, aot=True) == dict.fromkeys(some, "recompute")


def targets_of(names: Iterable[str], **options: Any) -> dict[str, str]:
    programs = {name: (TAKEN[name][0], (*qkv(grad=True), *TAKEN[name][1])) for name in names}
    report = same_each(programs, grad=True, **options)
    return {name: site.target for name, site in zip(programs, report.sites, strict=True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_in_other_dtypes(dtype: torch.dtype) -> None:
    learned = bias(1, 2, 8, 8).detach().to(dtype).requires_grad_()
    program, _ = TAKEN["a bias of every head"]
    same(program, *qkv(dtype=dtype, grad=True), learned, grad=True, rewritten=1, twice=3.0)


def test_narrow_values() -> None:
    same(
        lambda q, k, v, b: softmax(q @ k.mT + b) @ v[..., :4],
        *qkv(grad=True),
        bias(1, 2, 8, 8),
        grad=True,
        rewritten=1,
    )


LEFT: dict[str, tuple[Program, tuple[Any, ...], str]] = {
    "replaced before a matrix is added": (
        lambda q, k, v, b, m: softmax((q @ k.mT).masked_fill(~m, torch.finfo(torch.float32).min) + b) @ v,
        (bias(1, 2, 8, 8), KEEP),
        "gradient",
    ),
    "dropout": (
        lambda q, k, v, b: torch.nn.functional.dropout(softmax(q @ k.mT + b), 0.5) @ v,
        (bias(1, 2, 8, 8),),
        "dropout",
    ),
}


@pytest.mark.parametrize("row", list(LEFT.values()), ids=list(LEFT))
def test_left(row: tuple[Program, tuple[Any, ...], str]) -> None:
    program, rest, reason = row
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("aot_eager", choose="fused", on_error="raise"))(
            *qkv(grad=True), *rest
        )
    assert not report.rewritten
    assert reason in report.left[0].reason


def test_a_mask_without_a_gradient_takes_the_plain_call() -> None:
    program, _ = TAKEN["a bias of every head"]
    report = same(program, *qkv(grad=True), randn(1, 2, 8, 8), grad=True, rewritten=1)
    assert report.sites[0].target == "sdpa"


def test_the_planner_leaves_it_where_it_is_slower() -> None:
    program, _ = TAKEN["a bias of every head"]
    q, k, v = (randn(2, 4, 256, 64, seed=n, grad=True) for n in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("aot_eager"))(q, k, v, bias(1, 4, 256, 256))
    assert not report.rewritten
    assert "cheapest" in report.left[0].reason


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    program, rest = TAKEN["padded, the mask added last"]
    inputs = [*qkv(grad=True), *rest]
    wanted = torch.autograd.grad(program(*inputs).sin().sum(), [t for t in inputs if t.requires_grad])
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(program, backend=attn_pass.backend, options={"choose": "fused"})(*inputs)
    gradients = torch.autograd.grad(out.sin().sum(), [t for t in inputs if t.requires_grad])
    assert report.rewritten
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_learned_bias_that_needs_no_gradient_here_takes_the_plain_call() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(randn(1, 2, 8, 8, seed=3))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softmax(q @ k.mT * 0.25 + self.bias) @ v

    with torch.no_grad():
        report = same(Module(), *qkv(), rewritten=1, reference=False)
    assert report.sites[0].target == "sdpa"

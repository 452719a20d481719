"""Attention inside ``torch.vmap``: read through the batching rules; a level without a rewritten site stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass
from attn_pass.compat import ADDS_A_BATCH, TORCH_VERSION

Program = Callable[..., Any]
BIAS = randn(2, 9, 9, seed=4)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / 4.0).masked_fill(later, float("-inf")).softmax(-1) @ v


def heads_of_one(x: Tensor) -> Tensor:
    """A function of one element of the batch, as it is written for vmap: (L, E)."""
    q, k, v = (y.view(-1, 2, 16).transpose(0, 1) for y in (x, x * 2, x + 1))
    return causal(q, k, v).transpose(0, 1).flatten(1)


READ: dict[str, Program] = {
    "one level": lambda q, k, v: torch.vmap(attend)(q, k, v),
    "two levels": lambda q, k, v: torch.vmap(torch.vmap(causal))(q, k, v),
    "keys for all": lambda q, k, v: torch.vmap(causal, in_dims=(0, None, None))(q, k[0], v[0]),
    "other dims": lambda q, k, v: torch.vmap(attend, in_dims=(1, 1, 0), out_dims=2)(q, k, v.transpose(0, 1)),
    "of one element": lambda q, k, v: torch.vmap(heads_of_one)(q.transpose(1, 2).flatten(2)),
    "a bias of each": lambda q, k, v: torch.vmap(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v)(q, k, v, BIAS),
    "a call": lambda q, k, v: torch.vmap(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True))(q, k, v),
    "two results": lambda q, k, v: torch.vmap(lambda q, k, v: (attend(q, k, v), q + 1))(q, k, v),
    "closed over": lambda q, k, v: torch.vmap(lambda q: attend(q, k[0], v[0]) + v.sum())(q),
}

# There a call in vmap reaches the fused kernel, as one of four dimensions does everywhere: its operator is not read.
CALLS = {"a call"} if ADDS_A_BATCH else set[str]()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", sorted({*READ} - CALLS))
def test_read(name: str, grad: bool) -> None:
    same(READ[name], *qkv(q_len=9, kv_len=9, grad=grad), grad=grad, rewritten=1)


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="this torch has no vmap of dynamic sizes")
@pytest.mark.parametrize("name", ["one level", "two levels", "keys for all", "other dims"])
def test_dynamic_verified_and_in_half_precision(name: str) -> None:
    same(READ[name], *qkv(q_len=9, kv_len=9), dynamic=True, rewritten=1)
    same(READ[name], *qkv(q_len=9, kv_len=9), rewritten=1, verify="graph")
    same(READ[name], *qkv(q_len=9, kv_len=9, dtype=torch.bfloat16), rewritten=1)
    same(READ[name], *qkv(q_len=9, kv_len=9, dtype=torch.float16), rewritten=1)


def test_of_random_dims() -> None:
    draw = random.Random(0)
    for _ in range(12):
        dims = [draw.choice([0, 1, None]) for _ in range(3)]
        dims[0] = draw.choice([0, 1]) if dims == [None] * 3 else dims[0]
        out, levels, inner = draw.choice([0, 1, 2]), draw.choice([1, 2]), draw.choice([attend, causal])

        def program(*x: Tensor, dims: Any = tuple(dims), out: int = out, levels: int = levels, f: Any = inner) -> Any:
            x = tuple(t[0] if d is None else t for t, d in zip(x, dims))
            if levels == 2:
                f = torch.vmap(f, in_dims=0)
            return torch.vmap(f, in_dims=dims, out_dims=out)(*x)

        same(program, *qkv(batch=3, heads=3, q_len=5, kv_len=5, dim=4), rewritten=1)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, randomness="different")(q, k, v)


def with_a_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda q, k, v: attend(q, k, v).sum()))(q, k, v)


def other_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(0) @ v)(q, k, v)


def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q, k, v: (q @ k.mT).sigmoid() @ v)(q, k, v)


def written_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        s.mul_(0.5)
        return s.softmax(-1) @ v

    return torch.vmap(one)(q, k, v)


def graphs(program: Program, *inputs: Tensor, **options: Any) -> tuple[list[Any], attn_pass.Report]:
    """The graph before the pass and after it."""
    seen: list[Any] = []

    def look(gm: torch.fx.GraphModule, given: Any) -> Any:
        seen.append([(n.op, str(n.target), str(n.args), n.name) for n in gm.graph.nodes])
        report = attn_pass.Report()
        from attn_pass.engine import rewrite_graph
        from attn_pass.options import make_options

        rewrite_graph(gm, options=make_options(on_error="raise", **options), report=report, program="compile")
        seen.append([(n.op, str(n.target), str(n.args), n.name) for n in gm.graph.nodes])
        seen.append(report)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=look)(*inputs)
    return seen[:2], seen[2]


LEFT: dict[str, tuple[Program, str]] = {
    "dropout": (dropped, "inside torch.func.vmap"),
    "a gradient": (with_a_gradient, "inside torch.func.vmap"),
    "another axis": (other_axis, "does not sum over the whole softmax"),
    "no attention": (no_attention, ""),
    "written inside": (written_inside, "inside torch.func.vmap"),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_left_and_the_graph_is_as_it_was(name: str) -> None:
    program, reason = LEFT[name]
    (before, after), report = graphs(program, *qkv(), choose="fused")
    assert before == after and not report.rewritten
    assert all(reason in s.reason for s in report.sites) and bool(report.sites) == bool(reason), str(report)


def test_what_is_cheaper_as_it_is_stays_inside_vmap() -> None:
    (before, after), report = graphs(READ["one level"], *qkv(q_len=300, kv_len=300), targets=("flex",), choose="fused")
    assert before == after
    assert [s.outcome for s in report.sites] == ["left"] and "vmap" not in report.sites[0].reason


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="this torch has no vmap of dynamic sizes")
def test_a_level_that_cannot_be_traced_leaves_none_open() -> None:
    """The scale of a call is no number under ``dynamic=True``, and its sign would be a guard."""
    program = READ["a call"]
    report = same(program, *qkv(q_len=9, kv_len=9), dynamic=True, rewritten=0)
    assert "inside torch.func.vmap" in report.sites[0].reason
    assert torch._C._functorch.maybe_current_level() is None


def test_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return torch.vmap(causal)(q, k, v)

    program = torch.export.export(Module(), qkv())
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"], str(report)
    torch.testing.assert_close(program.module()(*qkv()), Module()(*qkv()), atol=1e-5, rtol=1e-5)

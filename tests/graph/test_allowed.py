"""Functions that Dynamo keeps as one node (``torch.compiler.allow_in_graph``): expanded while a graph is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import FLEX_ON_CPU, qkv, randn, same
from test_subgraphs import dynamo_graph
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.graph.allowed import put_in_pieces
from attn_pass.graph.regions import Region
from attn_pass.graph.values import Sizes

allowed = torch.compiler.allow_in_graph
KEEP = torch.arange(8) < torch.tensor([[5], [8]])
Program = Callable[..., Any]


@allowed
def where(mask: Tensor, scores: Tensor, fill: float) -> Tensor:
    """As einx.where('b j, b h i j, -> b h i j', ...) computes it."""
    fills = torch.asarray(fill, device=scores.device).reshape(1, 1, 1, 1)
    return torch.where(mask.reshape(mask.shape[0], 1, 1, mask.shape[1]), scores, fills)


@allowed
def dot(a: Tensor, b: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, a, b)


@allowed
def softmax(x: Tensor) -> Tensor:
    return torch.nn.functional.softmax(x, dim=-1)


@allowed
def heads_apart(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    q, k = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in x.chunk(2, -1))
    return q, k


@allowed
def scaled(x: Tensor) -> Tensor:
    x = x * 1.0
    x *= 0.5
    return x


@allowed
def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


def by_einx(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dot(q, k, "bhid,bhjd->bhij") * 0.3
    return dot(softmax(where(KEEP, scores, -1e30)), v, "bhij,bhjd->bhid")


def of_two_results(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = heads_apart(torch.cat([q, k], -1).flatten(1, 2), 2)
    return torch.softmax(q @ k.mT, -1) @ k + v.sum()


READ: dict[str, Program] = {
    "products, mask and softmax": by_einx,
    "all of it": whole,
    "an operand": lambda q, k, v: torch.softmax(scaled(q) @ k.mT, -1) @ v,
    "two results": of_two_results,
    "used by others as well": lambda q, k, v: (lambda x: torch.softmax(x @ k.mT, -1) @ v + x)(scaled(q)),
    "two of them": lambda q, k, v: whole(whole(q, k, v), k, v),
    "in a checkpoint": lambda q, k, v: checkpoint(lambda q: by_einx(q, k, v), q, use_reentrant=False),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("dynamic", [None, True])
def test_it_is_read(name: str, dynamic: bool | None) -> None:
    sites = 2 if name == "two of them" else 1
    report = same(READ[name], *qkv(grad=True), grad=True, rewritten=sites, dynamic=dynamic)
    assert all(s.target == "sdpa" and s.where.startswith("test_allowed.py:") for s in report.sites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_any_type(dtype: torch.dtype) -> None:
    same(whole if dtype != torch.float64 else by_einx, *qkv(dtype=dtype), rewritten=1)


def graph_after(program: Program, *inputs: Any) -> tuple[str, str, attn_pass.Report]:
    """Dynamo's graph, and what the pass made of it, run by nobody else."""
    seen: list[str] = []
    wrapped = attn_pass.wrap("eager", choose="fused", on_error="raise")

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(gm.print_readable(print_output=False))
        result = wrapped(gm, example)
        seen.append(gm.print_readable(print_output=False))
        return result

    torch._dynamo.reset()
    expected = program(*inputs)
    with attn_pass.record() as report:
        out = torch.compile(program, backend=backend)(*inputs)
    torch.testing.assert_close(out, expected)
    return seen[0], seen[1], report


def test_the_call_is_removed_if_it_was_read_and_stays_otherwise() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, b = heads_apart(torch.cat([q, k], -1).flatten(1, 2), 2)
        return softmax(scaled(q) @ k.mT) @ v, softmax(v), a, b.sum()

    before, after, report = graph_after(program, *qkv())
    assert len(report.rewritten) == 1
    calls = [
        tuple(text.count(f"test_allowed_{n}(") for n in ("softmax", "scaled", "heads_apart"))
        for text in (before, after)
    ]
    assert calls == [(2, 1, 1), (1, 1, 1)]
    assert "idle" not in after


def test_without_attention_the_graph_is_the_one_it_was() -> None:
    before, after, report = graph_after(lambda x: (softmax(scaled(x)), heads_apart(x.flatten(1, 2), 2)[1]), qkv()[0])
    assert before == after and not report.sites


class Doubled(torch.autograd.Function):
    """It computes nothing, and gives back what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@allowed
def writes_what_it_is_given(x: Tensor) -> Tensor:
    x.mul_(2)
    return x * 1.0


@allowed
def reshapes_what_it_is_given(x: Tensor) -> Tensor:
    x.transpose_(-1, -2)
    return x * 1.0


@torch.library.custom_op("attn_pass_test::double", mutates_args={"x"})
def double(x: Tensor) -> None:
    x.copy_(x * 2)


@torch.library.custom_op("attn_pass_test::doubled", mutates_args={"x"})
def doubled(x: Tensor) -> Tensor:
    x.copy_(x * 2)
    return x * 1


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@allowed
def writes_by_an_operator(x: Tensor) -> Tensor:
    return torch.ops.attn_pass_test.doubled(x) * 1.0  # type: ignore[no-any-return]


@allowed
def writes_by_an_operator_of_no_result(x: Tensor) -> Tensor:
    torch.ops.attn_pass_test.double(x)
    return x * 1.0


@allowed
def writes_a_view(x: Tensor) -> Tensor:
    y = x[..., :4]
    y += 1
    return x * 1.0


@allowed
def draws(x: Tensor) -> Tensor:
    return x + torch.rand_like(x) * 0


@allowed
def drops(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 1e-9) * 1.0


@allowed
def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return y + x


@allowed
def in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.mT).float()


@allowed
def of_its_own_backward(x: Tensor) -> Tensor:
    return Doubled.apply(x * 1.0)  # type: ignore[no-any-return]


@allowed
def hooked(x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y * 1.0


@allowed
def given_back(x: Tensor) -> Tensor:
    return x


@allowed
def one_thing_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1.0
    return y, y


OF_INFERENCE = ("reshapes what it is given", "writes it by an operator")


@allowed
def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda y: y * 2)(x)


LEFT = {
    "writes what it is given": writes_what_it_is_given,
    "reshapes what it is given": reshapes_what_it_is_given,
    "writes a view of it": writes_a_view,
    "writes it by an operator": writes_by_an_operator,
    "writes it by an operator without a result": writes_by_an_operator_of_no_result,
    "draws": draws,
    "drops": drops,
    "no_grad inside": without_gradient,
    "autocast inside": in_half,
    "a backward of its own": of_its_own_backward,
    "a hook": hooked,
    "gives back what it is given": given_back,
    "vmap inside": mapped,
}


@pytest.mark.parametrize("name", [*LEFT, "one thing twice"])
def test_functions_with_side_effects_are_not_expanded(name: str) -> None:
    """Nor is anything changed by trying."""
    function = LEFT.get(name, one_thing_twice)

    def program(x: Tensor) -> Any:
        y = x * 2
        result = function(y)
        return (y.sum(), *(result if isinstance(result, tuple) else (result,)))

    gm = dynamo_graph(program, randn(3, 4, grad=name not in OF_INFERENCE))
    before = gm.print_readable(print_output=False)
    assert not put_in_pieces(gm, Sizes(), Region.ambient(), in_body=False)
    assert gm.print_readable(print_output=False) == before


@pytest.mark.parametrize("name", LEFT)
def test_functions_with_side_effects_are_left(name: str) -> None:
    """On the scores: nothing is read through it, and the program is what it was."""
    function = LEFT[name]

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(function(q @ k.mT * 1.0), -1) @ v

    q, k, v = qkv(grad=name not in OF_INFERENCE)
    before, after, report = graph_after(program, q, k, v)
    assert before == after and not report.rewritten
    if q.requires_grad:
        compiled = torch.compile(program, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))
        for ours, eager in zip(*(torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, program))):
            torch.testing.assert_close(ours, eager)


@pytest.mark.skipif(not FLEX_ON_CPU, reason="soft caps are rewritten to FlexAttention")
def test_a_soft_cap_in_it() -> None:
    @allowed
    def capped(x: Tensor) -> Tensor:
        return torch.tanh(x / 2) * 2

    same(lambda q, k, v: torch.softmax(capped(q @ k.mT), -1) @ v, *qkv(), rewritten=1)

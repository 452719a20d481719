"""Calls expanded on trial: the graph is unchanged until an expansion is kept, and no guard is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_subgraphs import dynamo_graph
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, Expansion, expand
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value


def plan_of(gm: GraphModule, call: Node) -> Plan:
    region = Regions(gm.graph, Region()).of(call)
    return Plan(gm, call, region, SizeNodes(gm, Sizes()), Effects(gm.graph))


def call_of(gm: GraphModule, name: str) -> Node:
    (call,) = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == name or n.target == name]
    return call


def taken(program: Callable[..., Any], name: str, function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
    """The graph, its text before, and the expansion of the one call of that name."""
    gm = dynamo_graph(program, *inputs, **options)
    before = str(gm.graph)
    return gm, before, lambda: expand(plan_of(gm, call_of(gm, name)), function)


def softmaxed(x: Tensor, dim: int) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    unused = e @ e.mT  # noqa: F841  it goes again
    return e / e.sum(dim, keepdim=True)


def program(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


def test_taken_back_the_graph_is_the_one_it_was() -> None:
    gm, before, expanded = taken(program, "softmax", softmaxed, torch.randn(3, 5, 8))
    expansion: Expansion = expanded()
    gm.graph.lint()
    assert [n.name.rstrip("_0123456789") for n in expansion.nodes] == ["amax", "sub", "exp", "sum", "div"]
    assert str(gm.graph) != before
    expansion.take_back()
    expansion.take_back()  # twice does no harm
    assert str(gm.graph) == before


def test_kept_it_has_the_calls_name_users_and_value() -> None:
    x = torch.randn(3, 5, 8)
    gm, _, expanded = taken(program, "softmax", softmaxed, x)
    name = call_of(gm, "softmax").name
    expansion: Expansion = expanded()
    ((gone, new),) = expansion.keep()
    gm.graph.lint()
    gm.recompile()
    assert gone._erased and new.name == name and new.users and "softmax](" not in str(gm.graph)
    expansion.take_back()  # of what is in use, nothing
    torch.testing.assert_close(gm(x)[0], program(x))


def test_of_several_results_only_the_used_ones() -> None:
    x = torch.randn(3, 5, 8)

    def chunks(x: Tensor, number: int, dim: int) -> list[Tensor]:
        return [x[..., :2] * 1, x[..., 2:4] * 1, x[..., 4:6] * 1, x[..., 6:] * 1]

    def last(x: Tensor) -> Tensor:
        return torch.tensor_split(x, 4, -1)[3] + 1

    def pieces(x: Tensor, number: int, dim: int) -> list[Tensor]:
        return [x.narrow(dim, 2 * n, 2) for n in range(number)]

    gm, _, expanded = taken(last, "tensor_split", pieces, x)
    expansion: Expansion = expanded()
    assert [n.target for n in expansion.nodes] == ["narrow"]
    expansion.keep()
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(x)[0], last(x))
    gm, before, expanded = taken(last, "tensor_split", chunks, x)
    with pytest.raises(CannotExpand, match="another layout"):
        expanded()
    assert str(gm.graph) == before


def hidden(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x.exp()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "another shape": (lambda x, dim: x[:1], "another shape"),
    "another type": (lambda x, dim: x.double(), "another type"),
    "another layout": (lambda x, dim: x.mT.contiguous().mT, "another layout"),
    "a tensor from elsewhere": (lambda x, dim: hidden(x) + x, "no node holds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_computations_are_refused_without_a_trace(name: str) -> None:
    function, why = REFUSED[name]
    gm, before, expanded = taken(program, "softmax", function, torch.randn(3, 5, 8))
    with pytest.raises(CannotExpand, match=why):
        expanded()
    assert str(gm.graph) == before


def test_an_error_on_the_way_leaves_nothing() -> None:
    def fails(x: Tensor, dim: int) -> Tensor:
        raise ZeroDivisionError(str(x.exp().shape))

    gm, before, expanded = taken(program, "softmax", fails, torch.randn(3, 5, 8))
    with pytest.raises(ZeroDivisionError):
        expanded()
    assert str(gm.graph) == before


def shape_env(gm: GraphModule) -> Any:
    values = [v for n in gm.graph.nodes if (v := tensor_value(n)) is not None]
    return next(v.fake_mode.shape_env for v in values)


def test_sizes_are_nodes_and_go_again() -> None:
    def averaged(x: Tensor, dim: int) -> Tensor:
        return x.exp() / (x.shape[-1] * x.shape[0])

    gm, before, expanded = taken(program, "softmax", averaged, torch.randn(3, 5, 8), dynamic=True)
    guards = len(shape_env(gm).guards)
    expansion: Expansion = expanded()
    assert len(expansion.nodes) >= 3 and len(shape_env(gm).guards) == guards
    expansion.take_back()
    assert str(gm.graph) == before


def decided(x: Tensor, dim: int) -> Tensor:
    return x.exp() if x.shape[0] == 3 else x


def swallowed(x: Tensor, dim: int) -> Tensor:
    try:
        return decided(x, dim)
    except Exception:
        return x.exp()


def broadcast(x: Tensor, dim: int) -> Tensor:
    return torch.ops.aten.add.Tensor(x, torch.ones(5, 5))  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [decided, swallowed, broadcast])
def test_dependence_on_a_size_is_refused_and_adds_no_guard(
    function: Callable[..., Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a guard nor a specialised size may be left behind by a trial that comes to nothing, nor a log."""
    gm, before, expanded = taken(program, "softmax", function, torch.randn(3, 5, 8), dynamic=True)
    env = shape_env(gm)
    state = list(env.guards), dict(env.replacements), dict(env.var_to_range)
    for _ in range(2):  # nothing of the first trial is remembered as known
        with pytest.raises(CannotExpand, match="for some sizes only"):
            expanded()
        assert (list(env.guards), dict(env.replacements), dict(env.var_to_range)) == state
        assert str(gm.graph) == before
    assert "guard" not in capfd.readouterr().err and not caplog.records
    assert env._check_frozen.__func__ is type(env)._check_frozen


def test_a_fast_path_of_any_width_keeps_its_width(capfd: pytest.CaptureFixture[str]) -> None:
    from attn_pass.patterns.composite import take_apart

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.no_grad():
        gm = dynamo_graph(layer, torch.randn(2, 6, 32), dynamic=True)
    before, guards = str(gm.graph), len(shape_env(gm).guards)
    (opaque,) = take_apart(gm, Sizes(), Region(), False)
    assert opaque.expansion is None and "for some sizes only" in opaque.refusal
    assert (str(gm.graph), len(shape_env(gm).guards)) == (before, guards)
    assert "evaluate_expr" not in capfd.readouterr().err


def test_the_state_around_the_call_is_that_of_the_trial() -> None:
    """Under autocast a product is one of bfloat16, under no_grad nothing wants a gradient."""

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.bmm(x, x.mT)
        with torch.no_grad():
            return y.float() + torch.softmax(x, -1).sum()

    x = torch.randn(3, 5, 8, requires_grad=True)
    expanded = taken(called, "bmm", lambda a, b: a @ b, x)[2]
    values = [tensor_value(n) for n in expanded().nodes]
    assert [v.dtype for v in values if v is not None] == [torch.bfloat16]
    expanded = taken(called, "softmax", softmaxed, x)[2]
    assert not any(v.requires_grad for n in expanded().nodes if (v := tensor_value(n)) is not None)

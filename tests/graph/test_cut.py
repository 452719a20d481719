"""An extracted part of a program gives the same values as inside the program, from the time its sources are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from against_eager import randn
from read_graphs import captured, inputs_of, nodes_of
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F

from attn_pass.graph.cut import Around, CannotExtract, Cut, Input, Level, cut, numbers
from attn_pass.graph.edit import Plan, SizeNodes, Value
from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes

aten = torch.ops.aten


def cut_of(
    gm: GraphModule, result: Node, sources: Mapping[Node, int] | Sequence[Node], chosen: Any = None, **given: Any
) -> Cut:
    """The part, from sources that hold their value since they were made, or from the times given."""
    effects = Effects(gm.graph)
    level = Level(gm.graph, effects, effects.position[result], Regions(gm.graph, Region.ambient()))
    since = sources if isinstance(sources, Mapping) else {n: effects.position[n] for n in sources}
    given = {"known": {}, "needs_grad": lambda _: False, **given}
    return cut(result, since, Around((level,)), numbers(Sizes(), chosen), **given)


class Values(Interpreter):
    """Runs a graph and keeps what each node gave, as it was then."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.given: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.given[n] = result.clone() if isinstance(result, Tensor) else result
        return result


def check(program: Callable[..., Any], inputs: Sequence[Any], result: str, sources: Sequence[str]) -> Cut:
    """Cuts the last node of that name out from the named ones, and compares with the whole program."""
    gm = captured(program, *[x.clone() for x in inputs])
    node = nodes_of(gm, result)[-1]
    begin = [nodes_of(gm, name)[-1] for name in sources] or inputs_of(gm)
    part = cut_of(gm, node, begin)
    run = Values(gm)
    run.run(*[x.clone() for x in inputs])
    (computed,) = part.original(*(run.given[n].clone() for n in part.nodes))
    torch.testing.assert_close(computed, run.given[node], rtol=0, atol=0)
    assert part.shape == tuple(computed.shape)
    return part


def calls(gm: GraphModule) -> list[str]:
    """The names of what a graph calls."""
    return [n.name for n in gm.graph.nodes if n.op.startswith("call")]


def two_steps(x: Tensor, y: Tensor) -> Tensor:
    return ((x.exp() + y).sin() * y).cos()


def test_a_part_is_what_lies_between_sources_and_result() -> None:
    part = check(two_steps, [randn(3), randn(3)], "mul", ["sin"])
    assert calls(part.original) == ["mul"] and {n.name for n in part.nodes} == {"sin", "l_y_"}
    part = check(two_steps, [randn(3), randn(3)], "mul", [])
    assert calls(part.original) == ["exp", "add", "sin", "mul"]


def written_on_the_way(x: Tensor) -> Tensor:
    y = x.exp()
    z = y + 1
    y.mul_(3)
    z = z.sin()
    return z @ y


def test_what_is_written_on_the_way_is_part_of_it() -> None:
    part = check(written_on_the_way, [randn(4, 4)], "matmul", [])
    assert any(n.target == "mul_" for n in part.original.graph.nodes)


def test_what_was_written_before_a_source_is_read_is_in_its_value() -> None:
    gm = captured(written_on_the_way, randn(4, 4))
    ((exp,), (product,), (mul,)) = (nodes_of(gm, name) for name in ("exp", "matmul", "mul_"))
    effects, sin = Effects(gm.graph), nodes_of(gm, "sin")[0]
    late = {exp: effects.position[mul] + 1, sin: effects.position[sin]}
    part = cut_of(gm, product, late)
    assert not any(n.target == "mul_" for n in part.original.graph.nodes)
    assert any(n.target == "mul_" for n in cut_of(gm, product, inputs_of(gm)).original.graph.nodes)


def test_what_reads_a_source_before_it_was_written_cannot_begin_with_it() -> None:
    gm = captured(written_on_the_way, randn(4, 4))
    (exp,), (mul,) = nodes_of(gm, "exp"), nodes_of(gm, "mul_")
    (product,) = nodes_of(gm, "matmul")
    position = Effects(gm.graph).position
    with pytest.raises(CannotExtract, match="mul_ writes to an input of the site"):
        cut_of(gm, product, {exp: position[mul] + 1}, also=[mul])


# ---------------------------------------------------------------- what is no part


def test_a_part_that_reads_too_much_is_none() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(260):
            x = x.sin()
        return x.cos()

    gm = captured(long, randn(2))
    with pytest.raises(CannotExtract, match="more than 250 operations"):
        cut_of(gm, nodes_of(gm, "cos")[0], inputs_of(gm))
    near = nodes_of(gm, "sin")[-10]
    assert cut_of(gm, nodes_of(gm, "cos")[0], [near]).nodes == (near,)


class Holding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.own).sin()


def holding() -> GraphModule:
    """A graph that reads a tensor of its own."""
    program = torch.export.export(Holding(), (randn(3),)).module()
    assert isinstance(program, GraphModule)
    return program


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda: captured(lambda x: x.exp().add_(1).sin(), randn(3)), r"it writes memory in place \(add_\)"),
        (holding, "it reads a tensor of the program's own"),
        (lambda: captured(branching, randn(3)), "it calls a graph"),
    ],
)
def test_a_plain_part_writes_calls_and_holds_nothing(program: Callable[[], GraphModule], why: str) -> None:
    gm = program()
    (node,) = [n for n in gm.graph.nodes if "sin" in n.name and n.op.startswith("call")]
    cut_of(gm, node, inputs_of(gm))
    with pytest.raises(CannotExtract, match=why):
        cut_of(gm, node, inputs_of(gm), plain=True)


def branching(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)).sin()


def test_a_part_that_is_run_twice_draws_nothing() -> None:
    gm = captured(lambda x: F.dropout(x.exp(), 0.5, True).sin(), randn(3))
    (sin,), (exp,) = nodes_of(gm, "sin"), nodes_of(gm, "exp")
    (dropout,) = nodes_of(gm, "dropout")
    with pytest.raises(CannotExtract, match=r"it draws random numbers \(dropout\)"):
        cut_of(gm, sin, [exp], repeatable=True)
    assert cut_of(gm, sin, [exp]).nodes == (exp,)
    assert cut_of(gm, sin, [dropout], repeatable=True).nodes == (dropout,), "a source is drawn already"


def test_a_part_under_another_autocast_is_none() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        return y.sin()

    gm = captured(program, randn(4, 4))
    with pytest.raises(CannotExtract, match="runs under another autocast than the result"):
        cut_of(gm, nodes_of(gm, "sin")[0], inputs_of(gm))


def test_what_runs_without_gradients_has_none_in_the_part() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.exp()
        return (x * y).sin()

    gm = captured(program, randn(4).requires_grad_())
    (part,) = [cut_of(gm, nodes_of(gm, "sin")[0], inputs_of(gm), needs_grad=lambda _: True)]
    x = randn(4).requires_grad_()
    part.original(x)[0].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x * x.exp()).cos() * x.exp())
    assert [i.requires_grad for i in part.inputs] == [True]


# ---------------------------------------------------------------- sizes, and what was planned


def test_symbolic_sizes_are_numbers() -> None:
    def program(x: Tensor) -> Tensor:
        n = x.shape[0]
        return (x.reshape(2, n // 2, 3) + n).sin()

    gm = captured(program, randn(8, 3), dynamic=True)
    (sin,) = nodes_of(gm, "sin")
    x = next(n for n in inputs_of(gm) if isinstance(n.meta["example_value"], Tensor))
    part = cut_of(gm, sin, [x])
    assert part.shape == (2, 4, 3) and part.inputs[0].shape == (8, 3)
    value = randn(8, 3)
    torch.testing.assert_close(part.original(value)[0], (value.reshape(2, 4, 3) + 8).sin())
    symbol = str(x.meta["example_value"].shape[0])
    other = cut_of(gm, sin, [x], {symbol: 12})
    assert other.shape == (2, 6, 3) and other.inputs[0].shape == (12, 3)


def planned(gm: GraphModule, node: Node, make: Callable[[Plan], Value]) -> Value:
    effects = Effects(gm.graph)
    plan = Plan(gm, node, Regions(gm.graph, Region()).of(node), SizeNodes(gm, Sizes()), effects)
    with plan.running():
        return make(plan)


def test_what_was_planned_has_the_same_inputs() -> None:
    gm = captured(lambda x, y: (x.exp() * y).sin(), randn(3), randn(3))
    (sin,), (exp,), (mul,) = nodes_of(gm, "sin"), nodes_of(gm, "exp"), nodes_of(gm, "mul")
    y = inputs_of(gm)[1]
    new = planned(gm, sin, lambda p: p.call(aten.cos.default, p.call(aten.add.Tensor, y, exp)))
    part = cut_of(gm, sin, [exp], new=new, also=[mul])
    a, b = randn(3), randn(3)
    given = [a if n is exp else b for n in part.nodes]
    assert set(part.nodes) == {exp, y} and part.rewritten is not None
    torch.testing.assert_close(part.original(*given)[0], (a * b).sin())
    torch.testing.assert_close(part.rewritten(*given)[0], (a + b).cos())
    torch.testing.assert_close(part.also(*given)[0], a * b)
    assert cut_of(gm, sin, [exp]).rewritten is None


def test_what_was_planned_may_read_what_the_part_did_not() -> None:
    gm = captured(lambda x, y: (x.exp() * 2).sin() + y, randn(3), randn(3))
    (sin,), (exp,), y = nodes_of(gm, "sin"), nodes_of(gm, "exp"), inputs_of(gm)[1]
    assert y not in cut_of(gm, sin, [exp]).nodes
    new = planned(gm, sin, lambda p: p.call(aten.add.Tensor, exp, y))
    assert y in cut_of(gm, sin, [exp], new=new).nodes


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    "tensor",
    [
        randn(3, 4),
        randn(4, 3).t(),
        randn(3, 1).expand(3, 4),
        randn(40)[5:17].view(3, 4),
        randn(3, 8)[:, ::2],
        randn(0, 4),
        randn(3, 0),
        torch.tensor(2.0),
    ],
)
def test_an_input_lies_in_its_memory_as_the_programs_does(tensor: Tensor) -> None:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    entry = Input(shape, stride, "float32", "cpu", offset=tensor.storage_offset())
    view = entry.in_memory(torch.zeros(entry.memory))
    assert (view.shape, view.stride(), view.storage_offset()) == (tensor.shape, stride, entry.offset)
    if 0 in shape:
        assert entry.memory == 0
    else:
        with pytest.raises(RuntimeError, match="out of bounds"):
            entry.in_memory(torch.zeros(entry.memory - 1))


def test_the_inputs_of_a_part_are_laid_out_as_the_sources_are() -> None:
    gm = captured(lambda x: x.t().sin(), randn(40)[3:15].view(4, 3))
    (node,) = nodes_of(gm, "t")
    part = cut_of(gm, nodes_of(gm, "sin")[0], [node], known={node: randn(3, 4)})
    (entry,) = part.inputs
    assert (entry.shape, entry.stride, entry.dtype, entry.device) == ((3, 4), (1, 3), "float32", "cpu")
    assert entry.value is not None and not entry.requires_grad

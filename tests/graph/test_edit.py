"""Plans: calls run on fake values first, and are inserted in one step; sizes, and which strides can be observed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from against_eager import randn, same
from read_graphs import captured, inputs_of, nodes_of
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import LayoutError, Plan, Planned, SizeNodes, erase_unused, fake_of, replace_arguments
from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.index import Poly, Quotient, Symbol
from attn_pass.model.views import Expand, Permute, Reshape, Slice

aten = torch.ops.aten


def plan_for(gm: GraphModule, node: Node, **given: Any) -> Plan:
    """A plan for the place of a node, as the engine makes it."""
    effects, region = Effects(gm.graph), Regions(gm.graph, Region()).of(node)
    return Plan(gm, node, region, SizeNodes(gm, Sizes()), effects, **given)


def planned(gm: GraphModule, node: Node, make: Callable[[Plan], Any], **given: Any) -> tuple[Plan, Any]:
    plan = plan_for(gm, node, **given)
    with plan.running():
        return plan, make(plan)


# ---------------------------------------------------------------- planning


def test_the_graph_is_as_it_was_until_a_plan_is_applied() -> None:
    x = randn(3, 5)
    gm = captured(lambda x: x.exp().sin() + 1, x)
    (sin,), (exp,) = nodes_of(gm, "sin"), nodes_of(gm, "exp")
    before = gm.code
    plan, new = planned(gm, sin, lambda p: p.call(aten.cos.default, p.call(aten.neg.default, exp.args[0])))
    gm.recompile()
    assert gm.code == before and not plan.inserted and fake_of(new).shape == (3, 5)
    name, trace = sin.name, sin.meta["stack_trace"]
    node = plan.apply(new, [])
    gm.graph.lint()
    gm.recompile()
    assert sin._erased and exp._erased, "unused nodes"
    assert node.name == name and node.meta["stack_trace"] == trace
    assert [n.target for n in plan.inserted] == [aten.neg.default, aten.cos.default]
    torch.testing.assert_close(gm(x)[0], (-x).cos() + 1)


def test_a_call_that_torch_refuses_is_refused_before_anything_changes() -> None:
    gm = captured(lambda x: x.sin(), randn(3, 5))
    (sin,) = nodes_of(gm, "sin")
    before = str(gm.graph)
    with pytest.raises(Exception, match=r"shape|size|invalid"):
        planned(gm, sin, lambda p: p.call(aten.reshape.default, sin.args[0], [4, 4]))
    assert str(gm.graph) == before


def test_what_is_planned_and_not_needed_is_not_inserted() -> None:
    gm = captured(lambda x: x.sin(), randn(3, 5))
    (sin,) = nodes_of(gm, "sin")
    plan = plan_for(gm, sin)
    with plan.running():
        plan.call(aten.exp.default, sin.args[0])
        new = plan.call(aten.cos.default, sin.args[0])
    plan.apply(new, [])
    assert [n.target for n in plan.inserted] == [aten.cos.default]


def test_calls_of_numbers_alone_are_made_once_for_all_sites() -> None:
    gm = captured(lambda x: (x.sin(), x.cos()), randn(4))
    (sin,), (cos,) = nodes_of(gm, "sin"), nodes_of(gm, "cos")
    sizes, effects, regions = SizeNodes(gm, Sizes()), Effects(gm.graph), Regions(gm.graph, Region())

    def replaced(node: Node, start: float) -> list[Any]:
        plan = Plan(gm, node, regions.of(node), sizes, effects)
        with plan.running():
            ones = plan.call(aten.full.default, [4], start)
            new = plan.call(aten.add.Tensor, node.args[0], ones)
        effects.put_in_place_of(plan.apply(new, []), node)
        return [n.target for n in plan.inserted]

    both = [aten.full.default, aten.add.Tensor]
    assert replaced(sin, 0.0) == both
    assert replaced(cos, 0.0) == [aten.add.Tensor], "the numbers are in the graph already"
    gm.graph.lint()
    gm = captured(lambda x: (x.sin(), x.cos()), randn(4))
    (sin,), (cos,) = nodes_of(gm, "sin"), nodes_of(gm, "cos")
    sizes, effects, regions = SizeNodes(gm, Sizes()), Effects(gm.graph), Regions(gm.graph, Region())
    assert replaced(sin, 0.0) == replaced(cos, -0.0) == both, "0.0 and -0.0 are equal, and not the same"


def test_a_value_of_a_tensor_is_shared_only_on_request_and_if_it_is_never_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.exp()
        a = x.sin()
        y.add_(1)
        return a + y

    gm = captured(program, randn(4))
    (x,), (y,) = inputs_of(gm), nodes_of(gm, "exp")
    plan = plan_for(gm, nodes_of(gm, "sin")[0])
    with plan.running():
        assert plan.call(aten.exp.default, x).key is None
        with plan.sharing():
            assert plan.call(aten.exp.default, x).key is not None
            assert plan.call(aten.exp.default, y).key is None, "it is written"
        assert plan.call(aten.exp.default, x).key is None


# ---------------------------------------------------------------- sizes


def test_a_size_is_not_read_from_an_erased_node() -> None:
    a, b = (torch.export.Dim(name, min=2, max=99) for name in "ab")
    program = torch.export.export(Joined(), (randn(3), randn(5)), dynamic_shapes=({0: a}, {0: b}))
    gm = program.graph_module
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    (sin,), (cos,) = first.users, second.users
    sizes = Sizes()
    held = SizeNodes(gm, sizes)
    value = tensor_value(cos)
    assert value is not None
    joined = sizes.index(value.shape[0])
    assert held.dimensions[joined][0] is first

    (output,) = gm.graph.find_nodes(op="output")
    effects, region = Effects(gm.graph), Regions(gm.graph, Region()).of(cos)
    output.args = ((cos,),)
    for node in (sin, first):
        gm.graph.erase_node(node)
    plan = Plan(gm, cos, region, held, effects)
    with plan.running():
        size = plan.size(joined)
        ones = plan.call(torch.ops.aten.full.default, [size], 1.0)
    plan.insert(ones)
    gm.graph.lint()
    inputs = {i for node in plan.inserted for i in node.all_input_nodes}
    assert inputs and all(isinstance(node, Node) and not node._erased for node in inputs)


class Joined(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([a, b]).sin(), torch.cat([a, b]).cos()


def dynamic(length: int = 6) -> tuple[GraphModule, Node, Any]:
    """A graph with one symbolic size, its result, and that size as an index."""
    gm = captured(lambda x: x.exp().sin(), randn(length, 4), dynamic=True)
    (sin,) = nodes_of(gm, "sin")
    value = tensor_value(sin)
    assert value is not None and not isinstance(value.shape[0], int)
    return gm, sin, Sizes().index(value.shape[0])


def test_a_size_is_a_node_of_the_program_and_arithmetic_on_it() -> None:
    gm, sin, length = dynamic()
    plan = plan_for(gm, sin)
    half = Poly.of(Quotient(length + 1, 2))
    with plan.running():
        assert plan.size(7) == 7
        assert plan.size(length) is plan.size(length), "asked for twice, made once"
        new = plan.call(aten.full.default, [plan.size(half), plan.size(3 * length + 2)], 1.0)
    plan.insert(new)
    gm.graph.lint()
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    output.args = ((plan.inserted[-1],),)
    gm.recompile()
    inputs = (9 if tensor_value(n) is None else randn(9, 4) for n in inputs_of(gm))
    assert gm(*inputs)[0].shape == (5, 29)


def test_one_symbolic_size_of_a_shape_needs_no_node() -> None:
    gm, sin, length = dynamic()
    plan = plan_for(gm, sin)
    with plan.running():
        assert plan.shape([length, 4]) == [-1, 4] and plan.shape([2, 4]) == [2, 4]
        assert not plan.calls
        assert plan.shape([length, 0])[0] != -1, "beside a size of 0, -1 says nothing"


def test_a_size_that_no_node_holds_is_an_error() -> None:
    gm, sin, _ = dynamic()
    plan = plan_for(gm, sin)
    with plan.running(), pytest.raises(ValueError, match="no node holds the size nobody"):
        plan.size(Poly.of(Symbol("nobody")))


def test_steps_give_the_view() -> None:
    x = randn(4, 6)
    gm = captured(lambda x: x.sin(), x)
    (sin,) = nodes_of(gm, "sin")
    steps = [Slice(1, 2, 3), Permute((1, 0)), Reshape((3, 1, 4)), Expand((3, 2, 4))]
    plan, new = planned(gm, sin, lambda p: p.steps(sin.args[0], steps))
    plan.apply(new, [])
    gm.recompile()
    torch.testing.assert_close(gm(x)[0], x[:, 2:5].t().reshape(3, 1, 4).expand(3, 2, 4))


def test_a_guard_that_fails_for_some_size_is_reported() -> None:
    gm, sin, _ = dynamic()
    plan = plan_for(gm, sin)
    value = tensor_value(sin)
    assert value is not None
    since = plan.guards()
    assert plan.broken_guard(since) is None
    assert value.shape[0] % 2 == 0  # asked of the symbol, which torch notes down
    assert plan.guards() > since
    reported = plan.broken_guard(since)
    assert reported is not None and "fails for" in reported
    assert plan.broken_guard(plan.guards()) is None, "it was there before"


# ---------------------------------------------------------------- in place of a node


def test_a_node_that_is_needed_elsewhere_stays() -> None:
    x = randn(3)
    gm = captured(lambda x: (lambda e: (e.sin(), e))(x.exp()), x)
    (sin,), (exp,) = nodes_of(gm, "sin"), nodes_of(gm, "exp")
    plan, new = planned(gm, sin, lambda p: p.call(aten.cos.default, exp.args[0]))
    plan.apply(new, [exp])
    gm.graph.lint()
    gm.recompile()
    assert sin._erased and not exp._erased
    torch.testing.assert_close(gm(x), (x.cos(), x.exp()))


def test_what_has_an_effect_is_not_erased_with_its_users() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.clone()
        y.exp_()
        return y.sin().cos()

    gm = captured(program, randn(3))
    (cos,), (sin,), (written,) = nodes_of(gm, "cos"), nodes_of(gm, "sin"), nodes_of(gm, "exp_")
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    output.args = ((written.args[0],),)
    erase_unused(gm.graph, [cos, written])
    assert cos._erased and sin._erased and not written._erased
    gm.graph.lint()


def test_a_value_beside_the_result_leaves_what_is_erased_alone() -> None:
    gm = captured(lambda x: (lambda e: (e.sin(), e.cos()))(x.exp()), randn(3))
    (sin,), (cos,), (exp,) = nodes_of(gm, "sin"), nodes_of(gm, "cos"), nodes_of(gm, "exp")
    plan, new = planned(gm, sin, lambda p: p.call(aten.neg.default, exp.args[0]))
    node = plan.put_beside(new, exp, {sin})
    assert sin.args == (exp,) and cos.args == (node,)


def test_other_arguments_of_a_call() -> None:
    x = randn(3, 3)
    gm = captured(lambda x: torch.add(x, x.t().contiguous(), alpha=2), x)
    (add,), (place,) = nodes_of(gm, "add"), inputs_of(gm)
    replace_arguments(add, (place, place), {"alpha": 3})
    gm.recompile()
    torch.testing.assert_close(gm(x)[0], 4 * x)


# ---------------------------------------------------------------- layout


def transposed(plan: Plan, node: Node) -> Planned:
    """The same elements, the last two dimensions in another order in memory."""
    turned = plan.call(aten.mT.default, node.args[0])
    copied = plan.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return plan.call(aten.mT.default, plan.call(aten.sin.default, copied))


SEES = {
    "it is returned": (lambda s: s, True),
    "as_strided": (lambda s: s.as_strided((2,), (1,)), True),
    "stride": (lambda s: s + s.stride(0), True),
    "written in place": (lambda s: s.mul_(2).sum(), True),
    "a view that fails with the other strides": (lambda s: s.view(-1).sum(), True),
    "summed": (lambda s: s.sum(), False),
    "a product": (lambda s: s @ torch.ones(5, 2), False),
    "a reshape": (lambda s: s.reshape(-1) + 1, False),
    "pointwise, then returned": (lambda s: s + 1, True),
    "pointwise, then summed": (lambda s: (s + 1).exp().sum(), False),
}


@pytest.mark.parametrize("name", SEES)
def test_whether_the_strides_can_be_observed(name: str) -> None:
    after, seen = SEES[name]
    gm = captured(lambda x: after(x.sin()), randn(3, 5))
    (sin,) = nodes_of(gm, "sin")
    plan, same = planned(gm, sin, lambda p: p.call(aten.cos.default, sin.args[0]))
    assert plan.keeps_layout(same) and plan.has_layout_of(same, sin)
    plan, other = planned(gm, sin, lambda p: transposed(p, sin))
    assert not plan.has_layout_of(other, sin)
    if name != "stride":  # dynamo has made a number of it
        assert plan.keeps_layout(other) is not seen


def test_the_strides_of_a_size_of_one_do_not_matter() -> None:
    gm = captured(lambda x: x.sin(), randn(1, 5))
    (sin,) = nodes_of(gm, "sin")
    plan, other = planned(gm, sin, lambda p: transposed(p, sin))
    assert fake_of(other).stride() != (5, 1) and plan.keeps_layout(other)


def test_the_layout_of_the_result_is_made_where_it_can_be() -> None:
    gm = captured(lambda x: x.mT.sin(), randn(3, 5))
    (sin,) = nodes_of(gm, "sin")
    _, new = planned(gm, sin, lambda p: p.in_layout_of_result(p.call(aten.zeros.default, [5, 3])))
    assert fake_of(new).stride() == (1, 5)
    gm = captured(lambda x: torch.sin(x.expand(3, 5)).as_strided((3, 5), (0, 1)), randn(5))
    (strided,) = nodes_of(gm, "as_strided")
    with pytest.raises(LayoutError, match="cannot be kept"):
        planned(gm, strided, lambda p: p.in_layout_of_result(p.call(aten.zeros.default, [3, 5])))


# ---------------------------------------------------------------- what is written


MERGED: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "read": (lambda s: s.mT.reshape(-1).exp().sum(), False),
    "written": (lambda s: s.mT.reshape(-1).mul_(2).sum(), True),
    "a view of it written": (lambda s: s.mT.reshape(-1).view(5, 3).mul_(2).sum(), True),
    "a view that becomes a copy": (lambda s: s.reshape(-1).mul_(2).sum() + s.sum(), True),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_copy_that_becomes_a_view_may_not_be_written(name: str) -> None:
    """The dense value of a transposed one: its own transposed value is merged without a copy."""
    after, matters = MERGED[name]
    gm = captured(lambda x: after(x.sin()), randn(3, 5))
    (sin,) = nodes_of(gm, "sin")
    plan, other = planned(gm, sin, lambda p: transposed(p, sin))
    assert plan.keeps_layout(other) is not matters


def test_a_copy_that_becomes_a_view_may_be_given_to_a_caller_without_gradients_alone() -> None:
    for grad in (False, True):
        gm = captured(lambda x: x.sin().mT.reshape(-1), randn(3, 5, grad=grad))
        (sin,) = nodes_of(gm, "sin")
        for in_body in (False, True):
            plan, other = planned(gm, sin, partial(transposed, node=sin), in_body=in_body)
            assert plan.keeps_layout(other) is not (grad and in_body)


def test_whether_the_result_is_written_later() -> None:
    def written(gm: GraphModule, **given: Any) -> bool:
        return plan_for(gm, nodes_of(gm, "sin")[0], **given).may_be_written_later()

    assert written(captured(lambda x: x.sin().t().mul_(2), randn(3, 3)))
    plain = captured(lambda x: x.sin(), randn(3))
    assert not written(plain)
    assert written(plain, in_body=True), "a caller may write what a body returns"
    assert not written(captured(lambda x: x.sin().sum(), randn(3)), in_body=True)


def test_an_operand_written_after_the_site_is_copied_in_training_alone() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = x.clone()
        b = a.sin() * y
        a.add_(1)
        return b + a

    def operand(grad: bool, name: str) -> Any:
        gm = captured(program, randn(3), randn(3).requires_grad_(grad))
        (product,) = nodes_of(gm, "mul")
        (node,) = nodes_of(gm, name)
        _, value = planned(gm, product, lambda p: p.unwritten(node))
        return value is node

    assert operand(False, "clone")
    assert not operand(True, "clone"), "the backward wants what it was"
    assert operand(True, "sin"), "it is never written"


def test_layouts_are_followed_through_lists() -> None:
    """A result that lies otherwise makes `cat` lie otherwise, and a view of that a copy."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.bmm(q, k) * 0.25, 2)
        return torch.bmm(v, weights.permute(0, 2, 1)).view(-1, 8, 4, 4)

    def run(*x: Tensor) -> Tensor:
        y = torch.cat([attend(*x[:3]), attend(*x[3:])], 1)
        y.reshape(y.shape[0], -1).mul_(2)  # of a view
        return y

    x = [torch.randn(2, 16, 8), torch.randn(2, 8, 16), torch.randn(2, 8, 16)]
    same(run, *x, *(t.flip(0) for t in x), targets=("sdpa",))


def test_a_number_in_a_quotient_is_a_size() -> None:
    """``4 // k.shape[1]``, where the heads of the keys are known at run time only."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.view(q.shape[0], 4 // k.shape[1], -1, *q.shape[2:])
        return (grouped @ k.mT[:, None] * 0.3).softmax(-1) @ v[:, None]

    same(run, randn(3, 4, 7, 8), randn(3, 2, 9, 8, seed=1), randn(3, 2, 9, 8, seed=2), dynamic=True)

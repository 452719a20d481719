"""Puts one product in the place of several: weights above each other, and each layer's result in its own columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from attn_pass.graph.edit import Plan, Planned, SizeNodes, Value
from attn_pass.graph.values import LAID_OUT, tensor_value
from attn_pass.projections.groups import Group, Grouping
from attn_pass.projections.linear import Linear, linear_of
from attn_pass.reading.vocabulary import operation_of

aten = torch.ops.aten
SEEN = "the memory layout of its result is observable"


class Join:
    """One group of one graph: planned on fake values when constructed, and put into the graph by `apply`."""

    def __init__(self, grouping: Grouping, size_nodes: SizeNodes, linears: Sequence[Linear]) -> None:
        self.grouping, self.linears = grouping, linears
        self.plan = self._plan_for(linears[0].node, size_nodes)
        with self.plan.running():
            self.results = self._results()
            self.told_apart = [
                one
                for one, result in zip(linears, self.results)
                if self._is_held(one.node) or not self._plan_for(one.node, size_nodes).keeps_layout(result)
            ]

    def _plan_for(self, node: Node, size_nodes: SizeNodes) -> Plan:
        of = self.grouping
        return Plan(of.gm, node, of.regions.of(node), size_nodes, of.effects, any_strides=of.any_strides)

    def _is_held(self, node: Node) -> bool:
        """Whether a view of a result is returned, or goes where code may ask at which place of its memory it begins."""
        users = (user for alias in self.grouping.effects.aliases(node) for user in alias.users)
        return any(u.op == "output" or isinstance(u.target, torch._ops.HigherOrderOperator) for u in users)

    def _results(self) -> list[Planned]:
        plan, first = self.plan, self.linears[0]
        weight = plan.call(aten.cat.default, [one.weight for one in self.linears], 0)
        widths = [_width(one) for one in self.linears]
        bias: Planned | None = None
        if any(one.bias is not None for one in self.linears):
            bias = plan.call(aten.cat.default, [self._bias(one, n) for one, n in zip(self.linears, widths)], 0)
        self.joined = [weight] if bias is None else [weight, bias]
        linear = first.node.target if operation_of(first.node) == "linear" else aten.linear.default
        assert callable(linear)
        now = linear_of(first.node)  # another join may have replaced what it reads
        assert now is not None
        joined = plan.call(linear, now.input, weight, bias)
        last, at, results = joined.fake.dim() - 1, 0, []
        for width in widths:
            results.append(plan.call(aten.slice.Tensor, joined, last, at, at + width))
            at += width
        return results

    def _bias(self, linear: Linear, width: int) -> Value:
        """A layer's bias, zeros where it has none."""
        if linear.bias is not None:
            return linear.bias
        fake = next(v for one in self.linears if (v := tensor_value(one.bias)) is not None)
        return self.plan.call(aten.zeros.default, [width], dtype=fake.dtype, device=fake.device)

    def apply(self, laid_out: bool) -> None:
        """Changes the graph: the product stands where the first of those that it replaces did.

        ``laid_out`` says that weights and biases are parameters that can be laid into one buffer.
        """
        effects = self.grouping.effects
        nodes = [one.node for one in self.linears]
        for tensor in [n for one in self.linears for n in one.parameters]:
            if effects.position[tensor] > effects.position[nodes[0]]:
                nodes[0].prepend(tensor)  # an attribute, which nothing writes
        gone = set(nodes)
        for old, result in zip(nodes[1:], self.results[1:]):
            self._note(self.plan.put_beside(result, old, gone), old)
        first = nodes[0]
        self._note(self.plan.apply(self.results[0], nodes[1:]), first)
        for joined in self.joined if laid_out else ():
            assert joined.node is not None
            joined.node.meta[LAID_OUT] = True

    def _note(self, new: Node, old: Node) -> None:
        self.grouping.effects.put_in_place_of(new, old)
        self.grouping.regions.add(new, self.grouping.regions.of(old))


def planned(grouping: Grouping, size_nodes: SizeNodes, group: Group) -> tuple[Join | None, list[Linear]]:
    """The edit of those layers of a group whose users cannot tell, and the layers that stay apart as theirs can."""
    linears = list(group.linears)
    apart: list[Linear] = []
    while len(linears) > 1:
        join = Join(grouping, size_nodes, linears)
        if not join.told_apart:
            return join, apart
        apart += join.told_apart
        linears = [one for one in linears if one not in apart]
    return None, [*linears, *apart]


def _width(linear: Linear) -> int:
    value = tensor_value(linear.weight)
    assert value is not None
    return int(value.shape[0])

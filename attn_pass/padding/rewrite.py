"""Writes a proved region down: its operations on packed rows, in the order they had, and exits with all rows again."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.names import torch_name
from attn_pass.graph.regions import Regions
from attn_pass.graph.values import Sizes, fake_value, nodes_in, tensor_value
from attn_pass.padding.exits import Exit
from attn_pass.padding.layouts import Layout
from attn_pass.padding.masks import PER_BATCH, averages, places
from attn_pass.padding.packed import CannotPackError, Emitter, Packing, mapped
from attn_pass.padding.rules import RowWise, first_tensor
from attn_pass.padding.scores import ADDED
from attn_pass.padding.trace import Proof, Trace

aten = torch.ops.aten


class Rewrite:
    """One region of one graph; where less than ``least`` of its rows is padding, all are packed."""

    def __init__(
        self, gm: GraphModule, sizes: Sizes, regions: Regions, trace: Trace, proof: Proof, least: float = 0.0
    ) -> None:
        self.gm, self.sizes, self.regions, self.trace, self.proof = gm, sizes, regions, trace, proof
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.anchor, self.least = self._anchor(), least
        self.whole = set(proof.whole)
        self.new: dict[Node, Node] = {}
        self.entries: list[Node] = []  # what is packed where the region begins

    def _anchor(self) -> Node:
        """The node in front of which rows are counted: behind the mask, and behind all inputs."""
        last = max(self.proof.group.mask.nodes, key=self.order.__getitem__)
        after = last.next
        while after.op in ("placeholder", "get_attr"):
            after = after.next
        return after

    def apply(self) -> None:
        """Changes the graph. Raises `CannotPackError`, or what torch raises on fake values, before anything has."""
        region = [n for n in self.gm.graph.nodes if n in self.proof.layouts]
        state = self.regions.of(self.anchor)
        self._check(region, state)
        first = self.proof.sites[0]
        emit = Emitter(self.gm, self.sizes, first, self.anchor, self.regions)
        read = (*self.proof.exits.values(), *self.proof.inside.values())
        exits = [e for by_user in read for e in by_user.values()]
        value = first_tensor(first)
        assert value is not None
        replaced: list[tuple[Node, Node, Node]] = []
        losses: list[tuple[Node, Node]] = []
        with emit.running():
            group, sites = self.proof.group, self.proof.sites
            counted = places(sites), averages(sites), self.least
            packing = Packing(emit, group.mask, group.rows, exits, value.device, *counted)
            puts_back = exits or self.whole or self._adds_rows(region) or self.proof.is_trained
            packing.prepare(self._spreads(region), bool(puts_back))
            for node in region:
                before = self.anchor if self.order[node] < self.order[self.anchor] else node
                with emit.standing(before, node):
                    self.new[node] = self._packed_call(emit, packing, node)
            for node, by_user in self.proof.exits.items():
                users = sorted(by_user, key=self.order.__getitem__)
                of_loss = [user for user in users if by_user[user].is_loss]
                losses += [(user, self._loss(emit, packing, node, user, by_user[user])) for user in of_loss]
                replaced += self._leave(emit, packing, node, [user for user in users if user not in of_loss])
        for user, node, unpacked in replaced:
            user.replace_input_with(node, unpacked)
        for user, on_rows in losses:
            user.replace_all_uses_with(on_rows)
            self.gm.graph.erase_node(user)
        for node in reversed(region):
            self.gm.graph.erase_node(node)

    def _leave(self, emit: Emitter, packing: Packing, node: Node, users: list[Node]) -> list[tuple[Node, Node, Node]]:
        """The rows of a value in their places: for each user what it is to read.

        Once for all users with gradients and once for those without, which would cut the gradient of the others off.
        """
        by_grad_mode: dict[bool | None, Node] = {}
        for user in users:
            state = self.regions.of(user)
            if state.grad_enabled not in by_grad_mode:
                with emit.standing(user, node):
                    by_grad_mode[state.grad_enabled] = packing.unpacked(
                        self.new[node], self.proof.layouts[node], like=node
                    )
        return [(user, node, by_grad_mode[self.regions.of(user).grad_enabled]) for user in users]

    def _loss(self, emit: Emitter, packing: Packing, node: Node, user: Node, leaving: Exit) -> Node:
        """A loss of the rows that are there, and of their labels: the labels of all others are ignored."""
        layout, labels, result = self.proof.layouts[node], leaving.tensor, tensor_value(user)
        assert labels is not None and result is not None
        with emit.standing(user, user):
            rows, of_rows = self.new[node], packing.packed_here(labels, layout if layout.merged else Layout(0, 1))
            if not layout.merged:  # (1, C, rows), which torch's losses do not take where the rows are counted
                rows = emit.call(aten.t.default, emit.call(aten.squeeze.dim, rows, 0))
                of_rows = emit.call(aten.squeeze.dim, of_rows, 0)
            by_name = {node: rows, labels: of_rows}
            args, kwargs = mapped(user, lambda n: by_name.get(n, n))
            loss = emit.call(user.target, *args, **kwargs)
            if not result.dim():
                return loss
            if layout.merged:
                return packing.unpacked(loss, layout, like=user)
            return packing.unpacked(emit.call(aten.unsqueeze.default, loss, 0), Layout(0, 1), like=user)

    def _check(self, region: list[Node], state: Any) -> None:
        """Raises `CannotPackError` where an operation would have to move to where it means something else."""
        start = self.order[self.anchor]
        early = [n for n in region if self.order[n] < start]
        if any(self.regions.of(n) != state for n in early):
            raise CannotPackError("it begins under another state, of autocast or gradients, than its mask is made in")
        users = (u for by_user in self.proof.exits.values() for u in by_user)
        if any(self.order[u] < start for u in users):
            raise CannotPackError("rows leave it before its mask is made")

    def _adds_rows(self, region: list[Node]) -> bool:
        """Whether an attention adds rows of the region to its scores as they are."""
        return any(x in region for site in self.proof.sites for x in nodes_in([site.kwargs.get(n) for n in ADDED]))

    def _spreads(self, region: list[Node]) -> bool:
        """Whether some operand lacks the batch or the positions."""
        return any(
            self.trace.of_operand(node, rule, operand) is None and dims
            for node in region
            if (rule := self.trace.rule(node)) is not None and rule.spreads
            for operand, dims in rule.flows
        )

    # ------------------------------------------------------------ one operation

    def _packed_call(self, emit: Emitter, packing: Packing, node: Node) -> Node:
        rule, layout = self.trace.rule(node), self.proof.layouts[node]
        assert rule is not None
        ((source, _), *_) = rule.flows
        if node in self.whole:
            return self._as_it_was(emit, packing, node)
        if source in self.whole and isinstance(fake_value(source), (tuple, list)):
            return packing.packed(emit.call(getitem, self.new[source], 0), layout)
        operands = {n: self._operand(emit, packing, node, rule, n) for n, _ in rule.flows}
        if node in self.proof.group.sites:
            return self._attention(emit, packing, node, operands)
        if rule.reshapes:
            (source,) = operands.values()
            return emit.call(aten.reshape.default, source, self._shape(node, layout, packing))

        if torch_name(node) == "view_as_complex":
            operands = {n: self._in_pairs(emit, x) for n, x in operands.items()}

        def packed_operand(old: Node) -> Node:
            return operands.get(old, old)

        args, kwargs = mapped(node, packed_operand)
        return emit.call(node.target, *args, op=node.op, **kwargs)

    def _operand(self, emit: Emitter, packing: Packing, node: Node, rule: RowWise, operand: Node) -> Node:
        if operand in self.new:
            return self.new[operand]
        layout = self.trace.of_operand(node, rule, operand)
        if layout is not None:
            self.entries.append(operand)
            return packing.packed(operand, layout)
        dims = next(d for flow, d in rule.flows if flow is operand)
        return self._spread(packing, self.proof.layouts[node], node, operand, dims)

    def _spread(self, packing: Packing, layout: Layout, node: Node, operand: Node, dims: Mapping[int, int]) -> Node:
        """An operand that lacks the batch, the positions or both."""
        from_result = {new: old for old, new in dims.items()}
        batch, length = from_result.get(layout.batch), from_result.get(layout.length)
        if batch is None and length is None:
            return operand
        self.entries.append(operand)
        if batch is not None and length is None:
            rules = self.trace.around.rules
            length = layout.length - len(rules.shape(node)) + len(rules.shape(operand))
        return packing.spread(operand, batch, length)

    def _in_pairs(self, emit: Emitter, node: Node) -> Node:
        """With the numbers of its last dimension beside each other, as they were, but may not be where it is packed."""
        value = tensor_value(node)
        if value is None or self.sizes.index(value.stride(-1)) == 1:
            return node
        return emit.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _shape(self, node: Node, layout: Layout, packing: Packing) -> list[Any]:
        """The shape of a packed result."""
        shape: list[Any] = []
        for dim, size in enumerate(self.trace.around.rules.shape(node)):
            if dim == layout.length:
                shape.append(packing.count)
            elif dim == layout.batch:
                shape.append(1)
            elif isinstance(size, int):
                shape.append(size)
            else:
                raise CannotPackError("a size beside the rows is known at run time only")
        return shape

    def _attention(self, emit: Emitter, packing: Packing, node: Node, operands: Mapping[Node, Node]) -> Node:
        kwargs: dict[str, Any] = {
            name: value for name, value in node.kwargs.items() if name not in ("keep", *PER_BATCH)
        }
        if kwargs.get("captured"):
            kwargs["captured"] = [self._of_four(emit, x) for x in kwargs["captured"]]
        if (bias := kwargs.get("bias")) is not None:
            kwargs["bias"] = self._of_four(emit, self._in_places(packing, bias))
        if tables := kwargs.get("tables"):
            kwargs["tables"] = [self._in_places(packing, x) for x in tables]
        query, key, value = (operands[n] for n in node.args[:3] if isinstance(n, Node))
        kwargs |= {"keep": packing.keep, "offsets": packing.offsets}
        return emit.call(node.target, query, key, value, *node.args[3:], **kwargs)

    def _in_places(self, packing: Packing, added: Node) -> Node:
        """What is added to scores; where it is rows of the region, each at its place."""
        if added not in self.new:
            return added
        return packing.unpacked(self.new[added], self.proof.layouts[added], like=added)

    def _as_it_was(self, emit: Emitter, packing: Packing, node: Node) -> Node:
        """An attention that is called as it was: with operands in their places, and its result is packed."""
        unpacked: dict[Node, Node] = {}

        def with_all_rows(old: Node) -> Node:
            if old not in self.new:
                return old
            if old not in unpacked:
                unpacked[old] = packing.unpacked(self.new[old], self.proof.layouts[old], like=old)
            return unpacked[old]

        args, kwargs = mapped(node, with_all_rows)
        called = emit.call(node.target, *args, **kwargs)
        if isinstance(fake_value(node), (tuple, list)):  # what takes its result packs that
            return called
        return packing.packed(called, self.proof.layouts[node])

    def _of_four(self, emit: Emitter, node: Any) -> Node:
        shape = emit.shape(node)
        missing = 4 - len(shape)
        return emit.call(aten.reshape.default, node, [*(1 for _ in range(missing)), *shape]) if missing else node


def leaves(proof: Proof) -> list[tuple[Node, Node, Exit]]:
    """Every place where rows are read as no rows: the value, its user and why that is allowed."""
    read = (*proof.exits.items(), *proof.inside.items())
    return [(node, user, leaving) for node, by_user in read for user, leaving in by_user.items()]

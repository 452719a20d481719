"""Which values of a graph are row-wise, and of which no result depends on the padding: the proof of a region.

From the attentions the rows are followed in both directions, through operations that have a rule (`rules`). Then every
value is asked who uses it: an operation of the region, an exit (`exits`), or something that may see rows of padding.
What is seen is computed as it was, and so is all that it is made of. The rest is the region.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.names import operation_name
from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.index import product
from attn_pass.padding.added import ancestors, is_called_whole
from attn_pass.padding.cross import Origins, cross_rule
from attn_pass.padding.exits import Exit, Surroundings, exit_of
from attn_pass.padding.layouts import Layout, reshaped, through
from attn_pass.padding.masks import Group
from attn_pass.padding.rules import RowWise, first_tensor
from attn_pass.report.places import source_line
from attn_pass.report.region import IN_RESULT

_QKV = Layout(0, 2)
_MOST = 60  # operations that tell which rows are read, computed once more before the region


@dataclass
class Proof:
    """A region: its values with their layouts, where rows leave it, and why it is no larger."""

    group: Group
    layouts: dict[Node, Layout]
    exits: dict[Node, dict[Node, Exit]]  # by value, then by user
    stops: dict[Node, str] = field(default_factory=dict)  # values whose padding something may see, and what
    others: frozenset[Node] = frozenset()  # attentions of the graph whose keys are of other rows
    inside: dict[Node, dict[Node, Exit]] = field(default_factory=dict)  # what reads rows as no rows, and is in it

    @property
    def sites(self) -> list[Node]:
        """The attentions in it."""
        return [n for n in self.group.sites if n in self.layouts]

    @property
    def crosses(self) -> list[Node]:
        """Attentions in it whose keys are of other rows."""
        return [n for n in self.others if n in self.layouts]

    @property
    def whole(self) -> list[Node]:
        """Attentions in it that are called as they were, with all rows in their places."""
        return [*self.crosses, *(n for n in self.sites if is_called_whole(n))]

    @property
    def is_trained(self) -> bool:
        """Whether something in it may have a gradient."""
        return any(value.requires_grad for n in self.layouts if (value := first_tensor(n)) is not None)


class Trace:
    """The values whose rows come from, or go to, the attentions of a group."""

    def __init__(self, group: Group, around: Surroundings, effects: Effects) -> None:
        self.group, self.around, self.effects = group, around, effects
        self.layouts: dict[Node, Layout] = {}
        self.conflicts: set[Node] = set()
        self.no_exits: set[tuple[Node, Node]] = set()  # values and users that turned out to be none
        self.crosses = Origins(group.sites[0].graph, around.operators).crosses(group.sites)
        self._untouched = ancestors(group.mask.nodes)
        self.begins = max(effects.position[n] for n in group.mask.nodes)  # rows are counted behind the mask
        self._waiting: list[Node] = []
        self._follow()

    def rule(self, node: Node) -> RowWise | None:
        """The rule of a node; of the group's attentions, that of their queries, keys and values."""
        if node in self.crosses:
            return cross_rule(node)
        if node in self.group.sites:
            dims = {0: 0, 2: 2}
            return RowWise(tuple((n, dims) for n in dict.fromkeys(node.args[:3]) if isinstance(n, Node)))
        return self.around.rules.of(node)

    def _follow(self) -> None:
        for site in self.group.sites:
            self._add(site, _QKV)
        while self._waiting:
            node = self._waiting.pop()
            rule = self.rule(node)
            assert rule is not None
            for operand, _ in rule.flows:
                if (layout := self.of_operand(node, rule, operand)) is not None:
                    self._add(operand, layout)
            for user in node.users:
                self._go_on(node, user)

    def _go_on(self, node: Node, user: Node) -> None:
        rule = self.rule(user)
        if rule is None:
            return
        before = self.layouts[node]
        for operand, dims in rule.flows:
            if operand is node:
                rules = self.around.rules
                layout = (
                    reshaped(before, rules.shape(node), rules.shape(user), self.group.rows)
                    if rule.reshapes
                    else through(before, dims)
                )
                if layout is not None:
                    self._add(user, layout)

    def of_operand(self, node: Node, rule: RowWise, operand: Node) -> Layout | None:
        """Where the rows of an operand are, of a value with a layout; None where it has not all of them."""
        layout, rules = self.layouts[node], self.around.rules
        if rule.reshapes:
            return reshaped(layout, rules.shape(node), rules.shape(operand), self.group.rows)
        layouts = {
            through(layout, {new: old for old, new in dims.items()}) for flow, dims in rule.flows if flow is operand
        }
        return layouts.pop() if len(layouts) == 1 else None

    def _add(self, node: Node, layout: Layout) -> None:
        known = self.layouts.get(node)
        if known is not None:
            if known != layout:
                self.conflicts.add(node)
            return
        rule = self.rule(node)
        if rule is None or node in self._untouched or not self._has_rows(node, layout) or self.is_written(node):
            return
        self.layouts[node] = layout
        supplied = all(self._is_supplied(node, rule, operand) for operand, _ in rule.flows)
        if supplied and not any(map(self.is_written, rule.whole)):
            self._waiting.append(node)
        else:
            del self.layouts[node]

    def _has_rows(self, node: Node, layout: Layout) -> bool:
        shape, rows = self.around.rules.shape(node), self.group.rows
        if layout.merged:
            return bool(shape[layout.batch] == product(rows))
        return bool((shape[layout.batch], shape[layout.length]) == rows)

    def is_written(self, node: Node) -> bool:
        """Whether something writes to the memory of a node, at any time."""
        return tensor_value(node) is not None and bool(self.effects.mutations(node))

    def _is_supplied(self, node: Node, rule: RowWise, operand: Node) -> bool:
        """Whether an operand has all rows, or is one that packing can spread over them."""
        if self.of_operand(node, rule, operand) is not None:
            return not self.is_written(operand)
        if not rule.spreads or self.is_written(operand):
            return False
        layout, rank = self.layouts[node], len(self.around.rules.shape(operand))
        lead = len(self.around.rules.shape(node)) - rank
        dims = next(d for flow, d in rule.flows if flow is operand)
        has_batch = layout.batch in dims.values()
        return not has_batch or (not layout.merged and layout.length - lead >= 0)


def prove(trace: Trace) -> Proof:
    """The region of a group: the values whose padding no result depends on.

    Scores of rows of padding are seen where the attention that reads them is none of the region: again without these.
    """
    while True:
        exits: dict[Node, dict[Node, Exit]] = {}
        proof = _prove(trace, exits)
        sites = set(proof.sites)
        needed_elsewhere = {
            (node, user)
            for node in proof.layouts
            for user, leaving in exits.get(node, {}).items()
            if not sites >= set(leaving.sites)
        }
        if not needed_elsewhere:
            return proof
        trace.no_exits |= needed_elsewhere


def _prove(trace: Trace, exits: dict[Node, dict[Node, Exit]]) -> Proof:
    stops: dict[Node, str] = {}
    for node in trace.layouts:
        if node in trace.conflicts:
            stops[node] = "its rows are used in two ways"
            continue
        for user in node.users:
            if not is_inner(trace, node, user) and _exit(trace, exits, node, user) is None:
                stops[node] = what_sees(user)
                break
    seen, waiting = set(stops), list(stops)
    while waiting:
        node = waiting.pop()
        for operand in node.all_input_nodes:
            if operand in seen or operand not in trace.layouts or _exit(trace, exits, operand, node) is not None:
                continue
            seen.add(operand)
            waiting.append(operand)
    region = {n: layout for n, layout in trace.layouts.items() if n not in seen}
    region = {n: layout for n, layout in region.items() if not _is_of_a_list(n, region)}
    read = {n: {u: e for u in n.users if (e := _exit(trace, exits, n, u)) is not None} for n in region}
    left = {n: {u: e for u, e in by_user.items() if u not in region} for n, by_user in read.items()}
    inside = {
        n: {u: e for u, e in by_user.items() if u in region and not is_inner(trace, n, u)}
        for n, by_user in read.items()
    }
    left, inside = ({n: by_user for n, by_user in some.items() if by_user} for some in (left, inside))
    return Proof(trace.group, region, left, stops, trace.crosses, inside)


def _is_of_a_list(node: Node, region: Collection[Node]) -> bool:
    """Whether a node takes one of several tensors that are computed as they were: what is packed is that one."""
    lists = (
        n for n in node.all_input_nodes if isinstance(fake_value(n), (tuple, list)) and first_tensor(n) is not None
    )
    return any(n not in region for n in lists)


def is_inner(trace: Trace, node: Node, user: Node) -> bool:
    """Whether a user takes the rows of a value as rows, and each by each."""
    if user not in trace.layouts:
        return False
    rule = trace.rule(user)
    if rule is None or node in rule.whole:
        return False
    extra: list[Node] = []
    if user in trace.group.sites:  # beside queries, keys and values
        torch.fx.node.map_arg(user.kwargs, extra.append)
    return node not in extra and trace.of_operand(user, rule, node) == trace.layouts[node]


def _exit(trace: Trace, known: dict[Node, dict[Node, Exit]], node: Node, user: Node) -> Exit | None:
    if trace.effects.position[user] <= trace.begins or (node, user) in trace.no_exits:
        return None
    by_user = known.setdefault(node, {})
    if user not in by_user:
        leaving = exit_of(user, node, trace.layouts[node], trace.around) if tensor_value(node) is not None else None
        if leaving is None or not _is_decidable(trace, leaving):
            return None
        by_user[user] = leaving
    return by_user[user]


def _is_decidable(trace: Trace, leaving: Exit) -> bool:
    """Whether the rows that an exit reads follow from nothing that the region computes."""
    if leaving.tensor is None:
        return True
    made_of = ancestors((leaving.tensor,))
    written = any(trace.is_written(n) for n in made_of | ancestors(leaving.seen_as))
    return len(made_of) <= _MOST and made_of.isdisjoint(trace.group.sites) and not written


def what_sees(user: Node) -> str:
    """Why a region ends at an operation."""
    if user.op == "output":
        return IN_RESULT
    where = source_line(user.meta)
    location = "" if where.startswith("unknown") else f" ({where})"
    return f"{operation_name(user)} may mix rows of padding with others{location}"

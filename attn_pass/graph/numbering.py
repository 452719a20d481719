"""Values by what computes them: two nodes of one number hold the same elements, so one may stand for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.effects import Effects, is_pure
from attn_pass.graph.random_draws import may_draw
from attn_pass.graph.regions import Regions

_MOST = 60  # operations that a value is made of


class Numbers:
    """The numbers of one graph's values, given out as they are asked for."""

    def __init__(self, effects: Effects, regions: Regions) -> None:
        self._effects, self._regions = effects, regions
        self._known: dict[Node, Any] = {}
        self._number: dict[Any, int] = {}

    def of(self, node: Node) -> Any:
        """The number of a value; the node itself where it is an input, or is not known to be the same once more."""
        if node not in self._known:
            self._known[node] = self._numbered(node, _MOST)
        return self._known[node]

    def among(self, nodes: Iterable[Node]) -> dict[Node, Any]:
        """What tells nodes apart as their numbers would, computed only for those that may have one number.

        Of values that are made of more operations than are followed, which number they have depends on what was asked
        for before: such nodes may be told apart here.
        """
        outlines = {node: _outline(node) for node in nodes}
        same = Counter(outlines.values())
        return {node: self.of(node) if same[outline] > 1 else node for node, outline in outlines.items()}

    def _numbered(self, node: Node, depth: int) -> Any:
        if node in self._known:
            return self._known[node]
        computed = node.op in ("call_function", "call_method") and is_pure(node)
        if not computed or not depth or may_draw(node) or self._effects.mutations(node):
            return node
        if (at := self._effects.position.get(node)) is None:  # made since the effects were read
            return node
        args: Any = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: self._argument(a, at, depth))
        key = (node.op, node.target, repr(args), str(self._regions.of(node)))
        self._known[node] = ("computed", self._number.setdefault(key, len(self._number)))
        return self._known[node]

    def _argument(self, value: Any, at: int, depth: int) -> Any:
        """What an operand is, as it is read at a place of the graph: something may have been written to it before."""
        if not isinstance(value, Node):
            return repr(value)
        written = self._effects.last_mutation(value, at)
        return str((self._numbered(value, depth - 1), None if written is None else written.position))


def _outline(node: Node) -> Any:
    """What two nodes of one number have in common at first sight: the operation, and what its operands are."""
    if node.op not in ("call_function", "call_method"):
        return node
    operands: list[Any] = []
    args = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: _at_sight(a, operands))
    return (node.op, node.target, repr(args), tuple(operands))


def _at_sight(value: Any, operands: list[Any]) -> str:
    """An argument in words; what is known of a node at first sight is added to ``operands``."""
    if not isinstance(value, Node):
        return repr(value)
    operands.append(value.target if value.op in ("call_function", "call_method") else value)
    return "node"

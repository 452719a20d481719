"""Attentions whose keys are of other rows than their queries: a decoder's attentions to its encoder.

They work row by row in their queries: a row of the result is made of one row of the queries, and of all keys and
values, which come from elsewhere. Which those are is told by the attentions that rows went through, as queries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from typing import Any

from torch.fx import Graph, Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.padding.rules import RowWise


class Origins:
    """For every value of a graph the attentions that its rows went through, of which only queries are followed."""

    def __init__(self, graph: Graph, operators: Collection[Any]) -> None:
        self._bits: dict[Node, int] = {}
        self._number: dict[Node, int] = {}
        for node in graph.nodes:
            is_site = node.op == "call_function" and node.target in operators
            bits = 0
            for operand in node.args[:1] if is_site else node.all_input_nodes:
                bits |= self._bits.get(operand, 0) if isinstance(operand, Node) else 0
            if is_site:
                self._number[node] = len(self._number)
                bits |= 1 << self._number[node]
            self._bits[node] = bits

    def reads_others(self, site: Node) -> bool:
        """Whether an attention's keys are rows of others than its queries: both went through nothing in common."""
        query, key = (self._of(n) for n in site.args[:2])
        return bool(query) and bool(key) and not query & key

    def crosses(self, sites: Collection[Node]) -> frozenset[Node]:
        """The attentions whose queries went through some of ``sites``, and whose keys and values went through none."""
        own, others = self._all(sites), self._number.keys() - set(sites)
        return frozenset(
            n for n in others if self._of(n.args[0]) & own and not any(self._of(x) & own for x in n.args[1:3])
        )

    def _of(self, value: Any) -> int:
        return self._bits.get(value, 0)

    def _all(self, sites: Collection[Node]) -> int:
        return sum(1 << self._number[n] for n in sites)


def cross_rule(site: Node) -> RowWise | None:
    """The rule of an attention whose keys and values are of other rows, read whole as all that it is told is."""
    query = site.args[0]
    if not isinstance(query, Node) or site.kwargs.get("offsets") is not None:
        return None
    if isinstance(fake_value(site), (tuple, list)):
        if any(user.target is not getitem or user.args[1] != 0 for user in site.users):
            return None
    read: list[Node] = []
    for argument in (*site.args[1:], *_flat(site.kwargs)):
        if isinstance(argument, Node) and tensor_value(argument) is not None:
            read.append(argument)
    return None if query in read else RowWise(((query, {0: 0, 2: 2}),), tuple(dict.fromkeys(read)))


def _flat(kwargs: Mapping[str, Any]) -> list[Any]:
    return [v for value in kwargs.values() for v in (value if isinstance(value, (list, tuple)) else [value])]

"""Whether the fused call that Inductor's patterns emit for a part of a program computes the same as the part.

The patterns ignore literals, so that a match proves nothing. Both graphs are therefore read as a program's own are, and
compared as functions of the same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from attn_pass.devices.registry import decomposed_calls
from attn_pass.graph.regions import Region
from attn_pass.graph.values import Sizes
from attn_pass.model.same_function import is_same_function
from attn_pass.options import Options
from attn_pass.patterns import calls, softmax
from attn_pass.patterns.base import Site
from attn_pass.patterns.random_ops import DropoutSites
from attn_pass.reading.parts import Described
from attn_pass.report.record import Report
from attn_pass.rewriting.context import GraphContext, Surroundings
from attn_pass.rewriting.run import Run

aten = torch.ops.aten
_IN_ORDER = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default))


@dataclass(frozen=True)
class Forward:
    """A copy of what a traced graph computes its first result with, and the copy ``of`` each of its nodes."""

    gm: GraphModule
    of: dict[Node, Node]

    @staticmethod
    def copied(gm: GraphModule) -> Forward:
        """The copy; the backward, of which the first result needs nothing, is not in it."""
        graph, of = Graph(), dict[Node, Node]()
        results = graph.graph_copy(gm.graph, of)
        graph.output(pytree.tree_leaves(results)[0])
        copy = GraphModule(gm, graph)
        graph.eliminate_dead_code()
        return Forward(copy, {node: new for node, new in of.items() if isinstance(new, Node) and not new._erased})

    def sites(self) -> Iterator[Site]:
        """What is read as attention in it, the first result being its own up to views."""
        run = Run(Options(choose="cheapest"), Report(), "compile", Sizes(), DropoutSites(self.gm.graph))
        reader = GraphContext(run, self.gm, Surroundings(Region())).reader
        shown = set(_backwards(self.gm.graph.output_node().args[0]))
        for find in (functools.partial(calls.find, kernels=decomposed_calls()), softmax.find):
            yield from (site for site in find(reader) if site.node in shown)


def computes_the_same(before: Forward, after: GraphModule) -> bool:
    """Whether a graph still computes what it did before a pass, as far as both are attention that can be read.

    Args:
        before: the graph as it was.
        after: the graph that the pass left, whose nodes are those of before wherever the pass left them.
    """
    now = Forward.copied(after)
    before_pass, after_pass = _only(before), _only(now)
    if before_pass is None or after_pass is None:
        return False
    was = {now.of[node]: before.of[node] for node in now.of.keys() & before.of.keys()}
    number = {node: n for n, node in enumerate(before_pass.nodes)}
    sources = {n: number[was[node]] for n, node in enumerate(after_pass.nodes) if was.get(node) in number}
    return is_same_function(before_pass.attention, after_pass.attention, sources)


def _only(forward: Forward) -> Described | None:
    """The one attention of a part, if it was read and nothing had to be assumed."""
    sites = list(forward.sites())
    if len(sites) != 1 or sites[0].refusal or sites[0].needed_as_well:
        return None
    described = sites[0].described
    return None if described is None or described.assumptions or described.fixed else described


def _backwards(node: object) -> Iterator[Node]:
    """A node and what it is a view of, its elements in order."""
    while isinstance(node, Node):
        yield node
        if node.target not in _IN_ORDER:
            return
        node = node.args[0]

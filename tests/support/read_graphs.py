"""A function of tensors as Dynamo's graph, with a reader of it: for tests about a few nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes
from attn_pass.patterns.softmax_forms import is_softmax
from attn_pass.reading.reader import Reader


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> GraphModule:
    """The one graph that Dynamo makes of a function; what it writes in place is in the graph as it was written."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


def reader_of(gm: GraphModule, **known: Any) -> Reader:
    """A reader of a graph, as the engine makes it."""
    graph = gm.graph
    return Reader(graph, Sizes(), Effects(graph), Regions(graph, Region.ambient()), is_softmax=is_softmax, **known)


def nodes_of(gm: GraphModule, name: str) -> list[Node]:
    """The nodes that call the function or method of a name, in order."""
    return [n for n in gm.graph.nodes if getattr(n.target, "__name__", n.target) == name]


def inputs_of(gm: GraphModule) -> list[Node]:
    """The placeholders."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def result_of(gm: GraphModule) -> Node:
    """What the graph returns, the first of it."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    result = output.args[0][0]
    assert isinstance(result, Node)
    return result

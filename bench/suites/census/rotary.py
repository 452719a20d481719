"""Rotary embeddings and norms of queries and keys in Dynamo's graphs of models: how many the pass reads.

An operand counts as rotary where a cosine, a sine or a complex number is found on the way back from it to the first
sums over features (tables that are buffers of the model are not found). That walk knows no algebra, no views and no
rotations, so that it does not share the reading's mistakes; it also counts what has an angle for another reason.
Nothing is rewritten: the graphs run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.patterns import calls, softmax
from attn_pass.patterns.softmax_forms import is_softmax
from attn_pass.reading.made_of import sums
from attn_pass.reading.prologue import operands_of, prologues
from attn_pass.reading.reader import Reader
from bench.suites.census.dataset import Census, NotMeasured, error_text
from bench.suites.census.rows import Row, tried
from bench.suites.census.sdpa import build_with_sdpa

_ANGLES = ("cos", "sin", "polar", "view_as_complex", "cos.default", "sin.default", "polar.default")
FACTS = {"bench": "rotary"}


def measure(census: Census, name: str) -> Iterator[Row]:
    """One row: each query and key of a model, whether it has an angle, and what was read of it."""
    build_with_sdpa()
    torch.set_num_threads(1)
    try:
        model, inputs = census.zoo.build(name, dropout=None)
    except Exception as error:
        raise NotMeasured("unbuildable", error_text(error)) from error
    graphs: list[list[Row]] = []

    def look(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append([{"graph": len(graphs), **operand} for operand in operands_in(gm)])
        return gm.forward

    row: Row = {"status": "ok"}
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
    with tried(row), torch.no_grad():
        torch.compile(model.eval(), backend=look)(*args, **kwargs)
    yield {**row, "operands": [operand for graph in graphs for operand in graph]}


def operands_in(gm: GraphModule) -> Iterator[Row]:
    """The queries and keys of a graph's attentions."""
    graph = gm.graph
    reader = Reader(graph, Sizes(), Effects(graph), Regions(graph, Region.ambient()), is_softmax=is_softmax)
    sites = [site for finder in (calls.find, softmax.find) for site in finder(reader)]
    for number, site in enumerate(site for site in sites if site.described is not None):
        assert site.described is not None
        read = prologues(reader, site.described)
        for name, operand in operands_of(reader, site.described).items():
            yield {
                "site": number,
                "operand": name,
                "angle": has_angle(reader, operand.node),
                "read": str(read.get(name, "")),
            }


def has_angle(reader: Reader, operand: Node) -> bool:
    """Whether an angle or a complex number is behind an operand, before what sums over features."""
    waiting, seen = [operand], {operand}
    while waiting:
        node = waiting.pop()
        value = tensor_value(node)
        if getattr(node.target, "__name__", node.target) in _ANGLES or (value is not None and value.is_complex()):
            return True
        call = reader.call(node)
        if call is not None and sums(call):
            continue
        for source in (*node.all_input_nodes, *(write.node for write in reader.effects.mutations(node))):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return False

"""The products and softmaxes that a node's elements depend on: one pass over a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.pointwise import EXTREMA, POINTWISE
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import Call

SCATTERS = ("slice_scatter", "select_scatter")
_MOST = 8  # products or softmaxes of one node
_TRANSPARENT = frozenset({"copy", "detach", "cast", "dropout", "nan_to_num"})
_OF_THEIR_INPUT = ("pieces", "unbind", "index_put", "pad", "copy_to")


@dataclass(frozen=True)
class Reach:
    """For each node the products and the softmaxes that its elements come from.

    Only through views, casts and pointwise operations; of a node that comes from more than eight, none is remembered.
    """

    products: dict[Node, frozenset[Node]] = field(default_factory=dict)
    softmaxes: dict[Node, frozenset[Node]] = field(default_factory=dict)

    @staticmethod
    def of(reader: GraphReader, is_softmax: Callable[[Node], bool]) -> Reach:
        """That of a graph."""
        reach, none = Reach(), frozenset[Node]()
        for node in reader.graph.nodes:
            call = reader.result_call(node)
            if call is None:
                continue
            if is_softmax(node):
                _note(reader, node, reach.softmaxes, frozenset((node,)))
                continue
            if reader.is_product(node, call):
                _note(reader, node, reach.products, frozenset((node,)))
                continue
            made_of = inputs(call)
            for held in (reach.products, reach.softmaxes) if made_of else ():
                sets = [held[i] for i in made_of if i in held]
                reached = sets[0] if len(sets) == 1 else none.union(*sets)
                if reached and len(reached) <= _MOST:
                    _note(reader, node, held, reached)
        return reach


def _note(reader: GraphReader, node: Node, reach: dict[Node, frozenset[Node]], reached: frozenset[Node]) -> None:
    """Notes what reaches a node, and with it what else sees the tensor that it is written to."""
    reach[node] = reached
    is_own = "out" in node.kwargs or reached == {node}  # else it writes what it reads, which is reached already
    buffer = reader.written_by(node) if is_own else None
    for alias in () if buffer is None else reader.effects.aliases(buffer):
        if reader.order[alias] < reader.order[node]:
            reach[alias] = reach.get(alias, frozenset()) | reached


def inputs(call: Call) -> list[Node]:
    """The nodes whose elements those of the call are made of, one by one."""
    if call.op in EXTREMA and not isinstance(call.get("other"), Node):
        return []  # along a dimension, or of everything
    if call.op == "cat":
        values = list(call["input"]) if isinstance(call["input"], (list, tuple)) else []
    elif call.op in POINTWISE:
        values = [call.args.get(n) for n in POINTWISE[call.op]]
    elif call.op in SCATTERS:
        values = [call["input"], call["src"]]
    elif call.op in VIEWS or call.op in _TRANSPARENT or call.op in _OF_THEIR_INPUT:
        values = [call.args.get("input")]
    else:
        return []
    return [v for v in values if isinstance(v, Node)]

"""What a value depends on: the nodes it comes from and the inputs they start from, out of a body into its caller.

Two values that come from different inputs, or one of which comes from the other, are two values to any compiler that
merges equal computations; of others nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.subgraphs import attribute
from attn_pass.graph.values import fake_value, tensor_value

# These take a shape or a type from a tensor and none of its elements.
_SHAPES_ALONE = ("_like", "expand_as", "view_as", "reshape_as", "type_as")


@dataclass(frozen=True)
class Ancestry:
    """Nodes and inputs of a value. Not ``is_whole`` where it depends on more, or on a write to memory on the way."""

    nodes: frozenset[Node]
    inputs: frozenset[object]  # placeholders of the root graph, and attributes
    is_whole: bool = True
    needs_grad: bool = False  # one of the inputs does

    def may_equal(self, other: Ancestry) -> bool:
        """Whether the two may be made of the same inputs: where neither has one that the other has not."""
        if not (self.is_whole and other.is_whole):
            return True
        return self.inputs <= other.inputs or other.inputs <= self.inputs


def ancestry(
    starts: Iterable[Node], root: Graph, bound: Mapping[Node, Node], effects: Mapping[Graph, Effects]
) -> Ancestry:
    """What nodes are made of.

    Args:
        starts: nodes of one graph.
        root: the graph whose placeholders are inputs.
        bound: what callers pass to placeholders of bodies.
        effects: of the graph the nodes are in and those around it.
    """
    waiting, nodes, inputs = list(starts), set[Node](), set[object]()
    is_whole, needs_grad = True, False
    while waiting:
        node = waiting.pop()
        if node in nodes:
            continue
        nodes.add(node)
        known = effects.get(node.graph)
        is_whole = is_whole and known is not None and not known.mutations(node)
        if node.op == "placeholder" and node in bound:
            waiting.append(bound[node])
        elif node.op in ("placeholder", "get_attr"):
            tensor = attribute(node)
            value = tensor if isinstance(tensor, torch.Tensor) else tensor_value(node)
            inputs.add(node if tensor is None else id(tensor))
            is_whole = is_whole and (node.op == "get_attr" or node.graph is root)
            needs_grad = needs_grad or (value is not None and value.requires_grad)
        elif not str(getattr(node.target, "__name__", node.target)).partition(".")[0].endswith(_SHAPES_ALONE):
            waiting += [n for n in node.all_input_nodes if _has_elements(n)]
    return Ancestry(frozenset(nodes), frozenset(inputs), is_whole, needs_grad)


def _has_elements(node: Node) -> bool:
    """Whether a node is more than a size or a number that is known without any tensor, and no body."""
    if node.op == "get_attr":
        return isinstance(attribute(node), torch.Tensor)
    return isinstance(fake_value(node), (torch.Tensor, tuple, list, type(None)))

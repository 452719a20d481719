"""Gradients that fake values have forgotten: Dynamo runs ``detach_`` on the one fake tensor that a node has."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from attn_pass.graph.regions import Regions
from attn_pass.graph.values import tensor_value, wants_gradient

_DETACHES = ("detach_", torch.detach_, torch.ops.aten.detach_.default)


def restore_gradients(graph: Graph, regions: Regions) -> set[Node]:
    """Has tensors that are detached in place want a gradient again, as they do until then; returns these.

    Whatever is computed from them afterwards is taken to want one, too, which costs time and changes no number.
    """
    detached = {n.all_input_nodes[0] for n in graph.nodes if n.target in _DETACHES and n.all_input_nodes}
    for node in [n for n in graph.nodes if n in detached]:
        value = tensor_value(node)
        computed = node.op in ("call_function", "call_method") and regions.of(node).grad_enabled is not False
        may = value is not None and (value.is_floating_point() or value.is_complex())
        if value is not None and may and computed and any(map(wants_gradient, node.all_input_nodes)):
            value.requires_grad_()
    return detached

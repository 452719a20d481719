"""Calls that hide attention in one node: ``F.multi_head_attention_forward`` (trap T17).

With ``need_weights=True``, the default, torch computes products and a softmax to have weights to return. Where nobody
takes them, ``need_weights=False`` computes the same output through its own ``scaled_dot_product_attention`` call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from attn_pass.patterns.base import Site
from attn_pass.reading.lift import Reader

FORM = "nn.MultiheadAttention"
_NEED_WEIGHTS = 17  # its place among the positional arguments


@dataclass(frozen=True)
class Composite:
    """What is done to a composite call, and why."""

    node: Node
    target: str | None
    reason: str
    changes: bool

    def apply(self) -> None:
        """Asks the call for no weights."""
        node = self.node
        if len(node.args) > _NEED_WEIGHTS:
            node.args = (*node.args[:_NEED_WEIGHTS], False, *node.args[_NEED_WEIGHTS + 1 :])
        else:
            node.kwargs = {**node.kwargs, "need_weights": False}


def find(reader: Reader) -> Iterator[Site]:
    """Every composite attention call of the graph."""
    for node in reader.graph.nodes:
        if node.op == "call_function" and node.target is torch.nn.functional.multi_head_attention_forward:
            yield Site(node, FORM, reader.regions.of(node), composite=_decide(node))
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "_transformer_encoder_layer_fwd":
            yield Site(
                node, "nn.TransformerEncoderLayer", reader.regions.of(node),
                composite=Composite(node, None, "torch's own fused encoder layer", False),
            )  # fmt: skip


def _decide(node: Node) -> Composite:
    wanted = node.args[_NEED_WEIGHTS] if len(node.args) > _NEED_WEIGHTS else node.kwargs.get("need_weights", True)
    if wanted is False:
        return Composite(node, "sdpa", "it calls scaled_dot_product_attention itself", False)
    for user in node.users:
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            return Composite(node, None, "the attention weights are used", False)
    dropout = node.args[11] if len(node.args) > 11 else node.kwargs.get("dropout_p", 0.0)
    training = node.args[14] if len(node.args) > 14 else node.kwargs.get("training", True)
    if dropout != 0.0 and training is not False:
        return Composite(node, None, f"dropout {dropout}: it would draw other numbers", False)
    return Composite(node, "sdpa", "nobody takes the attention weights: asked for none", True)

"""Calls that hide attention in one node: ``F.multi_head_attention_forward``.

With ``need_weights=True``, the default, torch computes products and a softmax to have weights to return. Where nobody
takes them, ``need_weights=False`` computes the same output through its own ``scaled_dot_product_attention`` call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from attn_pass.patterns.base import Site
from attn_pass.reading.lift import Reader

FORM = "nn.MultiheadAttention"
_FORWARD = torch.nn.functional.multi_head_attention_forward
_PARAMETERS = inspect.signature(_FORWARD).parameters
NEED_WEIGHTS = "need_weights"


@dataclass(frozen=True)
class Composite:
    """A call that stays, with other arguments: why it is left, or None where these are exact."""

    node: Node
    refusal: str | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    target: str = "sdpa"  # what it calls with these arguments
    why: str = "nobody takes the attention weights: it is asked for none"
    masked: bool = False  # a row may be padded entirely, and then the two ways differ


def _without_weights(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with ``need_weights=False``."""
    place = list(_PARAMETERS).index(NEED_WEIGHTS)
    args, kwargs = node.args, node.kwargs
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, NEED_WEIGHTS: False}


def find(reader: Reader) -> Iterator[Site]:
    """Every composite attention call of the graph."""
    for node in reader.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _FORWARD:
            yield Site(node, FORM, reader.regions.of(node), composite=_read(node))
        elif getattr(node.target, "__name__", "") == "_transformer_encoder_layer_fwd":
            layer = Composite(node, "it is torch's own fused encoder layer")
            yield Site(node, "nn.TransformerEncoderLayer", reader.regions.of(node), composite=layer)


def _read(node: Node) -> Composite:
    defaults = {n: p.default for n, p in _PARAMETERS.items()}
    given = {**defaults, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    if given[NEED_WEIGHTS] is False:
        return Composite(node, "it calls scaled_dot_product_attention itself")
    for user in node.users:
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            return Composite(node, "the attention weights are used")
    if given["dropout_p"] != 0.0 and given["training"] is not False:
        return Composite(node, f"dropout {given['dropout_p']} would draw other numbers")
    masked = given["attn_mask"] is not None or given["key_padding_mask"] is not None
    return Composite(node, None, _without_weights(node), masked=masked)

"""Calls of torch's own modules with attention inside one node: `F.multi_head_attention_forward` and fast paths.

Each call is expanded on trial, so that the attention in it is read, varied and costed like any other. If that attention
is rewritten, the parts replace the call; otherwise they are removed and the call stays.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, expand
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import PLAIN_TENSORS, Sizes, tensor_value
from attn_pass.patterns import fast_paths
from attn_pass.patterns.base import Site, failed
from attn_pass.patterns.opaque import Opaque

FORM = "nn.MultiheadAttention"
ENCODER_LAYER = "nn.TransformerEncoderLayer"
_FORWARD: Any = torch.nn.functional.multi_head_attention_forward


def _undispatched(function: Any) -> Callable[..., Any]:
    """A torch function without its own `__torch_function__` dispatch, so that the functions it calls are seen."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


@dataclass(frozen=True)
class _Form:
    """What a call is called in the report, and a function of the same arguments whose every step is a node."""

    name: str
    function: Callable[..., Any]
    is_fast_path: bool = False


_LAYER = _Form(ENCODER_LAYER, fast_paths.encoder_layer, True)
_ATTENTION = _Form(FORM, fast_paths.attention, True)
CALLS: Mapping[Any, _Form] = {
    _FORWARD: _Form(FORM, _undispatched(_FORWARD)),
    torch._transformer_encoder_layer_fwd: _LAYER,
    torch.ops.aten._transformer_encoder_layer_fwd.default: _LAYER,
    torch._native_multi_head_attention: _ATTENTION,
    torch.ops.aten._native_multi_head_attention.default: _ATTENTION,
}


def take_apart(
    gm: GraphModule,
    sizes: Sizes,
    outer: Region,
    in_body: bool,
    calls_sdpa: Callable[[torch.device], bool] = lambda _: False,
) -> list[Opaque]:
    """Puts an expansion in front of every such call of a graph that runs under ``outer``, where that can be.

    ``calls_sdpa``: whether the fused kernel of a device calls torch's own attention.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in CALLS]
    if not calls:
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    result = []
    for call in calls:
        form, region = CALLS[call.target], regions.of(call)
        size_nodes.made.clear()  # of another call's expansion, which may not stay
        try:
            _check(call, form, region)
            function = partial(form.function, calls_sdpa=calls_sdpa) if form.is_fast_path else form.function
            expansion = expand(Plan(gm, call, region, size_nodes, effects, in_body), function)
            result.append(Opaque(call, form.name, region, expansion))
        except CannotExpand as error:
            result.append(Opaque(call, form.name, region, None, f"it cannot be taken apart: {error}"))
        except Exception as error:
            result.append(Opaque(call, form.name, region, None, error=error))
    return result


def _check(call: Node, form: _Form, region: Region) -> None:
    if region.functorch:
        raise CannotExpand(f"it runs under {region.describe()}")
    for node in call.all_input_nodes:
        value = tensor_value(node)
        if value is not None and not isinstance(value, PLAIN_TENSORS):
            raise CannotExpand(f"{node.name} is a {type(value).__name__}, not a plain tensor")
        if form.is_fast_path and value is not None and region.autocast_dtype(value.device.type) is not None:
            raise CannotExpand("torch's kernel does not follow autocast, and its parts would")


def with_opaque(sites: Iterable[Site], calls: Iterable[Opaque]) -> list[Site]:
    """The sites, each with the call that contains it, and one site for each call in which none was found."""
    every = list(sites)
    for opaque in calls:
        inside = set(opaque.nodes)
        own = [site for site in every if site.node in inside]
        if not own:
            why = opaque.refusal or "no attention was found in it"
            left = Site(opaque.call, opaque.form, opaque.region, refusal=why)
            own = [left if opaque.error is None else failed(opaque.call, opaque.form, opaque.region, opaque.error)]
            every += own
        for site in own:
            site.opaque = opaque
            site.written = opaque.written or site.written
            if site.error is None and opaque.is_used_otherwise:
                site.refused_at = None
                if site.refusal and (opaque.written is None or site.unshared is not None):
                    site.refusal = opaque.also
                elif site.needed_as_well:
                    site.needed_as_well = opaque.also
    return every

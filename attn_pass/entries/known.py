"""What is known of a graph inside Inductor's hook, which gets neither an exported program nor example inputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule

from attn_pass.compat import held_now
from attn_pass.graph.values import CONSTANTS, KNOWN_TENSORS, MAY_BE_ZERO
from attn_pass.options import Options

LITERAL = re.compile(r"lifted_tensor_\d+")
"""torch.export's name for what has none (torch/_export/passes/lift_constants_pass.py)."""


def known_of_module(gm: GraphModule, options: Options) -> dict[str, Any]:
    """Of an exported program as AOTInductor gets it: literals, constants, buffers, as for `attn_pass.aot_compile`."""
    literals: dict[str, torch.Tensor] = {}
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        path = str(node.target)
        holder, _, name = path.rpartition(".")
        module = gm.get_submodule(holder)
        value = getattr(module, name, None)
        plain = type(value) in (torch.Tensor, torch.nn.Buffer)
        if not isinstance(value, torch.Tensor) or not plain or value.requires_grad or value.is_meta:
            continue
        if LITERAL.fullmatch(name) and value.numel() == 1:
            literals[node.name] = value
        is_kept = name in module._buffers and name not in module._non_persistent_buffers_set
        if options.assume_constant_buffers or not is_kept:
            tensors[node.name] = (f"{'buffer' if name in module._buffers else 'constant'} {path}", value)
    # The user's ranges: in the graph every size is at least 2.
    ranges: dict[Any, Any] = dict(getattr(gm, "range_constraints", None) or {})
    may_be_zero = {str(symbol) for symbol, bounds in ranges.items() if bounds.lower < 1}
    return {CONSTANTS: literals, KNOWN_TENSORS: tensors, MAY_BE_ZERO: may_be_zero}


def held_inputs(gm: GraphModule) -> list[torch.Tensor | None]:
    """The inputs of a Dynamo graph that is being compiled, as far as Dynamo still has them at hand."""
    return [held_now(node) for node in gm.graph.find_nodes(op="placeholder")]

"""What is known of a graph before it is decided: tensors that keep their values, and parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from attn_pass.compat import held_now
from attn_pass.graph.values import CONSTANTS, FOLDS_CONSTANTS, KNOWN_TENSORS, MAY_BE_ZERO, PARAMETERS
from attn_pass.options import Options

Known = Callable[[], Mapping[str, Any]]
"""Gives what is known of a graph, by the names of `attn_pass.graph.values`."""

LITERAL = re.compile(r"lifted_tensor_\d+")
"""torch.export's name for what has none (torch/_export/passes/lift_constants_pass.py)."""


def known_buffers(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, folds: bool = False
) -> dict[str, Any]:
    """A Dynamo graph's inputs that are known: parameters, and with ``assume_constant_buffers`` buffers' values.

    ``folds`` says that what runs it makes constants of its parameters.
    """
    buffers: dict[str, tuple[str, torch.Tensor]] = {}
    inputs = (node for node in gm.graph.nodes if node.op == "placeholder")
    for node, value in zip(inputs, example_inputs if options.assume_constant_buffers else ()):
        of_module = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        if of_module and type(value) in (torch.Tensor, torch.nn.Buffer) and not value.requires_grad:
            buffers[node.name] = (_attribute_path(node), value)
    with_values = zip(gm.graph.find_nodes(op="placeholder"), example_inputs)
    parameters = {
        node.name: value
        for node, value in with_values
        if isinstance(value, torch.nn.Parameter) and not isinstance(value, FakeTensor)  # as DDPOptimizer compiles with
    }
    return {KNOWN_TENSORS: buffers, PARAMETERS: parameters, FOLDS_CONSTANTS: folds}


def _attribute_path(node: Node) -> str:
    """``buffer layers.0.mask`` for a placeholder that Dynamo made of it, ``attribute layers.0.mask`` of a plain one."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = name() if callable(name) else name
    words = re.findall(r"\['?(\w+)'?\]|\.(\w+)", text)[1:]
    path = ".".join(w for pair in words for w in pair if w not in ("", "_modules", "_buffers"))
    return f"{'buffer' if '_buffers' in text else 'attribute'} {path or node.name}"


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

"""Runs a part of a program on given inputs: as it is, in float64, and as the description that was read of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from attn_pass.compat import own_metrics
from attn_pass.graph.cut import Input
from attn_pass.graph.regions import Region

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_WIDENED = ("float", "half", "bfloat16")


@dataclass(frozen=True)
class Outcome:
    """A result and the gradients of the inputs that have one, by the inputs' numbers."""

    result: torch.Tensor
    gradients: Mapping[int, torch.Tensor]


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Out of whatever traces or compiles around us: plain tensors, no random state used up."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with tracing(None), unset_fake_temporarily(), _disable_current_modes(), torch.random.fork_rng(), own_metrics():
        yield


def run(
    program: Callable[..., Any],
    layouts: Sequence[Input],
    memory: Sequence[torch.Tensor],
    region: Region | None,
    cotangent: torch.Tensor | None,
) -> Outcome:
    """Runs a program on inputs laid out in copies of their memory; with a cotangent, backward too."""
    flats = [m.detach().requires_grad_(i.requires_grad and cotangent is not None) for i, m in zip(layouts, memory)]
    with torch.enable_grad(), region.restore() if region is not None else nullcontext():
        inputs = [i.in_memory(flat.clone()) for flat, i in zip(flats, layouts)]  # a program may write there
        # A GraphModule prints its failures to stderr when it is called, and one here is not a failure of the program.
        out = (program.forward if isinstance(program, GraphModule) else program)(*inputs)
    result: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return Outcome(result.detach(), _gradients(result, flats, cotangent))


def _gradients(
    result: torch.Tensor, flats: Sequence[torch.Tensor], cotangent: torch.Tensor | None
) -> dict[int, torch.Tensor]:
    leaves = {n: flat for n, flat in enumerate(flats) if flat.requires_grad}
    if cotangent is None or not leaves or not result.requires_grad:
        return {}
    gradients = torch.autograd.grad(result, list(leaves.values()), cotangent.to(result), allow_unused=True)
    return {n: g for n, g in zip(leaves, gradients) if g is not None}


def in_float64(module: GraphModule) -> GraphModule:
    """The program with every floating type it names replaced by float64."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.args = map_aggregate(node.args, _widened)
        node.kwargs = map_aggregate(node.kwargs, _widened)
        if node.op == "call_method" and node.target in _WIDENED:
            node.target = "double"
    members = {name: getattr(module, name) for name in {n.target for n in graph.nodes if n.op == "get_attr"}}
    return GraphModule(members, graph)


def _widened(value: Any) -> Any:
    return torch.float64 if value in _NARROW and isinstance(value, torch.dtype) else value

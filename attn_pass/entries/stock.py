"""Runs Inductor's own joint-graph passes, its attention patterns among them, on a part of a program."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attn_pass.entries.stock_meaning import Forward, computes_the_same
from attn_pass.errors import in_one_line
from attn_pass.graph.cut import Cut
from attn_pass.graph.regions import Region
from attn_pass.planner.stock import FusedCall, StockFails
from attn_pass.verify.running import outside_tracing

_FUSED = "_scaled_dot_product_"


class StockAsker:
    """`ask_inductor`, once for parts that are alike, as layers are; ``seconds`` is the time that it took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._known: dict[object, FusedCall | None] = {}

    def __call__(self, part: Cut, region: Region) -> FusedCall | None:
        key = (tuple(_spelled(part)), region)
        if key not in self._known:
            began = time.perf_counter()
            try:
                self._known[key] = ask_inductor(part, region)
            finally:
                self.seconds += time.perf_counter() - began
        return self._known[key]


def _spelled(part: Cut) -> Iterator[object]:
    """The operations with numbers for names, and the inputs in the order in which they are first used."""
    graph = part.original.graph
    inputs = dict(zip(graph.find_nodes(op="placeholder"), part.inputs))
    number: dict[Node, int] = {}
    for node in graph.nodes:
        if node in inputs:
            continue
        for used in node.all_input_nodes:
            if used in inputs and used not in number:
                number[used] = len(number)
                yield replace(inputs[used], value=None)
        yield f"{node.op} {node.target} {map_arg((node.args, node.kwargs), number.__getitem__)}"
        number[node] = len(number)


def ask_inductor(part: Cut, region: Region) -> FusedCall | None:
    """The fused call that stock Inductor has after its joint-graph passes; None where products and a softmax stay.

    The part is traced on fake tensors as AOTAutograd does it, with its backward where an input needs a gradient, and
    the very passes of the installed torch are run on it: about 0.2 s for the first part and 0.05 s for others.

    Raises:
        StockFails: a pass raises, which is stock's defect and not this site's.
    """
    with outside_tracing(), _counters_kept():
        graph = _traced(part, region)
        before = Forward.copied(graph)
        try:
            _joint_passes(graph)
        except Exception as error:
            raise StockFails(in_one_line(error)) from error
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and _FUSED in str(n.target)]
    forward = [n for n in calls if "backward" not in str(n.target)]
    if not forward:
        return None
    return replace(_call(forward[0]), as_written=len(forward) == 1 and computes_the_same(before, graph))


def _traced(part: Cut, region: Region) -> GraphModule:
    from torch._inductor.pattern_matcher import fwd_only, joint_fwd_bwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    trains = any(i.requires_grad for i in part.inputs)

    def program(*inputs: torch.Tensor) -> Any:
        with region.restore():
            return part.original.forward(*inputs)[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty_strided(i.shape, i.stride, dtype=getattr(torch, i.dtype), device=i.device).requires_grad_(
                i.requires_grad
            )
            for i in part.inputs
        ]
        with torch.set_grad_enabled(trains):
            traced: GraphModule = (joint_fwd_bwd if trains else fwd_only)(program, inputs)
    return traced


def _joint_passes(graph: GraphModule) -> None:
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    from attn_pass.entries.shield import POST_SLOT, PRE_SLOT

    with config.patch({PRE_SLOT: None, POST_SLOT: None}):
        joint_graph_passes(graph)


@contextmanager
def _counters_kept() -> Iterator[None]:
    """What torch counts stays as it was: nothing here is compiled."""
    from torch._dynamo.utils import counters

    before = copy.deepcopy(dict(counters))
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)


def _call(node: Node) -> FusedCall:
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name.removeprefix("aten::")
    arguments = dict(zip((a.name for a in node.target._schema.arguments), node.args)) | dict(node.kwargs)
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if not isinstance(mask, Node):
        return FusedCall(name)
    value = mask.meta["val"]
    return FusedCall(name, "boolean" if value.dtype == torch.bool else "additive", value.numel())

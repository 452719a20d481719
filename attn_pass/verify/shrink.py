"""A part of a program with a smaller sequence length: the same calls with every multiple of the length replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from attn_pass.graph.cut import CannotExtract, Cut, Input
from attn_pass.graph.regions import Region
from attn_pass.graph.values import CONSTANTS, KNOWN_TENSORS

_SHORTEST = 32  # of a length that is made smaller: what is shorter is more likely to be another size's number
_STEP = 16


def shrunk(part: Cut, lengths: tuple[int, int], factor: float, region: Region, key: str) -> GraphModule:
    """The original of a part with its query and key length smaller, so that about 1 / ``factor`` of the scores is left.

    ``key`` is the metadata key for its nodes' fake values. Running it on fake tensors shows that the new sizes fit
    together.

    Raises:
        CannotExtract: its lengths are already short, or the result is not a valid program.
    """
    length = _unit(*lengths)
    squared = all(n % length == 0 for n in lengths)
    new = int(length / (math.sqrt(factor) if squared else factor))
    new = new - new % _STEP if length % _STEP == 0 else new | 1
    if length < _SHORTEST or new < 1:
        raise CannotExtract("its scores are many and its lengths short")

    def smaller(value: Any) -> Any:
        plain = isinstance(value, int) and not isinstance(value, bool)
        return value // length * new if plain and value > 0 and value % length == 0 else value

    graph = copy.deepcopy(part.original.graph)
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, smaller), map_aggregate(node.kwargs, smaller)
    members = {n.target: getattr(part.original, n.target) for n in graph.nodes if n.op == "get_attr"}
    module = GraphModule(members, graph)
    inputs = [_smaller(i, smaller) for i in part.inputs]
    _propagate(module, inputs, region, key)
    _check(part, module, smaller, key)
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    module.meta[KNOWN_TENSORS] = {n: (n, i.value) for n, i in zip(names, inputs) if i.value is not None}
    tensors = {n.name: members[n.target] for n in graph.nodes if n.op == "get_attr"}
    module.meta[CONSTANTS] = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel() == 1}
    return module


def _unit(q_len: int, kv_len: int) -> int:
    """The shorter length where the longer is a multiple of it, else the longer."""
    short, long = sorted((q_len, kv_len))
    return short if short >= _SHORTEST and long % short == 0 else long


def _smaller(original: Input, smaller: Callable[[int], int]) -> Input:
    shape, stride = tuple(map(smaller, original.shape)), tuple(map(smaller, original.stride))
    value = original.value
    if value is not None:
        value = value[tuple(slice(0, n) for n in shape)]
    return replace(original, shape=shape, stride=stride, value=value)


def _propagate(module: GraphModule, inputs: list[Input], region: Region, key: str) -> None:
    class Running(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n.op != "output":
                n.meta[key] = value
            return value

    with FakeTensorMode(allow_non_fake_inputs=True), region.restore():
        fakes = [
            torch.empty_strided(i.shape, i.stride, dtype=getattr(torch, i.dtype), device=i.device).requires_grad_(
                i.requires_grad
            )
            for i in inputs
        ]
        try:
            Running(module).run(*fakes)
        except Exception as error:
            raise CannotExtract(f"with a shorter length it is not a valid program ({type(error).__name__})") from None


def _check(part: Cut, module: GraphModule, smaller: Callable[[int], int], key: str) -> None:
    """The shape of the result must be that of the original result at the smaller sizes."""
    (result,) = module.graph.find_nodes(op="output")[0].args[0]
    if tuple(result.meta[key].shape) != tuple(map(smaller, part.shape)):
        raise CannotExtract("with a shorter length its result has another shape")

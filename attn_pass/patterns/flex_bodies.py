"""Score and mask functions of FlexAttention, which are graphs of one element, on all elements at once.

A function's graph is run on index tensors that lie along one of four dimensions each, (B, 1, 1, 1) to (1, 1, 1, S), so
that broadcasting gives every element what `torch.vmap` gives it. That holds for operations that work element by element
and for elements of captured tensors; anything else is refused. Types come out the same because nothing has less than
four dimensions: to torch a tensor without any counts less than one with some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from attn_pass.graph.expand import CannotExpand
from attn_pass.graph.subgraphs import indexed_by_export
from attn_pass.reading.pointwise import EXTREMA, POINTWISE
from attn_pass.reading.vocabulary import understand

aten = torch.ops.aten
RANK = 4  # batch, head, query, key
_OF_ONE_ELEMENT = ("cast", "copy", "detach", "zeros", "ones", "full", "scalar")
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)


@dataclass(frozen=True)
class _Captured:
    """A captured tensor, indexed as far as it is so far."""

    tensor: Tensor
    at: tuple[Any, ...] = ()


class Runs(Protocol):
    """The executor: a `Recorder`, or torch itself."""

    def again(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call in a function's graph gives for these values."""


def on_grid(runs: Runs, body: GraphModule, elements: Sequence[Tensor], captured: Sequence[Any]) -> Any:
    """What a score or mask function gives for elements, tensors of four dimensions, and what it captures.

    Raises:
        CannotExpand: it does something else than compute element by element, in words.
    """
    values: dict[Node, Any] = {}
    arguments = iter((*elements, *(_captured(value) for value in captured)))
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "output":
            return values[node.args[0]] if isinstance(node.args[0], Node) else node.args[0]
        elif node.op != "get_attr":
            values[node] = _computed(runs, node, values)
    raise CannotExpand("one of its functions returns nothing")


def _captured(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _four(value) if value.dim() == 0 else _Captured(value)


def _four(value: Tensor) -> Tensor:
    viewed: Tensor = aten.view.default(value, [1] * RANK)
    return viewed


def _computed(runs: Runs, node: Node, values: dict[Node, Any]) -> Any:
    indexed = _indexed(node)
    if indexed is not None:
        source, at = values.get(indexed[0]), map_arg(indexed[1], lambda n: values[n])
        if isinstance(source, _Captured):
            return _element_of(node, replace(source, at=(*source.at, *at)))
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values.get(n, n))
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, (_Captured, Node)) for x in leaves):
        raise CannotExpand(f"{node.name} in one of its functions takes a captured tensor as a whole")
    if any(isinstance(x, Tensor) for x in leaves) and not _is_elementwise(node):
        raise CannotExpand(f"{node.name} in one of its functions is not computed element by element")
    result = runs.again(node, args, kwargs)
    if isinstance(result, _NUMBERS):
        return result
    if not isinstance(result, Tensor) or result.dim() not in (0, RANK):
        raise CannotExpand(f"{node.name} in one of its functions does not return an element")
    return _four(result) if result.dim() == 0 else result


def _indexed(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The tensor and the indices of ``table[head, q - kv]``, as Dynamo and as torch.export write it."""
    call = understand(node)
    if call is not None and call.op in ("getitem", "index") and isinstance(call["input"], Node):
        at = call["index"]
        return call["input"], tuple(at) if isinstance(at, (tuple, list)) else (at,)
    return indexed_by_export(node)


def _element_of(node: Node, captured: _Captured) -> Any:
    """The element of a captured tensor where all its dimensions are indexed."""
    for index in captured.at:
        is_integer = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        if not is_integer and (not isinstance(index, int) or isinstance(index, bool)):
            raise CannotExpand(
                f"{node.name} in one of its functions indexes a captured tensor with something other than integers"
            )
    if len(captured.at) < captured.tensor.dim():
        return captured
    device = captured.tensor.device
    at = [
        aten.full.default([1] * RANK, i, dtype=torch.int64, device=device) if isinstance(i, int) else i
        for i in captured.at
    ]
    return aten.index.Tensor(captured.tensor, at)


def _is_elementwise(node: Node) -> bool:
    """Whether an operation gives each element by the elements at the same place alone."""
    call = understand(node)
    if call is None:
        return _is_pointwise(_name(node)) and "out" not in node.kwargs
    if call.in_place:
        return False
    if call.op in EXTREMA:
        return isinstance(call["other"], Node)
    return call.op in POINTWISE or call.op in _OF_ONE_ELEMENT or _is_pointwise(_name(node))


def _name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return str(getattr(node.target, "__name__", ""))


@lru_cache(maxsize=256)
def _is_pointwise(name: str) -> bool:
    """Torch's properties of the operator of that name; ``max`` and ``min`` are reductions as well."""
    packet = getattr(aten, name.strip("_"), None) if not name.endswith("_") or name.startswith("__") else None
    if packet is None or name in EXTREMA:
        return False
    overloads = [getattr(packet, o) for o in packet.overloads()]
    drawn = any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
    return not drawn and any(torch.Tag.pointwise in o.tags for o in overloads)

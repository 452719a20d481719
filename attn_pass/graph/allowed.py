"""Expands functions of the user that Dynamo keeps as one node (`torch.compiler.allow_in_graph`: all of einx).

AOTAutograd traces through such a function, so what it calls is part of the program. Each is put in pieces before a
graph is read, and is one call again afterwards where nothing was made of the pieces.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils._pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, Expansion, Recorder, expand, without_values
from attn_pass.graph.memory import storages
from attn_pass.graph.random_draws import may_draw
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.graph.writes import IN_PLACE_DUNDERS, call_writes, traits_of


@dataclass(eq=False)
class InPieces:
    """One such call, its pieces in front of it and in the place of its results; the call has no arguments meanwhile."""

    call: Node
    expansion: Expansion
    arguments: tuple[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = (self.call.args, self.call.kwargs)
        self._inputs = tuple(self.call.all_input_nodes)
        for old, new in self.expansion.results:
            old.replace_all_uses_with(new)
            pass_name(old, new)
        self.call.args, self.call.kwargs = (), {}
        self._values = without_values(self.idle)

    @property
    def idle(self) -> tuple[Node, ...]:
        """The nodes that stand for nothing while the pieces do."""
        return (self.call, *(old for old, _ in self.expansion.results if old is not self.call))

    def settle(self) -> bool:
        """Makes it one call again where the pieces are as they were put in; else they stay. Returns whether they do."""
        graph = self.call.graph
        if self._is_touched():
            for node in reversed(self.idle):
                graph.erase_node(node)
            return True
        self.call.args, self.call.kwargs = self.arguments
        for node, meta in zip(self.idle, self._values, strict=True):
            node.meta.update(meta)
        for old, new in self.expansion.results:
            new.replace_all_uses_with(old, delete_user_cb=lambda user: user not in self.expansion.nodes)
            pass_name(new, old)
        self.expansion.take_back()
        return False

    def _is_touched(self) -> bool:
        nodes = set(self.expansion.nodes)
        if any(n._erased for n in (*nodes, *self._inputs)):
            return True
        inner = nodes - {new for _, new in self.expansion.results}
        return any(user not in nodes for node in inner for user in node.users)


def put_in_pieces(gm: GraphModule, sizes: Sizes, outer: Region, in_body: bool) -> list[InPieces]:
    """Expands every such call of a graph that runs under ``outer``, if its parts compute the same.

    A call that cannot be expanded is left without a report: it may have nothing to do with attention.
    """
    calls = [node for node in gm.graph.nodes if _is_allowed(node)]
    if not calls:
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    expanded: list[InPieces] = []
    for call in calls:
        region = regions.of(call)
        size_nodes.made.clear()
        if region.functorch or not callable(call.target):
            continue
        try:
            plan = Plan(gm, call, region, size_nodes, effects, in_body)
            expanded.append(InPieces(call, expand(plan, call.target, _Watching)))
        except Exception:  # whatever a function of the user's raises on fake tensors
            continue
    return expanded


class Settles(Protocol):
    """Something that stands in the place of nodes while a graph is read."""

    @property
    def idle(self) -> tuple[Node, ...]:
        """The nodes that it stands in the place of."""

    def settle(self) -> bool:
        """Keeps the expansion if a site in it was rewritten, removes it otherwise; returns whether it was kept."""


def settle(pieces: list[Settles]) -> bool:
    """Settles all of them, the last first, and forgets them; returns whether any stayed in pieces."""
    settled = [one.settle() for one in reversed(pieces)]
    pieces.clear()
    return any(settled)


def _is_allowed(node: Node) -> bool:
    target = node.target
    return node.op == "call_function" and isinstance(target, types.FunctionType) and traits_of(node.op, target).unknown


def pass_name(old: Node, new: Node) -> None:
    """Gives a node the name of the one it stands for."""
    name, old.name = old.name, f"{old.name}_idle"
    new.name = name


_PLAIN = (FakeTensor, torch.nn.Parameter)
_KINDS = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Watching(Recorder):
    """Allows what computes new tensors alone: no write to what was given, no draw, no switch of the state around it, no
    backward of its own.
    """

    def run(self, function: Callable[..., Any]) -> Any:
        self._given = {key for n in self.plan.result.all_input_nodes for key in storages(tensor_value(n)) or ()}
        inputs = [v for n in self.plan.result.all_input_nodes if (v := tensor_value(n)) is not None]
        if not all(isinstance(v, _PLAIN) for v in inputs):
            raise CannotExpand("it takes something other than plain tensors")

        def watched(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                self._around = Region.ambient()
            return function(*args, **kwargs)

        outputs = super().run(watched)
        self._check_backward(outputs, inputs)
        return outputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if Region.ambient() != self._around or torch._C._functorch.maybe_current_level() is not None:
            raise CannotExpand("it switches the state that its parts run under")
        self._check_not_written(func, args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        if not _is_value(result):
            raise CannotExpand(f"{getattr(func, '__name__', func)} gives no tensor")
        return result

    def _check_not_written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before anything runs: what was given might get another shape on the way."""
        name = str(getattr(func, "__name__", ""))
        dunder = name.startswith("__")
        in_place = name in IN_PLACE_DUNDERS or name == "__setitem__" if dunder else name.endswith("_")
        written = [*args[:1], kwargs.get("out")] if in_place or "out" in kwargs else []
        if name == "__set__" or any(key in self._given for value in written for key in storages(value) or ()):
            raise CannotExpand(f"{name} writes to its inputs")

    def _check_backward(self, outputs: Any, inputs: list[torch.Tensor]) -> None:
        """The forward of an ``autograd.Function`` may have been recorded, and its backward was not."""
        seen = {v.grad_fn for v in inputs}
        waiting = [v.grad_fn for v in torch.utils._pytree.tree_leaves(outputs) if isinstance(v, torch.Tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                raise CannotExpand("it has a backward of its own")
            waiting += [following for following, _ in node.next_functions]

    def check(self, results: list[tuple[Node, Node]]) -> None:
        new = [node for _, node in results]
        if not set(new) <= set(self.nodes) or len(set(new)) != len(new):
            raise CannotExpand("it returns one of its inputs, or the same tensor twice")
        for node in self.nodes:
            written = [storages(tensor_value(w.target)) or () for w in call_writes(node)]
            inside = all(self._given.isdisjoint(keys) for keys in written)
            if may_draw(node) or not inside:
                raise CannotExpand(f"{node.name} has side effects")


def _is_value(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return type(result) is FakeTensor
    if isinstance(result, (tuple, list)):
        return all(map(_is_value, result))
    return isinstance(result, (*_KINDS, *_SYMBOLS))

"""Expands a call on trial: its computation as nodes in front of it, which then replace it or are removed again.

The call and its users stay until a decision is made. A reader of the graph therefore sees both, and a graph in
which nothing is kept is unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from attn_pass.graph.edit import Plan, Planned, erase_unused
from attn_pass.graph.subgraphs import attribute_module
from attn_pass.graph.values import Sizes, fake_value, tensor_value
from attn_pass.model.index import Index


def without_values(nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """Removes the fake values of nodes, which then have no memory; returns them, to be restored."""
    return [{key: node.meta.pop(key) for key in ("example_value", "val") if key in node.meta} for node in nodes]


class CannotExpand(Exception):
    """Why a call stays one call, in words."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """The nodes that compute what ``call`` does, in graph order, in front of it.

    ``results``: each node that takes one of the call's results (the call itself where it has one), and the node of the
    expansion that has the same value.
    """

    call: Node
    nodes: tuple[Node, ...]
    results: tuple[tuple[Node, Node], ...]

    def keep(self, replaced: Mapping[Node, Node] | None = None) -> tuple[tuple[Node, Node], ...]:
        """Puts the expansion in the place of the call. Returns the nodes that are gone, each with what it became.

        Results keep their names; what only the call needed and is proven pure goes as well. ``replaced`` are nodes that
        are gone already, with what stands in their place.
        """
        graph, inputs = self.call.graph, self.call.all_input_nodes
        results = tuple((old, (replaced or {}).get(new, new)) for old, new in self.results)
        names = [old.name for old, _ in results]
        for old, new in results:
            old.replace_all_uses_with(new)
        for user in list(self.call.users):
            graph.erase_node(user)
        graph.erase_node(self.call)
        for (_, new), name in zip(results, names, strict=True):
            new.name = name
        erase_unused(graph, inputs)
        for node in inputs:  # the graphs of functions that it called
            if not node._erased and node.op == "get_attr" and not node.users and attribute_module(node) is not None:
                graph.erase_node(node)
        return results

    def take_back(self) -> None:
        """Leaves the graph as it was before."""
        for node in reversed(self.nodes):
            if not node._erased and not node.users:
                node.graph.erase_node(node)


def expand(plan: Plan, function: Callable[..., Any], recorder: Callable[[Plan], Recorder] | None = None) -> Expansion:
    """The computation of the call that ``plan`` is for, recorded while ``function`` runs on its arguments' fake values.

    ``function`` is called with the arguments of the call, and returns what the call does. It may use any function and
    method of torch; the shapes it reads are those of the fake values. Another ``recorder`` may allow less.

    Raises:
        CannotExpand: it does something that cannot be a node, its result differs from the call's, or it needs a fact
            about symbolic sizes that the program does not rest on so far.
    """
    call = plan.result
    results_taken = _results_taken(call)
    recording = (recorder or Recorder)(plan)
    try:
        outputs = recording.run(function)
        results = [
            (node, recording.node_of(outputs if index is None else outputs[index])) for node, index in results_taken
        ]
        for node, new in results:
            check_same(node, new, plan.sizes)
        recording.check(results)
    except Exception:
        Expansion(call, tuple(recording.nodes), ()).take_back()
        raise
    needed = _without_unneeded(recording.nodes, {new for _, new in results})
    return Expansion(call, tuple(needed), tuple(results))


def _results_taken(call: Node) -> list[tuple[Node, int | None]]:
    """The nodes that take a result of the call, with its number; the call itself where it gives one tensor."""
    if tensor_value(call) is not None:
        return [(call, None)]
    getitems: list[tuple[Node, int | None]] = []
    for user in call.users:
        if user.target is not operator.getitem or user.args[0] is not call or not isinstance(user.args[1], int):
            raise CannotExpand(f"all that it returns is used by {user.name}")
        if user.users:
            getitems.append((user, user.args[1]))
    return getitems


def check_same(node: Node, new: Node, sizes: Sizes) -> None:
    """Raises `CannotExpand` where a result has another type, shape or layout than the one it is for."""
    before, after = tensor_value(node), tensor_value(new)
    if before is None or after is None:
        raise CannotExpand(f"{node.name} is not a tensor")
    for aspect, a, b in (
        ("type", (before.dtype, before.device), (after.dtype, after.device)),
        ("shape", sizes.shape(before), sizes.shape(after)),
        ("layout", _strides(before, sizes), _strides(after, sizes)),
    ):
        if a != b:
            raise CannotExpand(f"taken apart it has another {aspect}: {b}, not {a}")


def _strides(tensor: torch.Tensor, sizes: Sizes) -> tuple[Index, ...]:
    return tuple(sizes.index(s) for s, n in zip(tensor.stride(), sizes.shape(tensor), strict=True) if n != 1)


def _without_unneeded(nodes: list[Node], results: set[Node]) -> list[Node]:
    """Erases nodes that no result needs, for example unused weights; returns the others."""
    for node in reversed(nodes):
        if not node.users and node not in results:
            node.graph.erase_node(node)
    return [node for node in nodes if not node._erased]


_OPERATORS = {
    "__getitem__": operator.getitem,
    **{f"__{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "matmul", "neg")},
}


def run_again(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a node's function or method gives for other values."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Recorder(TorchFunctionMode):
    """Makes a node of every function of torch that gives a tensor, in the spelling of a Dynamo graph."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.nodes: list[Node] = []
        self._nodes_of: dict[int, tuple[Any, Node]] = {}  # by identity, of values that are kept alive by it

    def run(self, function: Callable[..., Any]) -> Any:
        """Runs the function on the fake values of the call's arguments."""
        call = self.plan.result
        for node in call.all_input_nodes:
            value = fake_value(node)
            if value is not None:
                self.remember(value, node)
            elif attribute_module(node) is None:
                raise CannotExpand(f"{node.name} has no fake value")
        args, kwargs = torch.fx.map_arg((call.args, call.kwargs), fake_value)
        with self.plan.running(), self.plan.adding_no_guard() as new_guards, self:
            try:
                outputs = function(*args, **kwargs)
            except Exception:
                if not new_guards:
                    raise
        if new_guards:
            raise CannotExpand("it would hold for some sizes only, and they are not checked")
        return outputs

    def again(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call in a body of the recorded call gives for these values; it becomes a node in its own spelling."""
        with torch._C.DisableTorchFunction():
            result = run_again(node, args, kwargs)
        if isinstance(result, torch.Tensor):
            arguments = self._argument(args), self._argument(kwargs)
            self.remember(result, self._insert(node.op, node.target, *arguments, result))
        return result

    def node_of(self, value: Any) -> Node:
        """The node that holds a tensor met so far."""
        if id(value) not in self._nodes_of:
            raise CannotExpand("it uses a tensor that no node holds")
        return self._nodes_of[id(value)][1]

    def check(self, results: list[tuple[Node, Node]]) -> None:
        """Raises `CannotExpand` where what was recorded is not what the call does; ``results`` as in `Expansion`."""

    def remember(self, value: Any, node: Node) -> None:
        """Note that a node of the graph holds this value."""
        self._nodes_of[id(value)] = (value, node)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pieces = result if type(result) in (tuple, list) else [result]
        if any(isinstance(piece, torch.Tensor) for piece in pieces):
            node = self._record(func, args, kwargs or {}, result)
            for number, piece in enumerate(pieces if pieces is result else ()):
                self.remember(piece, self._insert("call_function", operator.getitem, (node, number), {}, piece))
        return result

    def _record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Node:
        arguments = self._argument(args), self._argument(kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute: x.mT
            own = getattr(func, "__self__", None)
            node = self._insert("call_function", getattr, (arguments[0][0], getattr(own, "__name__", "")), {}, result)
        elif getattr(torch.Tensor, name, None) is not func:
            node = self._insert("call_function", func, *arguments, result)
        elif name in _OPERATORS:
            node = self._insert("call_function", _OPERATORS[name], *arguments, result)
        else:
            node = self._insert("call_method", name, *arguments, result)
        self.remember(result, node)
        return node

    def _insert(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any) -> Node:
        node = self.plan.insert_node(op, target, args, kwargs, fake)
        self.nodes.append(node)
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._symbolic(value)
        if isinstance(value, (tuple, list)):
            items = [self._argument(v) for v in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return value

    def _symbolic(self, value: Any) -> Any:
        if id(value) in self._nodes_of:
            return self.node_of(value)
        if not isinstance(value, torch.SymInt):
            raise CannotExpand(f"no node holds {value}")
        try:
            size = self.plan.size(self.plan.sizes.index(value))
        except ValueError as error:
            raise CannotExpand(str(error)) from None
        if isinstance(size, int):
            return size
        self.nodes += self.plan.insert(size)
        return size.node if isinstance(size, Planned) else size

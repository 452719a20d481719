"""Expands `torch.vmap` levels: the operators that its batching rules call, on the tensors outside the level.

Dynamo writes a level as nodes, ``_vmap_increment_nesting`` to ``_vmap_decrement_nesting``, and between them tensors
lack a dimension. AOTAutograd traces through it, and so is done here, before a graph is read: the same operators stand
in front of the level and in the place of its results, and the level is what it was where nothing was made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from attn_pass.graph.allowed import pass_name
from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, check_same
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import attribute
from attn_pass.graph.values import Sizes, fake_value

_MOST = 400  # nodes of a level
_TENSORS = (torch.Tensor, torch.SymInt)


@dataclass(eq=False)
class Unbatched:
    """A level, and the operators it comes to, in front of it and in the place of its results."""

    level: tuple[Node, ...]
    nodes: tuple[Node, ...]
    results: tuple[tuple[Node, Node], ...]

    def __post_init__(self) -> None:
        self._inputs = tuple({i for n in self.level for i in n.all_input_nodes} - set(self.level))
        for old, new in self.results:
            old.replace_all_uses_with(new)
            pass_name(old, new)

    @property
    def idle(self) -> tuple[Node, ...]:
        """The nodes that stand for nothing while the operators do."""
        return self.level

    def settle(self) -> bool:
        """Keeps the operators where something was made of them, and the level where not; returns whether they stay."""
        own_nodes = set(self.nodes)
        inner = own_nodes - {new for _, new in self.results}
        if any(n._erased for n in own_nodes) or any(user not in own_nodes for node in inner for user in node.users):
            for node in reversed(self.level):
                node.graph.erase_node(node)
            return True
        for old, new in self.results:
            new.replace_all_uses_with(old, delete_user_cb=lambda user: user not in own_nodes)
            pass_name(new, old)
        _erase(self.nodes)
        return False


def without_vmap(gm: GraphModule, sizes: Sizes, outer: Region, in_body: bool) -> list[Unbatched]:
    """Puts the operators of every outermost level of vmap of a graph that runs under ``outer`` in its place.

    A level that does anything but compute is left, and what is in it says that it runs inside vmap.
    """
    if not any(_is(node, "_vmap_increment_nesting") for node in gm.graph.nodes):
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    unbatched = []
    for level in list(_levels(gm)):
        region = replace(regions.of(level[0]), functorch=regions.of(level[0]).functorch[:-1])
        size_nodes.made.clear()
        try:
            _check(level, region, regions)
            results = [n for n in level if _is(n, "_remove_batch_dim") and not set(n.users) <= set(level)]
            plan = Plan(gm, results[-1], region, size_nodes, effects, in_body)
            unbatched.append(_unbatched(plan, level, results, sizes))
        except Exception:  # whatever an operator that has no batching rule raises
            continue
    return unbatched


def _is(node: Node, name: str) -> bool:
    """Whether it calls functorch's function of that name, of torch._C._functorch or torch._functorch.predispatch."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == name


def _is_spec(node: Node) -> bool:
    """Whether it says how arguments of a call are nested, as torch.export writes calls of autograd functions."""
    return isinstance(attribute(node), pytree.TreeSpec)


def _levels(gm: GraphModule) -> Iterator[tuple[Node, ...]]:
    """The nodes of each outermost level, the ones that open and close it included."""
    depth, level = 0, list[Node]()
    for node in gm.graph.nodes:
        depth += _is(node, "_vmap_increment_nesting")
        if depth:
            level.append(node)
        depth -= _is(node, "_vmap_decrement_nesting")
        if level and not depth:
            yield tuple(level)
            level = []


def _check(level: tuple[Node, ...], region: Region, regions: Regions) -> None:
    """Raises `CannotExpand` for a level that switches some other state, or gives anything but its results."""
    inside = set(level)
    if region.functorch or any(on for _, _, on, _ in region.autocast) or len(level) > _MOST:
        raise CannotExpand("it runs under another state, or is long")
    for node in level[:-1]:
        state = regions.of(node)
        vmaps = all(kind.startswith("vmap") for kind in state.functorch)
        computes = node.op in ("call_function", "call_method") or _is_spec(node)
        if not vmaps or replace(state, functorch=()) != region or not computes:
            raise CannotExpand(f"{node.name} switches a state")
        if not _is(node, "_remove_batch_dim") and any(user not in inside for user in node.users):
            raise CannotExpand(f"{node.name} is used outside of the level")


def _unbatched(plan: Plan, level: tuple[Node, ...], results: list[Node], sizes: Sizes) -> Unbatched:
    inside = set(level)
    inputs = list(dict.fromkeys(i for n in level for i in n.all_input_nodes if i not in inside))
    tensors = [n for n in inputs if isinstance(fake_value(n), _TENSORS)]
    known = {n: fake_value(n) for n in inputs if n not in tensors}
    fakes = [fake_value(n) for n in tensors]

    def run(*tensor_values: Any) -> list[Any]:
        values: dict[Node, Any] = {**known, **dict(zip(tensors, tensor_values))}
        for node in level:
            if node.op == "get_attr":
                values[node] = attribute(node)
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = (
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
                if node.op == "call_method"
                else node.target(*args, **kwargs)  # type: ignore[operator]
            )
        return [values[node] for node in results]

    with plan.running(), plan.adding_no_guard() as new_guards, _closing_levels():
        traced = make_fx(run)(*fakes)
    if new_guards:
        raise CannotExpand("it would hold for some sizes only, and they are not checked")
    new_nodes: list[Node] = []
    try:
        outputs = _copied(plan, traced, tensors, new_nodes)
        for node in new_nodes:
            level[0].prepend(node)
        pairs = tuple(zip(results, outputs, strict=True))
        if len(set(outputs)) != len(outputs) or not set(outputs) <= set(new_nodes):
            raise CannotExpand("it returns one of its inputs, or the same tensor twice")
        for old, new in pairs:
            check_same(old, new, sizes)
    except Exception:
        _erase(new_nodes)
        raise
    return Unbatched(level, tuple(new_nodes), pairs)


@contextmanager
def _closing_levels() -> Iterator[None]:
    """Closes what is open after an operator failed inside a level."""
    functorch: Any = torch._C._functorch
    before = functorch.maybe_current_level()
    try:
        yield
    finally:
        while functorch.maybe_current_level() != before:
            functorch._vmap_decrement_nesting()


def _copied(plan: Plan, traced: GraphModule, inputs: list[Node], new_nodes: list[Node]) -> list[Node]:
    """The traced operators as nodes; they run on fake values again, which shows what has a gradient."""
    nodes: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return [nodes[n] for n in node.args[0]]
        if node.op != "call_function" or _does_more(node.target):
            raise CannotExpand(f"{node.name} has side effects")
        args, kwargs = map_arg((node.args, node.kwargs), nodes.__getitem__)
        fakes, named = map_arg((args, kwargs), fake_value)
        with plan.running():
            fake = node.target(*fakes, **named)
        nodes[node] = plan.insert_node("call_function", node.target, args, kwargs, fake)
        new_nodes.append(nodes[node])
    raise CannotExpand("it gives nothing")


def _does_more(target: Any) -> bool:
    """Whether an operator writes what it is given, or draws random numbers."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") != "_operator"
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _erase(nodes: tuple[Node, ...] | list[Node]) -> None:
    for node in reversed(nodes):
        node.graph.erase_node(node)

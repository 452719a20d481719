"""Gives calls that use only the shape of a tensor another tensor of that shape, so that the first may be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from attn_pass.graph.values import Sizes, fake_value, memory_order, tensor_value, value_key
from attn_pass.model.index import Index

aten = torch.ops.aten


@dataclass(frozen=True)
class ShapeUse:
    """``user`` takes the shape, dtype and device of ``node``, and with ``strides`` also how it lies in memory."""

    user: Node
    node: Node
    strides: bool


class NoSize(Exception):
    """A size that no node holds before the one that needs it."""


@dataclass(frozen=True)
class _Ready:
    """A use whose stand-in can be made: the size of each dimension, in the order they lie in memory in."""

    use: ShapeUse
    sizes: tuple[int | tuple[Node, int | None], ...]  # a node that holds the size, or the dimension of it that does
    order: tuple[int, ...]


def can_stand_in(use: ShapeUse, sizes: Sizes) -> bool:
    """Whether a new tensor can lie in memory as the node's does."""
    value = tensor_value(use.node)
    plain = isinstance(value, FakeTensor) and value.layout == torch.strided
    return value is not None and plain and (not use.strides or memory_order(value, sizes) is not None)


def give_stand_ins(
    graph: Graph, uses: Iterable[ShapeUse], gone: Set[Node], sizes: Sizes
) -> Iterator[tuple[Node, Node]]:
    """Replaces the node by a tensor without values in each use; yields the new nodes, each with its user.

    ``gone`` are nodes that no size may be taken from. Raises `NoSize`, before anything is changed.
    """
    ready = [_prepared(graph, use, gone, sizes) for use in uses if not use.user._erased]
    for item in ready:
        yield from ((node, item.use.user) for node in _insert(graph, item))


def _prepared(graph: Graph, use: ShapeUse, gone: Set[Node], sizes: Sizes) -> _Ready:
    value = tensor_value(use.node)
    assert value is not None
    shape = sizes.shape(value)
    order = memory_order(value, sizes) if use.strides else None
    order = tuple(range(len(shape))) if order is None else order
    holders = _size_holders(graph, use.user, gone, sizes, {s for s in shape if not isinstance(s, int)})
    wanted_sizes: list[int | tuple[Node, int | None]] = []
    for dim in order:
        size = shape[dim]
        if not isinstance(size, int) and size not in holders:
            raise NoSize(f"no node holds the size {size} of {use.node.name} before {use.user.name} takes it")
        wanted_sizes.append(size if isinstance(size, int) else holders[size])
    return _Ready(use, tuple(wanted_sizes), order)


def _size_holders(
    graph: Graph, before: Node, gone: Set[Node], sizes: Sizes, needed_sizes: set[Index]
) -> dict[Index, tuple[Node, int | None]]:
    """The nodes from which each needed size can be read."""
    holders: dict[Index, tuple[Node, int | None]] = {}
    for node in graph.nodes:
        if node is before or len(holders) == len(needed_sizes):
            break
        value = fake_value(node)
        if node in gone:
            continue
        if isinstance(value, torch.SymInt):
            here: list[tuple[Index, int | None]] = [(sizes.index(value), None)]
        elif isinstance(value, torch.Tensor):
            here = [(size, dim) for dim, size in enumerate(sizes.shape(value))]
        else:
            continue
        holders |= {size: (node, dim) for size, dim in here if size in needed_sizes - holders.keys()}
    return holders


def _insert(graph: Graph, item: _Ready) -> Iterator[Node]:
    use = item.use
    value = tensor_value(use.node)
    assert isinstance(value, FakeTensor)
    key, new_nodes = value_key(use.user), list[Node]()

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        new = graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg((args, kwargs), fake_value)
        new.meta[key] = target(*fakes[0], **fakes[1])
        new_nodes.append(new)
        return new

    with graph.inserting_before(use.user), value.fake_mode, enable_python_dispatcher():
        sizes = [
            holder if isinstance(holder, int) else holder[0] if holder[1] is None else call(aten.sym_size.int, *holder)
            for holder in item.sizes
        ]
        # If its memory layout cannot be observed, it takes no memory.
        dense = call(
            aten.empty.memory_format, sizes if use.strides else [1] * len(sizes), dtype=value.dtype, device=value.device
        )
        stand_in = dense if use.strides else call(aten.expand.default, dense, sizes)
        if item.order != tuple(range(len(sizes))):
            stand_in = call(aten.permute.default, stand_in, [item.order.index(d) for d in range(len(sizes))])
    for node in new_nodes:
        node.meta.update({k: v for k, v in use.user.meta.items() if k in ("stack_trace", "nn_module_stack")})
    use.user.replace_input_with(use.node, stand_in)
    yield from new_nodes

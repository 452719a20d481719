"""Writes unused nodes into a graph beside its own: another way to compute the same value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node, map_arg

from attn_pass.compat import no_new_guards
from attn_pass.graph.allowed import pass_name
from attn_pass.graph.edit import erase_unused
from attn_pass.graph.values import fake_value, tensor_value, value_key
from attn_pass.model.index import Index
from attn_pass.reading.reader import Reader


class CannotAdd(Exception):
    """What was to be computed in another way is not that."""


@dataclass(eq=False)
class InPlace:
    """Products that stand in the place of a node while a graph is read and decided; ``new`` is the node's value."""

    old: Node
    between: tuple[Node, ...]  # from the weights to the node
    new: Node
    products: tuple[Node, ...]
    nodes: tuple[Node, ...]  # all that were added

    def __post_init__(self) -> None:
        self.old.replace_all_uses_with(self.new)
        pass_name(self.old, self.new)

    @property
    def idle(self) -> tuple[Node, ...]:
        """The nodes that the products stand in the place of."""
        return (*self.between, self.old)

    def settle(self) -> bool:
        """Stays where one of the products was rewritten; else the node is back."""
        if any(product._erased for product in self.products):
            if not self.old._erased:  # beside weights that stay
                erase_unused(self.old.graph, [self.old])
            return True
        self.new.replace_all_uses_with(self.old)
        pass_name(self.new, self.old)
        for node in reversed(self.nodes):
            node.graph.erase_node(node)
        return False


class Beside:
    """Adds nodes in front of ``node``, at its time and in its region, with fake values."""

    def __init__(self, graph: Graph, reader: Reader, node: Node) -> None:
        self.graph, self.reader, self.node = graph, reader, node
        self.nodes: list[Node] = []
        self._sizes: dict[tuple[Node, int], Node] = {}

    def add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call, run on fake values. Raises `CannotAdd` where it fails or needs a fact about symbolic sizes."""
        mode = getattr(fake_value(self.node), "fake_mode", None)
        if mode is None:
            raise CannotAdd(f"{self.node.name} is no plain fake tensor")
        fakes, named = map_arg((args, kwargs), fake_value)
        region = self.reader.regions.of(self.node)
        grad = region.grad_enabled is not False
        guarding: AbstractContextManager[list[str]] = (
            nullcontext([]) if mode.shape_env is None else no_new_guards(mode.shape_env)
        )
        try:
            with mode, enable_python_dispatcher(), region.restore(), torch.set_grad_enabled(grad), guarding:
                fake = target(*fakes, **named)
        except Exception as error:
            raise CannotAdd(str(error)) from error
        return self._insert(target, args, kwargs, fake)

    def add_like_scores(self, target: Callable[..., Any], *args: Any) -> Node:
        """A call that gives what ``node`` does, as far as types and shapes go. Raises `CannotAdd` for another."""
        added = self.add(target, *args)
        value, scores = tensor_value(added), tensor_value(self.node)
        if value is None or scores is None or value.dtype != scores.dtype:
            raise CannotAdd(f"{added.name} has another type")
        if self.reader.shape(added) != self.reader.shape(self.node):
            raise CannotAdd(f"{added.name} has another shape")
        return added

    def size(self, of: Node, dim: int) -> int | Node:
        """A size as an argument."""
        size: Index = self.reader.shape(of)[dim]
        if isinstance(size, int):
            return size
        if (of, dim) not in self._sizes:
            self._sizes[of, dim] = self.add(torch.ops.aten.sym_size.int, of, dim)
        return self._sizes[of, dim]

    def take_back(self) -> None:
        """Leaves the graph as it was before."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)

    def _insert(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any) -> Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        key = value_key(self.node)
        new.meta = {**{k: v for k, v in self.node.meta.items() if k != key}, key: fake}
        self.reader.effects.add_beside(new, self.node)
        self.reader.regions.add(new, self.reader.regions.of(self.node))
        self.nodes.append(new)
        return new

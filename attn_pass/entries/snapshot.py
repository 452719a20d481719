"""Saves a graph, and Dynamo's tracing context, so that they can be restored if a rewrite fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule


def tracing_state() -> Callable[[], None]:
    """A function that restores Dynamo's tracing context to its current state, after a compile that failed.

    AOTAutograd stores its results for a graph there, including bodies of invoke_subgraph by name, which would be
    used for the original.
    """
    context = torch._guards.TracingContext.try_get()
    before = dict(vars(context)) if context is not None else {}

    def restore() -> None:
        if context is not None:
            vars(context).update(before)
            if "hop_dispatch_set_cache" in before:
                context.hop_dispatch_set_cache = type(before["hop_dispatch_set_cache"])()

    return restore


class Snapshot:
    """A graph as it is now, bodies included, to come back to. Parameters, buffers and constants are shared, not copied.

    Cheaper than copying the GraphModule, whose code would be generated at once. What `Graph.__deepcopy__` drops is
    kept: attributes of nodes such as `_dynamo_source`, which Dynamo needs to guard on aliases.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._graph = _copied_graph(gm.graph)
        self._class_name = type(gm).__name__
        self._attributes = {**vars(gm), "_modules": dict(gm._modules)}
        self._meta = dict(gm.meta)
        self._members: dict[str, Any] = {}
        for node in gm.graph.nodes:
            if node.op in ("get_attr", "call_module") and node.target not in self._members:
                member = attrgetter(node.target)(gm)
                self._members[node.target] = Snapshot(member) if isinstance(member, GraphModule) else member

    def restore(self) -> None:
        """Put the GraphModule back to what it was; to be called once, instead of `module`."""
        for target, member in self._members.items():
            if isinstance(member, Snapshot):
                member.restore()
                holder, _, name = target.rpartition(".")
                setattr(self._gm.get_submodule(holder), name, member._gm)
        for name in [name for name in self._gm._modules if name not in self._attributes["_modules"]]:
            delattr(self._gm, name)
        self._gm.graph = self._graph
        self._gm.meta = self._meta

    def module(self) -> GraphModule:
        """The graph as a new GraphModule; to be called once."""
        members = {k: m.module() if isinstance(m, Snapshot) else m for k, m in self._members.items()}
        gm = GraphModule(members, self._graph, class_name=self._class_name)
        for name, value in self._attributes.items():
            if name not in vars(gm):
                object.__setattr__(gm, name, value)
        gm.training = self._attributes["training"]
        gm.meta = self._meta
        return gm


def _copied_graph(graph: Graph) -> Graph:
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        new.name = (
            old.name
        )  # a copy renames what is called as a builtin: torch.export keeps an argument's name, "input"
        for name, value in vars(old).items():
            if name not in vars(new):
                setattr(new, name, value)
    return copied

"""Joined parameters of a Dynamo graph: one input takes the place of several, made of them at every call.

The graph as it is rewritten joins the parameters by an operation, which is right for any caller. Where they are laid
into one buffer (`attn_pass.projections.layout`) that operation goes: the input of the first parameter is the joined
tensor then, and what is called makes it of the parameters that Dynamo passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.values import LAID_OUT, tensor_value, value_key
from attn_pass.projections.layout import Joined


class LaidOut:
    """A graph whose joined parameters are inputs: ``inputs`` to compile it with, and ``around`` what is compiled."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.inputs, self._given = list(example_inputs), example_inputs
        self._joined: list[tuple[tuple[int, ...], Joined]] = []  # which inputs are one now, the first in its place
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        for node in [n for n in gm.graph.nodes if LAID_OUT in n.meta]:
            self._take(gm, node, places)
        if self._joined:
            gm.graph.lint()
            gm.recompile()

    def _take(self, gm: GraphModule, node: Node, places: dict[Node, int]) -> None:
        parts: list[Node] = list(node.args[0])  # type: ignore[arg-type]
        fakes = [tensor_value(part) for part in parts]
        value = tensor_value(node)
        assert value is not None
        with value.fake_mode:  # type: ignore[attr-defined]
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        fake.requires_grad_(any(v is not None and v.requires_grad for v in fakes))
        first = parts[0]
        first.meta[value_key(first)] = fake
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        self.inputs[places[first]] = fake
        of_parts = tuple(places[part] for part in parts)
        self._joined.append((of_parts, Joined([self._given[place].shape for place in of_parts])))

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What Dynamo calls with the inputs of its graph."""
        if not self._joined:
            return compiled
        all_joined = self._joined

        def call(*args: Any) -> Any:
            arguments = list(args)
            for places, join in all_joined:
                arguments[places[0]] = join([args[at] for at in places])
            return compiled(*arguments)

        return call

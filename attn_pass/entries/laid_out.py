"""Joined parameters of a Dynamo graph: one input takes the place of several, made of them at every call.

The graph as it is rewritten joins the parameters by an operation, which is right for any caller. Where they are laid
into one buffer (`attn_pass.projections.layout`) that operation goes: the input of the first parameter is the joined
tensor then, and what is called makes it of the parameters that Dynamo passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.values import LAID_OUT, tensor_value, value_key
from attn_pass.projections.layout import Joined, Place, joined_of, place_of


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
        self._joined.append((of_parts, joined_of([self._given[place] for place in of_parts])))

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What Dynamo calls with the inputs of its graph."""
        if not self._joined:
            return compiled
        all_joined, all_places = self._joined, [place for places, _ in self._joined for place in places]
        firsts = [places[0] for places, _ in self._joined]
        # What lies there: no copies, and no memory that this keeps.
        known: dict[Place, list[ReferenceType[torch.Tensor]]] = {}

        def joined(args: Sequence[Any], place: Place) -> list[torch.Tensor]:
            nonlocal known
            parameters = [[args[at] for at in places] for places, _ in all_joined]
            tensors = [join(of_one) for of_one, (_, join) in zip(parameters, all_joined)]
            memory = [join.memory_of(of_one) for of_one, (_, join) in zip(parameters, all_joined)]
            lying = [tensor for tensor in memory if tensor is not None]
            if place and len(lying) == len(memory):
                known = {
                    at: tensors for at, tensors in known.items() if all(tensor() is not None for tensor in tensors)
                }
                known[place_of([args[at] for at in all_places])] = [ref(tensor) for tensor in lying]
            return tensors

        def kept_at(place: Place) -> list[torch.Tensor] | None:
            tensors = [tensor() for tensor in known.get(place, ())]
            there = [tensor for tensor in tensors if tensor is not None]
            return there if there and len(there) == len(tensors) else None

        def call(*args: Any) -> Any:
            arguments, tensors, place = list(args), None, Place()
            if not torch.is_grad_enabled():
                place = place_of([args[at] for at in all_places])
                tensors = kept_at(place)
            for first, tensor in zip(firsts, tensors or joined(args, place)):
                arguments[first] = tensor
            return compiled(*arguments)

        return call

"""A part of a graph as a program of its own: Python text and its inputs, for another process to compile and time."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attn_pass.graph.effects import Effects
from attn_pass.graph.subgraphs import called_bodies
from attn_pass.graph.values import Sizes, fake_value

# What the text of a graph may name besides its inputs; anything else another process might not have.
_NAMES = {"torch", "math", "inf", "nan", "NoneType", "device", "fx_pytree", "pytree", "operator", "_operator"}
_NAMES |= vars(builtins).keys()


class CannotExtract(Exception):
    """Why a part of a graph is no program of its own, in words."""


@dataclass(frozen=True)
class Input:
    """An input of the program, sizes at their hints. ``value`` is given where the program was told it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Program:
    """``def forward(self, ...)`` as text, with its inputs in order."""

    text: str
    inputs: tuple[Input, ...]


def extract(
    result: Node,
    sources: Sequence[Node],
    sizes: Sizes,
    effects: Effects,
    known: Mapping[Node, torch.Tensor],
    needs_grad: Callable[[Node], bool],
) -> Program:
    """The program that computes ``result`` from ``sources`` and from whatever inputs of the graph it reads besides.

    Raises:
        CannotExtract: it writes memory in place, calls graphs, or calls what another process might not have.
    """
    order = _between(result, set(sources))
    position = effects.position
    order.sort(key=position.__getitem__)
    graph = Graph()
    copied: dict[Node, Any] = {}
    inputs: list[Input] = []
    for node in order:
        held = fake_value(node)
        if isinstance(held, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            copied[node] = _hint(held, sizes)
        elif node in sources or node.op in ("placeholder", "get_attr"):
            inputs.append(_input(node, sizes, known.get(node), needs_grad(node)))
            copied[node] = graph.placeholder(f"x{len(inputs)}")
        else:
            _check(node, effects)
            args, kwargs = map_arg((node.args, node.kwargs), copied.__getitem__)
            copied[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
    graph.output((copied[result],))
    code = graph.python_code("self")
    foreign = sorted(name for name in code.globals if name not in _NAMES)
    if foreign:
        raise CannotExtract(f"it calls {foreign[0]}")
    return Program(code.src, tuple(inputs))


def _between(result: Node, sources: set[Node]) -> list[Node]:
    """The ancestors of the result, down to the sources and inputs, each once."""
    found: dict[Node, None] = {}
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        if node not in sources and not isinstance(fake_value(node), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            waiting += node.all_input_nodes
    return list(found)


def _check(node: Node, effects: Effects) -> None:
    if called_bodies(node):
        raise CannotExtract(f"it calls a graph ({node.name})")
    if effects.mutations(node):
        raise CannotExtract(f"it writes memory in place ({effects.mutations(node)[0].node.name})")


def _hint(value: Any, sizes: Sizes) -> int | float | bool:
    if isinstance(value, torch.SymInt):
        return sizes.hint(sizes.index(value))
    hint = value.node.hint
    if hint is None:
        raise CannotExtract("it takes a number that is not known before it runs")
    return hint  # type: ignore[no-any-return]


def _input(node: Node, sizes: Sizes, value: torch.Tensor | None, requires_grad: bool) -> Input:
    held = fake_value(node)
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided:
        raise CannotExtract(f"{node.name} is no tensor that can be made here")

    def hints(values: Sequence[Any]) -> tuple[int, ...]:
        return tuple(sizes.hint(sizes.index(v)) for v in values)

    return Input(
        hints(held.shape),
        hints(held.stride()),
        str(held.dtype).removeprefix("torch."),
        str(held.device),
        requires_grad,
        value,
    )

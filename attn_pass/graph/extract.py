"""A part of a graph as Python text and its inputs, for another process to compile and time."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from attn_pass.graph.cut import Around, CannotExtract, Input, Level, cut, numbers
from attn_pass.graph.effects import Effects
from attn_pass.graph.values import Sizes

# What the text of a graph may name besides its inputs; anything else another process might not have.
_NAMES = {"torch", "math", "inf", "nan", "NoneType", "device", "fx_pytree", "pytree", "operator", "_operator"}
_NAMES |= vars(builtins).keys()


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
    since = effects.position[result]
    around = Around((Level(result.graph, effects, since),))
    part = cut(
        result, dict.fromkeys(sources, since), around, numbers(sizes), known=known, needs_grad=needs_grad, plain=True
    )
    return Program(text_of(part.original.graph), part.inputs)


def text_of(graph: Graph) -> str:
    """The graph as ``def forward(self, ...)``.

    Raises:
        CannotExtract: it names what no other process might have.
    """
    code = graph.python_code("self")
    unknown = sorted(name for name in code.globals if name not in _NAMES)
    if unknown:
        raise CannotExtract(f"it calls {unknown[0]}")
    return code.src

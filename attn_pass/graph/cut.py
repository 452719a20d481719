"""A part of a graph as a graph of its own: from its sources to its result, with numbers in place of symbolic sizes.

What was planned in its place is cut out the same way, with the same inputs, so that the two can be run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attn_pass.graph.edit import Planned, Value, fake_of, is_attribute
from attn_pass.graph.effects import Effects
from attn_pass.graph.random_draws import may_draw
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import attribute, called_bodies
from attn_pass.graph.values import Sizes, fake_value
from attn_pass.model.dtype_name import dtype_name

_MOST = 250  # nodes: a part that reads more is not separate
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CARRIED = ("stack_trace", "nn_module_stack")
Number = Callable[[Any], int | float | bool]
"""The number that a symbolic value stands for."""


class CannotExtract(Exception):
    """Why a part of a graph cannot be a separate program, in words."""


@dataclass(frozen=True)
class Input:
    """An input of the part, sizes as numbers. ``value`` is given if the program knows it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    value: torch.Tensor | None = None
    offset: int = 0  # elements in front of it in its memory, those alone that change how it is aligned

    @property
    def memory(self) -> int:
        """Elements of the memory it lies in, up to its last."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride))

    def in_memory(self, flat: torch.Tensor) -> torch.Tensor:
        """The input, as a view of its memory."""
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Level:
    """A graph and what is known of it; for the graphs around a body, up to when: the time of the body's call."""

    graph: Graph
    effects: Effects
    until: int
    regions: Regions | None = None


@dataclass(frozen=True)
class Around:
    """The graphs a part lies in, innermost first, and what their callers pass to placeholders of bodies."""

    levels: tuple[Level, ...]
    bound: Mapping[Node, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The part as it was, what was planned in its place if anything was, and the inputs of both.

    ``nodes`` are the inputs' nodes in the graph it was cut from; ``shape`` is the result's. ``also`` gives, for the
    same inputs, a tuple of other nodes' values.
    """

    original: GraphModule
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    shape: tuple[int, ...]
    also: GraphModule
    rewritten: GraphModule | None = None


def numbers(sizes: Sizes, chosen: Mapping[str, int] | None = None) -> Number:
    """Symbolic values as numbers: what was chosen for their symbols, else what the program was traced with."""
    by_symbol = chosen or {}

    def number(value: Any) -> int | float | bool:
        node = value.node
        if isinstance(value, torch.SymInt):
            index = sizes.index(value)  # so that the hints of its symbols are known
            if not by_symbol:
                return sizes.hint(index)
        values = {s: sympy.Integer(by_symbol.get(str(s), sizes.hints.get(str(s), 64))) for s in node.expr.free_symbols}
        substituted = node.expr.xreplace(values)
        if isinstance(value, torch.SymBool):
            return bool(substituted)
        if not substituted.is_number:
            raise CannotExtract(f"{node.expr} is not known before it runs")
        if isinstance(value, torch.SymFloat):
            if node.expr.is_Symbol and node.hint is None:
                raise CannotExtract("it takes a number that is not known before it runs")
            return float(node.hint if node.expr.is_Symbol else substituted)
        return int(substituted)

    return number


def cut(
    result: Node,
    sources: Mapping[Node, int],
    around: Around,
    number: Number,
    *,
    known: Mapping[Node, torch.Tensor],
    needs_grad: Callable[[Node], bool],
    new: Value | None = None,
    also: Sequence[Node] = (),
    plain: bool = False,
    repeatable: bool = False,
) -> Cut:
    """The part of the graph that computes ``result``, and ``new``, its planned replacement.

    Args:
        result: the node whose value the part computes.
        sources: where the part begins: nodes, and the time from which each holds the value it enters with.
        around: the graph and those around it.
        number: numbers for symbolic values.
        known: the values of inputs that are known.
        needs_grad: whether an input needs a gradient.
        new: the planned replacement of the result.
        also: other nodes whose values the part gives.
        plain: nothing in the part may write memory, call a graph or read a tensor of the program's own.
        repeatable: nothing in it may draw random numbers, so that it gives the same whenever it is run.

    Raises:
        CannotExtract: the part reads too much of the program, or something without a value of its own.
    """
    walk = _Walk(sources, around)
    order = walk.order([result])
    if plain:
        _check_plain([n for n in order if n not in sources], around)
    others, more = walk.order(_leaves_of(new)), walk.order(also)
    if repeatable and (drawn := [n for n in (*order, *others, *more) if n not in sources and may_draw(n)]):
        raise CannotExtract(f"it draws random numbers ({drawn[0].name})")
    leaves = list(dict.fromkeys(n for n in (*order, *others, *more) if _is_input(n, sources, around)))
    inputs = tuple(_input(n, number, known.get(n), needs_grad(n)) for n in leaves)
    regions = around.levels[0].regions
    region = None if regions is None else regions.of(result)
    original, rewritten, aside = (_Copy(leaves, around, number, region) for _ in range(3))
    original.nodes(order)
    rewritten.nodes(others)
    aside.nodes(more)
    return Cut(
        original.module(original.copied[result], name="Original"),
        inputs,
        tuple(leaves),
        _plain(fake_value(result).shape, number),
        aside.module(*(aside.copied[n] for n in also), name="Also"),
        None if new is None else rewritten.module(rewritten.planned(new), name="Rewritten"),
    )


# ---------------------------------------------------------------- what was there


class _Walk:
    """The ancestors of a result down to its sources, with what is written to their memory on the way."""

    def __init__(self, sources: Mapping[Node, int], around: Around) -> None:
        self.sources, self.around = sources, around
        self.level = {level.graph: (depth, level) for depth, level in enumerate(around.levels)}
        self.before = self._written_before()

    def _written_before(self) -> set[Node]:
        """Writes to the memory of a source whose effect is in the value it enters with."""
        written: set[Node] = set()
        for source, since in self.sources.items():
            written |= {m.node for m in self._effects(source).effects.mutations(source) if m.position < since}
        return written - set(self.sources)

    def _effects(self, node: Node) -> Level:
        if node.graph not in self.level:
            raise CannotExtract(f"{node.name} belongs to another graph")
        return self.level[node.graph][1]

    def order(self, results: Sequence[Node]) -> list[Node]:
        """What computes these, in the order of the program."""
        reached: dict[Node, None] = {}
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node in reached:
                continue
            if node in self.before:
                raise CannotExtract(f"{node.name} writes to an input of the site")
            reached[node] = None
            if len(reached) > _MOST:
                raise CannotExtract(f"it reads more than {_MOST} operations of the program")
            waiting += self._needed(node)
        return sorted(reached, key=lambda node: (*self._time(node), node))  # what was added has the time of another

    def _needed(self, node: Node) -> Iterator[Node]:
        if node in self.sources or isinstance(fake_value(node), SYMBOLIC):
            return
        if node in self.around.bound:
            yield self.around.bound[node]
        level = self._effects(node)
        for mutation in level.effects.mutations(node):
            if mutation.position < level.until and mutation.node not in self.before:
                yield mutation.node
        yield from node.all_input_nodes

    def _time(self, node: Node) -> tuple[int, int]:
        depth, level = self.level[node.graph]
        if node not in level.effects.position:
            raise CannotExtract(f"{node.name} is new in the graph")
        return -depth, level.effects.position[node]


def _is_input(node: Node, sources: Mapping[Node, int], around: Around) -> bool:
    if node in around.bound and node not in sources:
        return False
    if isinstance(fake_value(node), SYMBOLIC):
        return False
    if node.op == "get_attr" and node not in sources:
        tensor = attribute(node)
        return isinstance(tensor, (FakeTensor, torch.nn.Parameter)) or tensor is None
    return node in sources or node.op == "placeholder"


class _Copy:
    """A graph with inputs, into which nodes of the program and planned calls are copied."""

    def __init__(self, leaves: Sequence[Node], around: Around, number: Number, region: Region | None) -> None:
        self.graph = Graph()
        self.around, self.number, self.region = around, number, region
        self.members: dict[str, Any] = {}
        self.copied: dict[Any, Any] = {node: self.graph.placeholder(f"input{n}") for n, node in enumerate(leaves, 1)}
        self.regions = {level.graph: level.regions for level in around.levels}

    def module(self, *results: Any, name: str) -> GraphModule:
        """The graph with these results."""
        self.graph.output(results)
        return GraphModule(self.members, self.graph, class_name=name)

    def nodes(self, order: Sequence[Node]) -> None:
        """Copies nodes of the program."""
        for node in order:
            if node not in self.copied:
                self.copied[node] = self._node(node)

    def _node(self, node: Node) -> Any:
        fake = fake_value(node)
        if isinstance(fake, SYMBOLIC):
            return self.number(fake)
        if node in self.around.bound:
            return self.copied[self.around.bound[node]]
        if node.op == "get_attr":
            return self._get_attr("held", attribute(node))
        args, kwargs = map_arg((node.args, node.kwargs), self.copied.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        copied.meta = {k: node.meta[k] for k in _CARRIED if k in node.meta}
        own = self.regions[node.graph]
        if self.region is not None and own is not None and _loses_gradient(node, own.of(node), self.region):
            copied = self.graph.call_method("detach", (copied,))
        return copied

    def _get_attr(self, name: str, value: Any) -> Node:
        name = f"{name}_{len(self.members)}"
        self.members[name] = value
        return self.graph.get_attr(name)

    def planned(self, value: Any) -> Any:
        """Copies planned calls, and what is in their arguments."""
        if isinstance(value, (Node, Planned)):
            fake = fake_of(value)
            if isinstance(fake, SYMBOLIC):
                return self.number(fake)
            key = value if isinstance(value, Node) else id(value)
            if key not in self.copied:
                assert isinstance(value, Planned)
                self.copied[key] = self._call(value)
            return self.copied[key]
        if isinstance(value, SYMBOLIC):
            return self.number(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.planned(v) for v in value)
        if isinstance(value, dict):
            return {k: self.planned(v) for k, v in value.items()}
        return value

    def _call(self, value: Planned) -> Node:
        if is_attribute(value):
            return self._get_attr(value.args[0], value.fake)
        return self.graph.call_function(value.target, self.planned(value.args), self.planned(value.kwargs))


def _loses_gradient(node: Node, own: Region, region: Region) -> bool:
    """Whether a node runs without gradients where the result has them. Raises where it runs under another autocast."""
    fake = fake_value(node)
    if not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return False
    device = fake.device.type
    if own.autocast_dtype(device) != region.autocast_dtype(device):
        raise CannotExtract(f"{node.name} runs under another autocast than the result")
    return own.grad_enabled is False and region.grad_enabled is not False


def _check_plain(nodes: Iterable[Node], around: Around) -> None:
    (level,) = around.levels
    for node in nodes:
        if node.op == "placeholder" or isinstance(fake_value(node), SYMBOLIC):
            continue
        if called_bodies(node):
            raise CannotExtract(f"it calls a graph ({node.name})")
        if mutations := level.effects.mutations(node):
            raise CannotExtract(f"it writes memory in place ({mutations[0].node.name})")
        if node.op == "get_attr" and not isinstance(attribute(node), (torch.nn.Parameter, GraphModule)):
            raise CannotExtract(f"it reads a tensor of the program's own ({node.name})")


# ---------------------------------------------------------------- what was planned


def _leaves_of(value: Value | None) -> list[Node]:
    """The graph's own tensors that planned calls read."""
    reached: dict[Node, None] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, (Node, Planned)) and isinstance(fake_of(value), SYMBOLIC):
            return
        if isinstance(value, Node):
            reached[value] = None
        elif isinstance(value, Planned) and id(value) not in seen:
            seen.add(id(value))
            visit((value.args, value.kwargs))
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            visit(tuple(value.values()))

    visit(value)
    return list(reached)


# ---------------------------------------------------------------- inputs


ALIGNED = 64  # elements: further offsets change no alignment that a kernel needs


def _input(node: Node, number: Number, value: torch.Tensor | None, requires_grad: bool) -> Input:
    fake = fake_value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout != torch.strided:
        raise CannotExtract(f"{node.name} is not a tensor that can be made here")

    (offset,) = _plain([fake.storage_offset()], number)
    return Input(
        _plain(fake.shape, number),
        _plain(fake.stride(), number),
        dtype_name(fake.dtype),
        str(fake.device),
        requires_grad,
        value,
        offset % ALIGNED,
    )


def _plain(values: Sequence[Any], number: Number) -> tuple[int, ...]:
    return tuple(int(number(v)) if isinstance(v, torch.SymInt) else int(v) for v in values)

"""Reads the element of a node at a position as an expression, at a point in the program's time.

`Reader` holds what is known of one graph. `Reader.element` follows a tensor back to index arithmetic where it can,
which is how masks are named; `attn_pass.reading.operands` walks back through the views of an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Regions
from attn_pass.graph.values import Sizes, fake_value, tensor_value
from attn_pass.model.expression import Apply, Const, Expr, IndexValue, Load, apply, loads, walk
from attn_pass.model.piecewise import where_it_holds
from attn_pass.reading.constants import form_of
from attn_pass.reading.creation import created
from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.pointwise import POINTWISE, pointwise
from attn_pass.reading.reach import Reach
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position, broadcast_position
from attn_pass.reading.written_elements import put, written

_LARGEST = 1000  # parts of an element: what chooses between two values of itself is twice as large each time


@dataclass
class Used:
    """What was noted down while one site was read."""

    read_times: dict[Node, int] = field(default_factory=dict)  # of each node loaded, the earliest time it is read at
    known: list[str] = field(default_factory=list)  # the tensors that something was concluded from the values of


@dataclass(frozen=True)
class Caller:
    """The only call of a body: the reader of the graph it is in, what is passed to each placeholder, and when."""

    reader: Reader
    passed: Mapping[Node, Node]
    time: int


def _is_never(_: Reader, __: Node) -> bool:
    return False


class Reader(GraphReader):
    """What is known of one graph: operations, effects, regions, which products and softmaxes reach a node.

    Args:
        is_softmax: whether the finders treat a node as a softmax.
        knows_gradients: False for an exported graph, whose fake values do not show what needs a gradient.
        constants: tensors of one element that are part of the program's text.
        known: tensors that keep their values, with their names.
        needed: nodes without users that will have some: results of expanded calls.
        caller: the caller of a body that is called once.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Sizes,
        effects: Effects,
        regions: Regions,
        *,
        is_softmax: Callable[[Reader, Node], bool] = _is_never,
        knows_gradients: bool = True,
        constants: Mapping[Node, torch.Tensor] | None = None,
        known: Mapping[Node, tuple[str, torch.Tensor]] | None = None,
        needed: frozenset[Node] = frozenset(),
        caller: Caller | None = None,
    ) -> None:
        super().__init__(graph, sizes, effects, regions, knows_gradients=knows_gradients)
        self.constants: Mapping[Node, torch.Tensor] = constants or {}
        self.known: Mapping[Node, tuple[str, torch.Tensor]] = known or {}
        self.needed = needed
        self.caller = caller
        self._is_softmax = is_softmax
        self._used = Used()
        self._elements: dict[tuple[Node, Position, int, int | None], Expr] = {}
        self._forms: dict[Node, Callable[[Position], Expr] | None] = {}  # of known tensors
        self._until: int | None = None
        self._instead: dict[Node, tuple[Node, ...]] = {}
        self.sums: list[tuple[Node, ...]] = []  # products that add up to one that they stand in the place of

    @contextmanager
    def site(self) -> Iterator[Used]:
        """Notes down what is used of the graph, and of those around it, from here to the end of the block."""
        before, used = self._used, Used()
        self._note_in(used)
        try:
            yield used
        finally:
            self._note_in(before)

    def _note_in(self, used: Used) -> None:
        self._used = used
        if self.caller is not None:
            self.caller.reader._note_in(used)

    @property
    def products(self) -> Mapping[Node, frozenset[Node]]:
        """The products that each node's elements come from, through views, casts and pointwise operations alone."""
        return self._reach.products

    @property
    def softmaxes(self) -> Mapping[Node, frozenset[Node]]:
        """The softmaxes that each node's elements come from, in the same way."""
        return self._reach.softmaxes

    @cached_property
    def _reach(self) -> Reach:
        return Reach.of(self, lambda node: self._is_softmax(self, node))

    def put_in_place(self, product: Node, idle: tuple[Node, ...]) -> None:
        """Records that a product replaces nodes, which have no users now: its users have other inputs."""
        self.forget(product.users)
        self._reach.products[product] = frozenset((product,))
        self._instead[product] = idle

    def has_reach_of(self, new: Node, old: Node) -> None:
        """Records that the elements of a new node come from the same products and softmaxes as an old one's."""
        for held in (self._reach.products, self._reach.softmaxes):
            if old in held:
                held[new] = held[old]

    def instead_of(self, product: Node) -> tuple[Node, ...]:
        """The nodes that a product stands in the place of."""
        return self._instead.get(product, ())

    # ------------------------------------------------------------ values

    def scalar(self, value: Any, at: int) -> Expr | None:
        """A Python number, a symbolic number or a tensor of one known element, as an expression; else None."""
        if isinstance(value, (bool, int, float)):
            return Const(value)
        if not isinstance(value, Node):
            return None
        fake = fake_value(value)
        if isinstance(fake, (bool, int, float)):
            return Const(fake)
        if isinstance(fake, (torch.SymInt, torch.SymFloat)):
            return Load(self.source(value), ())
        if isinstance(fake, torch.Tensor) and all(s == 1 for s in self.sizes.shape(fake)):
            element = self.element(value, tuple(0 for _ in fake.shape), at)
            if isinstance(element, Const):
                return element
            return self.load(value, tuple(0 for _ in fake.shape), at)
        return None

    def load(self, node: Node, position: Position, at: int) -> Load:
        """An element of a node's tensor, to be read where the node stands; remembers the time it must hold from."""
        times = self._used.read_times
        times[node] = min(at, times.get(node, at))
        return Load(self.source(node), position)

    def element(self, node: Node, position: Position, at: int, depth: int = 0) -> Expr:
        """The element of a node as far down as it can be read: constants, index arithmetic, loads of the rest."""
        mutation = self.effects.last_mutation(node, at)
        key = (node, position, -1 if mutation is None else mutation.position, self._until)
        known = self._elements.get(key)
        if known is None:
            before = len(self._used.known)
            known = self._element(node, position, at, depth)
            if len(self._used.known) == before:  # the assumption has to be reported again
                self._elements[key] = known
        return known

    def _element(self, node: Node, position: Position, at: int, depth: int) -> Expr:
        start = (node, position, at)
        node, position, at = self.through_views(node, position, at, None)
        if (node, position, at) != start and depth < 60:
            return self.element(node, position, at, depth + 1)
        caller = self.caller
        if caller is not None and node in caller.passed and depth < 60 and self.effects.last_mutation(node, at) is None:
            element = caller.reader.element(caller.passed[node], position, caller.time, depth + 1)
            return element if not loads(element) else self._leaf(node, position)
        literal = self._literal(node, at)
        if literal is not None:
            return literal
        if node in self.known and not self.effects.mutations(node):
            name, tensor = self.known[node]
            if node not in self._forms:
                self._forms[node] = form_of(tensor)
            form = self._forms[node]
            if form is not None:
                self._used.known.append(name)
                return form(position)
        defined, call = self.definition(node, at)
        if depth >= 60 or tensor_value(node) is None:
            return self._leaf(node, position)
        if call is None:
            lifted = written(self, node, position, at, depth)
            return lifted if lifted is not None and self._is_held(lifted) else self._leaf(node, position)
        time = self.order[defined]
        found_value = created(self, defined, call, position, depth)
        if found_value is not None and (self._until is None or self._lasts(found_value, self._until)):
            return found_value
        if call.op in POINTWISE or call.op == "cast":
            try:
                lifted = pointwise(defined, call, position, lambda v, p: self.value_at(v, p, time, depth + 1))
            except Unreadable:
                return self._leaf(node, position)
            lifted = self._chosen_once(lifted)
        else:
            lifted = put(self, defined, call, position, depth)
        return lifted if lifted is not None and self._is_held(lifted) else self._leaf(node, position)

    def _chosen_once(self, lifted: Expr) -> Expr:
        """A choice by what is loaded, without the same choice in its branches where nothing is written between."""
        if not isinstance(lifted, Apply) or lifted.op != "where":
            return lifted
        condition, yes, no = lifted.args
        if not loads(condition) or not self.never_changes(condition):
            return lifted
        yes = where_it_holds(condition, yes, self.never_changes)
        return apply("where", condition, yes, where_it_holds(apply("not", condition), no, self.never_changes))

    def _is_held(self, lifted: Expr) -> bool:
        """Whether an element is kept as an expression: one that is not too long, nor of what does not last."""
        is_small = not any(True for _ in islice(walk(lifted), _LARGEST, None))
        return is_small and (self._until is None or self._lasts(lifted, self._until))

    @contextmanager
    def lasting(self, until: int) -> Iterator[None]:
        """In the block elements are lifted only as far down as what they load holds the same value until then.

        A position that a cache counts up behind the mask it was used for is not read once more: what was computed from
        it is. Nor is a row of a table looked up by a computed number again, which may be rounded otherwise.
        """
        self._until = until
        try:
            yield
        finally:
            self._until = None

    def _lasts(self, element: Expr, until: int) -> bool:
        is_lookup = isinstance(element, Apply) and element.op == "lookup"
        return not is_lookup and all(self.stays(load, until) for load in loads(element))

    def stays(self, load: Load, until: int) -> bool:
        """Whether what is loaded is, until then, what it was when its tensor was made."""
        node = self.source_nodes[load.source]
        return node in self.order and self.effects.mutation_between(node, self.order[node] - 1, until) is None

    def _leaf(self, node: Node, position: Position) -> Expr:
        """An element that can only be loaded; of a boolean tensor its form says that it is a truth value."""
        load, value = Load(self.source(node), position), tensor_value(node)
        return apply("cast", load, dtype=torch.bool) if value is not None and value.dtype == torch.bool else load

    def _literal(self, node: Node, at: int) -> Const | None:
        """The number a one-element tensor was written with, through the copies torch.export makes of it."""
        while self.constants:
            mutation = self.effects.last_mutation(node, at)
            writer = None if mutation is None else self.call(mutation.node)
            if mutation is not None and (writer is None or writer.op != "detach"):
                return None
            if node in self.constants:
                return Const(self.constants[node].item())
            call = self.call(node)
            if call is None or call.op not in ("copy", "detach"):
                return None
            node = call["input"]
        return None

    def value_at(self, value: Any, position: Position, at: int, depth: int) -> Expr:
        """The element of an operand, which may be a number, and may be broadcast. Raises `Unreadable`."""
        if isinstance(value, (bool, int, float)):
            return Const(value)
        if isinstance(value, Node):
            fake = fake_value(value)
            if isinstance(fake, torch.Tensor):
                return self.element(value, broadcast_position(position, self.sizes.shape(fake)), at, depth)
            if isinstance(fake, (bool, int, float)):
                return Const(fake)
            if isinstance(fake, torch.SymInt):
                return IndexValue(self.sizes.index(fake))
            if isinstance(fake, torch.SymFloat):
                return Load(self.source(value), ())
        raise Unreadable("an operand has no value that can be read")

"""Lifting: what the element of a node at a position is, as an expression, at a point in the program's time.

`Reader` holds what is known of one graph. `Reader.operand` walks back through the views of an operand, and
`Reader.element` lifts a tensor down to index arithmetic where it can, which is how masks are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, fake_value, memory_order, tensor_value, wants_gradient
from attn_pass.graph.writes import call_writes
from attn_pass.model.attention import Source, SourceKind
from attn_pass.model.expression import (
    OPERATIONS,
    Const,
    Expr,
    IndexValue,
    Load,
    apply,
)
from attn_pass.model.index import Index
from attn_pass.reading.products import PRODUCTS, Product, product_of, product_of_sum
from attn_pass.reading.views import VIEWS, Position, broadcast_position, view_of
from attn_pass.reading.vocabulary import Call, one_or_many, understand


class Unreadable(Exception):
    """What did not fit, in words, and the node it was found at."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


# Pointwise operations a spine may pass; the operands by name.
POINTWISE: Mapping[str, tuple[str, ...]] = {
    "add": ("input", "other"),
    "sub": ("input", "other"),
    "rsub": ("input", "other"),
    "mul": ("input", "other"),
    "div": ("input", "other"),
    "floordiv": ("input", "other"),
    "remainder": ("input", "other"),
    "neg": ("input",),
    "tanh": ("input",),
    "sigmoid": ("input",),
    "abs": ("input",),
    "exp": ("input",),
    "log": ("input",),
    "maximum": ("input", "other"),
    "minimum": ("input", "other"),
    "max": ("input", "other"),
    "clamp": ("input",),
    "where": ("condition", "input", "other"),
    "method_where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask"),
    "eq": ("input", "other"),
    "ne": ("input", "other"),
    "lt": ("input", "other"),
    "le": ("input", "other"),
    "gt": ("input", "other"),
    "ge": ("input", "other"),
    "and": ("input", "other"),
    "or": ("input", "other"),
    "not": ("input",),
}
PLAIN_TENSORS = (FakeTensor, torch.nn.Parameter)
ReadOperand = Callable[[Any, Position], Expr]
_MOST_STACKED = 64
_OF_THEIR_INPUT = ("pieces", "unbind", "index_put", "pad", "copy_to")
SCATTERS = ("slice_scatter", "select_scatter")
_TRANSPARENT = frozenset({"copy", "detach", "cast", "dropout", "nan_to_num"})


_MOST_REACHED = 8


@dataclass(frozen=True)
class OperandForm:
    """One way to see an operand: ``scale * product(factors) * node[position]``."""

    node: Node
    position: Position
    at: int
    dtype: torch.dtype
    scale: float = 1.0
    factors: tuple[tuple[Expr, bool], ...] = ()


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


@dataclass(frozen=True)
class _Reach:
    """The products and the softmaxes that each node's elements come from."""

    products: dict[Node, frozenset[Node]] = field(default_factory=dict)
    softmaxes: dict[Node, frozenset[Node]] = field(default_factory=dict)


def _is_never(_: Reader, __: Node) -> bool:
    return False


class Reader:
    """What is known of one graph: operations, effects, regions, which products and softmaxes reach a node.

    Args:
        is_softmax: whether a node is what the finders take for a softmax.
        knows_gradients: False for an exported graph, whose fake values do not tell what needs a gradient.
        constants: tensors of one element that are part of the program's text.
        known: tensors that keep the values they have, with their names.
        needed: nodes without users that will have some: results of calls taken apart.
        caller: for a body that is called once, where from.
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
        self.graph = graph
        self.sizes = sizes
        self.effects = effects
        self.regions = regions
        self.order = effects.position
        self.sources: list[Source] = []
        self.source_nodes: list[Node] = []
        self.knows_gradients = knows_gradients
        self.constants: Mapping[Node, torch.Tensor] = constants or {}
        self.known: Mapping[Node, tuple[str, torch.Tensor]] = known or {}
        self.needed = needed
        self.caller = caller
        self._is_softmax = is_softmax
        self._used = Used()
        self._source_of: dict[Node, int] = {}
        self._calls: dict[Node, Call | None] = {}
        self._elements: dict[tuple[Node, Position, int], Expr] = {}
        self._instead: dict[Node, tuple[Node, ...]] = {}

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

    # ------------------------------------------------------------ nodes

    def call(self, node: Node) -> Call | None:
        """The operation of a node, remembered."""
        if node not in self._calls:
            self._calls[node] = self._into_a_tensor(node) if "out" in node.kwargs else understand(node)
        return self._calls[node]

    def _into_a_tensor(self, node: Node) -> Call | None:
        """A pointwise operation that writes to a tensor of its operands' type (``out=``): like one in place."""
        call, made = understand(node, into=self.written_by(node)), tensor_value(node)
        if call is None or made is None or call.op not in POINTWISE:
            return None
        held = [tensor_value(call.args.get(name)) for name in POINTWISE[call.op] if name not in ("condition", "mask")]
        alike = all(v.dtype == made.dtype for v in held if v is not None)
        return Call(call.op, call.args, True) if alike and made.is_floating_point() else None

    def result_call(self, node: Node) -> Call | None:
        """The operation of a node, and that of a product or softmax as well that writes to a tensor (``out=``)."""
        call = self.call(node)
        if call is not None or "out" not in node.kwargs:
            return call
        call, made = understand(node, into=self.written_by(node)), tensor_value(node)
        if call is None or call.op != "softmax" or made is None:
            return call if call is not None and call.op in PRODUCTS else None
        held = tensor_value(call["input"])
        of_its_type = held is not None and held.dtype == made.dtype and call.get("dtype") in (None, made.dtype)
        return call if of_its_type else None

    def written_by(self, node: Node) -> Node | None:
        """The tensor whose elements a node replaces by its result, all of them: ``out=``, or that of ``baddbmm_``."""
        if node.op not in ("call_function", "call_method"):
            return None
        written = [w for w in call_writes(node) if w.whole]
        return written[0].target if len(written) == 1 else None

    def take_as(self, node: Node, call: Call) -> None:
        """Has a node read as another operation, which gives the same elements."""
        self._calls[node] = call

    def put_in_place(self, product: Node, idle: tuple[Node, ...]) -> None:
        """Notes that a product stands in the place of nodes, which nobody uses now: its users have other inputs."""
        for node in product.users:
            self._calls.pop(node, None)
        self._reach.products[product] = frozenset((product,))
        self._instead[product] = idle

    def instead_of(self, product: Node) -> tuple[Node, ...]:
        """The nodes that a product stands in the place of."""
        return self._instead.get(product, ())

    def product(self, node: Node) -> Product | None:
        """The product a node computes, if it is one."""
        call = self.result_call(node)
        if call is None or any(self.is_reshaped_in_place(n) for n in node.all_input_nodes):
            return None
        if call.op == "sum":
            return self._product_of_sum(node, call)
        return product_of(node, call, self.sizes) if self._is_product(node, call) else None

    def _is_product(self, node: Node, call: Call) -> bool:
        if call.op == "linear":
            # By a weight that is computed; layers of a model would make each softmax of their results a near miss.
            weight = call["other"]
            return isinstance(weight, Node) and weight.op in ("call_function", "call_method") and call["bias"] is None
        return call.op in PRODUCTS or (call.op == "sum" and self._product_of_sum(node, call) is not None)

    def _product_of_sum(self, node: Node, call: Call) -> Product | None:
        """``(a * b).sum(dim)``, with nothing written in between."""
        inner, value = call["input"], tensor_value(call["input"])
        times = self.call(inner) if isinstance(inner, Node) else None
        if times is None or value is None or times.op != "mul" or times.in_place or not value.is_floating_point():
            return None
        dims = None if call["dim"] is None else tensor_dims(call, "dim", value.dim())
        if dims is None or len(dims) != 1 or call["keepdim"] or call["dtype"] is not None:
            return None
        held = (inner, *(n for n in (times["input"], times["other"]) if isinstance(n, Node)))
        if any(self.effects.mutation_between(n, self.order[inner] - 1, self.order[node]) is not None for n in held):
            return None
        if any((v := tensor_value(n)) is None or v.dtype != value.dtype for n in held):
            return None
        return product_of_sum(node, dims[0], inner, times, self.sizes)

    def is_reshaped_in_place(self, node: Node) -> bool:
        """Whether ``transpose_`` or the like changes the node's shape: its fake value shows the last one only."""
        return self.effects.geometry_changes_after(node, 0)

    def shape(self, node: Node) -> Position:
        """The shape of a tensor node, as indices."""
        value = tensor_value(node)
        if value is None:
            raise Unreadable(f"{node.name} has no tensor value", node)
        return self.sizes.shape(value)

    def source(self, node: Node) -> int:
        """The number of the source a node is, registered on first use."""
        known = self._source_of.get(node)
        if known is None:
            if self.is_reshaped_in_place(node):
                raise Unreadable(f"{node.name} changes its shape in place", node)
            if isinstance(fake_value(node), torch.Tensor) and not isinstance(fake_value(node), PLAIN_TENSORS):
                raise Unreadable(f"{node.name} is a {type(fake_value(node)).__name__}, not a plain tensor", node)
            known = self._source_of[node] = len(self.sources)
            self.source_nodes.append(node)
            value = fake_value(node)
            if isinstance(value, torch.Tensor):
                shape, dtype, device = self.sizes.shape(value), value.dtype, value.device
                grad = value.requires_grad
            else:
                dtype = torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64
                shape, device, grad = (), torch.device("cpu"), False
            order = memory_order(value, self.sizes) if isinstance(value, torch.Tensor) else None
            strides, offset = self._layout(value)
            self.sources.append(Source(known, shape, dtype, device, _kind(node), grad, order, strides, offset))
        return known

    def _layout(self, value: object) -> tuple[tuple[Index, ...] | None, Index]:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None, 0
        return tuple(self.sizes.index(s) for s in value.stride()), self.sizes.index(value.storage_offset())

    @property
    def products(self) -> Mapping[Node, frozenset[Node]]:
        """The products that each node's elements come from, through views, casts and pointwise operations alone."""
        return self._reach.products

    @property
    def softmaxes(self) -> Mapping[Node, frozenset[Node]]:
        """The softmaxes that each node's elements come from, in the same way."""
        return self._reach.softmaxes

    @cached_property
    def _reach(self) -> _Reach:
        """One pass over the graph; at most eight products and softmaxes of a node are remembered."""
        reach, none = _Reach(), frozenset[Node]()
        for node in self.graph.nodes:
            call = self.result_call(node)
            if call is None:
                continue
            if self._is_softmax(self, node):
                self._reaches(node, reach.softmaxes, frozenset((node,)))
                continue
            if self._is_product(node, call):
                self._reaches(node, reach.products, frozenset((node,)))
                continue
            inputs = self.inputs(call)
            for from_what in (reach.products, reach.softmaxes):
                found = none.union(*(from_what.get(i, none) for i in inputs)) if inputs else none
                if found and len(found) <= _MOST_REACHED:
                    self._reaches(node, from_what, found)
        return reach

    def _reaches(self, node: Node, reach: dict[Node, frozenset[Node]], found: frozenset[Node]) -> None:
        """Notes what reaches a node, and with it what else sees the tensor that it is written to."""
        reach[node] = found
        is_own = "out" in node.kwargs or found == {node}  # else it writes what it reads, which is reached already
        buffer = self.written_by(node) if is_own else None
        for alias in () if buffer is None else self.effects.aliases(buffer):
            if self.order[alias] < self.order[node]:
                reach[alias] = reach.get(alias, frozenset()) | found

    def inputs(self, call: Call) -> list[Node]:
        """The nodes whose elements those of the call are made of, one by one."""
        if call.op == "max" and not isinstance(call.get("other"), Node):
            return []  # along a dimension, or of everything
        if call.op == "cat":
            values = list(call["input"]) if isinstance(call["input"], (list, tuple)) else []
        elif call.op in POINTWISE:
            values = [call.args.get(n) for n in POINTWISE[call.op]]
        elif call.op in SCATTERS:
            values = [call["input"], call["src"]]
        elif call.op in VIEWS or call.op in _TRANSPARENT or call.op in _OF_THEIR_INPUT:
            values = [call.args.get("input")]
        else:
            return []
        return [v for v in values if isinstance(v, Node)]

    # ------------------------------------------------------------ time

    def definition(self, node: Node, at: int) -> tuple[Node, Call | None]:
        """The operation that gave ``node`` the elements it has at time ``at``, and what it is.

        An in-place operation on the whole of ``node``'s memory counts as the functional one; a partial write means
        the value is only known by reading it, which is reported as no operation at all.
        """
        if self.is_reshaped_in_place(node):
            return node, None
        mutation = self.effects.last_mutation(node, at)
        if mutation is None:
            return node, self.call(node)
        call = self.call(node)
        is_step = call is not None and call.op in (*VIEWS, "detach") and self.is_alias(node, call)
        if is_step and mutation.position < self.order[node]:
            return node, call  # what was written lies behind it, and so may a gradient that it stops
        stops = wants_gradient(mutation.node) and not wants_gradient(node)
        if mutation.whole and not stops and self.effects.same_geometry(mutation.target, node):
            return mutation.node, self.call(mutation.node)
        return node, call if is_step and call is not None and call.op != "detach" else None

    def is_alias(self, node: Node, call: Call) -> bool:
        source = call.args.get("input")
        a, b = tensor_value(node), tensor_value(source)
        if isinstance(source, Node) and b is None:  # a piece of a split
            return True
        return a is not None and b is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata

    def back(self, node: Node, position: Position, at: int) -> tuple[Node, Position, int] | None:
        """One view back: the node whose element this is, its position, and the time it is read at."""
        defined, call = self.definition(node, at)
        if call is not None and defined is node and call.op == "stack":
            return self._of_stack(node, call, position)
        if call is None or defined is not node or call.op not in VIEWS:
            return None
        found = view_of(node, call, position, self.sizes)
        if found is None:
            return None
        return (*found, at if self.is_alias(node, call) else self.order[node])

    def _of_stack(self, node: Node, call: Call, position: Position) -> tuple[Node, Position, int] | None:
        """Back to what was stacked: the tensor of that number, or the one tensor that all are views of in turn."""
        tensors, dim = call["input"], call["dim"]
        if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int) or len(tensors) > _MOST_STACKED:
            return None
        if any(tensor_value(t) is None for t in tensors):
            return None
        dim %= len(position)
        which, rest, at = position[dim], (*position[:dim], *position[dim + 1 :]), self.order[node]
        if isinstance(which, int):
            return (tensors[which], rest, at) if 0 <= which < len(tensors) else None
        return along_stack([self.through_views(t, rest, at, self.regions.of(node)) for t in tensors], which)

    def through_views(
        self, node: Node, position: Position, at: int, region: Region | None
    ) -> tuple[Node, Position, int]:
        """Back through views and copies for as long as they can be followed within the region."""
        while True:
            if region is not None and self.regions.of(node) != region and self._matters(node):
                return node, position, at
            found = self.back(node, position, at) or self._through_copy(node, position, at)
            if found is None:
                return node, position, at
            node, position, at = found

    def _matters(self, node: Node) -> bool:
        """Whether the region a node runs in can change what it computes, or whether what it reads has a gradient."""
        return self.regions.of(node).functorch != () or any(map(wants_gradient, (node, *node.all_input_nodes)))

    def may_need_grad(self, value: torch.Tensor) -> bool:
        """Whether a gradient may flow into a tensor: what detach() would stop."""
        return value.requires_grad or (not self.knows_gradients and value.is_floating_point())

    def _through_copy(self, node: Node, position: Position, at: int) -> tuple[Node, Position, int] | None:
        defined, call = self.definition(node, at)
        if call is None or defined is not node or call.in_place:
            return None
        source = call.args.get("input")
        before, after = tensor_value(source), tensor_value(node)
        if not isinstance(source, Node) or before is None or after is None or before.device != after.device:
            return None
        same = call.op == "copy" or (call.op == "cast" and before.dtype == after.dtype)
        if call.op == "detach" and not self.may_need_grad(before):
            same = True
        if call.op == "dropout" and (call["training"] is False or call["p"] == 0):
            same = True
        return (source, position, self.order[node]) if same else None

    # ------------------------------------------------------------ operands

    def operand(self, node: Node, position: Position, at: int, region: Region, factors: bool) -> list[OperandForm]:
        """Every way to see an operand, from the tensor itself to the furthest it can be followed back."""
        value = tensor_value(node)
        assert value is not None
        form = OperandForm(node, position, at, value.dtype)
        forms = [form]
        while True:
            if self.regions.of(form.node) != region and self._matters(form.node):
                return forms
            found = self.back(form.node, form.position, form.at) or self._through_copy(
                form.node, form.position, form.at
            )
            if found is not None:
                form = replace(form, node=found[0], position=found[1], at=found[2])
            else:
                deeper = self._through_upcast(form) or (self._through_factor(form, region) if factors else None)
                if deeper is None:
                    return forms
                form = deeper
            if tensor_value(form.node) is not None:
                forms.append(form)

    def _through_upcast(self, form: OperandForm) -> OperandForm | None:
        """Through a cast that loses nothing (bfloat16 to float32); not behind a factor, applied in the wider type."""
        if form.factors:
            return None
        defined, call = self.definition(form.node, form.at)
        if call is None or defined is not form.node or call.op != "cast" or call.in_place:
            return None
        before, after = tensor_value(call["input"]), tensor_value(form.node)
        if before is None or after is None or before.device != after.device or not before.is_floating_point():
            return None
        if torch.promote_types(before.dtype, after.dtype) != after.dtype or after.dtype == before.dtype:
            return None
        return replace(form, node=call["input"], at=self.order[form.node], dtype=before.dtype)

    def _through_factor(self, form: OperandForm, region: Region) -> OperandForm | None:
        """Through a multiplication or division by a number, or by a tensor that is not as large as the operand.

        Not one in place (``q *= d ** -0.5``): what it was applied to is overwritten by the time the site is computed.
        """
        defined, call = self.definition(form.node, form.at)
        if call is None or call.in_place or call.op not in ("mul", "div") or call.get("rounding_mode") is not None:
            return None
        time = self.order[defined]
        left, right = call["input"], call["other"]
        tensor, factor = (left, right) if _rank(left) >= _rank(right) else (right, left)
        value = tensor_value(tensor)
        if not isinstance(tensor, Node) or value is None or (call.op == "div" and tensor is not left):
            return None
        after = tensor_value(form.node)
        if after is None or value.dtype != after.dtype or self.shape(tensor) != self.shape(form.node):
            return None
        inverse = call.op == "div"
        expression = self.scalar(factor, time)
        form = replace(form, node=tensor, at=time)
        if isinstance(expression, Const):
            number = float(expression.value)
            if number == 0 or number != number or abs(number) == float("inf"):
                return None
            return replace(form, scale=form.scale / number if inverse else form.scale * number)
        if expression is None:
            if not isinstance(factor, Node) or tensor_value(factor) is None:
                return None
            where = broadcast_position(form.position, self.shape(factor))
            source, where, read_at = self.through_views(factor, where, time, region)
            expression = self.load(source, where, read_at)
        return replace(form, factors=(*form.factors, (expression, inverse)))

    def scalar(self, value: Any, at: int) -> Expr | None:
        """A Python number, a symbolic number or a tensor of one known element, as an expression; else None."""
        if isinstance(value, (bool, int, float)):
            return Const(value)
        if not isinstance(value, Node):
            return None
        held = fake_value(value)
        if isinstance(held, (bool, int, float)):
            return Const(held)
        if isinstance(held, (torch.SymInt, torch.SymFloat)):
            return Load(self.source(value), ())
        if isinstance(held, torch.Tensor) and all(s == 1 for s in self.sizes.shape(held)):
            element = self.element(value, tuple(0 for _ in held.shape), at)
            if isinstance(element, Const):
                return element
            return self.load(value, tuple(0 for _ in held.shape), at)
        return None

    def load(self, node: Node, position: Position, at: int) -> Load:
        """An element of a node's tensor, to be read where the node stands; remembers the time it must hold from."""
        times = self._used.read_times
        times[node] = min(at, times.get(node, at))
        return Load(self.source(node), position)

    # ------------------------------------------------------------ values

    def element(self, node: Node, position: Position, at: int, depth: int = 0) -> Expr:
        """The element of a node as far down as it can be read: constants, index arithmetic, loads of the rest."""
        mutation = self.effects.last_mutation(node, at)
        key = (node, position, -1 if mutation is None else mutation.position)
        known = self._elements.get(key)
        if known is None:
            before = len(self._used.known)
            known = self._element(node, position, at, depth)
            if len(self._used.known) == before:  # what an assumption was made for has to be told again
                self._elements[key] = known
        return known

    def _element(self, node: Node, position: Position, at: int, depth: int) -> Expr:
        start = (node, position, at)
        node, position, at = self.through_views(node, position, at, None)
        if (node, position, at) != start and depth < 60:
            return self.element(node, position, at, depth + 1)
        if self.caller is not None and node in self.caller.passed and depth < 60:
            caller = self.caller
            found = caller.reader.element(caller.passed[node], position, caller.time, depth + 1)
            return found if not _has_load(found) else self._leaf(node, position)
        literal = self._literal(node, at)
        if literal is not None:
            return literal
        if node in self.known and not self.effects.mutations(node):
            from attn_pass.reading.constants import element_of

            name, tensor = self.known[node]
            found_value = element_of(tensor, position)
            if found_value is not None:
                self._used.known.append(name)
                return found_value
        defined, call = self.definition(node, at)
        if call is None or depth >= 60 or tensor_value(node) is None:
            return self._leaf(node, position)
        from attn_pass.reading.creation import created

        time = self.order[defined]
        found_value = created(self, defined, call, position, depth)
        if found_value is not None:
            return found_value
        if call.op in POINTWISE or call.op == "cast":
            try:
                return self.pointwise(defined, call, position, lambda v, p: self._value(v, p, time, depth + 1))
            except Unreadable:
                pass
        return self._leaf(node, position)

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

    def _value(self, value: Any, position: Position, at: int, depth: int) -> Expr:
        if isinstance(value, (bool, int, float)):
            return Const(value)
        if isinstance(value, Node):
            held = fake_value(value)
            if isinstance(held, torch.Tensor):
                return self.element(value, broadcast_position(position, self.sizes.shape(held)), at, depth)
            if isinstance(held, (bool, int, float)):
                return Const(held)
            if isinstance(held, torch.SymInt):
                return IndexValue(self.sizes.index(held))
            if isinstance(held, torch.SymFloat):
                return Load(self.source(value), ())
        raise Unreadable("an operand has no value that can be read")

    def pointwise(self, node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
        """A pointwise call as an expression; ``read(value, position)`` gives its operands."""
        from attn_pass.reading.dtype_range import leaves_the_type, wraps_in_comparison

        result, value = self._pointwise(node, call, position, read), tensor_value(node)
        dtype = None if value is None else value.dtype
        if leaves_the_type(call.op, result, dtype) or wraps_in_comparison(call):
            raise Unreadable("numbers that may leave the range or the digits of their type", node)
        return result

    def _pointwise(self, node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
        a = call.args
        op = call.op
        if op in ("add", "sub", "rsub"):
            left, right = read(a["input"], position), read(a["other"], position)
            alpha = a.get("alpha", 1)
            if op == "rsub":
                left, right = right, left
            if alpha != 1:
                if not isinstance(alpha, (int, float)):
                    raise Unreadable("a symbolic alpha", node)
                if op == "rsub":
                    left, right = left, apply("mul", right, Const(alpha))
                else:
                    right = apply("mul", right, Const(alpha))
            return apply("sub" if op == "rsub" else op, left, right)
        if op == "div" and a.get("rounding_mode") == "floor":
            return apply("floordiv", read(a["input"], position), read(a["other"], position))
        if op == "div" and a.get("rounding_mode") is not None:
            raise Unreadable("a rounding division", node)
        if op in ("where", "method_where"):
            condition, *values = (read(a[name], position) for name in ("condition", "input", "other"))
            return apply("where", condition, *(rounded(value, node) for value in values))
        if op == "masked_fill":
            condition, fill, inner = (read(a[name], position) for name in ("mask", "value", "input"))
            return apply("where", condition, rounded(fill, node), inner)
        if op == "max":
            if not isinstance(a["other"], Node) or tensor_value(node) is None:
                raise Unreadable("a maximum along a dimension", node)
            return apply("maximum", *(rounded(read(a[name], position), node) for name in ("input", "other")))
        if op == "clamp":
            out = read(a["input"], position)
            for bound, name in ((a.get("min"), "maximum"), (a.get("max"), "minimum")):
                if bound is not None:
                    out = apply(name, out, rounded(read(bound, position), node))
            return out
        if op == "cast":
            before, after = tensor_value(a["input"]), tensor_value(node)
            if before is None or after is None:
                raise Unreadable("a cast of something without a value", node)
            inner = read(a["input"], position)
            if before.device != after.device and _has_load(inner):
                raise Unreadable("a tensor that moves between devices", node)
            return inner if before.dtype == after.dtype else apply("cast", inner, dtype=after.dtype)
        if op in ("and", "or", "not"):
            value = tensor_value(node)
            if value is None or value.dtype != torch.bool:
                raise Unreadable("bitwise logic of integers", node)
        if op not in OPERATIONS:
            raise Unreadable(f"{op} is not pointwise", node)
        return apply(op, *(read(a[name], position) for name in POINTWISE[op]))


def rounded(value: Expr, node: Node) -> Expr:
    """A constant as it lies in a node's tensor: -1e30 is -1.00026e30 in bfloat16, however it was written there."""
    held = tensor_value(node)
    if not isinstance(value, Const) or held is None or not held.is_floating_point():
        return value
    return apply("cast", value, dtype=held.dtype)


def along_stack(pieces: Sequence[tuple[Node, Position, int]], which: Index) -> tuple[Node, Position, int] | None:
    """Where the piece ``which`` is, if each is one step further in one tensor than the one before it; else None."""
    (node, start, at), *others = pieces
    if not others or any(other is not node or time != at for other, _, time in others):
        return None
    steps = [b - a for a, b in zip(start, others[0][1])]
    for number, (_, position, _) in enumerate(others, 1):
        if any(a + step * number != p for a, step, p in zip(start, steps, position)):
            return None
    return node, tuple(a + which * step for a, step in zip(start, steps)), at


def _has_load(expression: Expr) -> bool:
    from attn_pass.model.expression import loads

    return bool(loads(expression))


def _rank(value: Any) -> int:
    held = tensor_value(value)
    return -1 if held is None else held.dim()


def _kind(node: Node) -> SourceKind:
    if node.op == "placeholder":
        value = tensor_value(node)
        return "parameter" if isinstance(value, torch.nn.Parameter) else "input"
    return "buffer" if node.op == "get_attr" else "computed"


def tensor_dims(call: Call, name: str, rank: int) -> tuple[int, ...] | None:
    """A ``dim`` argument as a tuple of non-negative dimensions; None when it is not constant."""
    dims = one_or_many(call.get(name))
    if any(not isinstance(d, int) or isinstance(d, bool) for d in dims):
        return None
    return tuple(d % rank for d in dims)

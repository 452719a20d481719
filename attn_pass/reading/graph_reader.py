"""What the nodes of a graph are: operations, shapes, sources; and the node and time that an element comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import PLAIN_TENSORS, Sizes, fake_value, memory_order, tensor_value, wants_gradient
from attn_pass.graph.writes import call_writes
from attn_pass.model.attention import Source, SourceKind
from attn_pass.model.expression import Expr, loads
from attn_pass.model.index import Index
from attn_pass.reading.bias_of_products import is_of_products
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.products import PRODUCTS, Product, product_of, product_of_sum
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import VIEWS, Position, view_of
from attn_pass.reading.vocabulary import Call, tensor_dims, understand

_MOST_STACKED = 64
_TRIANGLES = ("tril", "triu")
_STACKS = {"hstack": 1, "vstack": 0}  # the dimension of a matrix that they join along
_MAY_MULTIPLY = PRODUCTS | {"linear", "sum"}


class GraphReader(ABC):
    """One graph: its operations, products and sources, and the way back through views and copies.

    ``knows_gradients`` is False for an exported graph, whose fake values do not show what needs a gradient.
    """

    def __init__(
        self, graph: Graph, sizes: Sizes, effects: Effects, regions: Regions, *, knows_gradients: bool
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.effects = effects
        self.regions = regions
        self.order = effects.position
        self.knows_gradients = knows_gradients
        self.sources: list[Source] = []
        self.source_nodes: list[Node] = []
        self._source_of: dict[Node, int] = {}
        self._calls: dict[Node, Call | None] = {}

    @abstractmethod
    def element(self, node: Node, position: Position, at: int, depth: int = 0) -> Expr:
        """The element of a node as far down as it can be read."""

    @abstractmethod
    def value_at(self, value: Any, position: Position, at: int, depth: int) -> Expr:
        """The element of an operand, which may be a number, and may be broadcast. Raises `Unreadable`."""

    # ------------------------------------------------------------ nodes

    def call(self, node: Node) -> Call | None:
        """The operation of a node, remembered."""
        if node not in self._calls:
            self._calls[node] = self._into_a_tensor(node) if "out" in node.kwargs else _in_one_way(understand(node))
        return self._calls[node]

    def _into_a_tensor(self, node: Node) -> Call | None:
        """What writes to a tensor of its operands' type (``out=``), a triangle or pointwise: like one in place."""
        call, result = understand(node, into=self.written_by(node)), tensor_value(node)
        if call is None or result is None or call.op not in (*POINTWISE, *_TRIANGLES):
            return None
        names = POINTWISE.get(call.op, ("input",))
        fakes = [tensor_value(call.args.get(name)) for name in names if name not in ("condition", "mask")]
        alike = all(v.dtype == result.dtype for v in fakes if v is not None)
        is_known = result.is_floating_point() or call.op in _TRIANGLES
        return Call(call.op, call.args, True) if alike and is_known else None

    def result_call(self, node: Node) -> Call | None:
        """The operation of a node, and that of a product or softmax as well that writes to a tensor (``out=``)."""
        call = self.call(node)
        if call is not None or "out" not in node.kwargs:
            return call
        call, result = understand(node, into=self.written_by(node)), tensor_value(node)
        if call is None or call.op != "softmax" or result is None:
            return call if call is not None and call.op in PRODUCTS else None
        fake = tensor_value(call["input"])
        of_its_type = fake is not None and fake.dtype == result.dtype and call.get("dtype") in (None, result.dtype)
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

    def forget(self, nodes: Iterable[Node]) -> None:
        """Forgets the operations of nodes that were given other inputs."""
        for node in nodes:
            self._calls.pop(node, None)

    def product(self, node: Node) -> Product | None:
        """The product a node computes, if it is one."""
        call = self.result_call(node)
        if call is None or call.op not in _MAY_MULTIPLY:
            return None
        if any(self.is_reshaped_in_place(n) for n in node.all_input_nodes):
            return None
        if call.op == "sum":
            return self._product_of_sum(node, call)
        return product_of(node, call, self.sizes) if self.is_product(node, call) else None

    def is_product(self, node: Node, call: Call) -> bool:
        """Whether the call of a node is a product of two tensors."""
        if call.op not in _MAY_MULTIPLY:
            return False
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
        if dims is None or len(dims) != 1 or call["dtype"] is not None:
            return None
        if call["keepdim"] and times["input"] is times["other"]:
            return None  # the square of a norm, which operands are divided by
        held = (inner, *(n for n in (times["input"], times["other"]) if isinstance(n, Node)))
        if any(self.effects.mutation_between(n, self.order[inner] - 1, self.order[node]) is not None for n in held):
            return None
        if any((v := tensor_value(n)) is None or v.dtype != value.dtype for n in held):
            return None
        return product_of_sum(node, dims[0], bool(call["keepdim"]), inner, times, self.sizes)

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
            products = is_of_products(node, self.effects)
            self.sources.append(
                Source(known, shape, dtype, device, _kind(node), grad, order, strides, offset, products)
            )
        return known

    def _layout(self, value: object) -> tuple[tuple[Index, ...] | None, Index]:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None, 0
        return tuple(self.sizes.index(s) for s in value.stride()), self.sizes.index(value.storage_offset())

    # ------------------------------------------------------------ time

    def definition(self, node: Node, at: int) -> tuple[Node, Call | None]:
        """The operation that gave ``node`` the elements it has at time ``at``, and what it is.

        An in-place operation on the whole of ``node``'s memory counts as the functional one; a partial write is
        reported as no operation at all (`attn_pass.reading.written_elements`).
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

    def never_changes(self, expression: Expr) -> bool:
        """Whether an expression has the same value at all times: the graph writes to nothing that it loads."""
        return not any(self.effects.mutations(self.source_nodes[load.source]) for load in loads(expression))

    def is_alias(self, node: Node, call: Call) -> bool:
        """Whether a view shares the memory of what it is a view of."""
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
        source = view_of(node, call, position, self.sizes)
        if source is None:
            return None
        return (*source, at if self.is_alias(node, call) else self.order[node])

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
            if region is not None and self.regions.of(node) != region and self.matters(node):
                return node, position, at
            source = self.back(node, position, at) or self.through_copy(node, position, at)
            if source is None:
                return node, position, at
            node, position, at = source

    def matters(self, node: Node) -> bool:
        """Whether the region a node runs in can change what it computes, or whether what it reads has a gradient."""
        return self.regions.of(node).functorch != () or any(map(wants_gradient, (node, *node.all_input_nodes)))

    def may_need_grad(self, value: torch.Tensor) -> bool:
        """Whether a gradient may flow into a tensor: what detach() would stop."""
        return value.requires_grad or (not self.knows_gradients and value.is_floating_point())

    def through_copy(self, node: Node, position: Position, at: int) -> tuple[Node, Position, int] | None:
        """Back through what gives the same elements: a copy, a cast to the same type, detach where nothing flows."""
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


def _in_one_way(call: Call | None) -> Call | None:
    """A call, ``hstack`` and ``vstack`` as the ``cat`` they are of matrices; of vectors they are another operation."""
    if call is None or call.op not in _STACKS:
        return call
    tensors = call["input"]
    values = [tensor_value(t) for t in tensors] if isinstance(tensors, (list, tuple)) else []
    if not values or any(v is None or v.dim() < 2 for v in values):
        return None
    return Call("cat", {"input": tensors, "dim": _STACKS[call.op]}, False)


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


def _kind(node: Node) -> SourceKind:
    if node.op == "placeholder":
        return "parameter" if _is_parameter(node) else "input"
    if node.op == "get_attr":
        return "buffer"
    call = understand(node)
    table = None if call is None or call.op != "embedding" else call["input"]
    return "table" if isinstance(table, Node) and _is_parameter(table) else "computed"


def _is_parameter(node: Node) -> bool:
    """Whether a node is a parameter: an input, or an attribute of the graph, as with Inductor's ``freezing``."""
    return node.op in ("placeholder", "get_attr") and isinstance(tensor_value(node), torch.nn.Parameter)

"""Lowering for FlexAttention: score and mask functions as graphs of aten calls, what they capture, and operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.expression import Apply, Const, Dot, Expr, IndexValue, Load, walk
from attn_pass.model.index import Axis, Index, Poly, Quotient, Remainder, product
from attn_pass.model.operations import COMPARISONS, OPERATIONS
from attn_pass.model.structure import Band
from attn_pass.model.views import Group
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import is_dense
from attn_pass.targets.tanh import tanh

_CLAMPS = {"maximum": aten.clamp_min.default, "minimum": aten.clamp_max.default}


class Mod:
    """A graph ``(score, b, h, q_idx, kv_idx, *captured) -> score``, or one without a score that says what is kept.

    Elements of an axis are digits of the index of its group. Sizes and numbers that are not known come in as captured
    tensors without dimensions: the templates pass symbolic ones as integers only. ``in_triton``: the template takes
    tensors that lie anywhere, and its hyperbolic tangent has a derivative.
    """

    def __init__(self, lower: Lowering, expression: Expr, *, scored: bool = True, in_triton: bool = False) -> None:
        self.lower = lower
        self.plan = lower.plan
        self._in_triton = in_triton
        self._name = "ScoreMod" if scored else "MaskMod"
        self._device = lower.attention.sources[lower.attention.query.source].device
        self.captured: list[Value] = []
        self._graph = Graph()
        self._placeholders: dict[object, Node] = {}
        compute = lower.attention.compute_dtype
        if scored:
            self._score = self._placeholder("score", compute)
        indices = [self._placeholder(name, torch.int32) for name in ("b", "h", "q_idx", "kv_idx")]
        self._last = indices[-1]
        a = lower.attention
        self._digits: dict[Axis, tuple[Group, Node]] = {}
        for group, index in zip((a.batch, a.heads, a.rows, (a.keys,)), indices):
            self._digits |= {axis: (group, index) for axis in group}
        self._known: dict[Any, Any] = {}
        if scored and compute != torch.float32:
            self._score = self._call(aten.to.dtype, self._score, torch.float32)
        result = self._lower(expression)
        if scored and fake_dtype_is_wide(expression, lower):
            result = self._call(aten.to.dtype, result, torch.float32)
        if not scored:
            result = self._tensor(result, torch.bool)
            if _value(result).dtype != torch.bool:
                result = self._call(aten.to.dtype, result, torch.bool)
        self._graph.output(result)

    def _placeholder(self, name: str, dtype: torch.dtype) -> Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = torch.empty((), dtype=dtype, device=self._device)
        return node

    def module(self) -> GraphModule:
        """The graph as a module, to be planned with `Plan.module`."""
        return GraphModule(torch.nn.Module(), self._graph, class_name=self._name)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*map_arg(args, _value), **kwargs)
        return node

    def _capture(self, key: object, make: Callable[[], Value]) -> Node:
        known = self._placeholders.get(key)
        if known is None:
            self.captured.append(make())
            with self._graph.inserting_after(self._last):
                known = self._placeholders[key] = self._graph.placeholder(f"captured_{len(self.captured)}")
            known.meta["val"] = fake_of(self.captured[-1])
            self._last = known
        return known

    # ------------------------------------------------------------ expressions

    def _lower(self, expression: Expr) -> Any:
        if isinstance(expression, Const):
            return expression.value
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = self._lowered(expression)
        return known

    def _lowered(self, expression: Expr) -> Any:
        if isinstance(expression, Dot):
            return self._score
        if isinstance(expression, IndexValue):
            return self._index(expression.index)
        if isinstance(expression, Load):
            return self._load(expression)
        assert isinstance(expression, Apply)
        if expression.op == "lookup":
            table, row = expression.args
            assert isinstance(table, Load)
            source = self._capture(table.source, lambda: self._captured(self.lower.nodes[table.source]))
            indices = [self._lower(row), *(self._index(i) for i in table.index[1:])]
            return self._call(aten.index.Tensor, source, [self._tensor(i) for i in indices])
        op, args = expression.op, [self._lower(a) for a in expression.args]
        if op == "cast":
            return self._call(aten.to.dtype, self._tensor(args[0]), expression.dtype)
        if op == "where":
            return self._call(aten.where.self, self._tensor(args[0]), *self._alike(*args[1:]))
        operation = OPERATIONS[op]
        if op in COMPARISONS:
            return self._call(operation.overload(isinstance(args[1], Node)), self._tensor(args[0]), args[1])
        if op in ("maximum", "minimum") and isinstance(expression.args[1], Const):  # a clamp, with its gradient
            return self._call(_CLAMPS[op], self._tensor(args[0]), args[1])
        if op in ("maximum", "minimum"):
            return self._call(operation.aten, *self._alike(*args))
        if op in ("and", "or", "not"):
            return self._call(operation.aten, *(self._tensor(a) for a in args))
        if op in ("floordiv", "remainder"):
            return self._divided(self._tensor(args[0]), args[1], op == "remainder")
        if (
            op == "tanh"
            and not self._in_triton
            and isinstance(args[0], Node)
            and _value(args[0]).dtype == torch.float32
        ):
            return tanh(self._call, args[0])
        return self._call(operation.aten, self._tensor(args[0]), *args[1:])

    def _alike(self, left: Any, right: Any) -> tuple[Node, Node]:
        """Two operands of one type: numbers are taken to be scores."""
        number = not isinstance(left, Node) or not isinstance(right, Node)
        if not number:
            return left, right
        kind = torch.float32 if any(isinstance(x, float) for x in (left, right)) else None
        return self._tensor(left, kind), self._tensor(right, kind)

    def _tensor(self, value: Any, kind: torch.dtype | None = None) -> Node:
        if isinstance(value, Node):
            return value
        if kind is None:
            kind = torch.bool if isinstance(value, bool) else torch.float32 if isinstance(value, float) else torch.int64
        return self._call(aten.scalar_tensor.default, value, dtype=kind, device=self._device)

    def _load(self, load: Load) -> Node:
        node = self.lower.nodes[load.source]
        fake = fake_of(node)
        if not isinstance(fake, torch.Tensor):
            return self._number(node, torch.float32 if isinstance(fake, (float, torch.SymFloat)) else torch.int64)
        shape = self.lower.attention.sources[load.source].shape
        if not self._in_triton and not all(isinstance(n, int) for n in shape):
            return self._flat_load(load, node, shape)
        source = self._capture(load.source, lambda: self._captured(node))
        if not load.index:
            return source
        return self._call(aten.index.Tensor, source, [self._tensor(self._index(i)) for i in load.index])

    def _flat_load(self, load: Load, node: Node, shape: tuple[Index, ...]) -> Node:
        """An element of a tensor of unknown size, by its place in memory.

        Indexing needs the tensor's sizes, strides and bounds, and the CPU template declares no symbols for them
        ("ks2 was not declared", torch 2.13.0; among those it gets, it mistakes ks26 for ks2). One dimension has none of
        them, where nothing is checked: an index is within bounds as it was read.
        """
        source = self._capture(load.source, lambda: flat(self.plan, node))
        offset: Index = 0
        for index, size in zip(load.index, shape, strict=True):
            offset = offset * size + index
        at = self._tensor(self._index(offset))
        inside = self._call(aten.ge.Scalar, at, 0)
        return self._call(aten._unsafe_masked_index.default, source, inside, [at], 0)

    def _number(self, value: Value | int | float, kind: torch.dtype) -> Node:
        """A number that is not known statically, as a captured tensor without dimensions."""

        def full_value() -> Value:
            return self._captured(self.plan.call(aten.full.default, [], value, dtype=kind, device=self._device))

        return self._capture((id(value), kind), full_value)

    def _captured(self, value: Value) -> Value:
        return value if self._in_triton else captured(self.plan, value)

    # ------------------------------------------------------------ indices

    def _index(self, index: Index) -> Any:
        if isinstance(index, int):
            return index
        known = self._known.get(index)
        if known is not None:
            return known
        total: Any = 0
        for monomial, coefficient in index.terms.items():
            term: Any = coefficient
            for atom in monomial:
                factor = self._atom(atom)
                term = factor if isinstance(term, int) and term == 1 else self._call(aten.mul.Tensor, factor, term)
            if isinstance(total, int) and total == 0:
                total = term
            elif isinstance(total, Node):
                total = self._call(aten.add.Tensor, total, term)
            else:
                total = self._call(aten.add.Tensor, term, total) if isinstance(term, Node) else total + term
        self._known[index] = total
        return total

    def _atom(self, atom: Any) -> Any:
        if isinstance(atom, Axis):
            return self._digit(atom)
        if isinstance(atom, (Quotient, Remainder)):
            value, divisor = self._index(atom.value), self._index(atom.divisor)
            return self._divided(self._tensor(value), divisor, isinstance(atom, Remainder))
        return self._size(Poly.of(atom))

    def _size(self, index: Index) -> Any:
        if isinstance(index, int):
            return index
        value = self.plan.size(index)
        return value if isinstance(value, int) else self._number(value, torch.int64)

    def _digit(self, axis: Axis) -> Any:
        """The value of an axis: a digit of its group's index, which counts the slowest axis first."""
        if axis.size == 1:
            return 0
        known = self._known.get(axis)
        if known is not None:
            return known
        group, index = self._digits[axis]
        faster = product(a.size for a in group[group.index(axis) + 1 :])
        slower = product(a.size for a in group[: group.index(axis)])
        value = index
        if faster != 1:
            value = self._divided(value, self._size(faster), False)
        if slower != 1:
            value = self._divided(value, self._size(axis.size), True)
        self._known[axis] = value
        return value

    def _divided(self, value: Node, divisor: Any, remainder: bool) -> Node:
        scalar = not isinstance(divisor, Node)
        if remainder:
            return self._call(aten.remainder.Scalar if scalar else aten.remainder.Tensor, value, divisor)
        return self._call(aten.floor_divide.Scalar if scalar else aten.floor_divide.default, value, divisor)


def fake_dtype_is_wide(expression: Expr, lower: Lowering) -> bool:
    """Whether something in the expression could make the result float64, which the kernel's scores are not."""
    sources = lower.attention.sources
    return any(
        (isinstance(e, Load) and sources[e.source].dtype == torch.float64)
        or (isinstance(e, Apply) and e.dtype == torch.float64)
        for e in walk(expression)
    )


def captured(plan: Plan, value: Value) -> Value:
    """A value as the template takes it for a capture: something that lies in memory when the template is made.

    What Inductor has not computed yet it would compute inside the kernel, from pointers the kernel is not given, and
    finds no choices. `as_strided` makes it compute its operand first. It sees the memory of the operand's base
    through views that Inductor has merged away, so it is given a tensor that is dense (seen in torch 2.13.0).
    """
    if isinstance(value, Node) and value.op == "placeholder":
        return value
    dense = plan.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    fake = fake_of(dense)
    sizes = [plan.size(plan.sizes.index(s)) for s in fake.shape]
    strides = [plan.size(plan.sizes.index(s)) for s in fake.stride()]
    return plan.call(aten.as_strided.default, dense, sizes, strides)


def flat(plan: Plan, value: Value) -> Value:
    """A value for a capture, like `captured`, its elements one after the other."""
    dense = plan.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    number = product(plan.sizes.shape(fake_of(dense)))
    return plan.call(aten.as_strided.default, dense, [plan.size(number)], [1])


def own_memory(plan: Plan, value: Value) -> Value:
    """An operand as a 4-D tensor in memory of its own.

    The template confuses a view with its base: with a storage offset the numbers are wrong, with a base of
    another rank it fails (seen in torch 2.13.0). A copy would be left out where the view is dense; a product is not.
    A dense input of the program is not a view.
    """
    if isinstance(value, Node) and value.op == "placeholder" and is_dense(plan, fake_of(value), (0, 1, 2, 3)):
        return value
    return plan.call(aten.mul.Tensor, value, 1.0)


def band_mod(device: torch.device, band: Band) -> GraphModule:
    """Whether a key is inside the band, as a `mask_mod` graph; one without bounds keeps everything."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("b", "h", "q_idx", "kv_idx")]
    for node in inputs:
        node.meta["val"] = torch.empty((), dtype=torch.int32, device=device)

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*map_arg(args, _value), **kwargs)
        return node

    keeps = call(aten.full.default, [], True, dtype=torch.bool, device=device)
    distance = call(aten.sub.Tensor, inputs[3], inputs[2])
    for bound, compare in ((band.upper, aten.le.Scalar), (band.lower, aten.ge.Scalar)):
        if bound is not None:
            keeps = call(aten.logical_and.default, keeps, call(compare, distance, bound))
    graph.output(keeps)
    return GraphModule(torch.nn.Module(), graph, class_name="MaskMod")


def _value(node: Node) -> Any:
    return node.meta["val"]


def kernel_options(
    operands: Sequence[Value], options: Mapping[str, Any] | None = None, *, backward: bool = False
) -> dict[str, Any]:
    """The options of the operator, which must be complete (`KeyError` otherwise), as torch's own function makes them.

    On a GPU the grad mode decides whether the kernel keeps the inputs of its backward. The current mode
    need not be the one that the site runs in: ``backward`` says that there is one.
    """
    from torch.nn.attention.flex_attention import _apply_kernel_options

    query, key, value = (fake_of(v) for v in operands)
    with torch.set_grad_enabled(backward or torch.is_grad_enabled()):
        return dict(_apply_kernel_options(query, key, value, False, dict(options) if options else None))  # type: ignore[arg-type]

"""Lowering shared by the targets: operands, expressions and the result as planned calls on (B, H, L, D) tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.edit import Plan, Planned, Value, aten, fake_of
from attn_pass.graph.memory import storages
from attn_pass.model.attention import Attention, Factor
from attn_pass.model.expression import Apply, Const, Expr, IndexValue, Load
from attn_pass.model.index import Axis, Index, Poly, Quotient, Remainder, axes, axis_index, product
from attn_pass.model.operations import COMPARISONS, OPERATIONS
from attn_pass.model.structure import row_index
from attn_pass.model.views import Expand, Group, view_steps

_CLAMPS = {"maximum": aten.clamp_min.default, "minimum": aten.clamp_max.default}
"""Of a tensor and a number that stands second, by how they are read (`reading/pointwise.py`)."""


class Lowering:
    """Emits the parts of one attention into one plan."""

    def __init__(self, plan: Plan, nodes: Sequence[Node], attention: Attention) -> None:
        self.plan = plan
        self.nodes = nodes
        self.attention = attention

    def operand(self, load: Load, groups: Sequence[Group], dtype: torch.dtype, expand: bool = False) -> Value:
        """An operand as a tensor with a dimension a group, in ``dtype``; shared groups at size 1 unless ``expand``."""
        source = self.attention.sources[load.source]
        value = self.plan.unwritten(self.nodes[load.source])
        steps = list(view_steps(source.shape, load.index, groups))
        value = self.plan.steps(value, steps)
        if source.dtype != dtype:
            value = self.plan.call(aten.to.dtype, value, dtype)
        if expand:
            have = axes(*load.index)
            full = tuple(product(a.size for a in g) for g in groups)
            present = tuple(f if any(a in have for a in g) else 1 for f, g in zip(full, groups))
            if present != full:
                value = self.plan.steps(value, [Expand(full)])
        return value

    def query(self, dtype: torch.dtype) -> Value:
        """The query (B, H, L, D) with the scores' tensor factors multiplied in, but where a score function has them."""
        a = self.attention
        value = self.operand(a.query, (a.batch, a.heads, a.rows, (a.dim,)), dtype, expand=True)
        for factor in () if a.not_affine else a.factors:
            value = self._scaled(value, factor, (a.batch, a.heads, a.rows, (a.dim,)))
        return value

    def key(self, dtype: torch.dtype, *, expand: bool = True) -> Value:
        """The key (B, Hkv, S, D); shared groups at size 1 unless ``expand``."""
        a = self.attention
        return self.operand(a.key, (a.batch, a.kv_heads, (a.keys,), (a.dim,)), dtype, expand)

    def value(self, dtype: torch.dtype, *, expand: bool = True) -> Value:
        """The value (B, Hkv, S, Dv); shared groups at size 1 unless ``expand``."""
        a = self.attention
        return self.operand(a.value, (a.batch, a.kv_heads, (a.keys,), a.value_dim), dtype, expand)

    def _scaled(self, value: Value, factor: Factor, groups: Sequence[Group]) -> Value:
        """The value times a factor, in the dtype it had."""
        other = self.scalar(factor.value)
        if other is None:
            other = self.expression(factor.value, groups)
        if factor.chooses:
            return self.plan.call(aten.where.ScalarOther, other, value, 0)
        dtype = fake_of(value).dtype
        value = self.plan.call(aten.div.Tensor if factor.inverse else aten.mul.Tensor, value, other)
        return value if fake_of(value).dtype == dtype else self.plan.call(aten.to.dtype, value, dtype)

    def scalar(self, expression: Expr) -> Value | float | None:
        """A number or a symbolic number as an argument; None for anything that is a tensor."""
        if isinstance(expression, Const):
            return float(expression.value)
        if isinstance(expression, Load) and expression.index == ():
            node = self.nodes[expression.source]
            if not isinstance(fake_of(node), torch.Tensor):
                return node
        return None

    # ------------------------------------------------------------ masks

    def mask_groups(self) -> tuple[Group, ...]:
        """The groups of a (B, H, L, S) mask."""
        a = self.attention
        return (a.batch, a.heads, a.rows, (a.keys,))

    def expression(self, expression: Expr, groups: Sequence[Group]) -> Value:
        """An expression as a tensor with a dimension a group, at size 1 where it does not vary."""
        return self._with_dims(self._lower(expression, groups), len(groups))

    def _with_dims(self, value: Value | float | int | bool, dims: int) -> Value:
        """The value with as many dimensions, which what is computed of numbers alone does not have."""
        value = self._tensor(value, [1] * dims)
        is_number = fake_of(value).dim() == 0 and dims > 0
        return self.plan.call(aten.view.default, value, [1] * dims) if is_number else value

    def condition(self, expression: Expr, groups: Sequence[Group]) -> Value:
        """The same of a condition, boolean whatever it is computed in."""
        value = self.expression(expression, groups)
        return value if fake_of(value).dtype == torch.bool else self.plan.call(aten.to.dtype, value, torch.bool)

    def _lower(self, expression: Expr, groups: Sequence[Group]) -> Value | float | int | bool:
        if isinstance(expression, Const):
            return expression.value
        if isinstance(expression, Load):
            scalar = self.scalar(expression)
            if scalar is not None:
                return scalar
            source = self.attention.sources[expression.source]
            steps = view_steps(source.shape, expression.index, groups)
            return self.plan.steps(self.plan.unwritten(self.nodes[expression.source]), steps)
        if isinstance(expression, IndexValue):
            return self._index(expression.index, groups)
        assert isinstance(expression, Apply)
        if expression.op == "lookup":
            table, row = expression.args
            assert isinstance(table, Load)
            indices = [self._lower(row, groups), *(self._index(i, groups) for i in table.index[1:])]
            # Beside an index without dimensions the fake result has none (seen in torch 2.11 to 2.13).
            indices = [self._with_dims(i, len(groups)) for i in indices]
            dtype, node = self.attention.sources[table.source].dtype, self.nodes[table.source]
            if not (self.attention.needs_grad and dtype.is_floating_point and dtype.itemsize < 4):
                return self.plan.call(aten.index.Tensor, node, indices)
            # Its gradient is a sum over all that is looked up, which the operator's own would add up in half precision.
            wide = self.plan.call(aten.to.dtype, node, torch.float32)
            return self.plan.call(aten.to.dtype, self.plan.call(aten.index.Tensor, wide, indices), dtype)
        args = [self._lower(a, groups) for a in expression.args]
        return self._apply(expression, args)

    def _apply(self, expression: Apply, args: list[Value | float | int | bool]) -> Value:
        op, call = expression.op, self.plan.call
        if op == "cast":
            return call(aten.to.dtype, self._tensor(args[0]), expression.dtype)
        if op == "where":
            yes, no = (self._tensor(a) if isinstance(a, float) and self._needs_float64(a) else a for a in args[1:])
            if isinstance(yes, float) and isinstance(no, float) and torch.get_default_dtype().itemsize < 4:
                device = self.attention.sources[self.attention.query.source].device
                yes = call(aten.full.default, [], yes, dtype=torch.float32, device=device)  # else it is of that dtype
            overload = {
                (True, True): aten.where.self,
                (False, True): aten.where.ScalarSelf,
                (True, False): aten.where.ScalarOther,
                (False, False): aten.where.Scalar,
            }[(_is_tensor(yes), _is_tensor(no))]
            return call(overload, self._tensor(args[0]), yes, no)
        operation = OPERATIONS[op]
        if op in COMPARISONS:
            left, right = args
            return call(operation.overload(_is_tensor(right)), self._tensor(left), right)
        if op in _CLAMPS and self.attention.needs_grad and isinstance(args[1], float):  # the bound has no share
            tensor, of_bound = self._tensor(args[0]), torch.float64 if self._needs_float64(args[1]) else torch.float32
            wide = torch.promote_types(fake_of(tensor).dtype, of_bound)
            return call(_CLAMPS[op], call(aten.to.dtype, tensor, wide), args[1])
        if op in ("maximum", "minimum", "and", "or", "not"):
            tensors = [self._tensor(a) for a in args]
            if len(tensors) == 2 and fake_of(tensors[0]).dtype != fake_of(tensors[1]).dtype and op[0] == "m":
                wide = torch.promote_types(fake_of(tensors[0]).dtype, fake_of(tensors[1]).dtype)
                tensors = [call(aten.to.dtype, t, wide) for t in tensors]
            return call(operation.aten, *tensors)
        if not _is_tensor(args[0]):
            args[0] = self._tensor(args[0])
        if op == "remainder":
            return call(_remainder(args[1]), *args)
        return call(operation.aten, *args)

    def _tensor(self, value: Value | float | int | bool, shape: Sequence[int] = ()) -> Value:
        """A number, known or not, as a tensor of a shape; a tensor as it is."""
        if _is_tensor(value):
            return value  # type: ignore[return-value]
        device = self.attention.sources[self.attention.query.source].device
        fake = fake_of(value) if isinstance(value, (Planned, Node)) else value
        dtype = torch.float64 if isinstance(fake, float) and self._needs_float64(fake) else _type_of(fake)
        return self.plan.call(aten.full.default, list(shape), value, dtype=dtype, device=device)

    def _needs_float64(self, number: float) -> bool:
        """Whether float32 would round a number, or a product of it: it is part of float64 scores, or too large."""
        return self.attention.score_dtype == torch.float64 or _is_wide(number)

    def _index(self, index: Index, groups: Sequence[Group]) -> Value:
        """Index arithmetic from arange, an axis at its place among the groups."""
        call = self.plan.call
        total: Value | int = 0
        for monomial, coefficient in index.terms.items() if isinstance(index, Poly) else (((), index),):
            term: Value | int = coefficient
            for atom in monomial:
                if isinstance(atom, Axis):
                    factor: Value | int = self._axis(atom, groups)
                elif isinstance(atom, (Quotient, Remainder)) and axes(Poly.of(atom)):
                    divisor = self._index(atom.divisor, groups) if not isinstance(atom.divisor, int) else atom.divisor
                    divided = _floor_divide if isinstance(atom, Quotient) else _remainder
                    factor = call(divided(divisor), self._index(atom.value, groups), divisor)
                else:
                    factor = self.plan.size(Poly.of(atom))
                term = factor if isinstance(term, int) and term == 1 else self._arithmetic("mul", factor, term)
            total = term if isinstance(total, int) and total == 0 else self._arithmetic("add", term, total)
        return self._tensor(total)

    def _arithmetic(self, op: str, left: Value | int, right: Value | int) -> Value | int:
        """Of tensors and sizes, known or not."""
        if _is_tensor(right):
            left, right = right, left
        if _is_tensor(left):
            return self.plan.call(OPERATIONS[op].aten, left, right)
        return self.plan.call(getattr(operator, op), left, right)

    def _axis(self, axis: Axis, groups: Sequence[Group]) -> Value:
        device = self.attention.sources[self.attention.query.source].device
        size = self.plan.size(axis.size)
        values = self.plan.call(aten.arange.default, size, device=device)
        return self.plan.steps(values, view_steps((axis.size,), (axis_index(axis),), groups))

    # ------------------------------------------------------------ the result

    def result(self, value: Value, otherwise: Callable[[], Value] | None = None) -> Value:
        """The kernel's (B, H, L, Dv) in the shape and dtype of the site, with an equivalent memory layout.

        Args:
            value: the kernel's result.
            otherwise: makes the result with another memory layout, which is taken where it saves a copy.
        """
        shaped = self._shaped(value)
        # Written in place later: the kernel saves its result for the backward, which a matmul does not.
        written_later = self.attention.needs_grad and self.plan.may_be_written_later()
        keeps = not written_later and self.plan.keeps_layout(shaped)
        if otherwise is not None and not written_later and not (keeps and _share_memory(shaped, value)):
            other = otherwise()
            reshaped = self._shaped(other)
            if self.plan.keeps_layout(reshaped) and (not keeps or _share_memory(reshaped, other)):
                return reshaped
            keeps = keeps and self.plan.keeps_layout(shaped)
        return shaped if keeps else self.plan.in_layout_of_result(shaped)

    def _shaped(self, value: Value) -> Value:
        """The kernel's (B, H, L, Dv) in the shape and dtype of the site."""
        a = self.attention
        groups = (a.batch, a.heads, a.rows, a.value_dim)
        shape = tuple(product(x.size for x in g) for g in groups)
        for factor in a.result_factors:
            value = self._scaled(value, factor, groups)
        value = self.plan.steps(value, view_steps(shape, tuple(map(row_index, groups)), a.output))
        if fake_of(value).dtype != a.output_dtype:
            value = self.plan.call(aten.to.dtype, value, a.output_dtype)
        return value

    def logarithm(self, value: Value) -> Value:
        """The kernel's (B, H, L) of log-sum-exps, with a dimension for each of the softmax's but the keys'."""
        a = self.attention
        groups = (a.batch, a.heads, a.rows)
        shape = tuple(product(x.size for x in g) for g in groups)
        return self.plan.steps(value, view_steps(shape, tuple(map(row_index, groups)), a.score_rows))


def _share_memory(one: Value, other: Value) -> bool:
    """Whether a value is a view of another."""
    return storages(fake_of(one)) == storages(fake_of(other))


def zero_with_gradient(plan: Plan, value: Value) -> Value:
    """0 wherever a value is finite, with the value's gradient."""
    return plan.call(aten.sub.Tensor, value, plan.call(aten.detach.default, value))


def _type_of(value: object) -> torch.dtype:
    """The dtype of a tensor that holds a number."""
    if isinstance(value, bool):
        return torch.bool
    if not isinstance(value, (float, torch.SymFloat)):
        return torch.int64
    return torch.float64 if isinstance(value, float) and _is_wide(value) else torch.float32


def _is_wide(value: float) -> bool:
    """Whether a number is finite in float64 alone."""
    return torch.finfo(torch.float32).max < abs(value) < float("inf")


def _floor_divide(divisor: object) -> Callable[..., Any]:
    return aten.floor_divide.Scalar if isinstance(divisor, int) else aten.floor_divide.default


def _remainder(divisor: object) -> Callable[..., Any]:
    return aten.remainder.Tensor if _is_tensor(divisor) else aten.remainder.Scalar


def _is_tensor(value: object) -> bool:
    return isinstance(value, (Planned, Node)) and isinstance(fake_of(value), torch.Tensor)

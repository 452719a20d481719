"""Masks that depend on row and key through their distance alone: one vector instead of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_pass.model.expression import Apply, Const, Expr, IndexValue, Load, apply, as_index, index_value, transform
from attn_pass.model.index import Axis, Index, Poly, axis_index, is_less, is_nonnegative, substitute
from attn_pass.model.operations import COMPARISONS

_EXACT = (torch.float32, torch.float64)  # differences of positions are exact in these


@dataclass(frozen=True)
class ByDistance:
    """A bias and a keep-condition over ``axis``, which counts the distances ``key - row`` up from ``1 - rows``."""

    axis: Axis
    row: Axis
    bias: Expr | None
    condition: Expr | None

    def is_over(self, rows: Sequence[Axis]) -> bool:
        """Whether the rows are the one axis that distances count from, beside axes of size 1."""
        return [x for x in rows if x.size != 1] == [self.row]

    @staticmethod
    def of(bias: Expr | None, condition: Expr | None, key: Axis, row: Axis, shapes: Shapes) -> ByDistance | None:
        """The same mask over distances; None unless it depends on nothing else of key and row."""
        axis = Axis("distance", key.size + row.size - 1)
        proof = _Proof(key, row, axis_index(axis) + 1 - row.size, shapes)
        try:
            return ByDistance(
                axis,
                row,
                None if bias is None else proof.over_distance(bias),
                None if condition is None else proof.over_distance(condition),
            )
        except _DependsOnPlace:
            return None


Shapes = tuple[tuple[Index, ...], ...]  # of the sources, by their number


class _DependsOnPlace(Exception):
    pass


@dataclass(frozen=True)
class _Proof:
    key: Axis
    row: Axis
    distance: Index
    shapes: Shapes

    def index(self, index: Index) -> Index:
        """The index with row 0 and the key as far away. Raises unless moving both alike changes nothing."""
        step = Poly.of(Axis("step", 2))
        moved = {self.key: axis_index(self.key) + step, self.row: axis_index(self.row) + step}
        if substitute(index, moved) != index:
            raise _DependsOnPlace
        return substitute(index, {self.key: self.distance, self.row: 0})

    def over_distance(self, expression: Expr) -> Expr:
        """The expression over distances. Raises `_DependsOnPlace`."""
        return transform(expression, self._placed)

    def _placed(self, expression: Expr) -> Expr | None:
        if isinstance(expression, Const):
            return expression
        if isinstance(expression, IndexValue):
            return index_value(self.index(expression.index))
        if isinstance(expression, Load):
            indices = tuple(self.index(i) for i in expression.index)
            for index, size in zip(indices, self.shapes[expression.source]):
                if index != 0 and not (is_nonnegative(index) and is_less(index, size)):
                    raise _DependsOnPlace  # read under a condition only
            return Load(expression.source, indices)
        if not isinstance(expression, Apply):
            raise _DependsOnPlace
        if expression.op in (*COMPARISONS, "sub") and (difference := _difference(expression)) is not None:
            number = index_value(self.index(difference[0]))
            if difference[1] is not None:
                number = apply("cast", number, dtype=difference[1])
            return number if expression.op == "sub" else apply(expression.op, number, Const(0))
        return None


def _difference(expression: Apply) -> tuple[Index, torch.dtype | None] | None:
    """``a - b`` of two positions, and the type both were converted to before."""
    left, right = expression.args
    dtype = None
    if isinstance(left, Apply) and isinstance(right, Apply) and left.op == right.op == "cast":
        if left.dtype != right.dtype or left.dtype not in _EXACT:
            return None
        dtype, left, right = left.dtype, left.args[0], right.args[0]
    a, b = as_index(left), as_index(right)
    return None if a is None or b is None else (a - b, dtype)

"""Rows of a tensor of known values, at numbers that only the program knows: a triangle indexed by positions.

Caches of many libraries hold a boolean triangle as long as the cache, and each step takes the rows of its positions:
``triangle[position]`` is ``key <= position`` where the values are those of a triangle.
"""

from __future__ import annotations

from attn_pass.model.expression import Apply, Const, Expr, IndexValue, apply, expression_axes, index_value
from attn_pass.model.index import Axis, Index, axes, axis_index


def with_value(expression: Expr, axis: Axis, value: Expr) -> Expr | None:
    """The expression with a value in the place of an axis; None where it is more than added or taken off."""
    if axis not in expression_axes(expression):
        return expression
    if isinstance(expression, IndexValue):
        return _in_sum(expression.index, axis, value)
    if not isinstance(expression, Apply):
        return None
    args = [with_value(arg, axis, value) for arg in expression.args]
    known = [arg for arg in args if arg is not None]
    return apply(expression.op, *known, dtype=expression.dtype) if len(known) == len(args) else None


def from_the_front(value: Expr, size: Index) -> Expr:
    """An index that counts from the end where it is negative, as indexing by tensors takes it."""
    return apply("where", apply("lt", value, Const(0)), apply("add", value, index_value(size)), value)


def row_axis(depth: int, name: str, size: Index) -> Axis:
    """An axis for the row that is taken, whose number is not known yet; rows of rows are taken at other depths."""
    return Axis(f"row {depth} of {name}", size)


def _in_sum(index: Index, axis: Axis, value: Expr) -> Expr | None:
    added, taken_off = index - axis_index(axis), index + axis_index(axis)
    if axis not in axes(added):
        return value if added == 0 else apply("add", value, index_value(added))
    return None if axis in axes(taken_off) else apply("sub", index_value(taken_off), value)

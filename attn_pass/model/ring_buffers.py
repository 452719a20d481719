"""Bounds on the slots of a ring buffer, which is written at ``position % size`` and masked by how long ago that was.

Slot ``j`` was written ``(position - j) % size`` steps ago. A mask that compares this number bounds the slot: as long as
the buffer has not been full, the valid slots begin at the first one; and those written last are an arc, which is a
range of slots unless it wraps around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_pass.model.expression import Apply, Expr, Load, apply, as_index, expression_axes, index_value, loads
from attn_pass.model.index import Axis, Index, axes, axis_index, is_at_most, is_less
from attn_pass.model.key_limits import Limit, Sum, compared, limit_on_key, summed
from attn_pass.model.structure import row_index


@dataclass(frozen=True)
class Age:
    """``(newest - key) % size <= most``, for keys that are all below ``size``."""

    newest: Sum
    size: Index
    most: Sum


def ring_limits(
    condition: Expr, keys: Axis, rows: tuple[Axis, ...], dtype_of: Callable[[Load], torch.dtype]
) -> tuple[tuple[Limit, ...], bool]:
    """The bounds that hold where a comparison of a slot's age does, and whether they say all of it; none for another.

    For ``0 <= key < size``, ``(x - key) % size <= x`` is ``key <= x``: for larger keys ``x - key`` is negative, and the
    remainder is larger than ``x``. For any ``c``, ``(x - key) % size <= c`` keeps the keys from ``r - c`` to ``r`` if
    ``r >= c``, where ``r`` is ``x % size``; otherwise the range wraps around, and both ends may be kept.
    """
    age, comparison = age_of_slot(condition, keys), compared(condition)
    if age is None or comparison is None or not is_at_most(keys.size, age.size):
        return (), False
    if not all(summed(side).is_of_integers(dtype_of) for side in comparison[:2]):
        return (), False
    terms = [t for _, t in (*age.newest.terms, *age.most.terms)]
    if not terms or any(keys in expression_axes(t) for t in terms) or keys in axes(age.most.offset):
        return (), False
    if age.newest.minus(age.most).reduced() == Sum():
        return (limit_on_key(age.newest, row_index(rows), is_upper=True),), True
    slot = apply("remainder", age.newest.value, index_value(age.size))
    most = age.most.value
    is_range = apply("ge", slot, most)
    first = apply("where", is_range, apply("sub", slot, most), index_value(0))
    last = apply("where", is_range, slot, index_value(keys.size - 1))
    return tuple(Limit(upper, False, 0, ((1, end),)) for upper, end in ((False, first), (True, last))), False


def age_of_slot(condition: Expr, keys: Axis) -> Age | None:
    """What a comparison of a slot's age says, if its numbers are integers; None for any other condition."""
    margin = _margin(condition)
    of_key = [] if margin is None else [t for t in margin.terms if keys in expression_axes(t[1])]
    if margin is None or len(of_key) != 1:
        return None
    ((sign, term),) = of_key
    if not isinstance(term, Apply) or term.op != "remainder":
        return None
    size = as_index(term.args[1])
    if size is None or axes(size) or not is_less(0, size) or not loads(term):
        return None
    rest = Sum(margin.offset, tuple(t for t in margin.terms if t != (sign, term)))
    inside, key = summed(term.args[0]).reduced(), axis_index(keys)
    if sign < 0 and keys not in axes(inside.offset + key):  # (x - key) % size <= rest
        return Age(Sum(inside.offset + key, inside.terms), size, rest)
    if sign > 0 and keys not in axes(inside.offset - key):  # size - 1 - (x - 1 - key) % size >= -rest
        newest = Sum().minus(Sum(inside.offset - key + 1, inside.terms))
        return Age(newest, size, Sum(rest.offset + size - 1, rest.terms))
    return None


def _margin(condition: Expr) -> Sum | None:
    """What is not negative where a comparison of integers holds."""
    comparison = compared(condition)
    if comparison is None:
        return None
    small, large, least = comparison
    return summed(large).minus(summed(small)).minus(Sum(least)).reduced()

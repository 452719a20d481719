"""The range of keys that a mask may keep, where only the program knows it: how much of a cache has to be read.

A condition of the mask may be a bound on the key (`key_limits.py`), and then says nothing else. One that keeps the keys
of several ranges, such as a window and the first key beside it, has a hull: every key it keeps lies in there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attn_pass.model.conditions import conjuncts, structure_of
from attn_pass.model.expression import Apply, Expr, Load, apply, as_index, expression_axes, index_value, loads
from attn_pass.model.index import Axis, Index, is_at_most
from attn_pass.model.key_limits import Limit, limit_of
from attn_pass.model.ring_buffers import ring_limits
from attn_pass.model.structure import Band, Keys, row_index

DtypeOf = Callable[[Load], torch.dtype]


@dataclass(frozen=True)
class Bounded:
    """A condition of the mask, and the bounds that hold where it does; ``exact``: it says them and nothing else."""

    condition: Expr
    limits: tuple[Limit, ...]
    exact: bool = True


@dataclass(frozen=True)
class ValidRange:
    """Proved: a key that a row keeps lies between all of ``first`` and all of ``last``, which are run-time values.

    A row may be fully masked, and the values may lie outside of the cache. They are expressions over the axes of
    batch, heads and rows: what is read for all rows together lies between the least ``first`` and the largest ``last``
    of any (`attn_pass.targets.key_ranges`). ``conditions`` are those of the mask they follow from; the mask itself is
    what it was, and whatever of it says more than the range goes on holding inside.
    """

    conditions: tuple[Bounded, ...]
    rows: tuple[Axis, ...]

    @property
    def first(self) -> tuple[Expr, ...]:
        """Lower bounds of the keys, each inclusive: the largest counts."""
        return self._values(upper=False)

    @property
    def last(self) -> tuple[Expr, ...]:
        """Upper bounds of the keys, each inclusive: the least counts."""
        return self._values(upper=True)

    def of(self, condition: Expr) -> Bounded | None:
        """What one of the mask's conditions bounds; None where it bounds nothing."""
        return next((b for b in self.conditions if b.condition == condition), None)

    def _values(self, *, upper: bool) -> tuple[Expr, ...]:
        limits = [limit for b in self.conditions for limit in b.limits if limit.is_upper == upper]
        return tuple(_on_key(limit, row_index(self.rows)) for limit in limits)


def valid_range(conditions: Iterable[Expr], keys: Axis, rows: tuple[Axis, ...], dtype_of: DtypeOf) -> ValidRange | None:
    """The range that follows from conditions which hold together; None where none of them bounds the key."""
    bounds = [b for c in conditions if (b := _bounded(c, keys, rows, dtype_of)) is not None]
    return ValidRange(tuple(bounds), rows) if bounds else None


def _bounded(condition: Expr, keys: Axis, rows: tuple[Axis, ...], dtype_of: DtypeOf) -> Bounded | None:
    limit = limit_of(condition, keys, rows, dtype_of)
    if limit is not None:
        return Bounded(condition, (limit,))
    of_ring, exact = ring_limits(condition, keys, rows, dtype_of)
    if of_ring:
        return Bounded(condition, of_ring, exact)
    if not isinstance(condition, Apply) or condition.op != "or":
        return None
    options = [_Option(conjuncts(arg), keys, rows, dtype_of) for arg in condition.args]
    hull = [limit for upper in (True, False) if (limit := _hull(options, upper)) is not None]
    return Bounded(condition, tuple(hull), exact=False) if hull else None


def _on_key(limit: Limit, row: Index) -> Expr:
    return apply("add", limit.value, index_value(row)) if limit.with_row and row != 0 else limit.value


class _Option:
    """One of several conjunctions, and the range of the keys that it keeps."""

    def __init__(self, conditions: list[Expr], keys: Axis, rows: tuple[Axis, ...], dtype_of: DtypeOf) -> None:
        self.keys, self._bounds = keys, {True: list[Expr](), False: list[Expr]()}
        self._holds: Expr | None = (
            None  # the option keeps no key where this, which is the same for all of them, does not
        )
        row = row_index(rows)
        for condition in conditions:
            limit = limit_of(condition, keys, rows, dtype_of)
            if limit is not None:
                self._bounds[limit.is_upper].append(_on_key(limit, row))
            elif keys not in expression_axes(condition):
                self._holds = condition if self._holds is None else apply("and", self._holds, condition)
            else:
                self._add_sizes(condition, rows, row)

    def _add_sizes(self, condition: Expr, rows: tuple[Axis, ...], row: Index) -> None:
        for part in structure_of(condition, self.keys, rows).parts:
            if not isinstance(part, Band | Keys):
                continue
            for is_upper, bound in ((True, part.upper), (False, part.lower)):
                if bound is not None:
                    self._bounds[is_upper].append(index_value(bound + row if isinstance(part, Band) else bound))

    def end(self, upper: bool) -> Expr | None:
        """Where its keys end, or begin; None where they may go on to the last, or from the first."""
        bounds = self._bounds[upper]
        if bounds:
            out = bounds[0]
            for bound in bounds[1:]:
                out = apply("minimum" if upper else "maximum", out, bound)
            return out
        if self._holds is None or not loads(self._holds):
            return None
        last = self.keys.size - 1
        everything, nothing = (last, -1) if upper else (0, last + 1)
        return apply("where", self._holds, index_value(everything), index_value(nothing))


def _hull(options: list[_Option], upper: bool) -> Limit | None:
    """The bound on all that any of the options keeps; None where it is none, or follows from sizes alone."""
    out: Expr | None = None
    for option in options:
        end = option.end(upper)
        if end is None or _is_everything(end, upper, option.keys):
            return None
        out = end if out is None else apply("maximum" if upper else "minimum", out, end)
    return None if out is None or not loads(out) else Limit(upper, False, 0, ((1, out),))


def _is_everything(end: Expr, upper: bool, keys: Axis) -> bool:
    """Whether a bound is none, by sizes alone."""
    index = as_index(end)
    if index is None:
        return False
    return is_at_most(keys.size - 1, index) if upper else is_at_most(index, 0)

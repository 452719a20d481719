"""Bounds on keys that are run-time values: `key <= position`, `key < length[b]`, `key <= row + offset`.

A static cache holds more keys than are valid. Its mask says which, by comparing the key with what the program holds at
run time, and so how far the cache has to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_pass.model.expression import (
    Apply,
    Const,
    Expr,
    IndexValue,
    Load,
    apply,
    as_index,
    expression_axes,
    index_value,
    loads,
)
from attn_pass.model.index import Axis, Index, axes, axis_index
from attn_pass.model.structure import row_index

_OF_INTEGERS = frozenset(
    {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "floordiv", "remainder", "cast", "where"}
)
_WIDE = (torch.int32, torch.int64)  # positions do not wrap around in them
Term = tuple[int, Expr]  # 1 or -1, and what it is multiplied by


@dataclass(frozen=True)
class Limit:
    """``key <= offset + terms``, or ``>=``; of ``key - row`` in place of ``key`` where it moves ``with_row``."""

    is_upper: bool
    with_row: bool
    offset: Index
    terms: tuple[Term, ...]

    @property
    def value(self) -> Expr:
        """The bound as an expression of integers, in which the key does not occur."""
        total: Expr | None = None if self.offset == 0 else index_value(self.offset)
        for sign, term in self.terms:
            start = term if sign > 0 else apply("neg", term)
            total = start if total is None else apply("add" if sign > 0 else "sub", total, term)
        return index_value(0) if total is None else total

    @property
    def shift(self) -> Expr:
        """The part of the bound that only the program knows."""
        return Limit(self.is_upper, self.with_row, 0, self.terms).value


@dataclass(frozen=True)
class Sum:
    """``offset + terms``: a sum as the part that is index arithmetic, and the other terms."""

    offset: Index = 0
    terms: tuple[Term, ...] = ()

    def minus(self, other: Sum) -> Sum:
        """The difference."""
        return Sum(self.offset - other.offset, (*self.terms, *((-sign, term) for sign, term in other.terms)))

    def reduced(self) -> Sum:
        """The same without terms that cancel; only for sums of integers, where nothing is rounded."""
        terms: list[Term] = []
        for sign, term in self.terms:
            if (-sign, term) in terms:
                terms.remove((-sign, term))
            else:
                terms.append((sign, term))
        return Sum(self.offset, tuple(terms))

    def is_of_integers(self, dtype_of: Callable[[Load], torch.dtype]) -> bool:
        """Whether all terms are."""
        return all(is_integer(term, dtype_of) for _, term in self.terms)

    @property
    def value(self) -> Expr:
        """The sum as an expression."""
        return Limit(True, False, self.offset, self.terms).value


def limit_of(
    condition: Expr, keys: Axis, rows: tuple[Axis, ...], dtype_of: Callable[[Load], torch.dtype]
) -> Limit | None:
    """The bound on the key that a comparison with something only the program knows is; None where it is none."""
    comparison = compared(condition)
    if comparison is None:
        return None
    small, large, least = comparison
    margin = summed(large).minus(summed(small))
    if not margin.is_of_integers(dtype_of):
        return None
    margin, key = margin.reduced(), axis_index(keys)
    if not margin.terms or any(keys in expression_axes(term) for _, term in margin.terms):
        return None
    for sign in (1, -1):  # margin + sign * key is free of the key: an upper bound, or a lower one
        rest = margin.offset - least + sign * key
        if keys not in axes(rest):
            bound = Sum(sign * rest, tuple((sign * s, term) for s, term in margin.terms))
            return limit_on_key(bound, row_index(rows), is_upper=sign > 0)
    return None


def limit_on_key(bound: Sum, row: Index, *, is_upper: bool) -> Limit:
    """A bound in which the key does not occur, as one that moves with the row where it does."""
    moves = row != 0 and not axes(bound.offset - row) & axes(row)
    return Limit(is_upper, moves, bound.offset - row if moves else bound.offset, bound.terms)


def compared(condition: Expr) -> tuple[Expr, Expr, int] | None:
    """``(x, y, n)`` of a condition that, in integers, is ``y - x >= n``."""
    if isinstance(condition, Apply) and condition.op == "not":
        inner = compared(condition.args[0])
        return None if inner is None else (inner[1], inner[0], 1 - inner[2])
    if not isinstance(condition, Apply) or condition.op not in ("le", "lt", "ge", "gt"):
        return None
    first, second = condition.args
    least = int(condition.op in ("lt", "gt"))
    return (first, second, least) if condition.op in ("le", "lt") else (second, first, least)


def summed(value: Expr, sign: int = 1) -> Sum:
    """A value, or where ``sign`` is -1 its negative, as a sum."""
    index = as_index(value)
    if index is not None:
        return Sum(sign * index)
    if isinstance(value, Apply) and value.op in ("add", "sub", "neg"):
        signs = {"add": (sign, sign), "sub": (sign, -sign), "neg": (-sign,)}[value.op]
        parts = [summed(arg, s) for arg, s in zip(value.args, signs)]
        return Sum(sum((p.offset for p in parts), start=0), tuple(t for p in parts for t in p.terms))
    return Sum(0, ((sign, value),))


def is_integer(value: Expr, dtype_of: Callable[[Load], torch.dtype]) -> bool:
    """Whether a value is computed in integers alone, in which no comparison depends on a rounding."""
    if isinstance(value, Const):
        return type(value.value) is int
    if isinstance(value, IndexValue):
        return True
    if isinstance(value, Load):
        return dtype_of(value) in _WIDE
    if not isinstance(value, Apply) or value.op not in _OF_INTEGERS or not loads(value):
        return False
    if value.op == "cast" and value.dtype not in _WIDE:
        return False
    return all(is_integer(arg, dtype_of) for arg in (value.args[1:] if value.op == "where" else value.args))

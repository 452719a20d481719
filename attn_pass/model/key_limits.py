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


def limit_of(
    condition: Expr, keys: Axis, rows: tuple[Axis, ...], dtype_of: Callable[[Load], torch.dtype]
) -> Limit | None:
    """The bound on the key that a comparison with something only the program knows is; None where it is none."""
    compared = _compared(condition)
    if compared is None:
        return None
    small, large, least = compared
    margin, terms = _sum(large, 1)
    less, more = _sum(small, -1)
    margin, terms = margin + less - least, (*terms, *more)
    of_integers = all(_is_integer(term, dtype_of) and keys not in expression_axes(term) for _, term in terms)
    if not terms or not of_integers:
        return None
    key, row = axis_index(keys), row_index(rows)
    for sign in (1, -1):  # margin + sign * key is free of the key: an upper bound, or a lower one
        rest = margin + sign * key
        if keys in axes(rest):
            continue
        bound, signed = sign * rest, tuple((sign * s, term) for s, term in terms)
        moves = row != 0 and not axes(bound - row) & axes(row)
        return Limit(sign > 0, moves, bound - row if moves else bound, signed)
    return None


def _compared(condition: Expr) -> tuple[Expr, Expr, int] | None:
    """``(x, y, n)`` of a condition that, in integers, is ``y - x >= n``."""
    if isinstance(condition, Apply) and condition.op == "not":
        inner = _compared(condition.args[0])
        return None if inner is None else (inner[1], inner[0], 1 - inner[2])
    if not isinstance(condition, Apply) or condition.op not in ("le", "lt", "ge", "gt"):
        return None
    first, second = condition.args
    least = int(condition.op in ("lt", "gt"))
    return (first, second, least) if condition.op in ("le", "lt") else (second, first, least)


def _sum(value: Expr, sign: int) -> tuple[Index, tuple[Term, ...]]:
    """A sum as the part that is index arithmetic, and the other terms."""
    index = as_index(value)
    if index is not None:
        return sign * index, ()
    if isinstance(value, Apply) and value.op in ("add", "sub", "neg"):
        signs = {"add": (sign, sign), "sub": (sign, -sign), "neg": (-sign,)}[value.op]
        parts = [_sum(arg, s) for arg, s in zip(value.args, signs)]
        return sum((i for i, _ in parts), start=0), tuple(t for _, ts in parts for t in ts)
    return 0, ((sign, value),)


def _is_integer(value: Expr, dtype_of: Callable[[Load], torch.dtype]) -> bool:
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
    return all(_is_integer(arg, dtype_of) for arg in (value.args[1:] if value.op == "where" else value.args))

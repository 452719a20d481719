"""Splits a keep-condition, by algebra on indices, into the parts of a `Structure`, and names what is left."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from attn_pass.model.alternatives import simplified
from attn_pass.model.expression import (
    TRUE,
    Apply,
    Expr,
    IndexValue,
    apply,
    as_index,
    expression_axes,
    loads,
    rewrite_indices,
)
from attn_pass.model.index import Axis, Index, Poly, Quotient, axes, axis_index, is_at_most, is_less, terms_of
from attn_pass.model.ring_buffers import age_of_slot
from attn_pass.model.structure import ORDER, Band, Chunk, Either, Keys, Opaque, Part, Structure, row_index

RANGE = "run-time range"


@lru_cache(maxsize=1024)
def structure_of(condition: Expr, keys: Axis, rows: tuple[Axis, ...]) -> Structure:
    """The structure of a keep-condition; what is not understood is in it as an `Opaque` part."""
    key, row = axis_index(keys), row_index(rows)
    parts = tuple(_parted(c, key, row, keys) for c in conjuncts(condition))
    return Structure(key, row, _together([p for group in parts for p in group]))


def conjuncts(condition: Expr, negated: bool = False) -> list[Expr]:
    """The conditions that must all hold, negations pushed inwards."""
    if isinstance(condition, Apply):
        if condition.op == "not":
            return conjuncts(condition.args[0], not negated)
        if condition.op == ("or" if negated else "and"):
            return [c for a in condition.args for c in conjuncts(a, negated)]
        if negated and condition.op == "and":
            return [apply("or", *(apply("not", a) for a in condition.args))]
    condition = apply("not", condition) if negated else condition
    return [] if condition == TRUE else [condition]


def _parted(condition: Expr, key: Index, row: Index, keys: Axis) -> list[Part]:
    parts = _exact(condition, key, row)
    return [Opaque(_described(condition, key, row, keys))] if parts is None else parts


def _exact(condition: Expr, key: Index, row: Index) -> list[Part] | None:
    """The parts a condition on indices alone is, or None."""
    if not isinstance(condition, Apply):
        return None
    if condition.op == "or":
        options = []
        for arg in condition.args:
            alternatives: list[Part] = []
            for c in conjuncts(arg):
                part = _exact(c, key, row)
                if part is None:
                    return None
                alternatives += part
            options.append(_together(alternatives))
        if any(isinstance(p, Either) for o in options for p in o):
            options = [x for o in options for x in (o[0].options if len(o) == 1 and isinstance(o[0], Either) else (o,))]
        options = [_together(list(o)) for o in simplified(options, key, row)]
        if len(options) == 1:
            return list(options[0])
        return [Either(tuple(sorted(set(options), key=lambda o: [(ORDER.index(type(p)), str(p)) for p in o])))]
    if len(condition.args) != 2:
        return None
    distance = _absolute(condition, key, row)
    if distance is not None:
        return distance
    left, right = (as_index(a) for a in condition.args)
    if left is None or right is None:
        return None
    if condition.op == "eq":
        return _equal(left - right, key, row)
    margin = _margin(condition.op, left, right)
    return None if margin is None else _bounded(margin, key, row) or _ordered(margin, key, row)


def _margin(op: str, left: Index, right: Index) -> Index | None:
    """What is not negative where a comparison holds."""
    margins = {"le": right - left, "ge": left - right, "lt": right - left - 1, "gt": left - right - 1}
    return margins.get(op)


def margin_of(condition: Expr) -> Index | None:
    """What is not negative where a comparison of indices holds, and nowhere else; None for any other condition."""
    if not isinstance(condition, Apply) or len(condition.args) != 2:
        return None
    left, right = (as_index(a) for a in condition.args)
    return None if left is None or right is None else _margin(condition.op, left, right)


def _bounded(margin: Index, key: Index, row: Index) -> list[Part] | None:
    """``margin >= 0`` as a bound on ``key - row`` or on ``key``; a single row is at 0, and its bounds are on keys."""
    margin = _reduced(margin)
    for rest, band, upper in (
        (margin + key - row, True, True),
        (margin - key + row, True, False),
        (margin + key, False, True),
        (margin - key, False, False),
    ):
        if axes(rest):
            continue
        bounds = (None, rest) if upper else (-1 * rest, None)
        if row == 0 and bounds != (None, 0):
            return [Keys(*bounds)]
        return [Band(*bounds) if band else Keys(*bounds)]
    return None


def _reduced(margin: Index) -> Index:
    """``margin >= 0`` without a factor that all its terms share: ``2 * x + 3 >= 0`` is ``x + 1 >= 0``."""
    terms = dict(terms_of(margin))
    constant = terms.pop((), 0)
    factor = gcd(*terms.values())
    if factor < 2:
        return margin
    return sum((Poly({m: c // factor}) for m, c in terms.items()), start=Poly({})) + constant // factor


def _absolute(condition: Apply, key: Index, row: Index) -> list[Part] | None:
    """``abs(key - row) <= width`` and its other spellings."""
    for number, op in ((0, {"le": 0, "lt": -1}), (1, {"ge": 0, "gt": -1})):
        inner, width = condition.args[number], as_index(condition.args[1 - number])
        if condition.op in op and width is not None and isinstance(inner, Apply) and inner.op == "abs":
            distance = as_index(inner.args[0])
            if distance is None:
                return None
            width = width + op[condition.op]
            sides = [_bounded(width - distance, key, row), _bounded(width + distance, key, row)]
            return None if None in sides else [p for s in sides if s is not None for p in s]
    return None


def _equal(difference: Index, key: Index, row: Index) -> list[Part] | None:
    """``difference == 0``: the diagonal, one key, or one chunk."""
    high, low = _bounded(difference, key, row), _bounded(-1 * difference, key, row)
    if high is not None and low is not None:
        return high + low
    chunks = _in_chunks(difference, key, row)
    if chunks is None:
        return None
    if chunks.row_shift is None:
        return [Keys(-1 * chunks.key_shift, chunks.size - 1 - chunks.key_shift)]
    return [Chunk(chunks.size, chunks.key_shift, chunks.row_shift)]


def _ordered(margin: Index, key: Index, row: Index) -> list[Part] | None:
    """``margin >= 0`` of chunks: those up to the row's own (block causal) are what is before the row, and its chunk."""
    chunks = _in_chunks(margin, key, row) or _by_their_ends(margin, key, row)
    if chunks is None:
        return None
    if chunks.row_shift is None:
        before = Keys(None, chunks.size - 1 - chunks.key_shift)
        return [before if chunks.sign < 0 else Keys(-1 * chunks.key_shift, None)]
    shift = chunks.row_shift - chunks.key_shift
    band = Band(None, shift) if chunks.sign < 0 else Band(shift, None)
    return [Either(((band,), (Chunk(chunks.size, chunks.key_shift, chunks.row_shift),)))]


class _Chunks(NamedTuple):
    """``sign * ((key + key_shift) // size - (row + row_shift) // size)``; without the row where its shift is None."""

    sign: int
    size: Index
    key_shift: Index
    row_shift: Index | None


def _in_chunks(difference: Index, key: Index, row: Index) -> _Chunks | None:
    """An index as how many chunks a key is behind a row's, or behind the first one."""
    of_key: Quotient | None = None
    of_row: Quotient | None = None
    rest: Index = 0
    sign = 1
    for monomial, coefficient in terms_of(difference):
        atom = monomial[0] if len(monomial) == 1 else None
        if not isinstance(atom, Quotient):
            rest = rest + Poly({monomial: coefficient})
        elif not axes(atom.value - key) and of_key is None and abs(coefficient) == 1:
            of_key, sign = atom, coefficient
        elif not axes(atom.value - row) and of_row is None and abs(coefficient) == 1:
            of_row = atom
        else:
            return None
    if of_key is None or axes(rest) or axes(of_key.divisor) or not is_less(0, of_key.divisor):
        return None
    size, shift = of_key.divisor, of_key.value - key
    rest = rest * sign  # key // size + rest (- row // size)
    if of_row is None:
        return _Chunks(sign, size, shift + rest * size, None)
    if of_row.divisor != size or difference != rest * sign + Poly.of(of_key) * sign - Poly.of(of_row) * sign:
        return None
    return _Chunks(sign, size, shift, of_row.value - row - rest * size)


def _by_their_ends(margin: Index, key: Index, row: Index) -> _Chunks | None:
    """What ``margin >= 0`` compares where a key is up to the last place of a row's chunk, or from its first place on.

    ``key <= size * (row // size) + end`` says that ``(key + size - 1 - end) // size`` is at most ``row // size``.
    """
    for monomial, coefficient in terms_of(margin):
        atom = monomial[0] if len(monomial) == 1 else None
        if not isinstance(atom, Quotient) or atom.divisor != abs(coefficient) or axes(atom.value - row):
            continue
        sign = -1 if coefficient > 0 else 1
        rest = margin - Poly.of(atom) * coefficient - key * sign
        if axes(rest):
            return None
        return _Chunks(sign, atom.divisor, atom.divisor - 1 - rest if sign < 0 else rest, atom.value - row)
    return None


def _together(parts: list[Part]) -> tuple[Part, ...]:
    """Parts in a fixed order, bounds of one kind taken together where it is proven which one is the tighter."""
    out: list[Part] = []
    for part in parts:
        for number, other in enumerate(out):
            if isinstance(part, Band | Keys) and type(other) is type(part):
                merged = _tighter(other, part)
                if merged is not None:
                    out[number] = merged
                    break
        else:
            if part not in out:
                out.append(part)
    return tuple(sorted(out, key=lambda p: ORDER.index(type(p))))


def _tighter(a: Band | Keys, b: Band | Keys) -> Band | Keys | None:
    bounds: list[Index | None] = []
    for x, y, highest in ((a.lower, b.lower, True), (a.upper, b.upper, False)):
        if x is None or y is None:
            bounds.append(y if x is None else x)
        elif is_at_most(x, y):
            bounds.append(y if highest else x)
        elif is_at_most(y, x):
            bounds.append(x if highest else y)
        else:
            return None
    return type(a)(*bounds)


# ---------------------------------------------------------------- what has no name


def _described(condition: Expr, key: Index, row: Index, keys: Axis) -> str:
    """A word for a condition that depends on run-time values."""
    condition = _without_not(condition)
    used, of_rows = expression_axes(condition), axes(row)
    ranges = _ranged(condition, key, row, keys)
    if ranges is not None:
        return ranges
    if age_of_slot(condition, keys) is not None:
        return "ring buffer"
    if loads(condition) and not used & of_rows:
        return "padding" if keys in used else "dense"
    if loads(condition) and keys not in used:
        return "query padding"
    if isinstance(condition, Apply) and len(condition.args) == 2:
        left, right = condition.args
        if condition.op == "eq" and len(of_rows) == 1:
            return _grouped(left, right, keys, row) or _grouped(right, left, keys, row) or "dense"
        if condition.op in ("le", "lt", "ge", "gt") and loads(condition) and _is_shifted_causal(condition, key, row):
            return "causal with a run-time offset"
    return "dense"


_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


def _without_not(condition: Expr) -> Expr:
    """A comparison for one that must not hold, which in floating point is another where a NaN is compared."""
    if isinstance(condition, Apply) and condition.op == "not":
        inner = condition.args[0]
        if isinstance(inner, Apply) and inner.op in _OPPOSITE:
            return apply(_OPPOSITE[inner.op], *inner.args)
    return condition


def _ranged(condition: Expr, key: Index, row: Index, keys: Axis) -> str | None:
    """A word for a condition that keeps a range of keys with an end that is a run-time value, or several of these."""
    if not isinstance(condition, Apply) or not loads(condition):
        return None
    if condition.op == "or":
        options = [[p for c in conjuncts(arg) for p in _parted(c, key, row, keys)] for arg in condition.args]
        texts = [" and ".join(str(p) for p in _together(parts)) for parts in options]
        return " or ".join(dict.fromkeys(texts)) if any(RANGE in w for w in texts) else None
    if condition.op not in ("le", "lt", "ge", "gt") or len(condition.args) != 2:
        return None
    left, right = (_without_loads(a, {keys}) for a in condition.args)
    if left is None or right is None or keys not in expression_axes(condition):
        return None
    margin = _margin(condition.op, left, right)
    if margin is None or all(keys in axes(rest) for rest in (margin + key, margin - key)):
        return None
    bound = margin + key if keys not in axes(margin + key) else margin - key
    if axes(row) & axes(bound):
        return None  # it moves with the row
    of_rows = expression_axes(condition) & axes(row)
    return f"{RANGE} of each row" if of_rows else RANGE


def _grouped(of_key: Expr, of_row: Expr, keys: Axis, row: Index) -> str | None:
    """``f(key) == f(row)``: rows see the keys of their own group."""
    if expression_axes(of_key) & axes(row) or rewrite_indices(of_key, {keys: row}) != of_row:
        return None
    if isinstance(of_key, Apply) and of_key.op == "floordiv" and as_index(of_key.args[1]) is not None:
        return f"chunked ({of_key.args[1]})" + (" from a run-time start" if loads(of_key) else "")
    return "document" if loads(of_key) else None


def _is_shifted_causal(condition: Apply, key: Index, row: Index) -> bool:
    """``key <= row + x`` for an x that is the same for every key and row."""
    left, right = (_without_loads(a, axes(key) | axes(row)) for a in condition.args)
    if left is None or right is None:
        return False
    margin = _margin(condition.op, left, right)
    return margin is not None and not axes(margin + key - row)


def _without_loads(value: Expr, without: set[Axis]) -> Index | None:
    """The part of a sum that is index arithmetic, if nothing else in it depends on the axes."""
    index = as_index(value)
    if index is not None:
        return index
    if isinstance(value, Apply) and value.op in ("add", "sub"):
        left, right = (_without_loads(a, without) for a in value.args)
        if left is None or right is None:
            return None
        return left + right if value.op == "add" else left - right
    return None if expression_axes(value) & without or isinstance(value, IndexValue) else 0

"""What a mask keeps: named parts over key and row that hold together, exact for symbolic sizes, and what has no name.

`structure_of` takes a keep-condition apart by algebra on indices alone. What depends on a run-time value, or fits no
form, becomes an `Opaque` part: its name is for people, and nothing may be concluded from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Apply,
    Expr,
    IndexValue,
    apply,
    as_index,
    expression_axes,
    index_value,
    loads,
    rewrite_indices,
)
from attn_pass.model.index import (
    Axis,
    Index,
    Poly,
    Quotient,
    axes,
    axis_index,
    is_at_most,
    is_less,
    is_nonnegative,
    terms_of,
)


@dataclass(frozen=True)
class Band:
    """``lower <= key - row <= upper``; None is no bound. Causal, with or without an offset, and sliding windows."""

    lower: Index | None = None
    upper: Index | None = None

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        return Keys(
            None if self.lower is None else row + self.lower, None if self.upper is None else row + self.upper
        ).condition(key, row)

    def __str__(self) -> str:
        if self.lower is None:
            return "causal" if self.upper == 0 else f"causal with offset {self.upper}"
        if self.upper is None:
            return f"sliding window ({-1 * self.lower}, all)"
        return f"sliding window ({-1 * self.lower}, {self.upper})"


@dataclass(frozen=True)
class Keys:
    """``lower <= key <= upper``, the same for every row; None is no bound."""

    lower: Index | None = None
    upper: Index | None = None

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        out: Expr = TRUE
        if self.upper is not None:
            out = apply("le", index_value(key), index_value(self.upper))
        if self.lower is not None:
            out = apply("and", out, apply("ge", index_value(key), index_value(self.lower)))
        return out

    def __str__(self) -> str:
        if self.lower is None:
            return f"prefix ({1 if self.upper is None else self.upper + 1})"
        return f"keys from {self.lower}" + ("" if self.upper is None else f" to {self.upper}")


@dataclass(frozen=True)
class Chunk:
    """``(key + key_shift) // size == (row + row_shift) // size``: a query sees the keys of its own chunk."""

    size: Index
    key_shift: Index = 0
    row_shift: Index = 0

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        size = index_value(self.size)
        left, right = index_value(key + self.key_shift), index_value(row + self.row_shift)
        return apply("eq", apply("floordiv", left, size), apply("floordiv", right, size))

    def __str__(self) -> str:
        shifted = "" if self.key_shift == self.row_shift == 0 else f" shifted by ({self.key_shift}, {self.row_shift})"
        return f"chunked ({self.size}){shifted}"


@dataclass(frozen=True)
class Either:
    """At least one of several conjunctions: a prefix everybody sees beside a causal rest."""

    options: tuple[tuple[Part, ...], ...]

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        out: Expr = FALSE
        for option in self.options:
            out = apply("or", out, Structure(key, row, option).condition())
        return out

    def __str__(self) -> str:
        words = [" and ".join(str(part) for part in option) for option in self.options]
        return " or ".join(f"({w})" if " and " in w else w for w in words)


@dataclass(frozen=True)
class Opaque:
    """What depends on run-time values, or has no name: ``text`` is for people, and nothing may be concluded from it."""

    text: str

    def __str__(self) -> str:
        return self.text


Part = Band | Keys | Chunk | Either | Opaque
_ORDER = (Band, Chunk, Keys, Either, Opaque)


@dataclass(frozen=True)
class Structure:
    """A conjunction of parts over the indices ``key`` and ``row``; none of them keeps every key.

    Axes are named, so the structure goes on holding when they are moved into other groups.
    """

    key: Index = 0
    row: Index = 0
    parts: tuple[Part, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the parts are the whole mask: nothing depends on run-time values."""
        return not any(isinstance(part, Opaque) for part in self.parts)

    @property
    def is_causal(self) -> bool:
        """Whether the whole mask is ``key <= row``."""
        return self.parts == (Band(None, 0),)

    def condition(self) -> Expr:
        """The keep-condition of an exact structure."""
        assert self.is_exact
        out: Expr = TRUE
        for part in self.parts:
            assert not isinstance(part, Opaque)
            out = apply("and", out, part.condition(self.key, self.row))
        return out

    def and_opaque(self, text: str) -> Structure:
        """The structure with one more part that nobody could name."""
        part = Opaque(text)
        return self if part in self.parts else replace(self, parts=(*self.parts, part))

    def __str__(self) -> str:
        words = [f"({p})" if isinstance(p, Either) and len(self.parts) > 1 else str(p) for p in self.parts]
        return " and ".join(words) or "none"


EVERYTHING = Structure()


def row_index(rows: tuple[Axis, ...]) -> Index:
    """The position in the query's length that row axes, slowest first, amount to."""
    total: Index = 0
    for axis in rows:
        total = total * axis.size + axis_index(axis)
    return total


# ---------------------------------------------------------------- taking a condition apart


@lru_cache(maxsize=1024)
def structure_of(condition: Expr, keys: Axis, rows: tuple[Axis, ...]) -> Structure:
    """The structure of a keep-condition; what is not understood is in it as an `Opaque` part."""
    key, row = axis_index(keys), row_index(rows)
    parts = tuple(_parted(c, key, row, keys) for c in _conjuncts(condition, False))
    return Structure(key, row, _together([p for found in parts for p in found]))


def _conjuncts(condition: Expr, negated: bool) -> list[Expr]:
    """The conditions that must all hold, negations pushed inwards."""
    if isinstance(condition, Apply):
        if condition.op == "not":
            return _conjuncts(condition.args[0], not negated)
        if condition.op == ("or" if negated else "and"):
            return [c for a in condition.args for c in _conjuncts(a, negated)]
        if negated and condition.op == "and":
            return [apply("or", *(apply("not", a) for a in condition.args))]
    condition = apply("not", condition) if negated else condition
    return [] if condition == TRUE else [condition]


def _parted(condition: Expr, key: Index, row: Index, keys: Axis) -> list[Part]:
    found = _exact(condition, key, row)
    return [Opaque(_described(condition, key, row, keys))] if found is None else found


def _exact(condition: Expr, key: Index, row: Index) -> list[Part] | None:
    """The parts a condition on indices alone is, or None."""
    if not isinstance(condition, Apply):
        return None
    if condition.op == "or":
        options = []
        for arg in condition.args:
            found: list[Part] = []
            for c in _conjuncts(arg, False):
                part = _exact(c, key, row)
                if part is None:
                    return None
                found += part
            options.append(_together(found))
        if any(isinstance(p, Either) for o in options for p in o):
            options = [x for o in options for x in (o[0].options if len(o) == 1 and isinstance(o[0], Either) else (o,))]
        return [Either(tuple(sorted(set(options), key=lambda o: [_ORDER.index(type(p)) for p in o])))]
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
    return None if margin is None else _bounded(margin, key, row)


def _margin(op: str, left: Index, right: Index) -> Index | None:
    """What is not negative where a comparison holds."""
    margins = {"le": right - left, "ge": left - right, "lt": right - left - 1, "gt": left - right - 1}
    return margins.get(op)


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
    rest = rest * sign  # key // size + rest (- row // size) == 0
    if of_row is None:
        return [Keys(-1 * rest * size - shift, -1 * rest * size + (size - 1) - shift)]
    if of_row.divisor != size or difference != rest * sign + Poly.of(of_key) * sign - Poly.of(of_row) * sign:
        return None
    return [Chunk(size, shift, of_row.value - row - rest * size)]


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
    return tuple(sorted(out, key=lambda p: _ORDER.index(type(p))))


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
    used, of_rows = expression_axes(condition), axes(row)
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


# ---------------------------------------------------------------- rows


def keeps_a_key(structure: Structure, keys: Axis) -> bool:
    """Proves that every row keeps at least one key: a key is named for each row, and shown to exist and to be kept.

    A softmax over no keys at all has no row to lose; one key or more is taken for granted.
    """
    if not structure.is_exact:
        return False
    condition = structure.condition()
    candidates: list[Index] = [0, structure.row, keys.size - 1]
    for part in _all_parts(structure.parts):
        if isinstance(part, Band):
            candidates += [structure.row + b for b in (part.upper, part.lower) if b is not None]
        elif isinstance(part, Keys):
            candidates += [b for b in (part.lower, part.upper) if b is not None]
        elif isinstance(part, Chunk):
            candidates.append(structure.row + part.row_shift - part.key_shift)
    return any(_is_kept(condition, witness, keys) for witness in candidates)


def _all_parts(parts: tuple[Part, ...]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        found += [q for o in part.options for q in _all_parts(o)] if isinstance(part, Either) else [part]
    return found


def _is_kept(condition: Expr, witness: Index, keys: Axis) -> bool:
    exists = witness == 0 or (is_nonnegative(witness) and is_less(witness, keys.size))
    return exists and rewrite_indices(condition, {keys: witness}) == TRUE

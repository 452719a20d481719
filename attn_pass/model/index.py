"""Integer index arithmetic: polynomials over axes and sizes, with the divisions that views make.

An index is an ``int`` or a `Poly`. The atoms of a polynomial are

* `Symbol`: a size that is not known statically (``s0``), at least ``lower``;
* `Axis`: an index variable, ``0 <= axis < size``;
* `Quotient` and `Remainder`: what is left of ``x // m`` and ``x % m`` when neither could be resolved.

Everything is exact. A question that cannot be answered from ranges is answered "not proven", and no
guard is added to any shape environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Symbol:
    """An integer known only at run time: ``lower <= it`` (and ``<= upper`` when that is given); a size is from 0."""

    key: str
    lower: int = 0
    upper: int | None = None

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Axis:
    """An index variable running over ``0 .. size - 1``; two axes are the same when names and sizes are.

    The size is part of what an axis is: results proved for one size are remembered, and must not serve another.
    """

    key: str
    size: Index
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.key, self.size)))

    def __hash__(self) -> int:
        """Computed once: axes are members of sets and keys of dictionaries thousands of times in a small model."""
        return self._hash

    def __reduce__(self) -> tuple[type[Axis], tuple[str, Index]]:
        return Axis, (self.key, self.size)  # another process hashes strings otherwise

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Quotient:
    """``floor(value / divisor)`` for a value and a divisor that did not resolve."""

    value: Poly
    divisor: Index

    @property
    def key(self) -> str:
        return f"({self.value}//{self.divisor})"

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Remainder:
    """``value mod divisor`` for a value and a divisor that did not resolve."""

    value: Poly
    divisor: Index

    @property
    def key(self) -> str:
        return f"({self.value}%{self.divisor})"

    def __str__(self) -> str:
        return self.key


Atom = Symbol | Axis | Quotient | Remainder
Monomial = tuple[Atom, ...]
Index: TypeAlias = "int | Poly"
_ONE: Monomial = ()


def _sort_key(atom: Atom) -> str:
    return atom.key


class Poly:
    """A polynomial that is not a plain integer: ``{monomial: coefficient}``; immutable and hashable."""

    __slots__ = ("_axes", "_hash", "terms")

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = terms
        self._hash: int | None = None
        self._axes: frozenset[Axis] | None = None

    @staticmethod
    def of(atom: Atom) -> Poly:
        return Poly({(atom,): 1})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes it depends on, asked for many times."""
        if self._axes is None:
            self._axes = frozenset(a for a in atoms(self) if isinstance(a, Axis))
        return self._axes

    def __add__(self, other: Index) -> Index:
        terms = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total = terms.get(monomial, 0) + coefficient
            if total:
                terms[monomial] = total
            else:
                terms.pop(monomial, None)
        return _make(terms)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Index) -> Index:
        return self + (-other)

    def __rsub__(self, other: Index) -> Index:
        return (-self) + other

    def __mul__(self, other: Index) -> Index:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms.items():
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right, key=_sort_key)) if left and right else left or right
                total = terms.get(monomial, 0) + a * b
                if total:
                    terms[monomial] = total
                else:
                    terms.pop(monomial, None)
        return _make(terms)

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for monomial, coefficient in sorted(self.terms.items(), key=lambda item: [a.key for a in item[0]]):
            name = "*".join(str(a) for a in monomial)
            parts.append(name if coefficient == 1 and name else f"{coefficient}*{name}" if name else str(coefficient))
        return "+".join(parts).replace("+-", "-")

    __repr__ = __str__


def _terms(index: Index) -> Iterable[tuple[Monomial, int]]:
    if isinstance(index, Poly):
        return index.terms.items()
    return ((_ONE, index),) if index else ()


def terms_of(index: Index) -> Iterable[tuple[Monomial, int]]:
    """The monomials of an index with their coefficients."""
    return _terms(index)


def _make(terms: dict[Monomial, int]) -> Index:
    if not terms:
        return 0
    if len(terms) == 1 and _ONE in terms:
        return terms[_ONE]
    return Poly(terms)


def axis_index(axis: Axis) -> Index:
    """The index that is this axis; 0 for an axis of size 1."""
    return 0 if axis.size == 1 else Poly.of(axis)


def product(sizes: Iterable[Index]) -> Index:
    """The product of sizes; 1 for none."""
    total: Index = 1
    for size in sizes:
        total = total * size
    return total


def atoms(index: Index) -> Iterator[Atom]:
    """Every atom of an index, those inside quotients and remainders included."""
    for monomial, _ in _terms(index):
        for atom in monomial:
            yield atom
            if isinstance(atom, (Quotient, Remainder)):
                yield from atoms(atom.value)
                yield from atoms(atom.divisor)


def axes(*indices: Index) -> set[Axis]:
    """The axes that any of the indices depends on."""
    return set().union(*[index.axes for index in indices if type(index) is Poly])


# ---------------------------------------------------------------- ranges


def _is_size(atom: Atom) -> bool:
    """Whether an atom is known before any axis is: a symbol, or a division of symbols (``s0 // 4``)."""
    return not isinstance(atom, Axis) and (isinstance(atom, Symbol) or not axes(Poly.of(atom)))


def _may_be_negative(atom: Atom) -> bool:
    """Whether a factor's sign is open: an integer argument, or a quotient of something that may be negative."""
    if isinstance(atom, Quotient):
        return not is_nonnegative(atom.value)
    return isinstance(atom, Symbol) and atom.lower < 0


def _bound(index: Index, upper: bool) -> Index | None:
    """A bound of ``index`` in sizes only (no axes), or None."""
    total: Index = 0
    for monomial, coefficient in _terms(index):
        if any(_may_be_negative(atom) for atom in monomial) and len(monomial) > 1:
            return None
        highest = upper == (coefficient > 0)
        term: Index = coefficient
        for atom in monomial:
            if isinstance(atom, Quotient) and _may_be_negative(atom):
                return None
            if _is_size(atom):
                term = term * Poly.of(atom)
                continue
            if not highest:
                term = 0
                break
            if isinstance(atom, Axis):
                term = term * (atom.size - 1)
            elif isinstance(atom, Remainder):
                term = term * (atom.divisor - 1)
            elif isinstance(atom, Quotient):
                top = _bound(atom.value, True)
                if top is None:
                    return None
                are_integers = isinstance(top, int) and isinstance(atom.divisor, int)
                term = term * (top // atom.divisor if are_integers else top)  # type: ignore[operator]
        total = total + term
    return total


def is_nonnegative(index: Index) -> bool:
    """Proves ``index >= 0`` for every value of its axes and symbols; False means not proven."""
    low = _bound(index, False)
    if low is None:
        return False
    if isinstance(low, int):
        return low >= 0
    shifted: Index = 0
    for monomial, coefficient in low.terms.items():
        term: Index = coefficient
        for atom in monomial:
            term = term * (Poly.of(atom) + (atom.lower if isinstance(atom, Symbol) else 0))
        shifted = shifted + term
    return all(c >= 0 for _, c in _terms(shifted))


def is_less(left: Index, right: Index) -> bool:
    """Proves ``left < right``; False means not proven."""
    if isinstance(left, int) and isinstance(right, int):
        return left < right
    difference = right - left - 1
    if is_nonnegative(difference):
        return True
    high = _bound(left, True)
    low = _bound(right, False)
    return high is not None and low is not None and is_nonnegative(low - high - 1)


def is_at_most(left: Index, right: Index) -> bool:
    """Proves ``left <= right``; False means not proven."""
    return is_less(left, right + 1)


# ---------------------------------------------------------------- division


def divide_exactly(value: Index, divisor: Index) -> Index | None:
    """``value / divisor`` when every term divides, else None. A divisor of several terms must equal a multiple."""
    if divisor == 1:
        return value
    if value == 0:
        return 0
    if value == divisor:
        return 1
    single = list(_terms(divisor))
    if len(single) != 1:
        return _divide_by_sum(value, divisor)
    (monomial, coefficient) = single[0]
    out: dict[Monomial, int] = {}
    for term, c in _terms(value):
        if c % coefficient:
            return None
        rest = list(term)
        for atom in monomial:
            if atom not in rest:
                return None
            rest.remove(atom)
        out[tuple(rest)] = c // coefficient
    return _make(out)


def _divide_by_sum(value: Index, divisor: Index) -> Index | None:
    """Division by a divisor of several terms: tries the quotient that its first term suggests."""
    leading, coefficient = max(_terms(divisor), key=lambda item: len(item[0]))
    for term, c in _terms(value):
        rest = list(term)
        if c % coefficient or not all(atom in rest and not rest.remove(atom) for atom in leading):  # type: ignore[func-returns-value]
            continue
        guess = _make({tuple(rest): c // coefficient})
        remaining = value - guess * divisor
        if remaining == 0:
            return guess
        if len(list(_terms(remaining))) < len(list(_terms(value))):
            more = _divide_by_sum(remaining, divisor)
            if more is not None:
                return guess + more
    return None


@lru_cache(maxsize=8192)
def divide(value: Index, divisor: Index) -> tuple[Index, Index]:
    """``(value // divisor, value % divisor)`` for a non-negative value, resolved as far as ranges allow."""
    if divisor == 1:
        return value, 0
    if isinstance(value, int) and isinstance(divisor, int):
        return divmod(value, divisor)
    exact_part: Index = 0
    rest: Index = 0
    for monomial, coefficient in _terms(value):
        term = _make({monomial: coefficient})
        exact = divide_exactly(term, divisor)
        if exact is not None:
            exact_part = exact_part + exact
        elif isinstance(divisor, int) and abs(coefficient) >= divisor:
            quotient, left = divmod(coefficient, divisor)
            exact_part = exact_part + _make({monomial: quotient})
            rest = rest + (_make({monomial: left}) if left else 0)
        else:
            rest = rest + term
    if is_nonnegative(rest) and is_less(rest, divisor):
        return exact_part, rest
    if isinstance(rest, int) or not is_nonnegative(rest):
        # A symbolic divisor is not comparable with a number; and what is below a division must not be negative.
        exact_part, rest = 0, value
    if isinstance(rest, int):
        rest_poly = Poly({_ONE: rest})
        return exact_part + Poly.of(Quotient(rest_poly, divisor)), Poly.of(Remainder(rest_poly, divisor))
    reduced = _reduce(rest, divisor)
    if reduced is not None:
        return exact_part + reduced[0], reduced[1]
    if len(rest.terms) == 1:
        ((monomial, coefficient),) = rest.terms.items()
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Quotient):
            inner = monomial[0]
            return exact_part + divide(inner.value, inner.divisor * divisor)[0], Poly.of(Remainder(rest, divisor))
    return exact_part + Poly.of(Quotient(rest, divisor)), Poly.of(Remainder(rest, divisor))


def _reduce(rest: Poly, divisor: Index) -> tuple[Index, Index] | None:
    """``(g*y + r) // (g*m)`` with ``0 <= r < g`` is ``y // m``: takes a common factor out of the division."""
    for monomial, coefficient in rest.terms.items():
        candidates: list[Index] = [abs(coefficient)] if abs(coefficient) > 1 else []
        candidates += [Poly.of(a) for a in monomial if isinstance(a, Symbol)]
        symbols = tuple(a for a in monomial if isinstance(a, Symbol))
        if symbols:
            candidates.append(_make({symbols: abs(coefficient)}))
        for factor in candidates:
            smaller = divide_exactly(divisor, factor)
            if smaller is None or smaller == 1:
                continue
            high: Index = 0
            low: Index = 0
            for m, c in rest.terms.items():
                exact = divide_exactly(_make({m: c}), factor)
                if exact is None:
                    low = low + _make({m: c})
                else:
                    high = high + exact
            if high != 0 and is_nonnegative(low) and is_less(low, factor):
                quotient, left = divide(high, smaller)
                return quotient, left * factor + low
    return None


def recompose(index: Index) -> Index:
    """Puts ``(x // m) * m + x % m`` back together into ``x``."""
    if not isinstance(index, Poly):
        return index
    for monomial, coefficient in index.terms.items():
        for position, atom in enumerate(monomial):
            if not isinstance(atom, Remainder):
                continue
            rest = monomial[:position] + monomial[position + 1 :]
            factor = _make({rest: coefficient})
            high = divide(atom.value, atom.divisor)[0] * atom.divisor * factor
            low = Poly.of(atom) * factor
            remaining = index - low - high
            if len(list(_terms(remaining))) < len(index.terms) - 1:
                return recompose(remaining + atom.value * factor)
    return index


def substitute(index: Index, values: Mapping[Any, Index]) -> Index:
    """The index with axes, or symbols, replaced; quotients and remainders are resolved again."""
    if not isinstance(index, Poly) or not any(a in values for a in atoms(index)):
        return index
    total: Index = 0
    for monomial, coefficient in index.terms.items():
        term: Index = coefficient
        for atom in monomial:
            replaced: Index
            if isinstance(atom, (Axis, Symbol)):
                replaced = values.get(atom, Poly.of(atom))
            elif isinstance(atom, Quotient):
                replaced = divide(substitute(atom.value, values), substitute(atom.divisor, values))[0]
            elif isinstance(atom, Remainder):
                replaced = divide(substitute(atom.value, values), substitute(atom.divisor, values))[1]
            else:
                replaced = Poly.of(atom)
            term = term * replaced
        total = total + term
    return recompose(total)


def unsplit_axis(indices: Iterable[Index]) -> tuple[Axis, Index] | None:
    """An axis that occurs as ``axis // m`` or ``axis % m``, with ``m``; None when every axis occurs whole."""
    for index in indices:
        for atom in atoms(index):
            if isinstance(atom, (Quotient, Remainder)) and len(atom.value.terms) == 1:
                ((monomial, coefficient),) = atom.value.terms.items()
                if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Axis):
                    return monomial[0], atom.divisor
    return None


@dataclass(frozen=True, slots=True)
class Digit:
    """One axis inside a mixed-radix index: it advances the index by ``stride``."""

    axis: Axis
    stride: Index


def digits(index: Index) -> tuple[Index, tuple[Digit, ...]] | None:
    """Splits an affine index in a constant and one digit an axis, unordered; None when it is not affine."""
    constant: Index = 0
    result: list[Digit] = []
    for monomial, coefficient in _terms(index):
        in_axes = [a for a in monomial if isinstance(a, Axis)]
        if any(isinstance(a, (Quotient, Remainder)) for a in monomial) or len(in_axes) > 1:
            return None
        if not in_axes:
            constant = constant + _make({monomial: coefficient})
            continue
        stride = _make({tuple(a for a in monomial if not isinstance(a, Axis)): coefficient})
        result.append(Digit(in_axes[0], stride))
    merged: dict[Axis, Index] = {}
    for digit in result:
        merged[digit.axis] = merged.get(digit.axis, 0) + digit.stride
    return constant, tuple(Digit(axis, stride) for axis, stride in merged.items() if stride != 0)

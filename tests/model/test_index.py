"""Index arithmetic against brute force: the values of every axis, at several values of every symbolic size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_pass.model.index import (
    Axis,
    Index,
    Poly,
    Quotient,
    Remainder,
    Symbol,
    axes,
    axis_index,
    digits,
    divide,
    divide_exactly,
    is_at_most,
    is_less,
    is_nonnegative,
    product,
    recompose,
    substitute,
    unsplit_axis,
)

Values = dict[object, int]
property_test = settings(max_examples=120, deadline=None, derandomize=True, database=None)

SYMBOLS = (Symbol("s0", 2), Symbol("s1", 0), Symbol("s2", 5))
SIZES = (1, 2, 3, 4, 6)


def value(index: Index, at: Values) -> int:
    """The number an index is, by Python's own arithmetic."""
    if isinstance(index, int):
        return index
    total = 0
    for monomial, coefficient in index.terms.items():
        term = coefficient
        for atom in monomial:
            if isinstance(atom, Quotient):
                term *= value(atom.value, at) // value(atom.divisor, at)
            elif isinstance(atom, Remainder):
                term *= value(atom.value, at) % value(atom.divisor, at)
            else:
                term *= at[atom]
        total += term
    return total


def places(*indices: Index) -> Iterator[Values]:
    """Every value of the axes (of a long one both ends and the middle), for a few values of the symbols."""
    ordered = sorted(axes(*indices), key=lambda a: a.key)
    for more in (0, 1, 3):
        at: Values = {s: s.lower + more * (n + 1) for n, s in enumerate(SYMBOLS)}
        for position in itertools.product(*(_ends(value(a.size, at)) for a in ordered)):
            yield at | dict(zip(ordered, position))


def _ends(size: int) -> list[int]:
    return sorted({n for n in (0, 1, 2, 3, size // 2, size - 3, size - 2, size - 1) if 0 <= n < size})


@st.composite
def sizes(draw: st.DrawFn, symbolic: bool = True) -> Index:
    """A size: a number, a symbol, or a multiple of one."""
    number = draw(st.sampled_from(SIZES))
    if not symbolic or draw(st.booleans()):
        return number
    return Poly.of(draw(st.sampled_from(SYMBOLS))) * draw(st.integers(1, 2))


@st.composite
def polynomials(draw: st.DrawFn, symbolic: bool = True, negative: bool = True, among: tuple[Axis, ...] = ()) -> Index:
    """A sum of products of axes, symbols and numbers."""
    usable = among or [Axis(f"a{n}", draw(sizes(symbolic))) for n in range(draw(st.integers(1, 3)))]
    total: Index = draw(st.integers(-6 if negative else 0, 6))
    for axis in usable:
        coefficient = draw(st.integers(-4 if negative else 0, 12))
        stride: Index = Poly.of(draw(st.sampled_from(SYMBOLS))) if symbolic and draw(st.booleans()) else 1
        total = total + axis_index(axis) * coefficient * stride
    if symbolic and draw(st.booleans()):
        total = total + Poly.of(draw(st.sampled_from(SYMBOLS))) * draw(st.integers(-2 if negative else 0, 3))
    return total


@st.composite
def nonnegative(draw: st.DrawFn) -> Index:
    """A polynomial that is nowhere negative, though some of its coefficients may be."""
    index = draw(polynomials(symbolic=draw(st.booleans())))
    return index - min(0, *(value(index, at) for at in places(index)), 0)


@st.composite
def comparable(draw: st.DrawFn) -> tuple[Index, Index]:
    """Two polynomials of the same axes."""
    own = tuple(Axis(f"a{n}", draw(sizes())) for n in range(draw(st.integers(1, 2))))
    return draw(polynomials(among=own)), draw(polynomials(among=own))


@property_test
@given(polynomials(), polynomials())
def test_arithmetic_is_that_of_the_numbers(left: Index, right: Index) -> None:
    for at in itertools.islice(places(left, right), 60):
        a, b = value(left, at), value(right, at)
        assert value(left + right, at) == a + b
        assert value(left - right, at) == a - b
        assert value(left * right, at) == a * b
        assert value(-left, at) == -a
        assert value(product((left, right, 3)), at) == 3 * a * b


@property_test
@given(polynomials(), polynomials())
def test_what_cancels_is_a_plain_number(left: Index, right: Index) -> None:
    assert left - left == 0
    assert (left + right) - right == left
    assert hash(left + right) == hash(right + left)
    assert left + right == right + left


@property_test
@given(nonnegative(), st.one_of(st.integers(1, 12), sizes()))
def test_divide_gives_quotient_and_remainder(index: Index, divisor: Index) -> None:
    """For a value that is nowhere negative, and whatever could not be resolved."""
    quotient, remainder = divide(index, divisor)
    for at in places(index, divisor):
        number, by = value(index, at), value(divisor, at)
        if number >= 0 and by > 0:
            assert value(quotient, at) == number // by
            assert value(remainder, at) == number % by


@property_test
@given(polynomials(negative=False), st.one_of(st.integers(1, 12), sizes()), st.one_of(st.integers(1, 6), sizes()))
def test_divided_twice(index: Index, divisor: Index, again: Index) -> None:
    """Quotients and remainders are divided like anything else."""
    quotient, remainder = divide(index, divisor)
    for part in (quotient, remainder):
        high, low = divide(part, again)
        for at in places(index, divisor, again):
            if value(divisor, at) > 0 and value(again, at) > 0:
                assert value(high, at) == value(part, at) // value(again, at)
                assert value(low, at) == value(part, at) % value(again, at)


@property_test
@given(comparable())
def test_proven_facts_hold(pair: tuple[Index, Index]) -> None:
    left, right = pair
    proved = is_nonnegative(left), is_less(left, right), is_at_most(left, right)
    if any(proved):
        for at in places(left, right):
            a, b = value(left, at), value(right, at)
            assert not proved[0] or a >= 0
            assert not proved[1] or a < b
            assert not proved[2] or a <= b


@property_test
@given(nonnegative(), st.one_of(st.integers(1, 12), sizes()), st.integers(0, 12))
def test_what_is_proved_of_a_division_holds(index: Index, divisor: Index, bound: int) -> None:
    """Nothing is proved of a quotient or a remainder that is not so."""
    for part in divide(index, divisor):
        proved = is_nonnegative(part), is_less(part, bound), is_less(bound, part), is_less(part, divisor)
        for at in places(index, divisor):
            if value(divisor, at) > 0 and value(index, at) >= 0:
                number = value(part, at)
                assert not proved[0] or number >= 0
                assert not proved[1] or number < bound
                assert not proved[2] or bound < number
                assert not proved[3] or number < value(divisor, at)


def test_what_ranges_prove() -> None:
    """The questions a causal mask, a slice and a padded length ask."""
    s0, s2 = Poly.of(SYMBOLS[0]), Poly.of(SYMBOLS[2])
    i, j = axis_index(Axis("i", s0)), axis_index(Axis("j", 8))
    assert is_nonnegative(i) and is_less(i, s0) and is_at_most(i, s0 - 1)
    assert not is_less(i, s0 - 1)
    assert is_less(j, 8) and not is_less(j, 7) and is_at_most(j + 1, 8)
    assert is_less(1, s0) and not is_less(2, s0) and is_less(4, s2)
    assert is_at_most(i, i + j) and not is_less(i, i + j) and is_less(i, i + j + 1)
    assert not is_nonnegative(i - j) and not is_nonnegative(j - i)


def test_sizes_that_are_divisions_themselves() -> None:
    """Windows of a symbolic image: ``s2 // 4`` windows of 4."""
    windows, _ = divide(Poly.of(SYMBOLS[2]), 4)
    w, i = axis_index(Axis("w", windows)), axis_index(Axis("i", 4))
    assert is_less(w, windows) and is_at_most(w, windows - 1) and not is_less(w, windows - 1)
    assert divide(w * 4 + i, 4) == (w, i) and is_less(w * 4 + i, windows * 4)
    assert is_nonnegative(windows) and not is_nonnegative(windows - 1)


def test_an_axis_of_one_element_is_not_an_index() -> None:
    assert axis_index(Axis("i", 1)) == 0


def test_what_was_proved_for_one_size_serves_no_other() -> None:
    """Axes and symbols of the same name in two graphs."""
    small, large = Axis("o1", 2), Axis("o1", 6)
    assert divide(axis_index(small), 2) == (0, axis_index(small))
    quotient, remainder = divide(axis_index(large), 2)
    assert [value(quotient, {large: n}) for n in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [value(remainder, {large: n}) for n in range(6)] == [0, 1, 0, 1, 0, 1]
    assert divide(1, Poly.of(Symbol("s9", 2))) == (0, 1)
    assert divide(1, Poly.of(Symbol("s9", 1))) != (0, 1)


@property_test
@given(st.lists(sizes(), min_size=2, max_size=4), st.data())
def test_a_flat_index_splits_into_its_dimensions(shape: list[Index], data: st.DataObject) -> None:
    """What a view of a view does: flatten, then divide by the same sizes again."""
    assume(all(s != Poly.of(SYMBOLS[1]) for s in shape))
    positions = [axis_index(Axis(f"a{n}", size)) for n, size in enumerate(shape)]
    flat: Index = 0
    for position, size in zip(positions, shape):
        flat = flat * size + position
    for position, size in reversed(list(zip(positions, shape))[1:]):
        flat, low = divide(flat, size)
        assert low == position
    assert flat == positions[0]


@property_test
@given(polynomials(negative=False), st.one_of(st.integers(2, 12), sizes()))
def test_recompose_undoes_divide(index: Index, divisor: Index) -> None:
    """``(x // m) * m + x % m`` is ``x`` again in value, and in form where ``x`` is one axis."""
    quotient, remainder = divide(index, divisor)
    whole = recompose(quotient * divisor + remainder)
    for at in places(index, divisor):
        if value(divisor, at) > 0:
            assert value(whole, at) == value(index, at)
    axis = axis_index(Axis("x", 60))
    quotient, remainder = divide(axis, divisor)
    assert recompose(quotient * divisor + remainder) == axis
    assert recompose(7 * quotient * divisor + 7 * remainder + 3) == 7 * axis + 3


@property_test
@given(polynomials(negative=False), st.one_of(st.integers(2, 6), sizes()), st.data())
def test_substitute_replaces_axes_everywhere(index: Index, divisor: Index, data: st.DataObject) -> None:
    """Inside quotients and remainders too; the result has the value the parts have."""
    quotient, remainder = divide(index, divisor)
    ordered = sorted(axes(index), key=lambda a: a.key)
    assume(ordered)
    axis = data.draw(st.sampled_from(ordered))
    low = Axis("low", data.draw(st.integers(1, 3)))
    high = Axis("high", 2)
    replacement = axis_index(high) * low.size + axis_index(low) + data.draw(st.integers(0, 2))
    for part in (index, quotient, remainder):
        replaced = substitute(part, {axis: replacement})
        assert axis not in axes(replaced)
        for at in places(index, divisor, replacement):
            if value(divisor, at) > 0:
                assert value(replaced, at) == value(part, at | {axis: value(replacement, at)})


@property_test
@given(polynomials(negative=False), polynomials(negative=False))
def test_divide_exactly_finds_only_factors(factor: Index, other: Index) -> None:
    assume(factor != 0)
    quotient = divide_exactly(factor * other, factor)
    assert quotient is None or all(
        value(quotient * factor, at) == value(factor * other, at) for at in places(factor, other)
    )
    wrong = divide_exactly(factor * other + 1, factor)
    if wrong is not None:
        assert wrong * factor == factor * other + 1


def test_divide_exactly_of_sizes() -> None:
    s0, s2 = Poly.of(SYMBOLS[0]), Poly.of(SYMBOLS[2])
    assert divide_exactly(6 * s0 * s2, 2 * s0) == 3 * s2
    assert divide_exactly((s0 + 1) * s2, s0 + 1) == s2
    assert divide_exactly(6 * s0, 4) is None and divide_exactly(s0, s2) is None


def test_unsplit_axis_names_the_axis_and_by_what_it_is_divided() -> None:
    axis, whole = Axis("a", 12), Axis("b", 5)
    quotient, _ = divide(axis_index(axis), 3)
    assert unsplit_axis([axis_index(whole), quotient * 7]) == (axis, 3)
    assert unsplit_axis([axis_index(whole), axis_index(axis)]) is None


@property_test
@given(polynomials())
def test_digits_are_the_strides(index: Index) -> None:
    """An affine index is its constant and, for each axis, a stride."""
    split = digits(index)
    assert split is not None
    constant, strides = split
    assert len({d.axis for d in strides}) == len(strides)
    for at in places(index):
        assert value(constant, at) + sum(at[d.axis] * value(d.stride, at) for d in strides) == value(index, at)
    assert digits(Poly.of(Quotient(Poly.of(Axis("a", 6)), 4))) is None
    assert digits(axis_index(Axis("a", 6)) * axis_index(Axis("b", 6))) is None

"""Whether what multiplies the elements of a pair is the cosine and the sine of one angle, as far as it was read.

Four products make a pair: ``a * low + b * high`` and ``c * low + d * high``. In a rotation ``a`` and ``d`` are one
table, and ``b`` and ``c`` are the other one. Where a table is read down to its angle, all angles must be one. A table
that is given, or made in a way that is not read, is taken to be what it stands for; what can be asked of it is where it
is read: at one place for both elements of a pair, or at each element's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attn_pass.model.expression import Apply, Expr, Load, transform
from attn_pass.reading.unreadable import Unreadable

_NO_ANGLE = "what multiplies a pair is no cosine and sine of one angle"
_OTHER_ANGLE = "the elements of a pair are not rotated by one angle"


@dataclass(frozen=True)
class Coefficient:
    """What one element of a pair is multiplied by, in the result ``at``: tables, and weights of elements."""

    at: int
    tables: tuple[Expr, ...]
    weights: tuple[Expr, ...]


Row = tuple[Coefficient, Coefficient]  # of the low and of the high element


def check_tables(pairs: Iterable[tuple[Row, Row]]) -> None:
    """Raises `Unreadable` where what multiplies pairs is known to be no cosine and sine of one angle a pair."""
    own: dict[tuple[Load, int], int] = {}
    for (a, b), (c, d) in pairs:
        for one, other in ((a, d), (b, c)):
            if not _are_alike(one, other, own):
                raise Unreadable(_OTHER_ANGLE)
        for one, other in ((a, b), (c, d)):
            if not _are_of_one_angle(one.tables, other.tables):
                raise Unreadable(_NO_ANGLE)
        by_element = _same(a.weights, c.weights) and _same(b.weights, d.weights)
        by_result = _same(a.weights, b.weights) and _same(c.weights, d.weights)
        if not by_element and not by_result:
            raise Unreadable("the products of one element have different weights")


def _same(one: Sequence[Expr], other: Sequence[Expr]) -> bool:
    return sorted(map(repr, one)) == sorted(map(repr, other))


def _are_of_one_angle(one: Sequence[Expr], other: Sequence[Expr]) -> bool:
    """Whether two products of tables are a cosine and a sine, times what they have in common."""
    left, right = list(one), list(other)
    for factor in one:
        if factor in right:
            left.remove(factor)
            right.remove(factor)
    if not left or not right:
        return False
    if all(isinstance(each, Load) for each in (*left, *right)):
        return True
    if len(left) != 1 or len(right) != 1:
        return False
    known = [each for each in (*left, *right) if not isinstance(each, Load)]
    angles = {each.args[0] for each in known if isinstance(each, Apply) and each.op in ("cos", "sin")}
    operations = {each.op for each in known if isinstance(each, Apply)}
    return operations <= {"cos", "sin"} and len(operations) == len(known) and len(angles) == 1


def _are_alike(one: Coefficient, other: Coefficient, own: dict[tuple[Load, int], int]) -> bool:
    """Whether two products of tables are the same, or the same but that a table has a place for each element.

    ``own`` is how far from an element its place is, of each table that has one for each.
    """
    if _same(one.tables, other.tables):
        return True
    left, right = (_loads_in_order(each.tables) for each in (one, other))
    if len(left) != len(right) or _same_form(one.tables) != _same_form(other.tables):
        return False
    return all(a == b or _at_own_places(a, b, one.at, other.at, own) for a, b in zip(left, right))


def _at_own_places(a: Load, b: Load, at_a: int, at_b: int, own: dict[tuple[Load, int], int]) -> bool:
    """Whether two elements of a table are as far from each other as the results are that they make."""
    if a.source != b.source or len(a.index) != len(b.index):
        return False
    dims = [n for n, (i, j) in enumerate(zip(a.index, b.index)) if i != j]
    if len(dims) != 1:
        return False
    (dim,) = dims
    for load, at in ((a, at_a), (b, at_b)):
        position = load.index[dim]
        if not isinstance(position, int):
            return False
        row = Load(load.source, (*load.index[:dim], 0, *load.index[dim + 1 :]))
        if own.setdefault((row, dim), position - at) != position - at:
            return False
    return True


def _same_form(tables: Iterable[Expr]) -> list[str]:
    """The tables without the places at which they are read."""
    return [repr(_with_loads(table, lambda load: Load(load.source, ()))) for table in tables]


def _loads_in_order(tables: Iterable[Expr]) -> list[Load]:
    in_order: list[Load] = []

    def seen(load: Load) -> Load:
        in_order.append(load)
        return load

    for table in tables:
        _with_loads(table, seen)
    return in_order


def _with_loads(expression: Expr, change: Callable[[Load], Load]) -> Expr:
    return transform(expression, lambda part: change(part) if isinstance(part, Load) else None)

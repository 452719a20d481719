"""Rotary embeddings: which elements of a row are rotated in pairs, and by what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from attn_pass.model.expression import Expr, Load, expression_axes, rewrite_indices, transform
from attn_pass.model.index import Axis, Index
from attn_pass.model.prologue import Pairing, Rotation
from attn_pass.reading.linear_forms import LinearForm, Product, sources
from attn_pass.reading.rotation_tables import Coefficient, Row, check_tables
from attn_pass.reading.rows import Rows
from attn_pass.reading.unreadable import Unreadable

_MOST_PARTS = 8


@dataclass(frozen=True)
class ReadPiece:
    """Elements ``start + step * n`` of the head dim as sums of products with elements of one tensor."""

    start: int
    step: int
    axis: Axis
    at: Index
    rows: Rows
    form: LinearForm


@dataclass(frozen=True)
class Surroundings:
    """The axes an operand varies with beside its head dim, and which tensors are computed from data."""

    heads: frozenset[Axis]
    batch: frozenset[Axis]
    positions: frozenset[Axis]
    is_data: Mapping[int, bool]  # of a source, by number
    is_weight: Mapping[int, bool]
    same: Mapping[int, int]  # the first of those that are computed in the same way


@dataclass(frozen=True)
class _Part:
    """One product of an element: the place in its row, and what it is multiplied by."""

    rows: Rows
    place: int
    product: Product


def rotation_of(pieces: Sequence[ReadPiece], head_dim: int, around: Surroundings) -> Rotation | None:
    """The rotation that the pieces are; None where every element is multiplied by weights alone.

    Raises `Unreadable` for what is neither.
    """
    elements: dict[int, tuple[_Part, ...]] = {}
    for number, piece in enumerate(pieces):
        numbers = {load: piece.rows.numbers(number, load, piece.axis) for load in piece.form}
        for n in range(len(next(iter(numbers.values()), []))):
            elements[piece.start + piece.step * n] = tuple(
                _Part(piece.rows, numbers[load][n], _at(product, piece.axis, n)) for load, product in piece.form.items()
            )
    rotated = {d: parts for d, parts in elements.items() if len(parts) == 2}
    factors = (f for parts in elements.values() for part in parts for f in part.product.factors)
    if any(around.is_data[s] for s in set().union(*map(sources, set(factors)))):
        raise Unreadable("its elements are multiplied by something that is computed from data")
    if any(len(parts) not in (1, 2) for parts in elements.values()) or len(elements) != head_dim:
        raise Unreadable("an element is the sum of more than two products, or of none")
    tables = {f for parts in rotated.values() for part in parts for f in _tables(part.product.factors, around)}
    for parts in elements.values():
        if len(parts) == 1 and _tables(parts[0].product.factors, around):
            raise Unreadable("an element is multiplied by a table, and not rotated")
    if not rotated:
        return None
    for parts in rotated.values():
        _check_tables(parts, around)
    pairs = _pairs(rotated, around)
    places = sorted(set(chain.from_iterable(pairs)))
    pairing, times = _pairing(pairs, places)
    return Rotation(
        pairing,
        times,
        tuple(_ranges(sorted(rotated))),
        head_dim,
        any(expression_axes(f) & around.batch for f in tables),
        tuple(sorted(set().union(*map(sources, tables)))),
    )


def _tables(factors: Iterable[Expr], around: Surroundings) -> list[Expr]:
    """The factors that are no weights of the elements."""
    return [f for f in factors if not _is_weight(f, around)]


def _is_weight(factor: Expr, around: Surroundings) -> bool:
    """Whether a factor is one of its element, whatever the position."""
    if expression_axes(factor) & (around.positions | around.batch):
        return False  # of one token a table does not depend on the position
    return bool(around.positions) or all(around.is_weight[s] for s in sources(factor))


def _check_tables(parts: Sequence[_Part], around: Surroundings) -> None:
    """Raises `Unreadable` where what rotates is no table of positions."""
    for part in parts:
        tables = _tables(part.product.factors, around)
        used = set().union(*map(expression_axes, tables))
        if used & around.heads:
            raise Unreadable("the table depends on the head")
        if around.positions and not used & (around.positions | around.batch):
            raise Unreadable("what multiplies its elements does not depend on the position")


def _at(product: Product, axis: Axis, n: int) -> Product:
    """What an element of a piece is multiplied by, of its place ``n``."""
    return Product(product.number, tuple(rewrite_indices(f, {axis: n}) for f in product.factors))


def _pairs(rotated: Mapping[int, tuple[_Part, ...]], around: Surroundings) -> set[tuple[int, int]]:
    """The pairs of places that are rotated into each other. Raises `Unreadable` where they are not."""
    outputs: dict[tuple[int, int], list[tuple[_Part, _Part]]] = {}
    results: dict[tuple[int, int], list[Row]] = {}
    for at, parts in rotated.items():
        low, high = sorted(parts, key=lambda part: part.place)
        outputs.setdefault((low.place, high.place), []).append((low, high))
        row = (_coefficient(low.product, at, around), _coefficient(high.product, at, around))
        results.setdefault((low.place, high.place), []).append(row)
    places = [place for pair in outputs for place in pair]
    if len({part.rows.source for parts in rotated.values() for part in parts}) != 1:
        raise Unreadable("elements of several tensors are rotated")
    if len(set(places)) != len(places) or any(len(both) != 2 for both in outputs.values()):
        raise Unreadable("its elements are not rotated in pairs")
    for first, second in outputs.values():
        signs = [part.product.number > 0 for part in (*first, *second)]
        if (signs[0] == signs[3]) == (signs[1] == signs[2]):
            raise Unreadable("the signs of a pair are not those of a rotation")
        if len({abs(part.product.number) for part in (*first, *second)}) != 1:
            raise Unreadable("a part of a pair is scaled by another number")
    check_tables((first, second) for first, second in results.values())
    return set(outputs)


def _coefficient(product: Product, at: int, around: Surroundings) -> Coefficient:
    """What an element is multiplied by, with one number for tensors that are computed in the same way."""

    def same(part: Expr) -> Expr | None:
        return Load(around.same[part.source], part.index) if isinstance(part, Load) else None

    tables = _tables(product.factors, around)
    weights = [f for f in product.factors if f not in tables]
    return Coefficient(at, *(tuple(transform(f, same) for f in factors) for factors in (tables, weights)))


def _pairing(pairs: set[tuple[int, int]], places: Sequence[int]) -> tuple[Pairing, int]:
    """How the pairs are arranged among the elements that are rotated, and how many times."""
    rank = {place: n for n, place in enumerate(places)}
    ranked = {(rank[a], rank[b]) for a, b in pairs}
    size = len(places)
    if size > 2 and ranked == {(n, n + 1) for n in range(0, size, 2)}:
        return "neighbours", 1
    for parts in range(1, _MOST_PARTS + 1):
        part = size // parts
        if size % parts == 0 and part % 2 == 0:
            half = part // 2
            if ranked == {(b + n, b + n + half) for b in range(0, size, part) for n in range(half)}:
                return "halves", parts
    return "other", 1


def _ranges(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Numbers in order as ranges ``(start, stop)``."""
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield start, previous + 1
            start = number
        previous = number
    yield start, previous + 1

"""Where elements lie along the rows of a tensor: the dimension that a head dim runs over, and the place in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_pass.model.expression import Load
from attn_pass.model.index import Axis, Index, axis_index, divide, terms_of
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position

Along = tuple[int, int]  # c and k of an index c * axis + k


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that elements were found in: all in the same row, whatever batch and head are.

    ``position`` is that of the row's first element; the row runs over the dimensions ``dims``, which follow each other,
    with ``strides``. ``places`` are the elements: the ``at`` of each load along its piece's axis.
    """

    source: int
    position: Position
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    places: Mapping[tuple[int, Load], Along]

    def at(self, along: Axis, offset: Index = 0) -> Position:
        """The position of element ``along`` of the row."""
        index, out = axis_index(along) + offset, list(self.position)
        if len(self.dims) == 1:
            (dim,) = self.dims
            out[dim] = out[dim] + index
            return tuple(out)
        for dim, stride in zip(self.dims, self.strides):
            quotient, index = divide(index, stride)
            out[dim] = out[dim] + quotient
        return tuple(out)

    def numbers(self, piece: int, load: Load, axis: Axis) -> list[int]:
        """The place of each element of a piece."""
        factor, rest = self.places[piece, load]
        assert isinstance(axis.size, int)
        return [factor * n + rest for n in range(axis.size)]

    def index(self, piece: int, load: Load, axis: Axis) -> Index:
        """The place as an index over the piece's axis."""
        factor, rest = self.places[piece, load]
        return axis_index(axis) * factor + rest


def rows_of(elements: Iterable[tuple[int, Axis, Load]], shape: Sequence[Index]) -> Rows:
    """The rows that loads of one tensor are in, each with the number and the axis of its piece.

    Raises `Unreadable` where they are not all in one row.
    """
    listed = list(elements)
    split = [[_split(index, axis) for index in load.index] for _, axis, load in listed]
    first = split[0]
    if not first:
        raise Unreadable("it is made of one number")
    if any([rest for rest, _ in each] != [rest for rest, _ in first] for each in split):
        raise Unreadable("it has elements of another row or head")
    rank = len(first)
    dims = [n for n in range(rank) if any(each[n][1][0] for each in split) or len({e[n][1][1] for e in split}) > 1]
    dims = dims or [rank - 1]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise Unreadable("its elements lie in two dimensions that do not follow each other")
    strides = [1]
    for size in reversed([shape[n] for n in dims[1:]]):
        if not isinstance(size, int):
            raise Unreadable("its elements lie in a dimension of unknown size")
        strides.insert(0, strides[0] * size)
    places: dict[tuple[int, Load], Along] = {}
    for (piece, _, load), each in zip(listed, split):
        factor = sum(stride * each[n][1][0] for n, stride in zip(dims, strides))
        places[piece, load] = factor, sum(stride * each[n][1][1] for n, stride in zip(dims, strides))
    least = min(
        min(rest, rest + factor * (_size(axis) - 1))
        for (piece, axis, load) in listed
        for factor, rest in (places[piece, load],)
    )
    position = [rest + (0 if n in dims else each_k) for n, (rest, (_, each_k)) in enumerate(first)]
    start = least
    for dim, stride in zip(dims, strides):
        position[dim] = position[dim] + start // stride
        start %= stride
    moved = {key: (factor, rest - least) for key, (factor, rest) in places.items()}
    return Rows(listed[0][2].source, tuple(position), tuple(dims), tuple(strides), moved)


def _size(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return axis.size


def _split(index: Index, axis: Axis) -> tuple[Index, Along]:
    """An index as ``rest + c * axis + k``."""
    factor = constant = 0
    for monomial, coefficient in terms_of(index):
        if monomial == ():
            constant = coefficient
        elif monomial == (axis,):
            factor = coefficient
        elif axis in monomial:
            raise Unreadable("it has elements in an order that is not known")
    rest = index - axis_index(axis) * factor - constant if axis.size != 1 else index - constant
    return rest, (factor, constant)

"""A part of a tensor written in place: which part, and what was written to it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.effects import Mutation
from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.expression import Expr, apply, as_index, index_value
from attn_pass.model.index import Axis, Index, axes, axis_index, is_at_most, is_nonnegative
from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.views import VIEWS, Position
from attn_pass.reading.vocabulary import Call

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)
_TRIANGLES = {"triu_indices": "ge", "tril_indices": "le"}
Bounds = tuple[Index, Index] | None


@dataclass(frozen=True)
class Part:
    """``value`` was written to ``size`` indices from ``start`` on in each dimension; None is all of it.

    Of those, where every boolean tensor of ``masks`` holds at the dimensions beside it, and every relation of
    ``relations`` between two dimensions (``index[a] op index[b] + offset``). ``dims`` are the dimensions that the
    dimensions of what is written run over, -1 for none.
    """

    value: Any
    bounds: tuple[Bounds, ...]
    dims: tuple[int, ...]
    views: tuple[Node, ...] = ()  # from what is written to the whole
    masks: tuple[tuple[Node, tuple[int, ...]], ...] = ()
    relations: tuple[tuple[str, int, int, Index], ...] = ()
    is_result: bool = False  # the value is the writing operation's own result, not one of its operands

    def relation_at(self, position: Position) -> list[Expr]:
        """The relations for the element at a position."""
        return [
            apply(op, index_value(position[a]), index_value(position[b] + offset))
            for op, a, b, offset in self.relations
        ]


def written_part(
    reader: GraphReader, node: Node, mutation: Mutation, copies: Collection[object] = _COPIES
) -> Part | None:
    """What a write of a part of ``node`` wrote, and where; None for anything but slices that step by one and masks.

    ``copies`` are the targets that copy their second argument into all of their first.
    """
    views = _views(reader, mutation)
    if not reader.effects.same_geometry(views[-1], node):
        return None
    writer = mutation.node
    shape = reader.shape(mutation.target)
    part: Part | None = None
    if writer.target is operator.setitem:
        _, index, value = writer.args
        part = _indexed(reader, shape, index, value, reader.order[writer])
    elif writer.target in copies:
        part = Part(writer.args[1], (None,) * len(shape), tuple(range(len(shape))))
    elif (call := reader.call(writer)) is not None and call.op == "index_put":
        part = put_part(reader, writer)
    elif call is not None and call.in_place and call.op in POINTWISE and mutation.whole:
        part = Part(writer, (None,) * len(shape), tuple(range(len(shape))), is_result=True)
    return part if part is None or len(views) == 1 else _through_views(reader, mutation, views, part)


def put_part(reader: GraphReader, node: Node) -> Part | None:
    """What ``index_put`` writes, and where."""
    call = reader.call(node)
    if call is None or call["accumulate"] or not isinstance(call["input"], Node):
        return None
    entries = tuple(slice(None) if e is None else e for e in call["indices"])
    return _indexed(reader, reader.shape(call["input"]), entries, call["values"], reader.order[node])


def scattered_part(reader: GraphReader, node: Node) -> Part | None:
    """What ``slice_scatter`` and ``select_scatter`` write, and where."""
    call = reader.call(node)
    if call is None or call["dim"].__class__ is not int:
        return None
    shape = reader.shape(node)
    dim = call["dim"] % len(shape)
    if call.op == "slice_scatter":
        end = None if call["end"] == sys.maxsize else call["end"]
        entry: Any = slice(call["start"], end, call["step"])
    else:
        entry = call["index"]
    return _indexed(reader, shape, (*[slice(None)] * dim, entry), call["src"], reader.order[node])


def _views(reader: GraphReader, mutation: Mutation) -> list[Node]:
    """The views from the one that is written to the tensor it is a part of."""
    views = [mutation.target]
    while True:
        call = reader.call(views[-1])
        source = None if call is None else _viewed(reader, views[-1], call)
        if call is None or not isinstance(source, Node):
            return views
        if not call.in_place and (call.op not in VIEWS or not reader.is_alias(views[-1], call)):
            return views
        views.append(source)  # what an operation in place gives back is what it was given


def _viewed(reader: GraphReader, node: Node, call: Call) -> Any:
    """What a view is of, or what an operation in place gives back."""
    return reader.written_by(node) if "out" in node.kwargs else call.args.get("input")


def _indexed(reader: GraphReader, shape: Position, index: Any, value: Any, at: int) -> Part | None:
    """The part of a tensor that ``x[index]`` is."""
    entries = list(index) if isinstance(index, tuple) else [index]
    width = sum(_width(e) for e in entries)
    if any(e is Ellipsis for e in entries):
        ellipsis = next(n for n, e in enumerate(entries) if e is Ellipsis)
        entries[ellipsis : ellipsis + 1] = [slice(None)] * (len(shape) - width)
    entries += [slice(None)] * (len(shape) - sum(_width(e) for e in entries))
    bounds: list[Bounds] = []
    dims: list[int] = []
    masks: list[tuple[Node, tuple[int, ...]]] = []
    numbers: list[tuple[int, Node]] = []
    for entry in entries:
        dim = len(bounds)
        if isinstance(entry, slice):
            bound = _sliced(reader, entry, shape[dim])
            if bound is None:
                return None
            bounds.append(None if bound == (0, shape[dim]) else bound)
            dims.append(dim)
            continue
        fake = tensor_value(entry)
        if fake is not None and fake.dtype == torch.bool and fake.dim() > 0:
            over = tuple(range(dim, dim + fake.dim()))
            if reader.shape(entry) != tuple(shape[dim : dim + fake.dim()]):
                return None
            masks.append((entry, over))
            bounds += [None] * fake.dim()
        elif fake is not None and fake.dim() == 1:
            numbers.append((dim, entry))
            bounds.append(None)
        else:
            start = _index_of(reader, entry, shape[dim])
            if start is None or not is_at_most(start + 1, shape[dim]):
                return None
            bounds.append((start, 1))
    relations = _pairs(reader, shape, numbers, at) if numbers else ()
    selects = bool(masks or numbers)
    if relations is None or len(bounds) != len(shape) or len(masks) + bool(numbers) > 1:
        return None
    if selects and not _is_one_number(value):
        return None
    fake = tensor_value(value)
    ahead = 0 if fake is None else max(0, fake.dim() - len(dims))  # ones, which a part does not have
    over = () if selects else ((-1,) * ahead + tuple(dims))
    return Part(value, tuple(bounds), over, (), tuple(masks), relations)


def _width(entry: Any) -> int:
    """How many dimensions an entry of an index takes."""
    fake = tensor_value(entry)
    if fake is not None and fake.dtype == torch.bool:
        return fake.dim()
    return 0 if entry is Ellipsis or entry is None else 1


def _is_one_number(value: Any) -> bool:
    fake = tensor_value(value)
    return isinstance(value, (bool, int, float)) if fake is None else all(s == 1 for s in fake.shape)


def _sliced(reader: GraphReader, entry: slice, size: Index) -> tuple[Index, Index] | None:
    """Start and length of a slice that steps by one; None if they cannot be determined."""
    if entry.step not in (None, 1):
        return None
    start = 0 if entry.start is None else _index_of(reader, entry.start, size)
    stop = size if entry.stop is None else _index_of(reader, entry.stop, size)
    if start is None or stop is None or not (start == 0 or is_nonnegative(stop - start)):
        return None
    return (start, stop - start) if is_at_most(stop, size) else None


def _index_of(reader: GraphReader, value: Any, size: Index) -> Index | None:
    """A number of an index, counted from the front; None for one of unknown sign."""
    fake = fake_value(value) if isinstance(value, Node) else value
    if isinstance(fake, bool) or not isinstance(fake, (int, torch.SymInt)):
        return None
    index = reader.sizes.index(fake)
    if isinstance(index, int) and index < 0:
        index = size + index
        return index if is_nonnegative(index) else None
    return index if reader.sizes.is_nonnegative(fake) else None


def _pairs(
    reader: GraphReader, shape: Position, numbers: list[tuple[int, Node]], at: int
) -> tuple[tuple[str, int, int, Index], ...] | None:
    """Which elements two index tensors name together: a triangle (``torch.triu_indices``), or a diagonal."""
    if len(numbers) != 2:
        return None
    (row, rows), (column, columns) = numbers
    if column != row + 1:
        return None
    axis = Axis("n~", reader.shape(rows)[0])
    made_of = [reader.through_views(n, (axis_index(axis),), at, None) for n in (rows, columns)]
    (grid, first, _), (again, second, _) = made_of
    call = reader.call(grid)
    if call is not None and grid is again and call.op in _TRIANGLES and not reader.effects.mutations(grid):
        sizes = [_index_of(reader, call[name], 0) for name in ("row", "col")]
        offset = call["offset"]
        offset = fake_value(offset) if isinstance(offset, Node) else offset
        is_whole = sizes == [shape[row], shape[column]] and isinstance(offset, (int, torch.SymInt))
        if not is_whole or (first, second) != ((0, axis_index(axis)), (1, axis_index(axis))):
            return None
        return ((_TRIANGLES[call.op], column, row, reader.sizes.index(offset)),)
    places = [as_index(reader.element(n, (axis_index(axis),), at)) for n in (rows, columns)]
    if places == [axis_index(axis)] * 2 and axis.size == shape[row] == shape[column]:
        return (("eq", column, row, 0),)
    return None


def _through_views(reader: GraphReader, mutation: Mutation, views: list[Node], part: Part) -> Part | None:
    """A write to a view, as a write to a part of the tensor it is a view of."""
    shape = reader.shape(mutation.target)
    along = [Axis(f"w{n}", size) for n, size in enumerate(shape)]
    node, position = mutation.target, tuple(axis_index(a) for a in along)
    for source in views[1:]:
        if (call := reader.call(node)) is not None and call.in_place:
            node = source
            continue
        back = reader.back(node, position, reader.order[node] + 1)
        if back is None:
            return None
        node, position, _ = back
    bounds: list[Bounds] = []
    dim_of: dict[int, int] = {}
    for dim, (at, size) in enumerate(zip(position, reader.shape(node))):
        here = [n for n, axis in enumerate(along) if axis in axes(at)]
        if len(here) > 1:
            return None
        if not here:
            bounds.append(None if size == 1 else (at, 1))
            continue
        (number,) = here
        start, inner = at - axis_index(along[number]), part.bounds[number]
        if axes(start) or not is_nonnegative(start) or number in dim_of:
            return None
        dim_of[number] = dim
        length = along[number].size
        if inner is not None:
            start, length = start + inner[0], inner[1]
        bounds.append(None if (start, length) == (0, size) else (start, length))
    ones = {n for n, size in enumerate(shape) if size == 1}
    if (set(range(len(shape))) - ones) - dim_of.keys() or ((part.masks or part.relations) and ones - dim_of.keys()):
        return None
    return replace(
        part,
        bounds=tuple(bounds),
        dims=tuple(dim_of.get(d, -1) for d in part.dims),
        views=tuple(views),
        masks=tuple((mask, tuple(dim_of[d] for d in over)) for mask, over in part.masks),
        relations=_moved(part, dim_of, bounds),
    )


def _moved(part: Part, dim_of: dict[int, int], bounds: list[Bounds]) -> tuple[tuple[str, int, int, Index], ...]:
    def start(dim: int) -> Index:
        held = bounds[dim_of[dim]]
        return 0 if held is None else held[0]

    return tuple((op, dim_of[a], dim_of[b], offset + start(a) - start(b)) for op, a, b, offset in part.relations)

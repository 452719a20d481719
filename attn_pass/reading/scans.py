"""Elements of operations along a dimension, for index arithmetic: diff, cumsum, cat, all, any.

transformers uses them to distinguish packed sequences, and they show that there is only one sequence if the positions
are an ``arange`` of the program itself. Elements that cannot be decided are loaded from the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Const,
    Expr,
    apply,
    as_index,
    expression_axes,
    index_value,
    loads,
    rewrite_indices,
)
from attn_pass.model.index import Axis, Index, Poly, is_at_most, is_less
from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call, one_or_many

_INTEGERS = (torch.int64, torch.int32)
_MOST_PIECES = 4


def along(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """The element of an operation along a dimension; None where it is not decided by index arithmetic."""
    if call.op == "diff":
        return _diff(reader, node, call, position, depth)
    if call.op == "cumsum":
        return _cumsum(reader, node, call, position, depth)
    if call.op == "cat":
        return _cat(reader, node, call, position, depth)
    if call.op in ("all", "any"):
        return _reduced(reader, node, call, position, depth)
    return None


def _dimension(dim: Any, rank: int) -> int | None:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        return None
    return dim % rank


def _at(position: Position, dim: int, index: Index) -> Position:
    return (*position[:dim], index, *position[dim + 1 :])


def _canonical(
    reader: GraphReader, tensor: Node, position: Position, dim: int, at: int, depth: int
) -> tuple[Axis, Expr]:
    """The element with a variable of its own along ``dim``: what is proven of it holds at every index of the tensor."""
    axis = Axis(f"{tensor.name}~{id(tensor)}.{dim}", reader.shape(tensor)[dim])
    index: Index = Poly.of(axis) if axis.size != 1 else 0
    return axis, reader.element(tensor, _at(position, dim, index), at, depth + 1)


def _diff(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    tensor, before = call["input"], call["prepend"]
    value, out = tensor_value(tensor), tensor_value(node)
    if value is None or out is None or call["n"] != 1 or call["append"] is not None or value.dtype not in _INTEGERS:
        return None
    dim, time = _dimension(call["dim"], value.dim()), reader.order[node]
    if dim is None or value.dtype != out.dtype:
        return None
    first = tensor_value(before)
    if before is None:
        here, there = (
            reader.element(tensor, _at(position, dim, position[dim] + shift), time, depth + 1) for shift in (1, 0)
        )
        return _index_difference(here, there)
    if first is None or first.dtype != value.dtype or reader.shape(before)[dim] != 1:
        return None
    axis, later = _canonical(reader, tensor, position, dim, time, depth)
    if loads(later):
        return None
    start = _index_difference(
        reader.element(tensor, _at(position, dim, 0), time, depth + 1),
        reader.element(before, _at(position, dim, 0), time, depth + 1),
    )
    # From the second element on: element i less element i - 1.
    rest = _index_difference(later, rewrite_indices(later, {axis: Poly.of(axis) - 1})) if axis.size != 1 else start
    if start is None or rest is None:
        return None
    rest = rewrite_indices(rest, {axis: position[dim]})
    return apply("where", apply("lt", index_value(position[dim]), Const(1)), start, rest)


def _index_difference(left: Expr, right: Expr) -> Expr | None:
    a, b = as_index(left), as_index(right)
    return None if a is None or b is None else index_value(a - b)


def _cumsum(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """Of what is the same along the dimension: that many times it."""
    tensor = call["input"]
    value, out = tensor_value(tensor), tensor_value(node)
    if value is None or out is None or out.dtype not in _INTEGERS or value.dtype not in (*_INTEGERS, torch.bool):
        return None
    dim = _dimension(call["dim"], value.dim())
    if dim is None:
        return None
    axis, element = _canonical(reader, tensor, position, dim, reader.order[node], depth)
    if isinstance(element, Const):
        element = apply("cast", element, dtype=torch.int64)
    step = as_index(element)
    if step is None or axis in expression_axes(element):
        return None
    return index_value((position[dim] + 1) * step)


def _cat(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """The piece the position lies in, or a choice between pieces where that differs from index to index."""
    tensors = call["input"]
    out = tensor_value(node)
    if out is None or not isinstance(tensors, (tuple, list)):
        return None
    values = [tensor_value(t) for t in tensors]
    dim = _dimension(call["dim"], out.dim())
    if dim is None or any(v is None or v.dtype != out.dtype or v.dim() != out.dim() for v in values):
        return None
    x, time = position[dim], reader.order[node]
    start: Index = 0
    undecided: list[tuple[Index, Expr]] = []  # the end of a piece, and its element
    for tensor in tensors:
        end: Index = start + reader.shape(tensor)[dim]
        if is_less(x, start):
            break
        if not is_at_most(end, x):
            if is_at_most(start, x) and is_less(x, end):
                undecided.append((end, reader.element(tensor, _at(position, dim, x - start), time, depth + 1)))
                break
            axis, element = _canonical(reader, tensor, position, dim, time, depth)
            if loads(element) or len(undecided) == _MOST_PIECES:
                return None
            undecided.append((end, rewrite_indices(element, {axis: x - start})))
        start = end
    if not undecided:
        return None
    value = undecided[-1][1]
    for end, element in reversed(undecided[:-1]):
        value = apply("where", apply("lt", index_value(x), index_value(end)), element, value)
    return value


def padded(reader: GraphReader, node: Node, call: Call, position: Position, around: Expr, depth: int) -> Expr | None:
    """The element of what ``F.pad`` gives: one of its input, or the number around it."""
    tensor, widths, time = call["input"], call["pad"], reader.order[node]
    if call.get("mode", "constant") != "constant" or not isinstance(widths, (tuple, list)):
        return None
    numbers = [fake_value(w) if isinstance(w, Node) else w for w in widths]
    if not all(isinstance(w, (int, torch.SymInt)) for w in numbers):
        return None
    inside: Expr = TRUE
    at, own = position, dict[Axis, Index]()
    for number, before in enumerate(numbers[::2]):
        dim = len(position) - 1 - number
        x, size = position[dim] - reader.sizes.index(before), reader.shape(tensor)[dim]
        if is_less(x, 0) or is_at_most(size, x):
            return around
        if is_at_most(0, x) and is_less(x, size):
            at = _at(at, dim, x)
            continue
        axis = Axis(f"{tensor.name}~{id(tensor)}.{dim}", size)
        own[axis], at = x, _at(at, dim, Poly.of(axis) if axis.size != 1 else 0)
        bounds = (apply("le", Const(0), index_value(x)), apply("lt", index_value(x), index_value(size)))
        inside = apply("and", inside, apply("and", *bounds))
    element = reader.element(tensor, at, time, depth + 1)
    if own and loads(element):
        return None
    return apply("where", inside, rewrite_indices(element, own), around)


def _reduced(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """``all`` and ``any`` of what is true everywhere, or false everywhere."""
    tensor = call["input"]
    value = tensor_value(tensor)
    if value is None or value.dtype != torch.bool:
        return None
    rank = value.dim()
    dims = range(rank) if call["dim"] is None else [_dimension(d, rank) for d in one_or_many(call["dim"])]
    if any(d is None for d in dims):
        return None
    outer = iter(position)
    full_position: list[Index] = []
    for d, size in enumerate(reader.shape(tensor)):
        if d in dims:
            if call["keepdim"]:
                next(outer)
            if not is_less(0, size):
                return None
            full_position.append(0 if size == 1 else Poly.of(Axis(f"{tensor.name}~{id(tensor)}.{d}", size)))
        else:
            full_position.append(next(outer))
    element = reader.element(tensor, tuple(full_position), reader.order[node], depth + 1)
    return element if element in (TRUE, FALSE) else None

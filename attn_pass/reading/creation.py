"""Tensors made by creation operations, and index arithmetic on them: `Reader.element` of arange, tril and the like."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model import exact_floats
from attn_pass.model.expression import Const, Expr, Load, apply, as_index, index_value, loads
from attn_pass.model.index import Axis, Index, axis_index, is_nonnegative
from attn_pass.reading import known_rows
from attn_pass.reading.dtype_range import WRAPPING
from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.scans import along, padded
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call


def created(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """The element of a creation operation, of tril and triu, of an index by index tensors; None for anything else."""
    value = tensor_value(node)
    if value is None:
        return None
    if call.op in ("zeros", "ones"):
        return _constant(int(call.op == "ones"), value.dtype)
    if call.op in ("full", "fill"):
        return _constant(_number(call["fill_value" if call.op == "full" else "value"]), value.dtype)
    if call.op == "scalar":
        number = _number(call["value"])
        return None if value.dim() else _constant(number, value.dtype)
    if call.op == "arange":
        return _arange(reader, _bounds(call), call.get("step", 1), position, value)
    if call.op == "iota":
        return _arange(reader, (call["start"], None), call["step"], position, value)
    if call.op in ("tril", "triu"):
        return _triangle(reader, node, call, position, depth)
    if call.op == "pad":
        around = _constant(_number(0 if call["value"] is None else call["value"]), value.dtype)
        return None if around is None else padded(reader, node, call, position, around, depth)
    if call.op in ("getitem", "index", "index_select"):
        return _gathered(reader, node, call, position, depth)
    if call.op == "embedding":
        return (
            None if call.get("max_norm") is not None else _looked_up(reader, node, call["index"], position, call, depth)
        )
    return along(reader, node, call, position, depth)


def _number(value: Any) -> bool | int | float | None:
    if isinstance(value, Node):
        value = fake_value(value)
    return value if isinstance(value, (bool, int, float)) else None


def _constant(value: bool | int | float | None, dtype: torch.dtype) -> Expr | None:
    if value is None or dtype in WRAPPING:
        return None
    return apply("cast", Const(value), dtype=dtype)


def _bounds(call: Call) -> tuple[Any, ...]:
    """(end,), (start, end) or (start, end, step) of ``arange``."""
    return (*call.get("bounds", ()), *(call.args[n] for n in ("start", "end") if n in call.args))


def _arange(
    reader: GraphReader, bounds: tuple[Any, ...], step: Any, position: Position, value: torch.Tensor
) -> Expr | None:
    if value.dtype in WRAPPING or len(position) != 1:
        return None
    start: Index = 0
    step = _as_integer(bounds[2] if len(bounds) == 3 else step)
    if len(bounds) >= 2:
        begin = _as_integer(fake_value(bounds[0]) if isinstance(bounds[0], Node) else bounds[0])
        if not isinstance(begin, (int, torch.SymInt)):
            return None
        start = reader.sizes.index(begin)
    if not isinstance(step, int):
        return None
    index = position[0] * step + start
    if value.dtype in (torch.float16, torch.bfloat16) and not exact_floats.holds(value.dtype, index):
        return None
    return apply("cast", index_value(index), dtype=value.dtype) if value.is_floating_point() else index_value(index)


def _as_integer(number: Any) -> Any:
    """A whole floating number as the integer it is: positions of a floating type are exact up to 2**24 of them."""
    return int(number) if isinstance(number, float) and number.is_integer() and abs(number) < 1 << 20 else number


def _triangle(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    diagonal = call["diagonal"]
    if isinstance(diagonal, Node):
        diagonal = fake_value(diagonal)
    value = tensor_value(node)
    if not isinstance(diagonal, (int, torch.SymInt)) or len(position) < 2 or value is None:
        return None
    row, column = position[-2], position[-1]
    offset = reader.sizes.index(diagonal)
    left, right = index_value(column), index_value(row + offset)
    inside = apply("le", left, right) if call.op == "tril" else apply("ge", left, right)
    inner = reader.value_at(call["input"], position, reader.order[node], depth + 1)
    return apply("where", inside, inner, apply("cast", Const(0), dtype=value.dtype))


def _gathered(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """``x[i, :, j]`` by index tensors whose elements are index arithmetic."""
    source = call["input"]
    base = tensor_value(source)
    entries = None if base is None else _entries(call, base.dim())
    if base is None or entries is None:
        return None
    indices = [(n, tensor_value(e)) for n, e in enumerate(entries) if isinstance(e, Node)]
    if not indices or any(t is None or t.dtype == torch.bool for _, t in indices):
        return None
    keeps_its_place = call.op == "index_select"  # also by an index of no dimensions
    width = max(int(keeps_its_place), *(t.dim() for _, t in indices if t is not None))
    first, last = indices[0][0], indices[-1][0]
    # The dimensions of index tensors come where they stand, or first when something stands between them.
    lead = first if last - first + 1 == len(indices) else 0
    gathered, rest = position[lead : lead + width], iter((*position[:lead], *position[lead + width :]))
    time = reader.order[node]
    read_at: list[Index] = []
    indexed: tuple[Axis, Expr] | None = None  # the row of the source that is taken, and its number
    for entry in entries:
        if entry is None:
            next(rest)
        elif entry == slice(None):
            read_at.append(next(rest))
        else:
            number = reader.value_at(entry, gathered, time, depth + 1)
            index = as_index(number)
            if index is None and entries == [entry] and (row := _looked_up(reader, node, entry, position, call, depth)):
                return row
            if index is None and len(indices) == 1:
                axis = known_rows.row_axis(depth, entry.name, reader.sizes.shape(base)[len(read_at)])
                indexed, index = (axis, number), axis_index(axis)
            if index is None or not is_nonnegative(index):
                return None
            read_at.append(index)
    element = reader.element(source, (*read_at, *rest), time, depth + 1)
    return element if indexed is None else _of_row(element, *indexed, from_the_end=not keeps_its_place)


def _of_row(element: Expr, row: Axis, number: Expr, *, from_the_end: bool) -> Expr | None:
    """What is taken of a tensor whose values are known; None where they are not."""
    if loads(element):
        return None
    return known_rows.with_value(element, row, known_rows.from_the_front(number, row.size) if from_the_end else number)


def _looked_up(
    reader: GraphReader, node: Node, index: object, position: Position, call: Call, depth: int
) -> Expr | None:
    """A row of a table, its number computed from indices alone: T5's bias of a distance."""
    table, rows = call["input"], tensor_value(index)
    fake = tensor_value(table)
    if not isinstance(table, Node) or not isinstance(index, Node) or rows is None or fake is None:
        return None
    if fake.dtype == torch.bool or fake.is_complex() or reader.effects.mutations(table):
        return None
    if rows.dim() == 0:
        return None
    row = reader.element(index, position[: rows.dim()], reader.order[node], depth + 1)
    if as_index(row) is not None or loads(row):
        return None
    return apply("lookup", Load(reader.source(table), (0, *position[rows.dim() :])), row)


def _entries(call: Call, rank: int) -> list[Any] | None:
    """What each dimension is indexed by: a node, all of it, or None for a new dimension; None for anything else."""
    index = call["index"]
    if call.op == "index_select":
        dim = call["dim"]
        return [*[slice(None)] * (dim % rank), index] if isinstance(dim, int) and rank else None
    entries = list(index) if isinstance(index, (tuple, list)) else [index]
    if call.op == "index":
        entries = [slice(None) if e is None else e for e in entries]
    if any(e is Ellipsis for e in entries):
        at = next(n for n, e in enumerate(entries) if e is Ellipsis)
        missing = rank - sum(e is not None and e is not Ellipsis for e in entries)
        entries[at : at + 1] = [slice(None)] * missing
    is_readable = all(e is None or tensor_value(e) is not None or e == slice(None) for e in entries)
    return entries if is_readable and sum(e is not None for e in entries) <= rank else None

"""Tensors made of nothing, and the index arithmetic on them: what `Reader.element` knows of arange, tril and co."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.expression import Const, Expr, IndexValue, apply
from attn_pass.model.index import Index
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call

if TYPE_CHECKING:
    from attn_pass.reading.lift import Reader


def created(reader: Reader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """The element of a creation operation, of tril and triu, of an index by index tensors; None for anything else."""
    value = tensor_value(node)
    if value is None:
        return None
    if call.op in ("zeros", "ones"):
        return _constant(int(call.op == "ones"), value.dtype)
    if call.op == "full":
        return _constant(_number(call["fill_value"]), value.dtype)
    if call.op == "scalar":
        number = _number(call["value"])
        return None if value.dim() else _constant(number, value.dtype)
    if call.op == "arange":
        return _arange(reader, call, position, value)
    if call.op in ("tril", "triu"):
        return _triangle(reader, node, call, position, depth)
    if call.op == "getitem":
        return _gathered(reader, node, call, position, depth)
    return None


def _number(value: Any) -> bool | int | float | None:
    if isinstance(value, Node):
        value = fake_value(value)
    return value if isinstance(value, (bool, int, float)) else None


def _constant(value: bool | int | float | None, dtype: torch.dtype) -> Expr | None:
    if value is None:
        return None
    return apply("cast", Const(value), dtype=dtype)


def _arange(reader: Reader, call: Call, position: Position, value: torch.Tensor) -> Expr | None:
    bounds = (*call.get("bounds", ()), *(call.args[n] for n in ("start", "end") if n in call.args))
    if value.is_floating_point() or len(position) != 1:
        return None
    start: Index = 0
    step = bounds[2] if len(bounds) == 3 else call.get("step", 1)
    if len(bounds) >= 2:
        begin = fake_value(bounds[0]) if isinstance(bounds[0], Node) else bounds[0]
        if not isinstance(begin, (int, torch.SymInt)):
            return None
        start = reader.sizes.index(begin)
    if not isinstance(step, int):
        return None
    index = position[0] * step + start
    return Const(index) if isinstance(index, int) else IndexValue(index)


def _triangle(reader: Reader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    diagonal = call["diagonal"]
    if isinstance(diagonal, Node):
        diagonal = fake_value(diagonal)
    value = tensor_value(node)
    if not isinstance(diagonal, (int, torch.SymInt)) or len(position) < 2 or value is None:
        return None
    row, column = position[-2], position[-1]
    offset = reader.sizes.index(diagonal)
    left, right = _index(column), _index(row + offset)
    inside = apply("le", left, right) if call.op == "tril" else apply("ge", left, right)
    inner = reader._value(call["input"], position, reader.order[node], depth + 1)
    return apply("where", inside, inner, apply("cast", Const(0), dtype=value.dtype))


def _index(index: Index) -> Expr:
    return Const(index) if isinstance(index, int) else IndexValue(index)


def _gathered(reader: Reader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """``x[i, j]`` by index tensors whose elements are index arithmetic."""
    source, entries = call["input"], call["index"]
    base = tensor_value(source)
    entries = entries if isinstance(entries, tuple) else (entries,)
    if base is None or len(entries) > base.dim() or not all(tensor_value(e) is not None for e in entries):
        return None
    ranks = [t.dim() for t in (tensor_value(e) for e in entries) if t is not None]
    width = max(ranks)
    if any(t.dtype == torch.bool for t in (tensor_value(e) for e in entries) if t is not None):
        return None
    from attn_pass.model.expression import as_index
    from attn_pass.model.index import is_nonnegative

    time = reader.order[node]
    found: list[Index] = []
    for entry in entries:
        index = as_index(reader._value(entry, position[:width], time, depth + 1))
        if index is None or not is_nonnegative(index):
            return None
        found.append(index)
    return reader.element(source, (*found, *position[width:]), time, depth + 1)

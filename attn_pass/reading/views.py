"""Which element of its input a view shows: index maps of every view-like operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import Sizes, fake_value, tensor_value
from attn_pass.model.index import Index, Poly, divide, divide_exactly, is_nonnegative, recompose
from attn_pass.reading.vocabulary import Call, one_or_many, understand

Position = tuple[Index, ...]

# Operations whose result is the same elements in another arrangement, repetition included.
VIEWS = frozenset(
    {
        "reshape",
        "permute",
        "transpose",
        "movedim",
        "t",
        "mT",
        "expand",
        "select",
        "slice",
        "narrow",
        "getitem",
        "getattr",
        "repeat_interleave",
        "repeat",
    }
)


def view_of(
    node: Node, call: Call, position: Position, sizes: Sizes, *, of_complex: bool = False
) -> tuple[Node, Position] | None:
    """The node whose element ``node[position]`` is, and where; None if the call is not a view that can be followed.

    A view of complex numbers is followed with ``of_complex`` only: a view may conjugate them without a trace.
    """
    source = call.args.get("input")
    if not isinstance(source, Node):
        return None
    if call.op == "getitem":
        return _getitem(source, call["index"], position, sizes)
    before = tensor_value(source)
    after = tensor_value(node)
    if before is None or after is None or before.dtype != after.dtype:
        return None
    if before.is_complex() and not of_complex:
        return None
    mapped = _map(call, position, sizes.shape(before), sizes.shape(after), sizes)
    return None if mapped is None else (source, mapped)


def _map(call: Call, position: Position, before: Position, after: Position, sizes: Sizes) -> Position | None:
    rank = len(before)
    if call.op == "reshape":
        return reshape_position(position, after, before)
    if call.op == "expand":
        return broadcast_position(position, before)
    if call.op in ("permute", "transpose", "movedim", "t", "mT", "getattr"):
        order = _permutation(call, rank)
        if order is None:
            return None
        out: list[Index] = [0] * rank
        for to, come in enumerate(order):
            out[come] = position[to]
        return tuple(out)
    if call.op == "select":
        dim = _dim(call["dim"], rank)
        index = None if dim is None else _from_the_front(call["index"], before[dim], sizes)
        return None if dim is None or index is None else (*position[:dim], index, *position[dim:])
    if call.op in ("slice", "narrow"):
        return _sliced(call, position, before, sizes)
    if call.op == "repeat_interleave":
        dim, repeats = _dim(call["dim"], rank), call["repeats"]
        if dim is None or not isinstance(repeats, int):
            return None
        return (*position[:dim], divide(position[dim], repeats)[0], *position[dim + 1 :])
    if call.op == "repeat":
        aligned = position[len(position) - rank :]
        return tuple(
            0 if b == 1 else p if a == b else divide(p, b)[1]
            for p, a, b in zip(aligned, after[len(after) - rank :], before)
        )
    return None


def _sliced(call: Call, position: Position, before: Position, sizes: Sizes) -> Position | None:
    dim = _dim(call["dim"], len(before))
    step = call.get("step", 1)
    if dim is None or not isinstance(step, int):
        return None
    start = _start(call["start"], before[dim], sizes)
    return None if start is None else (*position[:dim], position[dim] * step + start, *position[dim + 1 :])


def _permutation(call: Call, rank: int) -> tuple[int, ...] | None:
    if call.op == "permute":
        dims = tuple(d % rank for d in one_or_many(call["dims"]) if isinstance(d, int))
        return dims if sorted(dims) == list(range(rank)) else None
    order = list(range(rank))
    if call.op == "t":
        return tuple(reversed(order))
    if call.op == "mT":
        return (*order[:-2], rank - 1, rank - 2)
    if call.op == "getattr":
        if call["name"] in ("mT", "mH"):
            return (*order[:-2], rank - 1, rank - 2)
        return tuple(reversed(order)) if call["name"] in ("T", "H") else None
    if call.op == "transpose":
        a, b = _dim(call["dim0"], rank), _dim(call["dim1"], rank)
        if a is None or b is None:
            return None
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    come = [_dim(d, rank) for d in one_or_many(call["source"])]
    go = [_dim(d, rank) for d in one_or_many(call["destination"])]
    if None in come or None in go:
        return None
    rest = iter(d for d in order if d not in come)
    return tuple(come[go.index(d)] if d in go else next(rest) for d in order)  # type: ignore[misc]


def _dim(dim: Any, rank: int) -> int | None:
    return dim % rank if isinstance(dim, int) and rank and -rank <= dim < rank else None


def _integer(value: Any, sizes: Sizes) -> Index | None:
    """A Python or symbolic integer argument as an index."""
    if isinstance(value, Node):
        value = fake_value(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    return sizes.index(value)


def _is_nonnegative(value: Any, sizes: Sizes) -> bool:
    return sizes.is_nonnegative(fake_value(value) if isinstance(value, Node) else value)


def _from_the_front(value: Any, size: Index, sizes: Sizes) -> Index | None:
    """A possibly negative integer argument counted from the start; None when its sign is not proven."""
    index = _integer(value, sizes)
    if index is None or _is_nonnegative(value, sizes):
        return index
    return size + index if is_nonnegative(-1 * index - 1) else None


def _start(value: Any, size: Index, sizes: Sizes) -> Index | None:
    """Where a slice starts: a negative one counts from the end, and stops at the first element; None when unproven."""
    if value is None:
        return 0
    start = _from_the_front(value, size, sizes)
    if start is None or is_nonnegative(start) or _is_nonnegative(value, sizes):
        return start
    return 0 if is_nonnegative(-1 * start) else None


def broadcast_position(position: Position, shape: Sequence[Index]) -> Position:
    """Where a tensor of ``shape`` is read when it is broadcast to the rank and sizes of ``position``."""
    return tuple(0 if size == 1 else p for p, size in zip(position[len(position) - len(shape) :], shape))


def reshape_position(position: Position, after: Sequence[Index], before: Sequence[Index]) -> Position | None:
    """Where a reshape from ``before`` to ``after`` takes the element at ``position`` from; None when not proven."""
    if 0 in after or 0 in before:
        return None
    outer = [(p, s) for p, s in zip(position, after) if s != 1]
    inner = [s for s in before if s != 1]
    index: list[Index] = []
    i = j = 0
    while i < len(outer) or j < len(inner):
        if i == len(outer) or j == len(inner):
            return None
        i2, j2 = i + 1, j + 1
        out_size, in_size = outer[i][1], inner[j]
        while out_size != in_size:
            if j2 < len(inner) and (divide_exactly(out_size, in_size) is not None or i2 == len(outer)):
                in_size, j2 = in_size * inner[j2], j2 + 1
            elif i2 < len(outer):
                out_size, i2 = out_size * outer[i2][1], i2 + 1
            else:
                return None
        index += _split(_flatten(outer[i:i2]), inner[j:j2])
        i, j = i2, j2
    rest = iter(index)
    return tuple(0 if s == 1 else next(rest) for s in before)


def _flatten(dims: Sequence[tuple[Index, Index]]) -> Index:
    flat: Index = 0
    for position, size in dims:
        flat = flat * size + position
    return recompose(flat) if isinstance(flat, Poly) else flat


def _split(flat: Index, sizes: Sequence[Index]) -> list[Index]:
    out: list[Index] = []
    for size in reversed(sizes[1:]):
        flat, low = divide(flat, size)
        out.append(low)
    out.append(flat)
    return out[::-1]


def _getitem(source: Node, index: Any, position: Position, sizes: Sizes) -> tuple[Node, Position] | None:
    before = tensor_value(source)
    if before is None:
        return _piece(source, index, position, sizes)
    entries = index if isinstance(index, tuple) else (index,)
    if any(e is Ellipsis for e in entries):
        at = next(n for n, e in enumerate(entries) if e is Ellipsis)
        missing = before.dim() - sum(e is not None and e is not Ellipsis for e in entries)
        entries = (*entries[:at], *[slice(None)] * missing, *entries[at + 1 :])
    shape = sizes.shape(before)
    out: list[Index] = []
    rest = iter(position)
    for entry in entries:
        if entry is None:
            next(rest)
            continue
        if len(out) == len(shape):
            return None
        size = shape[len(out)]
        if isinstance(entry, slice):
            start = _start(entry.start, size, sizes)
            step = 1 if entry.step is None else entry.step
            if start is None or not isinstance(step, int):
                return None
            out.append(next(rest) * step + start)
            continue
        chosen = _from_the_front(entry, size, sizes)
        if chosen is None:
            return None
        out.append(chosen)
    out += list(rest)
    return (source, tuple(out)) if len(out) == len(shape) else None


def _piece(parent: Node, number: Any, position: Position, sizes: Sizes) -> tuple[Node, Position] | None:
    """Element of one of the results of split, chunk, unbind or meshgrid."""
    call = understand(parent)
    pieces = fake_value(parent)
    if call is not None and call.op == "meshgrid":
        return _of_grid(call, number, position, sizes)
    if call is None or call.op not in ("pieces", "unbind") or not isinstance(number, int):
        return None
    base = call["input"]
    value = tensor_value(base)
    if value is None or not isinstance(pieces, (tuple, list)):
        return None
    dim = _dim(call["dim"], value.dim())
    if dim is None:
        return None
    number %= len(pieces)
    if call.op == "unbind":
        return base, (*position[:dim], number, *position[dim:])
    lengths = [sizes.index(piece.shape[dim]) for piece in pieces]
    if sum(lengths[1:], lengths[0]) != sizes.index(value.shape[dim]):
        return None  # tensor_split at indices that go back: its pieces overlap
    start: Index = 0
    for piece in pieces[:number]:
        start = start + sizes.index(piece.shape[dim])
    return base, (*position[:dim], position[dim] + start, *position[dim + 1 :])


def _of_grid(call: Call, number: Any, position: Position, sizes: Sizes) -> tuple[Node, Position] | None:
    """Element of one of the grids of meshgrid: the vector of that number, along a dimension of its own."""
    vectors, indexing = one_or_many(call["tensors"]), call.get("indexing", "ij")
    if not isinstance(number, int) or indexing not in ("ij", "xy") or len(vectors) != len(position):
        return None
    number %= len(vectors)
    vector = vectors[number]
    value = tensor_value(vector)
    if not isinstance(vector, Node) or value is None:
        return None
    dim = 1 - number if indexing == "xy" and number < 2 <= len(vectors) else number
    return vector, broadcast_position((position[dim],), sizes.shape(value))

"""A part of a tensor written in place: which part, and what was written to it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.effects import Mutation
from attn_pass.model.index import Axis, Index, axis_index, is_at_most
from attn_pass.reading.lift import Reader
from attn_pass.reading.views import Position

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)


@dataclass(frozen=True)
class Part:
    """``value`` was written to ``size`` indices from ``start`` on in each dimension; None is all of it."""

    value: Any
    bounds: tuple[tuple[Index, Index] | None, ...]
    views: tuple[Node, ...]  # from what is written to the whole


def written_part(reader: Reader, node: Node, mutation: Mutation) -> Part | None:
    """What a write of a part of ``node`` wrote, and where; None for anything but slices of it that step by one."""
    views = _views(reader, mutation)
    if not reader.effects.same_geometry(views[-1], node):
        return None
    if mutation.node.target is operator.setitem:
        _, index, value = mutation.node.args
        return _sliced(reader.shape(node), index, value)
    return _through_views(reader, mutation, views) if mutation.node.target in _COPIES else None


def _views(reader: Reader, mutation: Mutation) -> list[Node]:
    """The slices from the one that is written to the tensor it is a part of."""
    found = [mutation.target]
    while (call := reader.call(found[-1])) is not None and call.op == "slice" and isinstance(call["input"], Node):
        found.append(call["input"])
    return found


def _sliced(shape: Position, index: Any, value: Any) -> Part | None:
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(e is Ellipsis for e in entries):
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(shape) + 1 - len(entries))
    entries += [slice(None)] * (len(shape) - len(entries))
    bounds: list[tuple[Index, Index] | None] = []
    for entry, size in zip(entries, shape):
        if not isinstance(entry, slice) or entry.step not in (None, 1):
            return None
        start, stop = entry.start or 0, entry.stop
        if not isinstance(start, int) or start < 0 or not is_at_most(start, size):
            return None
        if stop is not None and not (isinstance(stop, int) and stop >= 0 and is_at_most(stop, size)):
            return None
        length = (size if stop is None else stop) - start
        bounds.append(None if length == size else (start, length))
    return Part(value, tuple(bounds), ())


def _through_views(reader: Reader, mutation: Mutation, views: list[Node]) -> Part | None:
    """``copy_`` into slices of slices: each place of the view, as a place of the tensor."""
    shape = reader.shape(mutation.target)
    axes = [Axis(f"w{n}", size) for n, size in enumerate(shape)]
    node, position = mutation.target, tuple(axis_index(a) for a in axes)
    for _ in views[1:]:
        back = reader.back(node, position, reader.order[node] + 1)
        if back is None:
            return None
        node, position, _ = back
    bounds: list[tuple[Index, Index] | None] = []
    for axis, at, size in zip(axes, position, reader.shape(node)):
        start = at - axis_index(axis)
        if not isinstance(start, int) or start < 0:
            return None
        bounds.append(None if axis.size == size else (start, axis.size))
    return Part(mutation.node.args[1], tuple(bounds), tuple(views))

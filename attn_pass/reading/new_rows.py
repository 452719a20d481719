"""The new keys that are written into a cache: how they were made before they entered it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from attn_pass.graph.effects import Mutation
from attn_pass.graph.values import tensor_value
from attn_pass.model.index import Axis, axes, axis_index
from attn_pass.reading.prologue_calls import writes_rows
from attn_pass.reading.reader import Reader
from attn_pass.reading.views import VIEWS, Position


@dataclass(frozen=True)
class Operand:
    """A query or key as it is read: the tensor, the position of an element, when, and its axes."""

    node: Node
    position: Position
    at: int
    dim: Axis
    heads: frozenset[Axis]
    batch: frozenset[Axis]
    cached: bool = False  # it joins what is kept in a cache


def new_rows(reader: Reader, operand: Operand) -> Operand | None:
    """The keys that join those of a cache, where that is the last that happened to them; else None."""
    node, position, at = reader.through_views(operand.node, operand.position, operand.at, None)
    mutation = _last_write(reader, node, at)
    writer = node if mutation is None else mutation.node
    call = reader.call(writer)
    new: Any = None
    if (rows := writes_rows(writer)) is not None:
        new = rows["source"]
    elif writer.target is operator.setitem:
        new = writer.args[2]
    elif call is not None and call.op in ("index_put", "slice_scatter"):
        new = call["values"] if call.op == "index_put" else call["src"]
    elif mutation is not None and getattr(writer.target, "__name__", writer.target) in ("copy_", "copy_.default"):
        new = writer.args[1]
    elif call is not None and call.op == "cat" and mutation is None:
        pieces = [p for p in call["input"] if (v := tensor_value(p)) is not None and v.dim() == len(position)]
        cached = [piece for piece in pieces if _is_kept(reader, piece)]
        rest = [piece for piece in pieces if piece not in cached]
        new = rest[0] if cached and len(rest) == 1 else None
    value, joined = tensor_value(new), tensor_value(node)
    if value is None or joined is None or value.dim() != joined.dim() or not isinstance(new, Node):
        return None
    shape, sizes = reader.shape(node), reader.shape(new)
    if any(size != all_of and operand.dim in axes(p) for p, all_of, size in zip(position, shape, sizes)):
        return None
    moved = tuple(
        p if size == all_of else axis_index(Axis(f"new{n}", size))
        for n, (p, all_of, size) in enumerate(zip(position, shape, sizes))
    )
    return Operand(new, moved, reader.order[writer], operand.dim, operand.heads, operand.batch, cached=True)


def _last_write(reader: Reader, node: Node, at: int) -> Mutation | None:
    """The last write to a tensor before a time. Two caches that a program is given are taken to be two."""
    root = _root(reader, node)
    writes = (m for m in reader.effects.mutations(node) if m.position < at and _root(reader, m.target) is root)
    return max(writes, key=lambda m: m.position, default=None)


def _root(reader: Reader, node: Node) -> Node:
    """The tensor that a node is a view of, or gives back."""
    while True:
        call = reader.call(node)
        source: Any = None
        if (rows := writes_rows(node)) is not None and "_copy_" in str(node.target):
            source = rows["input"]
        elif call is not None and (call.in_place or (call.op in VIEWS and reader.is_alias(node, call))):
            source = call.args.get("like", call.args.get("input"))
        if not isinstance(source, Node):
            return node
        node = source


def _is_kept(reader: Reader, piece: object) -> bool:
    """Whether a tensor is what the program is given, or a part of it."""
    if not isinstance(piece, Node) or tensor_value(piece) is None:
        return False
    position = tuple(axis_index(Axis(f"k{n}", size)) for n, size in enumerate(reader.shape(piece)))
    node, _, _ = reader.through_views(piece, position, reader.order[piece] + 1, None)
    return node.op in ("placeholder", "get_attr")

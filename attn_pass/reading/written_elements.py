"""The element of a tensor that was written in part: what was written where it is in the part, else what was before."""

from __future__ import annotations

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value, wants_gradient
from attn_pass.model.expression import TRUE, Expr, apply, expression_axes, index_value, loads, rewrite_indices
from attn_pass.model.index import Axis, Index, axis_index
from attn_pass.model.piecewise import where_it_holds
from attn_pass.reading.dtype_range import WRAPPING
from attn_pass.reading.graph_reader import GraphReader
from attn_pass.reading.partial_writes import Part, put_part, scattered_part, written_part
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call

_COPIES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    "copy_",
    "fill_",
)
_OUT_OF_PLACE = {"slice_scatter": scattered_part, "select_scatter": scattered_part, "index_put": put_part}


def written(reader: GraphReader, node: Node, position: Position, at: int, depth: int) -> Expr | None:
    """The element of a node at a time, of which a part was written in place last; None where that cannot be read."""
    mutation = reader.effects.last_mutation(node, at)
    if mutation is None or reader.is_reshaped_in_place(node) or wants_gradient(mutation.node):
        return None
    try:
        part = written_part(reader, node, mutation, _COPIES)
        time = reader.order[mutation.node]
        return None if part is None else _chosen(reader, node, node, part, position, (mutation.position, time), depth)
    except Unreadable:
        return None


def put(reader: GraphReader, node: Node, call: Call, position: Position, depth: int) -> Expr | None:
    """The element of an operation that gives a tensor with a part of it, or all, written; None for any other."""
    before, time = call.args.get("input"), reader.order[node]
    part_of = _OUT_OF_PLACE.get(call.op)
    if not isinstance(before, Node) or (part_of is None and call.op != "copy_to"):
        return None
    try:
        if part_of is None:
            return _copied(reader, node, before, position, depth)
        part = part_of(reader, node)
        return None if part is None else _chosen(reader, node, before, part, position, (time, time), depth)
    except Unreadable:
        return None


def _copied(reader: GraphReader, node: Node, copied: Node, position: Position, depth: int) -> Expr | None:
    """The element of a tensor that was copied into another one: cast to its type, and broadcast."""
    value, source = tensor_value(node), tensor_value(copied)
    if value is None or source is None or source.device != value.device or value.dtype in WRAPPING:
        return None
    element = reader.value_at(copied, position, reader.order[node], depth + 1)
    return element if source.dtype == value.dtype else apply("cast", element, dtype=value.dtype)


def _chosen(
    reader: GraphReader,
    node: Node,
    before: Node,
    part: Part,
    position: Position,
    times: tuple[int, int],
    depth: int,
) -> Expr | None:
    """``times``: until when the tensor ``before`` has the elements that are not written over, and that of the write.

    The value is read along an axis as long as the part: what is proved of it holds at every index of the part.
    """
    result, value = tensor_value(node), tensor_value(part.value)
    if (
        result is None
        or result.dtype in WRAPPING
        or any(wants_gradient(n) for n in (before, part.value) if _is_node(n))
    ):
        return None
    if value is not None and value.device != result.device and value.dim() > 0:
        return None
    inside, at_part, places = _place(reader.shape(node), part, position, f"{node.name}~{id(node)}.{times[1]}")
    within = tuple(at_part[d] if d >= 0 else 0 for d in part.dims)
    chosen = reader.value_at(part.value, within, times[1] + part.is_result, depth + 1)
    masks = [reader.value_at(mask, tuple(at_part[d] for d in over), times[1], depth + 1) for mask, over in part.masks]
    if any(expression_axes(load) & places.keys() for e in (chosen, *masks) for load in loads(e)):
        return None  # beyond the part there is nothing to load
    for condition in (*(rewrite_indices(m, places) for m in masks), *part.relation_at(position)):
        inside = apply("and", inside, condition)
    if value is None or value.dtype != result.dtype:
        chosen = apply("cast", chosen, dtype=result.dtype)
    rest = reader.element(before, position, times[0], depth + 1)
    rest = where_it_holds(apply("not", inside), rest, reader.never_changes)
    return apply("where", inside, rewrite_indices(chosen, places), rest)


def _place(
    shape: Position, part: Part, position: Position, name: str
) -> tuple[Expr, dict[int, Index], dict[Axis, Index]]:
    """Whether a position is in the slices of a part; where in it, along axes of the part; and where these are."""
    inside: Expr = TRUE
    at_part, places = dict(enumerate(position)), dict[Axis, Index]()
    for dim, bounds in enumerate(part.bounds):
        if bounds is None:
            continue
        (start, length), here = bounds, position[dim]
        axis = Axis(f"{name}.{dim}", length)
        at_part[dim], places[axis] = axis_index(axis), here - start
        if start != 0:
            inside = apply("and", inside, apply("ge", index_value(here), index_value(start)))
        if start + length != shape[dim]:
            inside = apply("and", inside, apply("lt", index_value(here), index_value(start + length)))
    return inside, at_part, places


def _is_node(value: object) -> bool:
    return isinstance(value, Node)

"""Weights divided by their own sum: the sum is 1 whatever the scores are, so only an addend of it matters."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.model.expression import Const, Dot
from attn_pass.model.index import Axis, axis_index
from attn_pass.patterns.row_sums import sums_what_is_not_negative
from attn_pass.patterns.softmax_forms import read_softmax
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import SideLoad, UseDefWalk
from attn_pass.reading.views import Position, broadcast_position
from attn_pass.reading.vocabulary import tensor_dims

_LEAST = 0.5  # a sum of weights is above it, whatever their rounding


def renormalised_by(
    reader: Reader, walk: UseDefWalk, side: SideLoad, keys: Axis
) -> tuple[float, tuple[Node, ...]] | None:
    """The number that weights are divided by where ``side`` is their sum, and the nodes that compute it.

    ``w / w.sum()`` is divided by 1, ``w / (w.sum() + eps)`` by ``1 + eps``. None for any other divisor: sums of weights
    that were changed after the softmax (dropped out, masked, cut), or whose softmax has a sink, are not 1.
    """
    softmax = read_softmax(reader, walk.leaf)
    if softmax is None or softmax.sink is not None or reader.shape(walk.leaf)[softmax.dim] != keys.size:
        return None
    return _divisor(reader, walk, side.written, side.written_position, keys)


def _divisor(
    reader: Reader, walk: UseDefWalk, node: object, position: Position, keys: Axis
) -> tuple[float, tuple[Node, ...]] | None:
    if not isinstance(node, Node):
        return None
    position = broadcast_position(position, reader.shape(node))
    nodes: list[Node] = [node]
    while (back := reader.back(node, position, reader.order[node])) is not None:
        node, position, _ = back
        nodes.append(node)
    call = reader.call(node)
    if call is None or call.in_place:
        return None
    if call.op == "add" and call["alpha"] == 1:
        for sums, added in ((call["input"], call["other"]), (call["other"], call["input"])):
            number = reader.scalar(added, reader.order[node])
            if isinstance(number, Const) and float(number.value) >= 0:
                divisor = _divisor(reader, walk, sums, position, keys)
                return None if divisor is None else (divisor[0] + float(number.value), (*nodes, *divisor[1]))
        return None
    if call.op == "clamp" and call.get("max") is None and isinstance(call["min"], (int, float)):
        divisor = _divisor(reader, walk, call["input"], position, keys) if call["min"] <= _LEAST else None
        return None if divisor is None else (divisor[0], (*nodes, *divisor[1]))
    if call.op not in ("sum", "vector_norm") or not sums_what_is_not_negative(call):
        return None
    weights = _sum_of_weights(reader, walk, node, position, keys)
    return None if weights is None else (1.0, (*nodes, *weights))


def _sum_of_weights(
    reader: Reader, walk: UseDefWalk, node: Node, position: Position, keys: Axis
) -> tuple[Node, ...] | None:
    """The nodes between the softmax and a sum of its row that the weights lie in; None for any other sum."""
    call = reader.call(node)
    assert call is not None
    summed = call["input"]
    dims = tensor_dims(call, "dim", len(reader.shape(summed)))
    if dims is None or len(dims) != 1:
        return None
    (dim,) = dims
    if reader.shape(summed)[dim] != keys.size:  # a part of a row, or a row and more
        return None
    where = (*position[:dim], axis_index(keys), *position[dim + (1 if call["keepdim"] else 0) :])
    again = UseDefWalk(reader, walk.leaf, walk.reach, walk.region, of_weights=True)
    try:
        plain = isinstance(again.read(summed, where, reader.order[node]), Dot)
    except Unreadable:
        return None
    if not plain or again.dropout or again.leaf_position != walk.leaf_position:
        return None
    return tuple(again.internal)

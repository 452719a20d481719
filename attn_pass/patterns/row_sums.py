"""The parts of a written-out softmax: exponentials, their sum over a row, its logarithm, the subtracted maximum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.piecewise import where_it_is_one
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position, broadcast_position
from attn_pass.reading.vocabulary import Call, tensor_dims


@dataclass(frozen=True)
class Exponential:
    """``exp(scale * (input - shift))``, where ``shift`` is the same for all elements of a row, or None.

    With ``unmasked`` it is 0 where that node, the exponential itself, was masked.
    """

    node: Node
    input: Node
    inner: Node
    shift: Node | None
    scale: float
    nodes: tuple[Node, ...]
    unmasked: Node | None = None


@dataclass(frozen=True)
class Denominator:
    """``max(sum over dim of exponentials + added, at_least)``."""

    dim: int
    nodes: tuple[Node, ...]
    added: float | Node | None = None
    added_dtype: torch.dtype | None = None
    at_least: float = 0.0


# ---------------------------------------------------------------- exponentials

BASES: Mapping[str, float] = {"exp": 1.0, "exp2": math.log(2.0)}
# What masks exponentials: which of its operands they may be, and which is what they are masked by.
_EITHER = (("input", "other"), ("other", "input"))
_MASKING = {"mul": _EITHER, "where": _EITHER, "method_where": _EITHER, "masked_fill": (("input", "value"),)}
_MOST_MASKS = 3  # one after another


def row_axes(reader: Reader, node: Node) -> Position:
    """An axis for every dimension of a node: the position of any of its elements."""
    return tuple(axis_index(Axis(f"{node.name}.{n}", size)) for n, size in enumerate(reader.shape(node)))


def read_exponential(reader: Reader, node: Node, masks: int = _MOST_MASKS) -> Exponential | None:
    """``exp(x)``, ``exp(x - m)`` or powers of two, of which some may be masked; None for anything else."""
    call = reader.call(node)
    if call is not None and call.op in _MASKING and masks and not call.in_place:
        return _masked(reader, node, call, masks - 1)
    if call is None or call.op not in BASES or call.in_place or not isinstance(call["input"], Node):
        return None
    inner, scale = call["input"], BASES[call.op]
    value, difference = tensor_value(inner), reader.call(inner)
    if value is None:
        return None
    plain = Exponential(node, inner, inner, None, scale, (node,))
    if difference is None or difference.op != "sub" or difference["alpha"] != 1 or difference.in_place:
        return plain
    scores, shift = difference["input"], difference["other"]
    if not isinstance(scores, Node) or not isinstance(shift, Node) or tensor_value(shift) is None:
        return plain
    if tensor_value(scores) is None or reader.shape(scores) != reader.shape(inner):
        return plain
    return replace(plain, input=scores, shift=shift, nodes=(node, inner))


def _masked(reader: Reader, node: Node, call: Call, masks: int) -> Exponential | None:
    """Exponentials that a mask sets to zero."""
    for name, other in _MASKING[call.op]:
        inner = call[name]
        value, masked = tensor_value(inner), tensor_value(node)
        if not isinstance(inner, Node) or value is None or masked is None or value.dtype != masked.dtype:
            continue
        exp = read_exponential(reader, inner, masks)
        if exp is None or reader.shape(inner) != reader.shape(node) or reader.effects.mutations(inner):
            continue
        if _leaves_zeros(reader, node, call, other):
            return replace(exp, node=node, nodes=(node, *exp.nodes), unmasked=exp.unmasked or inner)
    return None


def _leaves_zeros(reader: Reader, node: Node, call: Call, other: str) -> bool:
    """Whether what stands beside exponentials is a factor of ones and zeros, or the 0 that they are filled with."""
    try:
        beside = reader.value_at(call[other], row_axes(reader, node), reader.order[node], 0)
    except Unreadable:
        return False
    if call.op == "mul":
        return where_it_is_one(beside) is not None
    return isinstance(beside, Const) and beside.value == 0


def _same_exponential(reader: Reader, node: object, exponentials: Node) -> tuple[Node, ...] | None:
    """The node itself, if it computes the exponentials once more; nothing if it is them; None if it is others.

    Since torch 2.14 a norm is decomposed to powers of absolute values, which of exponentials are themselves.
    """
    if node is exponentials:
        return ()
    if isinstance(node, Node) and (base := _of_itself(reader, node, "abs")) is not None:
        nodes = _same_exponential(reader, base, exponentials)
        return None if nodes is None else (node, *nodes)
    again, once = reader.call(node) if isinstance(node, Node) else None, reader.call(exponentials)
    if not isinstance(node, Node) or again is None or once is None or again.op != once.op or again.in_place:
        return None
    if again.op not in BASES or again["input"] is not once["input"]:
        return None
    first, last = sorted(reader.order[n] for n in (node, exponentials))
    return None if reader.effects.mutation_between(again["input"], first, last) is not None else (node,)


def _of_itself(reader: Reader, node: Node, *others: str) -> Node | None:
    """What a first power, or one of ``others``, is of."""
    call = reader.call(node)
    if call is None or call.in_place or not (call.op in others or (call.op == "pow" and call["exponent"] == 1)):
        return None
    return call["input"] if isinstance(call["input"], Node) else None


# ---------------------------------------------------------------- their sum


def read_denominator(
    reader: Reader, node: Node, position: Position, at: Position, exponentials: Node, *, inverse: bool = False
) -> Denominator | None:
    """The sum of the exponentials of the row that ``at`` lies in, with what was done to it; or one divided by it."""
    node, position, nodes = back_through_views(reader, node, position)
    call = reader.call(node)
    if call is None or call.in_place:
        return None
    if inverse:
        inner = inverted(reader, call)
        if inner is None:
            return None
        below, undone = inner
        denominator = _below(reader, below, position, at, exponentials, inverse=undone)
        return None if denominator is None else replace(denominator, nodes=(*nodes, *denominator.nodes))
    if (base := _of_itself(reader, node)) is not None:
        denominator = read_denominator(reader, base, position, at, exponentials)
        return None if denominator is None else replace(denominator, nodes=(*nodes, *denominator.nodes))
    if call.op in ("sum", "vector_norm"):
        dim = _reduced(reader, call, position, at) if sums_what_is_not_negative(call) else None
        again = None if dim is None else _same_exponential(reader, call["input"], exponentials)
        return None if dim is None or again is None else Denominator(dim, (*nodes, *again))
    if call.op == "clamp" and call.get("max") is None and isinstance(call["min"], (int, float)):
        denominator = _below(reader, call["input"], position, at, exponentials)
        return (
            None
            if denominator is None
            else replace(denominator, at_least=float(call["min"]), nodes=(*nodes, *denominator.nodes))
        )
    if call.op == "add" and call["alpha"] == 1:
        for sums, added in ((call["input"], call["other"]), (call["other"], call["input"])):
            denominator = _below(reader, sums, position, at, exponentials)
            if denominator is not None and denominator.added is None and denominator.at_least == 0:
                in_rows = position == (*at[: denominator.dim], 0, *at[denominator.dim + 1 :])
                return _plus(reader, node, denominator, added, (*nodes, *denominator.nodes), in_rows)
    return None


def _plus(
    reader: Reader, node: Node, denominator: Denominator, added: object, nodes: tuple[Node, ...], in_rows: bool
) -> Denominator | None:
    number = reader.scalar(added, reader.order[node])
    if isinstance(number, Const):
        value = tensor_value(node)
        assert value is not None
        return replace(denominator, added=float(number.value), added_dtype=value.dtype, nodes=nodes)
    return replace(denominator, added=added, nodes=nodes) if isinstance(added, Node) and in_rows else None


def _below(
    reader: Reader, node: object, position: Position, at: Position, exponentials: Node, *, inverse: bool = False
) -> Denominator | None:
    if not isinstance(node, Node) or tensor_value(node) is None:
        return None
    where = broadcast_position(position, reader.shape(node))
    return read_denominator(reader, node, where, at, exponentials, inverse=inverse)


def inverted(reader: Reader, call: Call) -> tuple[object, bool] | None:
    """What one is divided by, and whether that still is an inverse: ``1 / t`` is ``t.reciprocal() * 1`` in aten."""
    if call.op == "reciprocal" or (call.op == "pow" and call["exponent"] == -1):
        return call["input"], False
    if call.op == "div" and call["input"] == 1 and call.get("rounding_mode") is None:
        return call["other"], False
    if call.op == "mul":
        for inner, one in ((call["input"], call["other"]), (call["other"], call["input"])):
            if not isinstance(one, Node) and one == 1:
                return inner, True
    return None


def sums_what_is_not_negative(call: Call) -> bool:
    """Whether a reduction adds up elements that are not negative, in their own type or a wider one."""
    if call.op == "vector_norm" and call["ord"] != 1:
        return False
    return call["dim"] is not None and call["dtype"] in (None, torch.float32, torch.float64)


def _reduced(reader: Reader, call: Call, position: Position, at: Position) -> int | None:
    """The one dimension reduced, where the reduction's ``position`` is the row of the element ``at``; else None."""
    dims = tensor_dims(call, "dim", len(at))
    if dims is None or len(dims) != 1:
        return None
    (dim,) = dims
    return dim if position == (*at[:dim], *((0,) if call["keepdim"] else ()), *at[dim + 1 :]) else None


def back_through_views(reader: Reader, node: Node, position: Position) -> tuple[Node, Position, tuple[Node, ...]]:
    """Back through views: the node whose element it is, where, and every node on the way, both ends included."""
    nodes, at = [node], reader.order[node]
    while (source := reader.back(node, position, at)) is not None:
        node, position, at = source
        nodes.append(node)
    return node, position, tuple(nodes)


# ---------------------------------------------------------------- and its logarithm


def read_logsumexp(
    reader: Reader, node: Node, position: Position, at: Position, scores: Node
) -> tuple[int, tuple[Node, ...]] | None:
    """The dimension ``node`` is the logarithm of the sum of exponentials of ``scores`` along, and its nodes.

    At ``position`` it has to be that of the row that the element ``at`` of the scores lies in.
    """
    node, position, nodes = back_through_views(reader, node, position)
    call = reader.call(node)
    if call is None or call.in_place:
        return None
    if call.op == "logsumexp":
        dim = _reduced(reader, call, position, at)
        return None if dim is None or call["input"] is not scores else (dim, nodes)
    if call.op == "add" and call["alpha"] == 1:  # as torch decomposes it
        for sums, shift in ((call["input"], call["other"]), (call["other"], call["input"])):
            logarithm = _shifted_logarithm(reader, sums, shift, position, at, scores)
            if logarithm is not None:
                return logarithm[0], (*nodes, *logarithm[1])
    return None


def _shifted_logarithm(
    reader: Reader, sums: object, shift: object, position: Position, at: Position, scores: Node
) -> tuple[int, tuple[Node, ...]] | None:
    """``log(sum(exp(x - m))) + m``, where ``m`` is the maximum, or 0 where that is infinite."""
    if not isinstance(sums, Node) or not isinstance(shift, Node):
        return None
    if tensor_value(sums) is None or tensor_value(shift) is None:
        return None
    sums, inside, nodes = back_through_views(reader, sums, broadcast_position(position, reader.shape(sums)))
    logarithm = reader.call(sums)
    if logarithm is None or logarithm.op != "log" or not isinstance(logarithm["input"], Node):
        return None
    summed, where, more = back_through_views(reader, logarithm["input"], inside)
    call = reader.call(summed)
    if call is None or call.op != "sum" or call["dim"] is None or not isinstance(call["input"], Node):
        return None
    dim, exp = _reduced(reader, call, where, at), read_exponential(reader, call["input"])
    if dim is None or exp is None or exp.input is not scores or exp.scale != 1 or exp.shift is None:
        return None
    own_shift, row = exp.shift, broadcast_position((*at[:dim], 0, *at[dim + 1 :]), reader.shape(exp.shift))
    again = back_through_views(reader, shift, broadcast_position(position, reader.shape(shift)))
    if back_through_views(reader, own_shift, row)[:2] != again[:2]:
        return None
    maximum = shifted_maximum(reader, own_shift, scores, dim)
    return None if maximum is None else (dim, (*nodes, *more, *again[2], *exp.nodes, *maximum))


# ---------------------------------------------------------------- the maximum taken off before


def row_maximum(reader: Reader, node: object, scores: Node, dim: int) -> tuple[Node, ...] | None:
    """The nodes that compute the row maximum of ``scores`` with the dimension kept; None for anything else."""
    return shifted_maximum(reader, node, scores, dim, through=())


def shifted_maximum(
    reader: Reader, node: object, scores: Node, dim: int, through: tuple[str, ...] = ("clamp", "masked_fill", "where")
) -> tuple[Node, ...] | None:
    """The nodes from the row maximum of ``scores``, its dimension kept, to ``node``; ``through`` may be on the way."""
    nodes: list[Node] = []
    rank = len(reader.shape(scores))
    while isinstance(node, Node):
        call = reader.call(node)
        if call is None or call.in_place:
            return None
        nodes.append(node)
        if (
            call.op in ("detach", "copy")
            or call.op in through
            or (call.op == "getitem" and call["index"] == 0)
            or (call.op == "getattr" and call["name"] == "values")
        ):
            if call.op == "where":
                condition, yes, no = call["condition"], call["input"], call["other"]
                nodes += _beside(reader, condition)
                node = no if reader.scalar(yes, reader.order[node]) is not None else yes
                continue
            nodes += _beside(reader, call.get("mask"))
            node = call["input"]
            continue
        if call.op == "amax":
            dims, keeps = tensor_dims(call, "dim", rank), call["keepdim"]
        elif call.op == "max" and isinstance(call.get("dim", call["other"]), int):
            dims, keeps = (call.get("dim", call["other"]) % rank,), call["keepdim"]
        else:
            return None
        return tuple(nodes) if dims == (dim,) and keeps and call["input"] is scores else None
    return None


def _beside(reader: Reader, node: object) -> tuple[Node, ...]:
    """The nodes of a test of the maximum itself, ``m.abs() == inf``."""
    nodes: list[Node] = []
    while isinstance(node, Node) and (call := reader.call(node)) is not None and call.op in ("eq", "ne", "abs", "not"):
        nodes.append(node)
        node = call["input"]
    return tuple(nodes)

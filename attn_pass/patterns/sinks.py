"""Attention sinks: one more logit per row, in the softmax or in its sum, whose weight is discarded."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch.fx import Node

from attn_pass.graph.regions import Region
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Apply, Const, Expr, Load, apply, contains_dot, expression_axes
from attn_pass.model.index import Axis, Index, axes, axis_index
from attn_pass.patterns.softmax_forms import Softmax
from attn_pass.patterns.weights import maximum_of
from attn_pass.reading.masks import added_terms
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.views import Position, broadcast_position


def read_sinks(
    reader: Reader,
    scores: UseDefWalk,
    score: Expr,
    node: Node,
    positions: tuple[Position, ...],
    keys: Axis,
    region: Region,
    time: int,
) -> tuple[Expr, Expr, tuple[Node, ...]]:
    """``(score, sink, nodes)``: the elements beside the keys are logits that no product enters, as one logit.

    Raises `Unreadable` for anything else. A maximum taken off both scores and sinks is left out of both.
    """
    sinks: list[Expr] = []
    nodes: dict[Node, None] = {}
    plain, without_maximum = score, 0
    for position in positions:
        walk = UseDefWalk(reader, scores.leaf, reader.products, region)
        sink = walk.read(node, position, time)
        nodes |= dict.fromkeys(walk.internal)
        if isinstance(score, Apply) and isinstance(sink, Apply) and score.op == sink.op == "sub":
            taken = score.args[1]
            if taken == sink.args[1] and isinstance(taken, Load) and taken in scores.loads:
                chain = maximum_of(reader, scores.loads[taken].written, scores)
                if chain is not None:
                    plain, sink, without_maximum = score.args[0], sink.args[0], without_maximum + 1
                    nodes |= dict.fromkeys(chain)
        if contains_dot(sink):
            raise Unreadable(_NOT_WHOLE, node)
        if keys in expression_axes(sink):
            raise Unreadable("more than one logit of a row is not a product of queries and keys", node)
        scores.loads |= walk.loads
        sinks.append(sink)
    if without_maximum not in (0, len(sinks)):
        raise Unreadable("a maximum is subtracted from the scores, but not from every logit beside them", node)
    value = tensor_value(node)
    return plain, sinks[0] if len(sinks) == 1 else _as_one(sinks, None if value is None else value.dtype), tuple(nodes)


def _as_one(sinks: list[Expr], dtype: torch.dtype | None) -> Expr:
    """The logarithm of the sum of their exponentials; -inf where all of them are."""
    if all(isinstance(sink, Const) for sink in sinks):
        return Const(float(torch.tensor([s.value for s in sinks if isinstance(s, Const)]).double().logsumexp(0)))
    if dtype in (torch.bfloat16, torch.float16):
        sinks = [apply("cast", sink, dtype=torch.float32) for sink in sinks]
    if len(set(sinks)) == 1:
        return apply("add", sinks[0], Const(math.log(len(sinks))))
    most = reduce(lambda a, b: apply("maximum", a, b), sinks)
    shares = [apply("exp", apply("sub", sink, most)) for sink in sinks]
    total = apply("add", most, apply("log", reduce(lambda a, b: apply("add", a, b), shares)))
    return apply("where", apply("eq", most, Const(-math.inf)), most, total)


def added_sink(
    reader: Reader, scores: UseDefWalk, softmax: Softmax, at_softmax: Position, keys: Axis, time: int
) -> tuple[Expr, tuple[Node, ...]]:
    """``(sink, nodes)`` where the sum of exponentials has one more: ``exp(s - m) / (exp(-m) + sum)``."""
    if not isinstance(softmax.sink, Node):
        assert softmax.sink is not None
        return Const(softmax.sink / softmax.scale), ()
    position = broadcast_position(at_softmax, reader.shape(softmax.sink))
    walk = UseDefWalk(reader, scores.leaf, reader.products, scores.region)
    sink = walk.operand(softmax.sink, position, time)
    if contains_dot(sink) or keys in expression_axes(sink):
        raise Unreadable("more than one logit of a row is not a product of queries and keys", softmax.sink)
    scores.loads |= walk.loads
    return sink, tuple(walk.internal)


def check_no_shift(score: Expr, keys: Axis, node: Node) -> None:
    """Raises `Unreadable` where a term that is the same for all keys would shift the scores against a sink."""
    if not isinstance(score, Apply) or not contains_dot(score):
        return
    for arg in score.args:
        has_rows = not contains_dot(arg) and any(keys not in expression_axes(term) for term in added_terms(arg))
        alone = not contains_dot(arg) and keys not in expression_axes(arg)
        changes = score.op not in ("add", "sub", "mul", "div", "where") and arg != Const(0)
        if (has_rows and score.op in ("add", "sub")) or (alone and changes):
            raise Unreadable("a term that is the same for all keys is added to scores that are joined by a sink", node)
        check_no_shift(arg, keys, node)


def sink_positions(
    reader: Reader, softmax: Node, read: Softmax, at_softmax: Position, keys: Axis
) -> tuple[Position, ...] | None:
    """Where the softmax has its entries before and behind the keys; None if it has none.

    Raises `Unreadable` for too many, and where the keys are not the others in their order.
    """
    dim = read.dim
    extra: Index = reader.shape(softmax)[dim] - keys.size
    first = at_softmax[dim] - axis_index(keys)
    outside = keys in axes(*at_softmax[:dim], *at_softmax[dim + 1 :])
    if not isinstance(extra, int) or not 0 <= extra <= _MOST:
        joined = len(reader.products.get(read.input, ())) > 1 and not outside
        raise Unreadable(OTHER_KEYS if joined else _NOT_WHOLE, softmax)
    if outside or not isinstance(first, int) or not 0 <= first <= extra:
        raise Unreadable(_NOT_WHOLE if extra else "the softmax runs over another dimension than the keys", softmax)
    places: list[Index] = [*range(first), *(keys.size + n for n in range(first, extra))]
    return tuple((*at_softmax[:dim], place, *at_softmax[dim + 1 :]) for place in places) or None


OTHER_KEYS = "the weights are a part of the softmax, whose other scores are of keys that cannot be joined to these"
_NOT_WHOLE = "the product does not sum over the whole softmax"
_MOST = 8  # sinks of a row; further ones are keys by another name

"""Attention sinks: a logit of every row beside the scores, in the softmax or in its sum; its weight is thrown away."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.regions import Region
from attn_pass.model.expression import Apply, Const, Dot, Expr, Load, contains_dot, expression_axes
from attn_pass.model.index import Axis, Index, axes, axis_index
from attn_pass.patterns.softmax_forms import Softmax
from attn_pass.patterns.weights import maximum_of
from attn_pass.reading.lift import Reader, Unreadable
from attn_pass.reading.spine import Spine
from attn_pass.reading.views import Position, broadcast_position


def read_sink(
    reader: Reader, scores: Spine, score: Expr, node: Node, position: Position, keys: Axis, region: Region, time: int
) -> tuple[Expr, Expr, tuple[Node, ...]]:
    """``(score, sink, nodes)``: the element at ``position``, beside the keys, is a logit that no product enters.

    Raises `Unreadable` for anything else. A maximum taken off both scores and sink is left out of both.
    """
    spine = Spine(reader, scores.leaf, reader.products, region)
    sink = spine.read(node, position, time)
    nodes: tuple[Node, ...] = tuple(spine.internal)
    if isinstance(score, Apply) and isinstance(sink, Apply) and score.op == sink.op == "sub":
        taken = score.args[1]
        if taken == sink.args[1] and isinstance(taken, Load) and taken in scores.loads:
            chain = maximum_of(reader, scores.loads[taken].written, scores)
            if chain is not None:
                score, sink, nodes = score.args[0], sink.args[0], (*nodes, *chain)
    if contains_dot(sink) or keys in expression_axes(sink):
        raise Unreadable("more than one logit of a row is no product of queries and keys", node)
    scores.loads |= spine.loads
    return score, sink, nodes


def added_sink(
    reader: Reader, scores: Spine, softmax: Softmax, at_softmax: Position, keys: Axis, time: int
) -> tuple[Expr, tuple[Node, ...]]:
    """``(sink, nodes)`` where the sum of exponentials has one more: ``exp(s - m) / (exp(-m) + sum)``."""
    if not isinstance(softmax.sink, Node):
        assert softmax.sink is not None
        return Const(softmax.sink / softmax.scale), ()
    position = broadcast_position(at_softmax, reader.shape(softmax.sink))
    spine = Spine(reader, scores.leaf, reader.products, scores.region)
    sink = spine._operand(softmax.sink, position, time)
    if contains_dot(sink) or keys in expression_axes(sink):
        raise Unreadable("more than one logit of a row is no product of queries and keys", softmax.sink)
    scores.loads |= spine.loads
    return sink, tuple(spine.internal)


def check_no_shift(score: Expr, keys: Axis, node: Node) -> None:
    """Raises `Unreadable` where a term that is the same for all keys would shift the scores against a sink."""
    if not isinstance(score, Apply) or not contains_dot(score):
        return
    for arg in score.args:
        alone = not contains_dot(arg) and not isinstance(arg, Dot) and keys not in expression_axes(arg)
        if alone and (score.op in ("add", "sub") or (score.op not in ("mul", "div", "where") and arg != Const(0))):
            raise Unreadable("a term that is the same for all keys is added to scores that are joined by a sink", node)
        check_no_shift(arg, keys, node)


def sink_position(reader: Reader, softmax: Node, dim: int, at_softmax: Position, keys: Axis) -> Position | None:
    """Where the softmax has its one entry before or behind the keys; None if it has none.

    Raises `Unreadable` for several, and where the keys are not the others in their order.
    """
    extra: Index = reader.shape(softmax)[dim] - keys.size
    first = at_softmax[dim] - axis_index(keys)
    if extra != 0 and extra != 1:
        raise Unreadable("the product does not sum over the whole softmax", softmax)
    if keys in axes(*at_softmax[:dim], *at_softmax[dim + 1 :]) or (first != 0 and (first != 1 or extra != 1)):
        raise Unreadable("the softmax runs over another dimension than the keys", softmax)
    if extra == 0:
        return None
    return (*at_softmax[:dim], keys.size if first == 0 else 0, *at_softmax[dim + 1 :])

"""Attention sinks: a logit joined to every row of the scores before the softmax; its weight is thrown away after it."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.regions import Region
from attn_pass.model.expression import Apply, Const, Dot, Expr, Load, contains_dot, expression_axes
from attn_pass.model.index import Axis, Index
from attn_pass.patterns.weights import maximum_of
from attn_pass.reading.lift import Reader, Unreadable
from attn_pass.reading.spine import Spine
from attn_pass.reading.views import Position


def read_sink(
    reader: Reader, scores: Spine, score: Expr, node: Node, position: Position, keys: Axis, region: Region, time: int
) -> tuple[Expr, Expr, tuple[Node, ...]]:
    """``(score, sink, nodes)``: the element at ``position``, behind the last key, is a logit that no product enters.

    Raises `Unreadable` for anything else. A maximum taken off both scores and sink is left out of both; any other term
    that is the same for all keys would shift the scores against the sink, and is refused.
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
    _check_no_shift(score, keys, node)
    scores.loads |= spine.loads
    return score, sink, nodes


def _check_no_shift(score: Expr, keys: Axis, node: Node) -> None:
    if not isinstance(score, Apply) or not contains_dot(score):
        return
    for arg in score.args:
        alone = not contains_dot(arg) and not isinstance(arg, Dot) and keys not in expression_axes(arg)
        if alone and (score.op in ("add", "sub") or (score.op not in ("mul", "div", "where") and arg != Const(0))):
            raise Unreadable("a term that is the same for all keys is added to scores that are joined by a sink", node)
        _check_no_shift(arg, keys, node)


def sink_position(reader: Reader, softmax: Node, dim: int, at_softmax: Position, keys: Axis) -> Position | None:
    """Where the softmax has its one entry behind the keys; None if it has none. Raises `Unreadable` for several."""
    extra: Index = reader.shape(softmax)[dim] - keys.size
    if extra == 0:
        return None
    if extra != 1:
        raise Unreadable("the product does not sum over the whole softmax", softmax)
    return (*at_softmax[:dim], keys.size, *at_softmax[dim + 1 :])

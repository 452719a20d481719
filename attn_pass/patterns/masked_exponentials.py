"""Exponentials that are set to zero by a mask before they are summed: ``e = exp(s) * mask; e / e.sum()``.

That is the softmax of scores that are -inf there. Where the largest of all scores was taken off first, and a number is
added to the sum, it is one only if the scores were filled under the same mask before.
"""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const, Expr, apply
from attn_pass.model.index import Axis
from attn_pass.patterns.after_product import reach_from
from attn_pass.patterns.softmax_forms import Softmax
from attn_pass.patterns.weights import Weights, masked_once, read_weights
from attn_pass.reading.reader import Reader
from attn_pass.reading.scores import NEGATIVE_INFINITY
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.views import Position


def masked_before_the_sum(
    reader: Reader, read: Softmax, at: Position, keys: Axis, scores: UseDefWalk, score: Expr, weights: Weights
) -> tuple[Expr, tuple[Node, ...]]:
    """The score of exponentials that were masked, and the nodes that mask them; ``at`` is where they are read.

    What has to be the mask of the scores is noted in ``weights``. Raises `Unreadable` where they are no mask's.
    """
    if read.masked is None:
        return score, ()
    summed, exponentials = read.masked
    walk = UseDefWalk(reader, exponentials, reach_from(reader, exponentials), scores.region, of_weights=True)
    expression = walk.read(summed, at, reader.order[summed])
    made_of, beside = read_weights(reader, walk, expression, (read.input, read.dim), keys)
    if made_of.zeroed is None or made_of.factors or made_of.guarded or walk.dropout or walk.leaf_position != at:
        raise Unreadable("the exponentials of the scores are changed before they are summed", summed)
    scores.loads |= walk.loads
    nodes = (*walk.internal, *beside)
    if read.masked_before:
        weights.zero(made_of.zeroed)
        return score, nodes
    try:
        value = tensor_value(read.input)
        assert value is not None
        return masked_once(reader, score, scores, made_of.zeroed, value.dtype)[0], nodes
    except Unreadable:  # by no mask of the scores
        return apply("where", made_of.zeroed, Const(NEGATIVE_INFINITY), score), nodes

"""One attention written by hand, lifted: weights back to the softmax, scores back to a product, and the operands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch.fx import Node

from attn_pass.graph.regions import Region
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const, Expr, apply, expression_axes, loads
from attn_pass.model.index import Axis, axes
from attn_pass.patterns.after_product import Ending, reach_from, sink_of_share
from attn_pass.patterns.base import still_held
from attn_pass.patterns.masked_exponentials import masked_before_the_sum
from attn_pass.patterns.products import adds_nothing, factors_of_rows, with_product
from attn_pass.patterns.sinks import OTHER_KEYS, added_sink, check_no_shift, read_sinks, sink_positions
from attn_pass.patterns.softmax_forms import Softmax
from attn_pass.patterns.weights import Weights, deep, masked_once, read_weights, without_row_reductions
from attn_pass.reading.describe import Parts
from attn_pass.reading.operands import OperandForm, operand
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.views import Position


@dataclass(frozen=True)
class Candidate:
    """What may be one attention: a product with weights, their softmax, and one of the products its scores come from.

    With ``late`` the softmax is divided by its sum where the site ends, and ``softmax`` is its exponentials.
    """

    reader: Reader
    product: Product
    weights: Node
    softmax: Node
    read: Softmax
    scores_product: Node
    ending: Ending
    late: bool = False

    @property
    def region(self) -> Region:
        """Where the product with the weights runs."""
        return self.reader.regions.of(self.product.node)

    @property
    def shares_a_sink(self) -> bool:
        """Whether what comes after the product is a share of the row that a sink leaves to it."""
        return self.ending.factor is not None and not self.late


def lift(c: Candidate) -> tuple[Parts, tuple[Node, ...]]:
    """The parts of the site, and the nodes that compute it and nothing else. Raises `Unreadable`."""
    reader, above = c.reader, _read_weights(c)
    scores = _read_scores(c, above)
    softmax_value, input_value = tensor_value(c.softmax), tensor_value(c.read.input)
    scores_product, result = tensor_value(c.scores_product), tensor_value(c.product.node)
    assert softmax_value is not None and input_value is not None and scores_product is not None and result is not None
    rounds_to = (
        softmax_value.dtype if input_value.dtype == torch.float64 else input_value.dtype
    )  # a softmax with a dtype argument rounds first
    score_dtype = _score_dtype(scores.walk, scores.score, rounds_to, c.scores_product)
    query, key, dim = _operands(c, above, scores)
    value = operand(reader, above.values, above.at_values, reader.order[c.product.node], c.region, factors=False)
    made_of, rows = above.made_of, [p for n, p in enumerate(above.at_softmax) if n != c.read.dim]
    parts = Parts(
        reader=reader,
        result=c.ending.node,
        output=c.ending.output,
        rows_at=(tuple(rows[:-1]), rows[-1] if rows else 0),
        keys=above.keys,
        dim=dim,
        query=still_held(reader, query, c.ending.node),
        key=still_held(reader, key, c.ending.node),
        value=still_held(reader, value, c.ending.node),
        score=scores.score,
        side=scores.walk.loads,
        score_dtype=score_dtype,
        factor_dtype=_narrowest(scores.walk, input_value.dtype),
        product_dtypes=(scores_product.dtype, result.dtype),
        dropout=above.dropout,
        empty_row_is_nan=c.read.empty_row_is_nan and not (made_of.guarded or made_of.zeroed or scores.sink),
        nan_guard=made_of.nan_guard or scores.walk.is_guarded,
        fill_is_weak=scores.fill_is_weak,
        result_factors=(*made_of.factors, *factors_of_rows(reader, c.product, c.weights, c.ending.at_product)),
        sink=scores.sink,
        by_logarithm=c.read.by_logarithm,
        plain_scores=scores.are_plain,
    )
    internal = dict.fromkeys((*above.nodes, *scores.nodes))
    return parts, tuple(n for n in internal if n is not c.ending.node)


# ---------------------------------------------------------------- from the result back to the softmax


@dataclass(frozen=True)
class _Above:
    """What comes after the softmax."""

    keys: Axis
    values: Node
    at_values: Position
    at_softmax: Position
    beside_keys: tuple[Position, ...] | None  # where the softmax has keys without a value
    made_of: Weights
    dropout: float
    nodes: tuple[Node, ...]


def _read_weights(c: Candidate) -> _Above:
    reader, product, node = c.reader, c.product, c.product.node
    if product.alpha != 1 or not adds_nothing(reader, product):
        raise Unreadable("something is added to the product of weights and values", node)
    keys = Axis("j", product.summed_size)
    left, right = product.positions(c.ending.at_product, keys)
    at_weights, at_values, values = (left, right, product.right)
    if c.weights is product.right:
        at_weights, at_values, values = right, left, product.left
    reach = reach_from(reader, c.softmax) if c.late else reader.softmaxes
    walk = UseDefWalk(reader, c.softmax, reach, c.region, of_weights=True)
    expression = walk.read(c.weights, at_weights, reader.order[node])
    passed = tuple(walk.internal)
    made_of, beside = read_weights(reader, walk, expression, (c.read.input, c.read.dim), keys)
    if walk.leaf_position is None:
        raise Unreadable("the weights do not come from the softmax", node)
    beside_keys = sink_positions(reader, c.softmax, c.read, walk.leaf_position, keys)
    if reader.regions.of(c.softmax) != c.region:
        raise Unreadable("the softmax runs under another context than the product", c.softmax)
    nodes = (node, *c.ending.nodes, *passed, *beside, *c.read.nodes)
    return _Above(keys, values, at_values, walk.leaf_position, beside_keys, made_of, walk.dropout, nodes)


# ---------------------------------------------------------------- from the softmax back to the product of the scores


@dataclass(frozen=True)
class _Scores:
    """What comes before the softmax."""

    walk: UseDefWalk
    product: Product
    at_product: Position
    score: Expr
    sink: Expr | None
    are_plain: bool  # nothing that the softmax does not feel was left out
    fill_is_weak: bool
    nodes: tuple[Node, ...]


def _read_scores(c: Candidate, above: _Above) -> _Scores:
    reader = c.reader
    walk = UseDefWalk(reader, c.scores_product, reader.products, c.region)
    time = min(reader.order[n] for n in c.read.nodes)
    score = walk.read(c.read.input, above.at_softmax, time)
    passed = tuple(walk.internal)
    product, at_product = _score_product(c, above, walk)
    value = tensor_value(c.read.input)
    assert value is not None
    is_weak = False
    score, masking = masked_before_the_sum(reader, c.read, above.at_softmax, above.keys, walk, score, above.made_of)
    if above.made_of.zeroed is not None:
        score, is_weak = masked_once(reader, score, walk, above.made_of.zeroed, value.dtype)
    score, sink, beside = _with_sink(c, above, walk, score, time)
    if c.read.scale != 1:
        score = apply("mul", score, Const(c.read.scale))
        sink = None if sink is None else apply("mul", sink, Const(c.read.scale))
    score = with_product(reader, walk, product, score)
    plain = not (c.late or beside or above.made_of.zeroed) and c.read.scale == 1
    # What differs from key to key as it is loaded may be the same for all of them.
    forms = (score, deep(reader, walk, score)) if plain or sink is not None else ()
    if sink is None:
        plain = plain and not any(_has_shift(form, above.keys, c.scores_product) for form in forms)
    else:
        for form in forms:
            check_no_shift(form, above.keys, c.scores_product)
    times = (p.times for p in (c.product, product) if p.times is not None)
    nodes = (*passed, *masking, *beside, *reader.instead_of(c.product.node), *times)
    return _Scores(walk, product, at_product, score, sink, plain, is_weak, nodes)


def _score_product(c: Candidate, above: _Above, walk: UseDefWalk) -> tuple[Product, Position]:
    """The product of queries and keys, and where it is read. Raises `Unreadable`."""
    product, node = c.reader.product(c.scores_product), c.scores_product
    if walk.leaf_position is None and above.keys.size != c.reader.shape(c.softmax)[c.read.dim]:
        raise Unreadable(OTHER_KEYS, node)
    if product is None or walk.leaf_position is None:
        raise Unreadable("the product of queries and keys cannot be read", node)
    if walk.dropout:
        raise Unreadable("dropout is applied to the scores", node)
    return product, walk.leaf_position


def _with_sink(
    c: Candidate, above: _Above, walk: UseDefWalk, score: Expr, time: int
) -> tuple[Expr, Expr | None, Iterable[Node]]:
    """The score without its sink, the sink, and the nodes that make it one; or without what rows do not feel."""
    reader, keys = c.reader, above.keys
    if (above.beside_keys is not None) + (c.read.sink is not None) + c.shares_a_sink > 1:
        raise Unreadable("two sinks, added in different places", c.product.node)
    if above.beside_keys is not None:
        if c.read.masked is not None:
            raise Unreadable("a sink may be masked", c.softmax)
        return read_sinks(reader, walk, score, c.read.input, above.beside_keys, keys, c.region, time)
    if c.read.sink is not None:
        return score, *added_sink(reader, walk, c.read, above.at_softmax, keys, time)
    if c.shares_a_sink:
        return score, *sink_of_share(reader, c.ending, c.read, walk, above.at_softmax, keys)
    score, beside = without_row_reductions(reader, score, walk, keys)
    return score, None, beside


def _has_shift(score: Expr, keys: Axis, node: Node) -> bool:
    """Whether something is added to whole rows of the scores."""
    try:
        check_no_shift(score, keys, node)
    except Unreadable:
        return True
    return False


def _operands(c: Candidate, above: _Above, scores: _Scores) -> tuple[list[OperandForm], list[OperandForm], Axis]:
    """Query and key, and the axis they are summed over. Raises `Unreadable`."""
    product, keys = scores.product, above.keys
    dim = Axis("d", product.summed_size)
    left, right = product.positions(scores.at_product, dim)
    query, key, at_query, at_key = product.left, product.right, left, right
    if keys in axes(*left) or (keys.size == 1 and _is_transposed(left, right, above.at_softmax)):
        query, key, at_query, at_key = product.right, product.left, right, left
    time = c.reader.order[c.scores_product]
    of_query = operand(c.reader, query, at_query, time, c.region, factors=True)
    of_key = operand(c.reader, key, at_key, time, c.region, factors=True)
    # A query may be expanded along the keys, which says itself that it is the query.
    for rows, columns in ((of_query, of_key), (of_key, of_query)):
        if for_all_keys := [form for form in rows if not _depends_on(form, keys)]:
            return for_all_keys, columns, dim
    raise Unreadable("both sides of the score product depend on the key", c.scores_product)


def _depends_on(form: OperandForm, keys: Axis) -> bool:
    """Whether an operand, seen so, differs from key to key."""
    return keys in axes(*form.position) or any(keys in expression_axes(factor) for factor, _ in form.factors)


# ---------------------------------------------------------------- types


def _score_dtype(scores: UseDefWalk, score: Expr, softmax: torch.dtype, node: Node) -> torch.dtype:
    """The type in which masks and biases join the scores: a fill has to mask there. Raises `Unreadable` for two.

    That is the softmax's own at least, but for float16, where other numbers mask. What ``score`` no longer holds, as
    a row's maximum that was taken off, does not count. An infinite number is the same in every type, and decides none.
    """
    loads_left = set(loads(score))
    joined = [(d, term) for d, term in scores.joined if loads_left.intersection(loads(term)) or not loads(term)]
    if softmax != torch.float64:  # it rounds what was joined in float64
        joined = [(softmax if d == torch.float64 else d, term) for d, term in joined]
    types = {d for d, _ in joined}
    if types and torch.float64 not in types:  # what absorbed a score is not given back to it in float64
        softmax = torch.float32 if softmax == torch.float64 else softmax
    if len(types) > 1:
        types = {d for d, term in joined if not (isinstance(term, Const) and math.isinf(term.value))}
    if types == {torch.bfloat16} and softmax == torch.float32:  # where -1e9 absorbs a score, and not in float32
        return torch.bfloat16
    if torch.float16 not in types:
        return reduce(torch.promote_types, types, softmax)
    if len(types) > 1 or scores.is_beyond_half:
        raise Unreadable("something that may mask is added to the scores in float16, and again in a wider dtype", node)
    return torch.float16


def _narrowest(scores: UseDefWalk, softmax: torch.dtype) -> torch.dtype:
    """float16 where the scores pass through it."""
    dtypes = {value.dtype for node in scores.internal if (value := tensor_value(node)) is not None}
    return torch.float16 if torch.float16 in dtypes else softmax


def _is_transposed(left: tuple, right: tuple, at_softmax: tuple) -> bool:  # type: ignore[type-arg]
    """With a single key: whether the rows come from the right operand."""
    rows = axes(*at_softmax)
    return len(axes(*right) & rows) > len(axes(*left) & rows)

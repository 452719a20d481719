"""Attention written by hand: a softmax whose result reaches one side of a product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const, Expr, apply, loads
from attn_pass.model.index import Axis, axes
from attn_pass.patterns.after_product import (
    Ending,
    at_product,
    endings,
    exponentials,
    late_softmax,
    reach_from,
    sink_of_share,
)
from attn_pass.patterns.also_used import with_what_else_is_needed
from attn_pass.patterns.base import Site, UsedElsewhere, check_uses, check_window, failed, refused, still_held
from attn_pass.patterns.products import adds_nothing, factors_of_rows, with_product
from attn_pass.patterns.shape_uses import remaining_shape_uses, with_shape_uses
from attn_pass.patterns.shared_scores import with_partners
from attn_pass.patterns.sinks import OTHER_KEYS, added_sink, check_no_shift, read_sinks, sink_positions
from attn_pass.patterns.softmax_forms import Softmax, read_softmax
from attn_pass.patterns.weights import masked_once, read_weights, without_row_reductions
from attn_pass.reading.describe import Parts, describe
from attn_pass.reading.operands import operand
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.views import VIEWS

FORM = "eager"


def find(reader: Reader) -> Iterator[Site]:
    """Every product with weights on one side, and every softmax of a product that reaches none."""
    yield from with_what_else_is_needed(reader, with_partners(reader, list(_find(reader))))


def _find(reader: Reader) -> Iterator[Site]:
    reached: set[Node] = set()
    for node in reader.graph.nodes:
        product = reader.product(node)
        if product is None:
            continue
        for weights in (product.left, product.right):
            for softmax in reader.softmaxes.get(weights, ()):
                if not _reads_product(reader, softmax):
                    continue
                reached.add(softmax)
                yield _read(reader, product, weights, softmax)
                break
            else:
                late = _read_late(reader, product, weights)
                if late is None:
                    continue
                yield late
            break
    used = {
        s
        for n in reader.products
        if reader.products[n] == {n}
        for i in n.all_input_nodes
        for s in reader.softmaxes.get(i, ())
    }
    for node, found in list(reader.softmaxes.items()):
        if found != {node} or node in reached:
            continue
        if _reads_product(reader, node):
            yield _near_miss(reader, node)
        elif node in used:
            hidden = _hidden_product(reader, node)
            if hidden is not None:
                yield refused(node, FORM, reader.regions.of(node), hidden)


def _reads_product(reader: Reader, softmax: Node) -> bool:
    read = read_softmax(reader, softmax)
    return read is not None and bool(reader.products.get(read.input))


def _hidden_product(reader: Reader, softmax: Node, steps: int = 16) -> Unreadable | None:
    """What stands between a softmax and a product it comes from, when that is no operation a reading can pass."""
    read = read_softmax(reader, softmax)
    waiting: list[tuple[Node, Node | None]] = [] if read is None else [(read.input, None)]
    seen: set[Node] = set()
    while waiting and len(seen) < steps:
        node, stranger = waiting.pop(0)
        seen.add(node)
        call = reader.call(node)
        if node in reader.products:
            if stranger is None:
                return None
            name = getattr(stranger.target, "__name__", str(stranger.target))
            return Unreadable(f"{name} stands between the scores and the softmax", stranger)
        known = call is not None and (call.op in POINTWISE or call.op in VIEWS)
        first = stranger or (None if known else node)
        waiting += [
            (i, first) for i in node.all_input_nodes if i not in seen and i.op in ("call_function", "call_method")
        ]
    return None


def _near_miss(reader: Reader, softmax: Node) -> Site:
    region = reader.regions.of(softmax)
    users = [u for u in softmax.users]
    after = next((u for u in users if u.op != "output"), None)
    reason = "the softmax of a product reaches no product"
    if after is None and users:
        reason = "the softmax of a product is returned by the model"
    elif after is not None:
        reason += f"; {after.name} comes next"
    return refused(softmax, FORM, region, Unreadable(reason, after or softmax))


def _read(reader: Reader, product: Product, weights: Node, softmax: Node) -> Site:
    read = read_softmax(reader, softmax)
    assert read is not None
    site = _read_to(reader, product, weights, softmax, read, at_product(reader, product.node))
    if site.unshared is not None:
        for ending in endings(reader, product.node):
            further = _read_to(reader, product, weights, softmax, read, ending)
            if further.described is not None and not further.refusal:
                return further
    return site


def _read_late(reader: Reader, product: Product, weights: Node) -> Site | None:
    """The site whose exponentials are divided by their sum after the product with the values; None if they are not."""
    exp = exponentials(reader, weights)
    for ending in endings(reader, product.node) if exp is not None else ():
        assert exp is not None
        read = late_softmax(reader, ending, product, weights, exp)
        if read is not None and reader.products.get(read.input):
            return _read_to(reader, product, weights, exp, read, ending, late=True)
    return None


def _read_to(
    reader: Reader, product: Product, weights: Node, softmax: Node, read: Softmax, ending: Ending, *, late: bool = False
) -> Site:
    """The site that ends there."""
    node, region = ending.node, reader.regions.of(product.node)
    site = Site(node, FORM, region, written_to=reader.written_by(node))
    best: Unreadable | None = None
    if region.functorch:
        return refused(node, FORM, region, Unreadable(f"it runs under {region.describe()}", product.node))
    for candidate in sorted(reader.products[read.input], key=lambda n: reader.order[n]):
        try:
            with reader.site() as used:
                parts, internal = _lift(reader, product, weights, softmax, read, candidate, ending, late=late)
                site.described = describe(parts, used)
            site.softmax_of = (read.input, read.dim)
            site.internal = with_shape_uses(reader, internal, site.described.nodes, node)
            site.shape_uses = remaining_shape_uses(reader, site.internal, node)
            check_uses(reader, site.internal, node, site.shape_uses)
            check_window(reader, site.described, node)
            return site
        except Unreadable as error:
            best = best or error
        except Exception as error:
            return failed(node, FORM, region, error)
    assert best is not None
    return Site(
        node,
        FORM,
        region,
        refusal=best.reason,
        refused_at=best.node,
        kind="attention" if site.described is not None else "near miss",
        unshared=site if isinstance(best, UsedElsewhere) else None,
    )


def _lift(
    reader: Reader,
    product: Product,
    weights: Node,
    softmax: Node,
    read: Softmax,
    scores_product: Node,
    ending: Ending,
    *,
    late: bool = False,
) -> tuple[Parts, tuple[Node, ...]]:
    """Lifts one site with one choice of the product of queries and keys. Raises `Unreadable`.

    With ``late`` the softmax is divided by its sum where the site ends, and ``softmax`` is its exponentials.
    """
    node, end = product.node, ending.node
    region, order = reader.regions.of(node), reader.order
    if product.alpha != 1 or not adds_nothing(reader, product):
        raise Unreadable("something is added to the product of weights and values", node)
    keys = Axis("j", product.summed_size)
    left, right = product.positions(ending.at_product, keys)
    at_weights, at_values, values = (left, right, product.right)
    if weights is product.right:
        at_weights, at_values, values = right, left, product.left

    reach = reach_from(reader, softmax) if late else reader.softmaxes
    spine = UseDefWalk(reader, softmax, reach, region, of_weights=True)
    expression = spine.read(weights, at_weights, order[node])
    internal = dict.fromkeys((node, *ending.nodes, *spine.internal))
    made_of, beside = read_weights(reader, spine, expression, (read.input, read.dim), keys)
    internal |= dict.fromkeys(beside)
    at_softmax = spine.leaf_position
    if at_softmax is None:
        raise Unreadable("the weights do not come from the softmax", node)
    beside_keys = sink_positions(reader, softmax, read, at_softmax, keys)
    if reader.regions.of(softmax) != region:
        raise Unreadable("the softmax runs under another context than the product", softmax)
    internal |= dict.fromkeys(read.nodes)

    scores = UseDefWalk(reader, scores_product, reader.products, region)
    time = min(order[n] for n in read.nodes)
    score = scores.read(read.input, at_softmax, time)
    value = tensor_value(read.input)
    assert value is not None
    internal |= dict.fromkeys(scores.internal)
    inner = reader.product(scores_product)
    if scores.leaf_position is None and keys.size != reader.shape(softmax)[read.dim]:
        raise Unreadable(OTHER_KEYS, scores_product)
    if inner is None or scores.leaf_position is None:
        raise Unreadable("the product of queries and keys cannot be read", scores_product)
    if scores.dropout:
        raise Unreadable("dropout is applied to the scores", scores_product)
    if made_of.zeroed is not None:
        score = masked_once(reader, score, scores, made_of.zeroed, value.dtype)
    sink = None
    if (beside_keys is not None) + (read.sink is not None) + (ending.factor is not None and not late) > 1:
        raise Unreadable("two sinks, each in a place of its own", node)
    if beside_keys is not None:
        score, sink, beside = read_sinks(reader, scores, score, read.input, beside_keys, keys, region, time)
    elif read.sink is not None:
        sink, beside = added_sink(reader, scores, read, at_softmax, keys, time)
    elif ending.factor is not None and not late:
        sink, beside = sink_of_share(reader, ending, read, scores, at_softmax, keys)
    else:
        score, beside = without_row_reductions(reader, score, scores, keys)
    internal |= dict.fromkeys(beside)
    if read.scale != 1:
        score = apply("mul", score, Const(read.scale))
        sink = None if sink is None else apply("mul", sink, Const(read.scale))
    internal |= dict.fromkeys(reader.instead_of(node))
    internal |= dict.fromkeys(p.times for p in (product, inner) if p.times is not None)
    score = with_product(reader, scores, inner, score)
    plain = not (late or beside or made_of.zeroed) and read.scale == 1
    if sink is not None:
        check_no_shift(score, keys, scores_product)
    elif plain:
        try:
            check_no_shift(score, keys, scores_product)
        except Unreadable:
            plain = False
    own = tensor_value(softmax)
    assert own is not None
    told = own.dtype if value.dtype == torch.float64 else value.dtype  # a softmax that is told its type rounds first
    score_dtype = _score_dtype(scores, score, told, scores_product)
    dim = Axis("d", inner.summed_size)
    left, right = inner.positions(scores.leaf_position, dim)
    query, key, at_query, at_key = inner.left, inner.right, left, right
    if keys in axes(*left) or (keys.size == 1 and _is_transposed(left, right, at_softmax)):
        query, key, at_query, at_key = inner.right, inner.left, right, left
    if keys in axes(*at_query):
        raise Unreadable("both sides of the score product depend on the key", scores_product)
    rows = [p for n, p in enumerate(at_softmax) if n != read.dim]
    made, result = tensor_value(scores_product), tensor_value(node)
    assert made is not None and result is not None
    parts = Parts(
        reader=reader,
        result=end,
        output=ending.output,
        rows_at=(tuple(rows[:-1]), rows[-1] if rows else 0),
        keys=keys,
        dim=dim,
        query=still_held(
            reader, operand(reader, query, at_query, order[scores_product], region, factors=True), ending.node
        ),
        key=still_held(reader, operand(reader, key, at_key, order[scores_product], region, factors=True), ending.node),
        value=still_held(reader, operand(reader, values, at_values, order[node], region, factors=False), ending.node),
        score=score,
        side=scores.loads,
        score_dtype=score_dtype,
        factor_dtype=_narrowest(scores, value.dtype),
        product_dtypes=(made.dtype, result.dtype),
        dropout=spine.dropout,
        empty_row_is_nan=read.empty_row_is_nan and not (made_of.guarded or made_of.zeroed or sink),
        nan_guard=made_of.nan_guard,
        result_factors=(*made_of.factors, *factors_of_rows(reader, product, weights, ending.at_product)),
        sink=sink,
        by_logarithm=read.by_logarithm,
        plain_scores=plain,
    )
    return parts, tuple(n for n in internal if n is not end)


def _score_dtype(scores: UseDefWalk, score: Expr, softmax: torch.dtype, node: Node) -> torch.dtype:
    """The type in which masks and biases join the scores: a fill has to mask there. Raises `Unreadable` for two.

    That is the softmax's own at least, but for float16, where other numbers mask. What ``score`` no longer holds, as
    a row's maximum that was taken off, does not count. An infinite number is the same in every type, and decides none.
    """
    kept = set(loads(score))
    joined = [(d, term) for d, term in scores.joined if kept.intersection(loads(term)) or not loads(term)]
    if softmax != torch.float64:  # it rounds what was joined in float64
        joined = [(softmax if d == torch.float64 else d, term) for d, term in joined]
    types = {d for d, _ in joined}
    if types and torch.float64 not in types:  # what absorbed a score is not given back to it in float64
        softmax = torch.float32 if softmax == torch.float64 else softmax
    if len(types) > 1:
        types = {d for d, term in joined if not (isinstance(term, Const) and math.isinf(term.value))}
    if torch.float16 not in types:
        return reduce(torch.promote_types, types, softmax)
    if len(types) > 1 or scores.is_beyond_half:
        raise Unreadable("what may mask is added to the scores in float16, and in a wider type as well", node)
    return torch.float16


def _narrowest(scores: UseDefWalk, softmax: torch.dtype) -> torch.dtype:
    """float16 where the scores pass through it."""
    dtypes = {value.dtype for node in scores.internal if (value := tensor_value(node)) is not None}
    return torch.float16 if torch.float16 in dtypes else softmax


def _is_transposed(left: tuple, right: tuple, at_softmax: tuple) -> bool:  # type: ignore[type-arg]
    """With a single key: whether the rows come from the right operand."""
    rows = axes(*at_softmax)
    return len(axes(*right) & rows) > len(axes(*left) & rows)

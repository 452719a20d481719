"""Attention written by hand: a softmax whose result reaches one side of a product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Dot, Expr, apply
from attn_pass.model.index import Axis, axes, axis_index
from attn_pass.patterns.base import Site, check_uses, check_window, failed, refused, with_shape_uses
from attn_pass.patterns.sinks import read_sink, sink_position
from attn_pass.patterns.weights import masked_once, read_weights, without_row_reductions
from attn_pass.reading.describe import Parts, _with_dot, describe
from attn_pass.reading.lift import POINTWISE, Reader, Unreadable, tensor_dims
from attn_pass.reading.products import Product
from attn_pass.reading.spine import Spine
from attn_pass.reading.views import VIEWS, broadcast_position

FORM = "eager"


@dataclass(frozen=True)
class Softmax:
    """A softmax, however it is spelled: its input, its dimension, the nodes it is made of."""

    input: Node
    dim: int
    nodes: tuple[Node, ...]
    empty_row_is_nan: bool


def read_softmax(reader: Reader, node: Node) -> Softmax | None:
    """The softmax a node computes; None when it is none."""
    call = reader.call(node)
    value = tensor_value(node)
    if call is None or value is None or value.dim() == 0:
        return None
    if call.op == "softmax":
        dims = tensor_dims(call, "dim", value.dim()) if call.get("dim") is not None else None
        if dims is None or len(dims) != 1 or not isinstance(call["input"], Node):
            return None
        safe = node.target is torch.ops.aten._safe_softmax.default
        return Softmax(call["input"], dims[0], (node,), not safe)
    return _by_hand(reader, node) if call.op == "div" else None


def _by_hand(reader: Reader, node: Node) -> Softmax | None:
    """``exp(x - max(x)) / sum(exp(x - max(x)))``, with and without the maximum."""
    call = reader.call(node)
    assert call is not None
    top, bottom = call["input"], call["other"]
    if not isinstance(top, Node) or not isinstance(bottom, Node) or call.get("rounding_mode") is not None:
        return None
    exp, value = reader.call(top), tensor_value(top)
    if exp is None or value is None or exp.op != "exp" or exp.in_place or call.in_place:
        return None
    total = _row_sum(reader, bottom, top)
    if total is None:
        return None
    dim, summed = total
    inner = exp["input"]
    nodes = [node, top, *summed]
    difference = reader.call(inner) if isinstance(inner, Node) else None
    if difference is not None and difference.op == "sub" and difference["alpha"] == 1 and not difference.in_place:
        maximum = _row_maximum(reader, difference["other"], difference["input"], dim, value.dim())
        if maximum is not None:
            return Softmax(difference["input"], dim, (*nodes, inner, *maximum), True)
    return Softmax(inner, dim, tuple(nodes), True) if isinstance(inner, Node) else None


def _row_sum(reader: Reader, bottom: Node, top: Node) -> tuple[int, tuple[Node, ...]] | None:
    """The dimension ``bottom`` sums the exponentials ``top`` over, and its nodes; None for anything else."""
    shape = reader.shape(top)
    at = tuple(axis_index(Axis(f"{top.name}.{n}", size)) for n, size in enumerate(shape))
    divisor = tensor_value(bottom)
    if divisor is None or divisor.dim() > len(shape):
        return None
    nodes, node = [bottom], bottom
    position = broadcast_position(at, reader.shape(bottom))
    while (back := reader.back(node, position, reader.order[bottom])) is not None:
        node, position, _ = back
        nodes.append(node)
    call, value = reader.call(node), tensor_value(node)
    if call is None or value is None or call.op != "sum" or call["dim"] is None or call["dtype"] is not None:
        return None
    dims = tensor_dims(call, "dim", len(shape))
    exponentials = call["input"]
    if dims is None or len(dims) != 1 or not isinstance(exponentials, Node):
        return None
    (dim,) = dims
    if position != ((*at[:dim], *((0,) if call["keepdim"] else ()), *at[dim + 1 :])):
        return None
    if exponentials is not top:
        again, once = reader.call(exponentials), reader.call(top)
        if again is None or once is None or again.op != "exp" or again.in_place or again["input"] is not once["input"]:
            return None
        first, last = sorted(reader.order[n] for n in (exponentials, top))
        if reader.effects.mutation_between(again["input"], first, last) is not None:
            return None
        nodes.append(exponentials)
    return dim, tuple(nodes)


def _row_maximum(reader: Reader, node: object, scores: Node, dim: int, rank: int) -> tuple[Node, ...] | None:
    """The nodes that compute the row maximum of ``scores`` with the dimension kept; None for anything else."""
    nodes: list[Node] = []
    while isinstance(node, Node):
        call = reader.call(node)
        if call is None:
            return None
        nodes.append(node)
        if (
            call.op == "detach"
            or (call.op == "getitem" and call["index"] == 0)
            or (call.op == "getattr" and call["name"] == "values")
        ):
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


def find(reader: Reader) -> Iterator[Site]:
    """Every product with weights on one side, and every softmax of a product that reaches none."""
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
                continue
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
    region = reader.regions.of(product.node)
    site = Site(product.node, FORM, region)
    best: Unreadable | None = None
    read = read_softmax(reader, softmax)
    assert read is not None
    if region.functorch:
        return refused(product.node, FORM, region, Unreadable(f"it runs under {region.describe()}", product.node))
    for candidate in sorted(reader.products[read.input], key=lambda n: reader.order[n]):
        reader.start_site()
        try:
            parts, internal = _lift(reader, product, weights, softmax, read, candidate)
            site.described = describe(parts)
            site.internal = with_shape_uses(reader, internal, site.described.nodes, product.node)
            check_uses(reader, site.internal, product.node)
            check_window(reader, site.described, product.node)
            return site
        except Unreadable as error:
            best = best or error
        except Exception as error:
            return failed(product.node, FORM, region, error)
    assert best is not None
    return Site(
        product.node,
        FORM,
        region,
        refusal=best.reason,
        refused_at=best.node,
        kind="attention" if site.described is not None else "near miss",
    )


def _lift(
    reader: Reader, product: Product, weights: Node, softmax: Node, read: Softmax, scores_product: Node
) -> tuple[Parts, tuple[Node, ...]]:
    """Lifts one site with one choice of the product of queries and keys. Raises `Unreadable`."""
    node = product.node
    region, order = reader.regions.of(node), reader.order
    if product.alpha != 1 or (product.addend is not None and product.beta != 0):
        raise Unreadable("something is added to the product of weights and values", node)
    shape = reader.shape(node)
    output = tuple(Axis(f"o{n}", size) for n, size in enumerate(shape))
    keys = Axis("j", product.summed_size)
    left, right = product.positions(tuple(axis_index(a) for a in output), keys)
    at_weights, at_values, values = (left, right, product.right)
    if weights is product.right:
        at_weights, at_values, values = right, left, product.left

    spine = Spine(reader, softmax, reader.softmaxes, region, of_weights=True)
    expression = spine.read(weights, at_weights, order[node])
    internal = dict.fromkeys(spine.internal)
    made_of, beside = read_weights(reader, spine, expression, (read.input, read.dim), keys)
    internal |= dict.fromkeys(beside)
    at_softmax = spine.leaf_position
    if at_softmax is None:
        raise Unreadable("the weights do not come from the softmax", node)
    behind = sink_position(reader, softmax, read.dim, at_softmax, keys)
    if at_softmax[read.dim] != axis_index(keys) or keys in axes(*at_softmax[: read.dim], *at_softmax[read.dim + 1 :]):
        raise Unreadable("the softmax runs over another dimension than the keys", softmax)
    if reader.regions.of(softmax) != region:
        raise Unreadable("the softmax runs under another context than the product", softmax)
    internal |= dict.fromkeys(read.nodes)

    scores = Spine(reader, scores_product, reader.products, region)
    time = min(order[n] for n in read.nodes)
    score = scores.read(read.input, at_softmax, time)
    value = tensor_value(read.input)
    assert value is not None
    internal |= dict.fromkeys(scores.internal)
    inner = reader.product(scores_product)
    if inner is None or scores.leaf_position is None:
        raise Unreadable("the product of queries and keys cannot be read", scores_product)
    if scores.dropout:
        raise Unreadable("dropout is applied to the scores", scores_product)
    if made_of.zeroed is not None:
        score = masked_once(reader, score, scores, made_of.zeroed, value.dtype)
    sink = None
    if behind is not None:
        score, sink, beside = read_sink(reader, scores, score, read.input, behind, keys, region, time)
    else:
        score, beside = without_row_reductions(reader, score, scores, keys)
    internal |= dict.fromkeys(beside)
    score = _with_product(reader, scores, inner, score)
    dim = Axis("d", inner.summed_size)
    left, right = inner.positions(scores.leaf_position, dim)
    query, key, at_query, at_key = inner.left, inner.right, left, right
    if keys in axes(*left) or (keys.size == 1 and _is_transposed(left, right, at_softmax)):
        query, key, at_query, at_key = inner.right, inner.left, right, left
    if keys in axes(*at_query):
        raise Unreadable("both sides of the score product depend on the key", scores_product)
    rows = [p for n, p in enumerate(at_softmax) if n != read.dim]
    made = tensor_value(scores_product)
    result = tensor_value(node)
    assert made is not None and result is not None
    parts = Parts(
        reader=reader,
        result=node,
        output=output,
        rows_at=(tuple(rows[:-1]), rows[-1] if rows else 0),
        keys=keys,
        dim=dim,
        query=reader.operand(query, at_query, order[scores_product], region, factors=True),
        key=reader.operand(key, at_key, order[scores_product], region, factors=True),
        value=reader.operand(values, at_values, order[node], region, factors=False),
        score=score,
        side=scores.loads,
        score_dtype=_score_dtype(scores, value.dtype),
        product_dtypes=(made.dtype, result.dtype),
        dropout=spine.dropout,
        empty_row_is_nan=read.empty_row_is_nan and not (made_of.guarded or made_of.zeroed or sink),
        nan_guard=made_of.nan_guard,
        result_factors=made_of.factors,
        sink=sink,
    )
    return parts, tuple(n for n in internal if n is not node)


def _score_dtype(scores: Spine, softmax: torch.dtype) -> torch.dtype:
    """The narrowest type the scores pass through: a fill has to mask there, wherever the softmax itself is computed."""
    dtypes = {value.dtype for node in scores.internal if (value := tensor_value(node)) is not None}
    return torch.float16 if torch.float16 in dtypes else softmax


def _is_transposed(left: tuple, right: tuple, at_softmax: tuple) -> bool:  # type: ignore[type-arg]
    """With a single key: whether the rows come from the right operand."""
    rows = axes(*at_softmax)
    return len(axes(*right) & rows) > len(axes(*left) & rows)


def _with_product(reader: Reader, spine: Spine, product: Product, score: Expr) -> Expr:
    """The score with ``alpha`` and the added matrix of ``baddbmm`` spelled out."""
    dot: Expr = Dot()
    if product.alpha != 1:
        factor = reader.scalar(product.alpha, reader.order[product.node])
        if factor is None:
            raise Unreadable("alpha of the score product is not a number", product.node)
        dot = apply("mul", dot, factor)
    if product.addend is not None and product.beta != 0:
        assert spine.leaf_position is not None
        shape = reader.shape(product.addend)
        addend = spine._operand(
            product.addend, broadcast_position(spine.leaf_position, shape), reader.order[product.node]
        )
        if product.beta != 1:
            factor = reader.scalar(product.beta, reader.order[product.node])
            if factor is None:
                raise Unreadable("beta of the score product is not a number", product.node)
            addend = apply("mul", addend, factor)
        dot = apply("add", dot, addend)
    return score if isinstance(dot, Dot) else _with_dot(score, dot)

"""The operations after the product with the values: the division by the sum of exponentials, and a sink's share.

``(exp(s) @ v) / sum(exp(s))`` is the softmax normalised late; ``(softmax(s) @ v) * sigmoid(logsumexp(s) - sink)`` is
the softmax with one more logit, ``sink``, whose weight is discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Apply, Const, Dot, Expr, Load, contains_dot, expression_axes
from attn_pass.model.index import Axis, axis_index
from attn_pass.patterns.row_sums import back_through_views, inverted, read_denominator, read_exponential, read_logsumexp
from attn_pass.patterns.softmax_forms import Softmax, combined
from attn_pass.reading.products import Product
from attn_pass.reading.reach import inputs
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import SideLoad, UseDefWalk
from attn_pass.reading.views import VIEWS, Position, broadcast_position

_FAR = 8  # operations between a product and what is done to its rows
_STEPS = 12  # operations a factor of rows is made of


@dataclass(frozen=True)
class Ending:
    """Where a site ends: its result, over whose axes the product's element lies at ``at_product``.

    With ``factor`` the rows of the product were multiplied by it, or divided.
    """

    node: Node
    output: tuple[Axis, ...]
    at_product: Position
    nodes: tuple[Node, ...] = ()
    factor: SideLoad | None = None
    divides: bool = False


def at_product(reader: Reader, node: Node) -> Ending:
    """A site that ends at its product."""
    output = _axes(reader, node)
    return Ending(node, output, tuple(axis_index(a) for a in output))


def endings(reader: Reader, product: Node) -> Iterator[Ending]:
    """Every product or quotient of the result's rows that follows, through views and casts that have no other user."""
    node = product
    reach = reach_from(reader, product, _FAR)
    for _ in range(_FAR):
        (node, *others) = (*node.users, None)
        if node is None or others != [None]:
            return
        call = reader.call(node)
        if call is None or call.in_place or (call.op not in VIEWS and call.op not in ("cast", "copy", "mul", "div")):
            return
        if call.op in ("mul", "div") and call.get("rounding_mode") is None and tensor_value(node) is not None:
            ending = _ending(reader, node, product, reach)
            if ending is not None:
                yield ending
            return


def _ending(reader: Reader, node: Node, product: Node, reach: Mapping[Node, frozenset[Node]]) -> Ending | None:
    output = _axes(reader, node)
    walk = UseDefWalk(reader, product, reach, reader.regions.of(product))
    try:
        expression = walk.read(node, tuple(axis_index(a) for a in output), reader.order[node])
    except Unreadable:
        return None
    if (
        not isinstance(expression, Apply)
        or expression.op not in ("mul", "div")
        or walk.leaf_position is None
        or walk.dropout
    ):
        return None
    left, right = expression.args
    factor = right if isinstance(left, Dot) else left if isinstance(right, Dot) and expression.op == "mul" else None
    if not isinstance(factor, Load) or factor not in walk.loads:
        return None
    return Ending(
        node, output, walk.leaf_position, tuple(walk.internal), walk.loads[factor], divides=expression.op == "div"
    )


def reach_from(reader: Reader, leaf: Node, steps: int = 64) -> dict[Node, frozenset[Node]]:
    """The nodes whose elements are made of the leaf's by views, casts and pointwise operations."""
    reached = {leaf: frozenset((leaf,))}
    waiting = list(leaf.users)
    while waiting and steps:
        node, steps = waiting.pop(0), steps - 1
        call = reader.call(node)
        if node in reached or call is None or not any(i in reached for i in inputs(call)):
            continue
        reached[node] = frozenset((leaf,))
        waiting += node.users
    return reached


def _axes(reader: Reader, node: Node) -> tuple[Axis, ...]:
    return tuple(Axis(f"o{n}", size) for n, size in enumerate(reader.shape(node)))


# ---------------------------------------------------------------- normalised late


def exponentials(reader: Reader, weights: Node) -> Node | None:
    """The exponentials of a product that weights are, through views and casts."""
    node: object = weights
    for _ in range(_FAR):
        call = reader.call(node) if isinstance(node, Node) else None
        if call is None or not isinstance(node, Node):
            return None
        if (exp := read_exponential(reader, node)) is not None:
            return node if reader.products.get(exp.inner) else None
        if call.op not in VIEWS and call.op not in ("cast", "copy"):
            return None
        node = call["input"]
    return None


def late_softmax(reader: Reader, ending: Ending, product: Product, weights: Node, exp_node: Node) -> Softmax | None:
    """The softmax whose exponentials are divided by their sum after the product; None where they are not."""
    exp, side = read_exponential(reader, exp_node), ending.factor
    if exp is None or side is None or not isinstance(side.written, Node):
        return None
    keys = Axis("j", product.summed_size)
    left, right = product.positions(ending.at_product, keys)
    region = reader.regions.of(product.node)
    walk = UseDefWalk(reader, exp_node, reach_from(reader, exp_node), region)
    try:
        plain = isinstance(
            walk.read(weights, right if weights is product.right else left, reader.order[product.node]), Dot
        )
    except Unreadable:
        return None
    if not plain or walk.leaf_position is None:
        return None
    total = read_denominator(
        reader, side.written, side.written_position, walk.leaf_position, exp_node, inverse=not ending.divides
    )
    return None if total is None else combined(reader, ending.node, exp, total)


# ---------------------------------------------------------------- a sink's share


def sink_of_share(
    reader: Reader, ending: Ending, softmax: Softmax, scores: UseDefWalk, at_softmax: Position, keys: Axis
) -> tuple[Expr, tuple[Node, ...]]:
    """The sink whose share is taken off the rows of the result, and the nodes that compute the share.

    Raises `Unreadable` for any other factor.
    """
    side = ending.factor
    assert side is not None
    factor, position, divides, nodes = _uninverted(reader, side, ending.divides)
    for total in _logarithms(reader, factor):
        walk = UseDefWalk(reader, total, reach_from(reader, total), scores.region)
        try:
            share = walk.read(factor, position, side.written_at)
        except Unreadable:
            continue
        sink = _sink_in(share, inverse=divides)
        if sink is None or walk.leaf_position is None or keys in expression_axes(sink):
            continue
        for input in (softmax.input, _uncast(reader, softmax.input)):
            logsumexp = read_logsumexp(reader, total, walk.leaf_position, at_softmax, input)
            if logsumexp is not None and logsumexp[0] == softmax.dim and softmax.scale == 1:
                scores.loads |= walk.loads
                beside = () if input is softmax.input else (softmax.input,)
                return sink, (*nodes, *walk.internal, *logsumexp[1], *beside)
    raise Unreadable("the rows of the result are multiplied by something other than the share of a sink", ending.node)


def _uninverted(reader: Reader, side: SideLoad, divides: bool) -> tuple[Node, Position, bool, tuple[Node, ...]]:
    """The factor, or what it is the inverse of; whether the rows are divided by that; the nodes that invert it."""
    node, position, nodes = back_through_views(reader, side.written, side.written_position)
    call = reader.call(node)
    while call is not None and not call.in_place and (inverse := inverted(reader, call)) is not None:
        inner, still = inverse
        if not isinstance(inner, Node) or tensor_value(inner) is None:
            break
        position = broadcast_position(position, reader.shape(inner))
        divides = divides if still else not divides
        node, position, more = back_through_views(reader, inner, position)
        nodes, call = (*nodes, *more), reader.call(node)
    return node, position, divides, nodes


def _logarithms(reader: Reader, node: Node) -> Iterator[Node]:
    """The nodes that a factor is made of and that may be a logarithm of a sum of exponentials, nearest first."""
    waiting, seen = [node], set[Node]()
    while waiting and len(seen) < _STEPS:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        call = reader.call(current)
        if call is not None and (call.op == "logsumexp" or (call.op == "add" and _is_logarithm(reader, call["input"]))):
            yield current
        if call is not None:
            waiting += inputs(call)


def _is_logarithm(reader: Reader, node: object) -> bool:
    call = reader.call(node) if isinstance(node, Node) else None
    return call is not None and call.op == "log"


def _sink_in(share: Expr, *, inverse: bool) -> Expr | None:
    """``sink`` of ``sigmoid(lse - sink)``; of ``1 + exp(sink - lse)`` where rows are divided by it."""
    if not inverse and isinstance(share, Apply) and share.op == "div" and share.args[0] == Const(1):
        share, inverse = share.args[1], True
    if not inverse:
        lse, sink = _operands(_operands(share, "sigmoid")[0], "sub")
    else:
        left, right = _operands(share, "add")
        one, raised = (left, right) if left == Const(1) else (right, left)
        sink, lse = _operands(_operands(raised, "exp")[0], "sub") if one == Const(1) else (None, None)
    return sink if sink is not None and isinstance(lse, Dot) and not contains_dot(sink) else None


def _operands(expression: Expr | None, op: str) -> tuple[Expr | None, Expr | None]:
    """The operands of that operation, two of them; None for what is missing and for any other operation."""
    if not isinstance(expression, Apply) or expression.op != op:
        return None, None
    first, *others = expression.args
    return first, others[0] if others else None


def _uncast(reader: Reader, node: Node) -> Node:
    """What was converted to a wider floating type for the softmax alone."""
    call = reader.call(node)
    before = tensor_value(call["input"]) if call is not None and call.op == "cast" else None
    return node if call is None or before is None or not before.is_floating_point() else call["input"]

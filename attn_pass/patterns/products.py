"""The other factors and terms of a product: factors of an einsum, `alpha`, `beta`, and the matrix `baddbmm` adds."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Factor
from attn_pass.model.expression import Const, Dot, Expr, apply, with_dot
from attn_pass.model.index import Axis, axis_index
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.scores import is_small
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.views import Position, broadcast_position


def adds_nothing(reader: Reader, product: Product) -> bool:
    """Whether a product adds no matrix to its sums, or one of zeros."""
    addend = product.addend
    if addend is None or product.beta == 0:
        return True
    value = tensor_value(addend)
    if value is None or not isinstance(product.beta, (int, float)) or product.beta != product.beta:
        return False
    at = tuple(axis_index(Axis(f"z{n}", size)) for n, size in enumerate(reader.shape(addend)))
    element = reader.element(addend, at, reader.order[product.node])
    return isinstance(element, Const) and element.value == 0 and abs(product.beta) < float("inf")


def factors_of_rows(reader: Reader, product: Product, weights: Node, position: Position) -> tuple[Factor, ...]:
    """Further factors of the product's element there, the same for all keys. Raises `Unreadable`."""
    at = dict(zip(product.out_letters, position))
    time, factors = reader.order[product.node], []
    of_rows = product.left_letters if weights is product.left else product.right_letters
    for node, letters in product.factors:
        if not set(letters) <= set(of_rows):
            raise Unreadable("a factor of the weights differs along the head dim of the values", product.node)
        where = broadcast_position(tuple(at[c] for c in letters), reader.shape(node))
        number = reader.scalar(node, time)
        factors.append(Factor(reader.load(node, where, time) if number is None else number))
    return tuple(factors)


def with_product(reader: Reader, walk: UseDefWalk, product: Product, score: Expr) -> Expr:
    """The score with ``alpha``, the added matrix of ``baddbmm`` and further factors of an einsum spelled out."""
    dot: Expr = Dot()
    at = dict(zip(product.out_letters, walk.leaf_position or ()))
    for node, letters in product.factors:
        where = broadcast_position(tuple(at[c] for c in letters), reader.shape(node))
        dot = apply("mul", dot, walk.operand(node, where, reader.order[product.node]))
    if product.alpha != 1:
        factor = reader.scalar(product.alpha, reader.order[product.node])
        if factor is None:
            raise Unreadable("alpha of the score product is not a number", product.node)
        dot = apply("mul", dot, factor)
    if product.addend is not None and product.beta != 0:
        assert walk.leaf_position is not None
        shape = reader.shape(product.addend)
        addend = walk.operand(product.addend, broadcast_position(walk.leaf_position, shape), reader.order[product.node])
        value = tensor_value(product.node)
        if value is not None and not is_small(addend, value.dtype):
            walk.joined.append((value.dtype, addend))
        if product.beta != 1:
            factor = reader.scalar(product.beta, reader.order[product.node])
            if factor is None:
                raise Unreadable("beta of the score product is not a number", product.node)
            addend = apply("mul", addend, factor)
        dot = apply("add", dot, addend)
    return score if isinstance(dot, Dot) else with_dot(score, dot)

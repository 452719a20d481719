"""Scores that are several products joined before the softmax: one product over joined operands.

``cat([q @ k1.mT, q @ k2.mT], -1)`` is ``q @ cat([k1, k2], -2).mT``, element by element, and a ``stack`` of the products
of each head is one product of stacked queries and keys. A bias and a mask that a piece has of its own are joined alike
(`joined_masks`). All of it is written into the graph beside the program's own nodes, where nothing uses it, and the
reader takes the joined scores for a copy of its result. What no site has taken by the end is erased again.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from attn_pass.graph.values import tensor_value
from attn_pass.patterns.base import Site
from attn_pass.patterns.beside import Beside, CannotAdd
from attn_pass.patterns.joined_masks import join_bias, join_masks
from attn_pass.patterns.joined_pieces import Piece, piece_of
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import Call

aten = torch.ops.aten
_MOST = 64  # pieces


@dataclass(frozen=True)
class Joined:
    """Scores that are joined, the joined operands and masks, the product over them, and what it becomes: the scores."""

    scores: Node
    operands: tuple[Node, ...]
    product: Node
    result: Node
    nodes: tuple[Node, ...]


def join_scores(graph: Graph, reader: Reader) -> list[Joined]:
    """Adds the joined operands and their product for all joined scores, and has the reader read these as that."""
    every = []
    for node in list(graph.nodes):
        call = reader.call(node)
        if call is None or call.op not in ("cat", "stack") or tensor_value(node) is None:
            continue
        values, dim = call["input"], call["dim"]
        if not isinstance(dim, int) or not isinstance(values, (list, tuple)) or not 2 <= len(values) <= _MOST:
            continue
        pieces = [piece_of(reader, value, node) for value in values]
        readable = [p for p in pieces if p is not None]
        joined = _joined(graph, reader, node, call, readable) if len(readable) == len(pieces) else None
        if joined is not None:
            every.append(joined)
    return every


def erase_unused(graph: Graph, joined: list[Joined]) -> None:
    """Erases what no site has taken."""
    for one in joined:
        for node in reversed(one.nodes):
            if not node._erased and not node.users:
                graph.erase_node(node)


@contextmanager
def as_read(joined: list[Joined], site: Site) -> Iterator[None]:
    """Has the graph compute what the site reads while it is decided; as it was again, if the site is left.

    What takes a shape from the scores keeps doing so: it gets another tensor of that shape when they go.
    """
    sources = () if site.described is None else site.described.nodes
    used = [one for one in joined if one.product in site.internal or any(n in sources for n in one.operands)]
    of_a_shape = {use.user for use in site.shape_uses}
    for one in used:
        one.scores.replace_all_uses_with(one.result, delete_user_cb=lambda user: user not in of_a_shape)
    try:
        yield
    finally:
        for one in used:
            if not one.result._erased:
                one.result.replace_all_uses_with(one.scores)


@dataclass(frozen=True)
class _Side:
    """An operand of the product over all pieces: the node of each of them, or one for all."""

    nodes: tuple[Node, ...]
    letters: str
    dim: int | None = None  # that the nodes are joined along; None for one that all have


@dataclass(frozen=True)
class _Plan:
    left: _Side
    right: _Side
    out: str
    dim: int  # of the scores, that they are joined along
    is_stack: bool


def _joined(graph: Graph, reader: Reader, scores: Node, call: Call, pieces: list[Piece]) -> Joined | None:
    products = [p.product for p in pieces]
    first = products[0]
    letters = (first.left_letters, first.right_letters, first.out_letters)
    if any((p.scale, p.divides) != (pieces[0].scale, pieces[0].divides) for p in pieces):
        return None
    if any((p.left_letters, p.right_letters, p.out_letters) != letters for p in products):
        return None
    plan = _plan(reader, products, call["dim"], call.op == "stack")
    if plan is None or not _are_alike(reader, scores, pieces, (*plan.left.nodes, *plan.right.nodes)):
        return None
    beside = Beside(graph, reader, scores)
    try:
        return _added(beside, reader, scores, plan, pieces)
    except CannotAdd:
        beside.take_back()
        return None


def _plan(reader: Reader, products: list[Product], dim: int, is_stack: bool) -> _Plan | None:
    """Which operands are joined, and along what; None where that is not one product."""
    first = products[0]
    out = first.out_letters
    where = dim % (len(out) + is_stack)
    letter = out[where] if not is_stack else next(c for c in string.ascii_letters if c not in _letters(first))
    sides = []
    for name in ("left", "right"):
        own: str = getattr(first, f"{name}_letters")
        nodes = tuple(getattr(p, name) for p in products)
        if is_stack and not all(_is_same(reader, nodes[0], n) for n in nodes):
            sides.append(_Side(nodes, letter + own, 0))
        elif not is_stack and letter in own and _is_whole(reader, products, name, letter):
            sides.append(_Side(nodes, own, own.index(letter)))
        elif letter not in own and all(_is_same(reader, nodes[0], n) for n in nodes):
            sides.append(_Side(nodes[:1], own))
        else:
            return None
    left, right = sides
    if left.dim is None and right.dim is None:
        return None
    if any(s.dim is not None and not _may_be_joined(reader, s, is_stack) for s in sides):
        return None
    return _Plan(left, right, out[:where] + letter + out[where:] if is_stack else out, where, is_stack)


def _letters(product: Product) -> str:
    return product.left_letters + product.right_letters + product.out_letters


def _is_whole(reader: Reader, products: list[Product], side: str, letter: str) -> bool:
    """Whether the operand has the dimension as the result has it, and not broadcast."""
    for p in products:
        own: str = getattr(p, f"{side}_letters")
        shape = reader.shape(getattr(p, side))
        if shape[own.index(letter)] != reader.shape(p.node)[p.out_letters.index(letter)]:
            return False
    return True


def _may_be_joined(reader: Reader, side: _Side, is_stack: bool) -> bool:
    values = [tensor_value(n) for n in side.nodes]
    shapes = [reader.shape(n) for n in side.nodes]
    assert side.dim is not None
    rest = shapes if is_stack else [(*s[: side.dim], *s[side.dim + 1 :]) for s in shapes]
    return len(set(rest)) == 1 and len({(v.dtype, v.device) for v in values if v is not None}) == 1


def _is_same(reader: Reader, one: object, other: object) -> bool:
    """Whether two nodes are equal, or the same view of a node that is not written in between: a view may be a copy."""
    if one is other or not isinstance(one, Node) or not isinstance(other, Node):
        return one is other
    call, alike = reader.call(one), reader.call(other)
    if call is None or alike is None or call.op not in VIEWS or one.target != other.target:
        return False
    first, last = sorted(reader.order[n] for n in (one, other))
    if reader.effects.mutation_between(call["input"], first, last) is not None:
        return False
    given = [{name: value for name, value in each.args.items() if name != "input"} for each in (call, alike)]
    return given[0] == given[1] and _is_same(reader, call["input"], alike["input"])


def _are_alike(reader: Reader, scores: Node, pieces: list[Piece], operands: Sequence[Node]) -> bool:
    """Whether the products run where they are joined, on tensors that are not written until then."""
    region, end = reader.regions.of(scores), reader.order[scores]
    if any(reader.regions.of(n) != region for p in pieces for n in p.nodes):
        return False
    first = min(reader.order[n] for p in pieces for n in p.nodes)
    read = [*operands, *(n for p in pieces for n in (p.bias, p.mask) if n is not None)]
    return all(reader.effects.mutation_between(n, first - 1, end) is None for n in read)


def _added(beside: Beside, reader: Reader, scores: Node, plan: _Plan, pieces: list[Piece]) -> Joined:
    """The joined nodes in the graph. Raises `CannotAdd`."""
    sides, operands = [], []
    for side in (plan.left, plan.right):
        if side.dim is None:
            sides.append(side.nodes[0])
            continue
        sides.append(beside.add(aten.stack.default if plan.is_stack else aten.cat.default, list(side.nodes), side.dim))
        operands.append(sides[-1])
    equation = f"{plan.left.letters},{plan.right.letters}->{plan.out}"
    product = result = beside.add_like_scores(aten.einsum.default, equation, sides)
    first = pieces[0]
    if first.scale is not None:
        scaled = aten.div.Tensor if first.divides else aten.mul.Tensor
        result = beside.add_like_scores(scaled, result, first.scale)
    if (bias := join_bias(beside, reader, plan.dim, plan.is_stack, pieces)) is not None:
        operands.append(bias)
        result = beside.add_like_scores(aten.add.Tensor, result, bias)
    if (masks := join_masks(beside, reader, plan.dim, plan.is_stack, pieces)) is not None:
        operands.append(masks[0])
        result = beside.add_like_scores(aten.masked_fill.Scalar, result, *masks)
    reader.take_as(scores, Call("copy", {"input": result}, False))
    return Joined(scores, tuple(operands), product, result, tuple(beside.nodes))

"""Scores of one query over several sets of keys, joined before the softmax: one product over the joined keys.

``cat([q @ k1.mT, q @ k2.mT], -1)`` is ``q @ cat([k1, k2], -2).mT``, element by element. The joined keys and their
product are written into the graph beside the program's own nodes, where nothing uses them, and the reader takes the
``cat`` for a copy of that product. What no site has taken by the end is erased again. Rows of several queries over the
same keys are joined alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from attn_pass.graph.values import fake_value, tensor_value, value_key
from attn_pass.patterns.base import Site
from attn_pass.reading.lift import Reader
from attn_pass.reading.products import Product
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Joined:
    """A ``cat`` of scores, with the joined keys and the product over them."""

    scores: Node
    keys: Node
    product: Node


@dataclass(frozen=True)
class _Piece:
    product: Product
    scale: float | int | None
    divides: bool


def join_scores(graph: Graph, reader: Reader) -> list[Joined]:
    """Adds the joined keys and their product for each ``cat`` of scores, and has the reader read it as that."""
    found = []
    for node in list(graph.nodes):
        call = reader.call(node)
        if call is None or call.op != "cat" or not isinstance(call["dim"], int) or tensor_value(node) is None:
            continue
        values = call["input"]
        if not isinstance(values, (list, tuple)) or len(values) < 2:
            continue
        pieces = [_piece(reader, value, node) for value in values]
        whole = [p for p in pieces if p is not None]
        joined = _joined(graph, reader, node, call["dim"], whole) if len(whole) == len(pieces) else None
        if joined is not None:
            found.append(joined)
    return found


def erase_unused(graph: Graph, joined: list[Joined]) -> None:
    """Erases what no site has taken."""
    for one in joined:
        for node in (one.product, one.keys):
            if not node._erased and not node.users:
                graph.erase_node(node)


@contextmanager
def as_read(joined: list[Joined], site: Site) -> Iterator[None]:
    """Has the graph compute what the site reads while it is decided; as it was again, if the site is left.

    What takes a shape from the scores keeps doing so: it gets another tensor of that shape when they go.
    """
    taken = [one for one in joined if one.product in site.internal]
    of_a_shape = {use.user for use in site.shape_uses}
    for one in taken:
        one.scores.replace_all_uses_with(one.product, delete_user_cb=lambda user: user not in of_a_shape)
    try:
        yield
    finally:
        for one in taken:
            if not one.product._erased:
                one.product.replace_all_uses_with(one.scores)


def _piece(reader: Reader, value: object, cat: Node) -> _Piece | None:
    """A product, or one scaled by a number, that nothing but the ``cat`` uses and nobody writes."""
    if not isinstance(value, Node) or set(value.users) != {cat} or _is_written(reader, value):
        return None
    product, call = reader.product(value), reader.call(value)
    if product is not None:
        plain = product.alpha == 1 and (product.addend is None or product.beta == 0) and not product.factors
        return _Piece(product, None, False) if plain else None
    if call is None or call.op not in ("mul", "div") or call.in_place or call.get("rounding_mode") is not None:
        return None
    inner, scale = call["input"], call["other"]
    if not isinstance(inner, Node) or not isinstance(scale, (int, float)) or set(inner.users) != {value}:
        return None
    product = None if _is_written(reader, inner) else reader.product(inner)
    if product is None or product.addend is not None or product.factors:
        return None
    return _Piece(product, scale, call.op == "div")


def _is_written(reader: Reader, node: Node) -> bool:
    return bool(reader.effects.mutations(node))


def _joined(graph: Graph, reader: Reader, cat: Node, dim: int, pieces: list[_Piece]) -> Joined | None:
    first, products = pieces[0], [p.product for p in pieces]
    letters = (first.product.left_letters, first.product.right_letters, first.product.out_letters)
    if any((p.scale, p.divides) != (first.scale, first.divides) for p in pieces):
        return None
    if any((p.left_letters, p.right_letters, p.out_letters) != letters for p in products):
        return None
    letter = letters[2][dim % len(letters[2])]
    keys_right = letter in letters[1] and letter not in letters[0]
    if not keys_right and (letter in letters[1] or letter not in letters[0]):
        return None
    query, *others = [p.left if keys_right else p.right for p in products]
    keys = [p.right if keys_right else p.left for p in products]
    if not all(_is_same(reader, query, other) for other in others):
        return None
    if not _are_alike(reader, cat, products, [query, *others, *keys]):
        return None
    keys_dim = letters[1 if keys_right else 0].index(letter)
    if not _may_be_joined(reader, keys, keys_dim):
        return None
    equation = f"{letters[0]},{letters[1]}->{letters[2]}"
    with graph.inserting_before(cat):
        joined = graph.call_function(aten.cat.default, (keys, keys_dim))
        both = [query, joined] if keys_right else [joined, query]
        product = graph.call_function(aten.einsum.default, (equation, both))
    _give_values(reader, cat, joined, product, keys, keys_dim)
    scaled = Call("div" if first.divides else "mul", {"input": product, "other": first.scale}, False)
    reader.take_as(cat, Call("copy", {"input": product}, False) if first.scale is None else scaled)
    return Joined(cat, joined, product)


def _is_same(reader: Reader, one: object, other: object) -> bool:
    """Whether two nodes are one, or the same view of one that nobody writes in between: a view may be a copy."""
    if one is other or not isinstance(one, Node) or not isinstance(other, Node):
        return one is other
    call = reader.call(one)
    if call is None or call.op not in VIEWS or (one.target, one.kwargs) != (other.target, other.kwargs):
        return False
    first, last = sorted(reader.order[n] for n in (one, other))
    if reader.effects.mutation_between(call["input"], first, last) is not None:
        return False
    return _is_same(reader, one.args[0], other.args[0]) and one.args[1:] == other.args[1:]


def _are_alike(reader: Reader, cat: Node, products: list[Product], operands: list[Node]) -> bool:
    """Whether the products run where the ``cat`` does, on tensors that are not written until then."""
    region = reader.regions.of(cat)
    if any(reader.regions.of(p.node) != region for p in products):
        return False
    first = min(reader.order[p.node] for p in products)
    return all(reader.effects.mutation_between(o, first - 1, reader.order[cat]) is None for o in operands)


def _may_be_joined(reader: Reader, keys: list[Node], dim: int) -> bool:
    values = [tensor_value(k) for k in keys]
    shapes = [reader.shape(k) for k in keys]
    rest = [(*s[:dim], *s[dim + 1 :]) for s in shapes]
    return len(set(rest)) == 1 and len({(v.dtype, v.device) for v in values if v is not None}) == 1


def _give_values(reader: Reader, cat: Node, joined: Node, product: Node, keys: list[Node], dim: int) -> None:
    """The new nodes' fake values and their place in time and region: the ``cat``'s."""
    key, held = value_key(cat), fake_value(cat)
    with held.fake_mode, torch.set_grad_enabled(reader.regions.of(cat).grad_enabled is not False):
        value = torch.cat([fake_value(k) for k in keys], dim)
    for node, fake in ((joined, value), (product, held)):
        node.meta = {**{k: v for k, v in cat.meta.items() if k != key}, key: fake}
        reader.order[node] = reader.order[cat]
        reader.regions.add(node, reader.regions.of(cat))

"""Weights that are split after the softmax, each piece multiplied with its own values, and the products summed.

``w[..., :n] @ v1 + w[..., n:] @ v2`` is ``w @ cat([v1, v2], -2)``. That product replaces the sum while
the graph is read and decided, and the sum is restored if the site is not rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.index import Axis, Index, axis_index
from attn_pass.patterns.beside import Beside, CannotAdd, InPlace
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader

aten = torch.ops.aten


@dataclass(eq=False)
class Summed(InPlace):
    """One product in the place of a sum of products, and its joined ``values``."""

    values: Node


def join_sums(graph: Graph, reader: Reader) -> list[Summed]:
    """Puts one product in the place of each such sum; the reader knows by now what comes from a softmax."""
    every = []
    for node in list(graph.nodes):
        call = reader.call(node)
        if call is None or call.op != "add" or node._erased or len(terms := list(_terms(reader, node))) < 2:
            continue
        joined = _joined(graph, reader, node, terms)
        if joined is not None:
            every.append(joined)
            reader.put_in_place(joined.new, joined.idle)
            reader.effects.put_in_place_of(joined.new, node)  # what writes to the sum writes to it
    return every


@dataclass(frozen=True)
class _Piece:
    """A product of a piece of the weights: from ``start`` on along the dimension summed over."""

    product: Product
    weights: Node
    start: Index
    size: Index
    weights_left: bool
    nodes: tuple[Node, ...]


def _terms(reader: Reader, node: Node) -> Iterator[tuple[Node, ...]]:
    """The products that are added up, each in a tuple with the additions above it; nothing if one is none."""
    call = reader.call(node)
    assert call is not None
    for value in (call["input"], call["other"]):
        inner = reader.call(value) if isinstance(value, Node) else None
        if inner is None or call.in_place or call["alpha"] != 1 or set(value.users) != {node}:
            continue
        if reader.effects.mutations(value):
            continue
        if inner.op == "add":
            yield from ((*nodes, value) for nodes in _terms(reader, value))
        elif reader.product(value) is not None:
            yield (value,)


def _joined(graph: Graph, reader: Reader, node: Node, terms: list[tuple[Node, ...]]) -> Summed | None:
    pieces = [_piece(reader, nodes[0], node) for nodes in terms]
    in_order = sorted(
        (p for p in pieces if p is not None), key=lambda p: p.start if isinstance(p.start, int) else 1 << 40
    )
    additions = {n for nodes in terms for n in nodes[1:]}
    if len(in_order) != len(pieces) or len(terms) != len(additions) + 2:
        return None
    first = in_order[0]
    if any((p.weights, p.weights_left) != (first.weights, first.weights_left) for p in in_order):
        return None
    letters = (first.product.left_letters, first.product.right_letters, first.product.out_letters)
    if any((p.product.left_letters, p.product.right_letters, p.product.out_letters) != letters for p in in_order):
        return None
    along = letters[0 if first.weights_left else 1].index(first.product.summed)
    end: Index = 0
    for p in in_order:
        if p.start != end:
            return None
        end = end + p.size
    if end != reader.shape(first.weights)[along] or not _values_are_alike(reader, in_order, letters):
        return None
    beside = Beside(graph, reader, node)
    try:
        values = [p.product.right if p.weights_left else p.product.left for p in in_order]
        dim = letters[1 if first.weights_left else 0].index(first.product.summed)
        joined = beside.add(aten.cat.default, values, dim)
        both = [first.weights, joined] if first.weights_left else [joined, first.weights]
        product = beside.add_like_scores(aten.einsum.default, f"{letters[0]},{letters[1]}->{letters[2]}", both)
    except CannotAdd:
        beside.take_back()
        return None
    between = dict.fromkeys(n for p in in_order for n in p.nodes) | dict.fromkeys(additions)
    return Summed(node, tuple(between), product, (product,), tuple(beside.nodes), joined)


def _piece(reader: Reader, node: Node, end: Node) -> _Piece | None:
    """The product as that of a piece of weights with no other user or writer."""
    product, region = reader.product(node), reader.regions.of(end)
    if product is None or product.alpha != 1 or product.addend is not None or product.factors:
        return None
    if len(product.summed) != 1 or product.times is not None or reader.regions.of(node) != region:
        return None
    for left in (True, False):
        weights, letters = (product.left, product.left_letters) if left else (product.right, product.right_letters)
        values = product.right if left else product.left
        if not reader.softmaxes.get(weights):
            continue
        dim = letters.index(product.summed)
        at = [axis_index(Axis(f"p{n}", size)) for n, size in enumerate(reader.shape(weights))]
        back = reader.back(weights, tuple(at), reader.order[node])
        if back is None:
            return None
        source, position, _ = back
        start = position[dim] - at[dim] if len(position) == len(at) else None
        others = [n for n in range(len(at)) if n != dim]
        if start is None or any(position[n] != at[n] for n in others):
            return None
        if tuple(reader.shape(source)[n] for n in others) != tuple(reader.shape(weights)[n] for n in others):
            return None
        until = reader.order[end]
        if reader.effects.mutations(source) or reader.effects.mutations(weights):
            return None
        if reader.effects.mutation_between(values, reader.order[node] - 1, until) is not None:
            return None
        passed = _passed(weights, source)
        return _Piece(product, source, start, reader.shape(weights)[dim], left, (*passed, node))
    return None


def _passed(piece: Node, weights: Node) -> tuple[Node, ...]:
    """The nodes from the weights to a piece of them: a slice, or a split and what takes one of its results."""
    chain = [piece]
    while weights not in chain[0].all_input_nodes:
        chain.insert(0, chain[0].all_input_nodes[0])
    return tuple(chain)


def _values_are_alike(reader: Reader, pieces: list[_Piece], letters: tuple[str, str, str]) -> bool:
    first = pieces[0]
    nodes = [p.product.right if p.weights_left else p.product.left for p in pieces]
    dim = letters[1 if first.weights_left else 0].index(first.product.summed)
    shapes = [reader.shape(n) for n in nodes]
    kinds = {(v.dtype, v.device) for v in map(tensor_value, nodes) if v is not None}
    return len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) == 1 and len(kinds) == 1

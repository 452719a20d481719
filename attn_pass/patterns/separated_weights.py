"""Weights that are a sum of several softmaxes, or a difference: one product with the values for each of them.

``(w1 - factor * w2) @ v``, as in differential attention, is ``w1 @ v - (factor * w2) @ v``. These products replace the
one while the graph is read and decided. Their sites are partners: all of them are rewritten, or the one is restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.graph.values import memory_order, tensor_value
from attn_pass.patterns.base import Site
from attn_pass.patterns.beside import Beside, CannotAdd, InPlace
from attn_pass.reading.parts import Described
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader

aten = torch.ops.aten
_MOST = 4  # softmaxes in one sum: each of them is multiplied with the values again
_ALONE = "the weights are added to others before the product"


def separate(graph: Graph, reader: Reader) -> list[InPlace]:
    """Puts several products in the place of each product with a sum of softmaxes."""
    every = []
    for node in list(graph.nodes):
        product = reader.product(node)
        if product is None or product.alpha != 1 or product.addend is not None or product.factors or product.times:
            continue
        for weights in (product.left, product.right):
            separated = _separated(graph, reader, product, weights) if _is_sum(reader, product, weights) else None
            if separated is not None:
                every.append(separated)
                break
    return every


def with_others_of_sums(reader: Reader, sites: Sequence[Site]) -> list[Site]:
    """The sites, where those of one sum are partners; if one of them cannot be read, the others are refused."""
    sites = list(sites)
    for products in reader.sums:
        numbers = [n for n, site in enumerate(sites) if any(p is site.node or p in site.internal for p in products)]
        group = {id(partner): partner for n in numbers for partner in (sites[n].partners or (sites[n],))}
        if len(numbers) == len(products) and all(s.described is not None and not s.refusal for s in group.values()):
            for site in group.values():
                site.partners, site.alone = tuple(group.values()), _ALONE
            for n in numbers:
                sites[n].described = _as_term(sites[n].described)
            continue
        for n, site in enumerate(sites):
            if id(site) in group:
                sites[n] = replace(site, refusal=site.refusal or _ALONE, partners=(), unshared=None)
    return sites


def _as_term(described: Described | None) -> Described:
    """The same, with what its report has to say of a result that is rounded before it is added up."""
    assert described is not None
    return replace(described, attention=replace(described.attention, is_term=True))


def _is_sum(reader: Reader, product: Product, node: Node) -> bool:
    """Whether weights are a sum of softmaxes, perhaps converted to another floating type, that has no other use."""
    return len(_terms(reader, product, node)[0]) > 1


def _terms(reader: Reader, product: Product, node: Node) -> tuple[list[Node], list[Node]]:
    """The terms of a sum, and the nodes that add them up; a node that is no sum is its only term."""
    call, value = reader.call(node), tensor_value(node)
    users = [user for user in node.users if not is_metadata_assertion(user)]
    alone = len(users) == 1 and not reader.effects.mutations(node)
    if (
        call is None
        or value is None
        or call.in_place
        or not alone
        or reader.regions.of(node) != reader.regions.of(product.node)
    ):
        return [node], []
    if call.op in ("cast", "copy"):
        parts = [call["input"]]
    elif call.op in ("add", "sub") and call["alpha"] == 1:
        parts = [call["input"], call["other"]]
    else:
        return [node], []
    if not all(_has_weights(reader, part, node) for part in parts):
        return [node], []
    inner = [_terms(reader, product, part) for part in parts]
    terms = [term for found, _ in inner for term in found]
    return (terms, [n for _, found in inner for n in found] + [node]) if len(terms) > 1 else ([node], [])


def _has_weights(reader: Reader, part: object, whole: Node) -> bool:
    """Whether an operand is made of a softmax, and has the shape of the sum."""
    value = tensor_value(part)
    if not isinstance(part, Node) or value is None or not value.is_floating_point() or not reader.softmaxes.get(part):
        return False
    return reader.shape(part) == reader.shape(whole)


def _separated(graph: Graph, reader: Reader, product: Product, weights: Node) -> InPlace | None:
    node = product.node
    terms, between = _terms(reader, product, weights)
    start = min(reader.order[n] for n in between)
    held = (*terms, product.right if weights is product.left else product.left)
    if len(terms) > _MOST or any(
        reader.effects.mutation_between(n, start - 1, reader.order[node]) is not None for n in held
    ):
        return None
    beside, products = Beside(graph, reader, node), dict[Node, Node]()
    try:
        for term in terms:
            products[term] = _times_values(beside, reader, product, weights, term)
        combined = _added_up(beside, reader, weights, products)
        if (layout := _layout(reader, node)) is None or _layout(reader, combined) != layout:
            raise CannotAdd("it has another layout")
    except CannotAdd:
        beside.take_back()
        return None
    separated = InPlace(node, tuple(between), combined, tuple(products.values()), tuple(beside.nodes))
    for each in separated.products:
        reader.put_in_place(each, separated.idle)
    reader.forget(combined.users)
    reader.sums.append(separated.products)
    reader.effects.put_in_place_of(combined, node)
    return separated


def _times_values(beside: Beside, reader: Reader, product: Product, weights: Node, term: Node) -> Node:
    """The product with one term instead of the sum. Raises `CannotAdd`."""
    value, whole = tensor_value(term), tensor_value(weights)
    assert value is not None and whole is not None
    if value.dtype != whole.dtype:
        converted = beside.add(aten.to.dtype, term, whole.dtype)
        reader.has_reach_of(converted, term)
        term = converted
    both = [term if n is weights else n for n in (product.left, product.right)]
    equation = f"{product.left_letters},{product.right_letters}->{product.out_letters}"
    return beside.add_like_scores(aten.einsum.default, equation, both)


def _added_up(beside: Beside, reader: Reader, node: Node, products: Mapping[Node, Node]) -> Node:
    """What was added up to the weights, of the products. Raises `CannotAdd`."""
    if node in products:
        return products[node]
    call = reader.call(node)
    assert call is not None
    if call.op in ("cast", "copy"):
        return _added_up(beside, reader, call["input"], products)
    both = [_added_up(beside, reader, call[name], products) for name in ("input", "other")]
    return beside.add_like_scores(aten.add.Tensor if call.op == "add" else aten.sub.Tensor, *both)


def _layout(reader: Reader, node: Node) -> tuple[int, ...] | None:
    value = tensor_value(node)
    return None if value is None else memory_order(value, reader.sizes)

"""Parts of a mask that are broadcast, computed before they are: Inductor would compute them again for each element.

Inductor computes a mask or a bias in one loop with everything that it is made of. Where a part of it is broadcast, as
the regions of Swin's shifted windows are over images and heads, that part is computed again for each of them: 7 ms for
512 x 3 x 49 x 49 elements in bfloat16, which is twice the time of the attention (seen in torch 2.13.0). So such a part
becomes a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.values import Sizes, memory_order, nodes_in, tensor_value, value_key, wants_gradient
from attn_pass.model.index import product
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import understand

_OPERANDS = ("keep", "bias", "captured")
_LOOKUPS = ("index", "index_select", "embedding")
_TIMES, _LEAST = 4, 1 << 15  # how often it would be computed, and for how many elements, from which on it counts


class _Part(NamedTuple):
    user: Node  # a pointwise operation
    views: tuple[Node, ...]  # what it reads, and the views that this is of the part, last first
    part: Node


def compute_once(graph: Graph, operators: Collection[object], sizes: Sizes) -> bool:
    """Makes buffers of the parts of all masks in a graph that Inductor compiles; returns whether there are any."""
    found: list[_Part] = []
    seen: set[Node] = set()  # layers share their masks
    for node in graph.nodes:
        if node.target in operators:
            for operand in nodes_in([node.kwargs.get(name) for name in _OPERANDS]):
                found += _parts(operand, sizes, seen)
    if not found:
        return False
    effects = Effects(graph)
    kept = [part for part in found if _is_read_only(part, effects)]
    for part in kept:
        _make_buffer(graph, part)
    return bool(kept)


def _is_read_only(found: _Part, effects: Effects) -> bool:
    """Whether what the user reads is still the part, and nobody writes to it through the user's result.

    Some views are copies, such as ``repeat``, and may be written where the part is not.
    """
    until = effects.position[found.user]
    read = (*found.views, found.part)
    if any(effects.mutation_between(n, effects.position[n], until) is not None for n in read):
        return False
    return found.user not in effects.aliases(read[0])


def _make_buffer(graph: Graph, found: _Part) -> None:
    from torch._inductor.inductor_prims import force_stride_order  # as it is: its argument becomes a buffer

    fake = tensor_value(found.part)
    assert fake is not None
    with graph.inserting_before(found.user):
        value = graph.call_function(force_stride_order, (found.part, list(fake.stride())))
        value.meta[value_key(found.part)] = fake
        before = found.part
        for view in reversed(found.views):
            copied = graph.node_copy(view, {before: value}.get)  # other arguments are numbers
            before, value = view, copied
    found.user.replace_input_with(before, value)


def _parts(node: Node, sizes: Sizes, seen: set[Node]) -> Iterator[_Part]:
    """Those of a value that Inductor computes in one loop with what it is made of."""
    if node in seen:
        return
    seen.add(node)
    call = understand(node)
    if node.target is torch.ops.aten.view.dtype or (call is not None and call.op in (*VIEWS, "copy")):
        yield from (part for source in node.all_input_nodes[:1] for part in _parts(source, sizes, seen))
    elif call is None or call.in_place:
        return
    elif _is_pointwise(call.op):
        elements = _elements(node, sizes)
        for operand in node.all_input_nodes:
            views, part = _through_views(operand)
            if tensor_value(part) is None:
                continue
            if _elements(part, sizes) * _TIMES > elements:
                yield from _parts(part, sizes, seen)
            elif elements >= _LEAST and _is_computed(part, sizes):
                yield _Part(node, views, part)


def _through_views(node: Node) -> tuple[tuple[Node, ...], Node]:
    views: list[Node] = []
    while (call := understand(node)) is not None and call.op in VIEWS and not call.in_place:
        if len(node.all_input_nodes) != 1:
            break
        views.append(node)
        node = node.all_input_nodes[0]
    return tuple(views), node


def _is_computed(node: Node, sizes: Sizes) -> bool:
    """Whether it is computed in the loop that reads it, in inference, and its layout is known."""
    call, value = understand(node), tensor_value(node)
    if call is None or value is None or wants_gradient(node) or not (_is_pointwise(call.op) or call.op in _LOOKUPS):
        return False
    is_dense = memory_order(value, sizes) is not None
    return value.dim() > 0 and is_dense and all(isinstance(s, int) for s in value.stride())


def _is_pointwise(op: str) -> bool:
    return op in POINTWISE or op == "cast"


def _elements(node: Node, sizes: Sizes) -> int:
    value = tensor_value(node)
    return 0 if value is None else sizes.hint(product(sizes.shape(value)))

"""A graph as regions are looked for in it: one mask for attentions that compute it each for itself, fewer views.

Of equal operations on the same tensors the first is taken. Where heads and sequences of an attention's result are put
into one dimension, and apart again, they stay apart: so a batch of the program is one of the packed rows, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from attn_pass.graph.effects import Effects, is_pure
from attn_pass.graph.numbering import Numbers
from attn_pass.graph.random_draws import may_draw
from attn_pass.graph.regions import Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.graph.writes import call_writes
from attn_pass.padding.added import added_mask, ancestors
from attn_pass.padding.masks import PER_BATCH, mask_of
from attn_pass.reading.vocabulary import understand

_FILLS = {
    "masked_fill_": torch.masked_fill,
    torch.ops.aten.masked_fill_.Scalar: torch.ops.aten.masked_fill.Scalar,
    torch.ops.aten.masked_fill_.Tensor: torch.ops.aten.masked_fill.Tensor,
}


def share_masks(graph: Graph, operators: Collection[Any], regions: Regions) -> None:
    """Gives every attention of a graph the first of the masks that are computed alike."""
    numbers = Numbers(Effects(graph), regions)
    first: dict[Any, Node] = {}
    for site in graph.nodes:
        if site.op != "call_function" or site.target not in operators:
            continue
        for name in ("keep", *PER_BATCH):
            mask = site.kwargs.get(name)
            if isinstance(mask, Node) and (shared := first.setdefault(numbers.of(mask), mask)) is not mask:
                site.update_kwarg(name, shared)
                erase(graph, mask)
        added = added_mask(site)
        if added is not None and (shared := first.setdefault(numbers.of(added), added)) is not added:
            position = {node: n for n, node in enumerate(graph.nodes)}
            if all(position[user] > position[shared] for user in added.users):
                added.replace_all_uses_with(shared)
                erase(graph, added)


def fill_masks_apart(graph: Graph, operators: Collection[Any]) -> None:
    """Masks that are filled in place, in memory that nobody has seen: a copy that is filled is the same.

    So `nn.MultiheadAttention` makes its own. What reads the memory afterwards reads the copy.
    """
    masks = {mask for site in graph.nodes if site.target in operators for mask in mask_of(site).nodes}
    made_of = ancestors(masks)
    for node in [n for n in graph.nodes if n in made_of]:
        call = understand(node)
        if call is None or call.op != "masked_fill" or not call.in_place or not isinstance(call["input"], Node):
            continue
        target, effects = call["input"], Effects(graph)
        aliases, at = effects.aliases(target), effects.position[node]
        before = [alias for alias in aliases if effects.position[alias] < at]
        if before != [target] or not effects.is_internal(target, set(aliases)) or node.target not in _FILLS:
            continue
        node.op, node.target = "call_function", _FILLS[node.target]
        for user in [u for u in target.users if effects.position[u] > at]:
            user.replace_input_with(target, node)


def keep_heads_apart(graph: Graph, operators: Collection[Any], sizes: Sizes) -> None:
    """Takes attentions' results as they are where a view of a view of them has their own shape."""
    effects = Effects(graph)
    for site in list(graph.nodes):
        if site.op != "call_function" or site.target not in operators or tensor_value(site) is None:
            continue
        if effects.mutations(site):
            continue
        for merged in [u for u in site.users if _is_view(u) and not effects.mutations(u)]:
            for apart in [u for u in merged.users if _is_view(u)]:
                values = [tensor_value(n) for n in (site, merged, apart)]
                shapes = [() if v is None else sizes.shape(v) for v in values]
                if shapes[0] == shapes[2] and len(shapes[1]) < len(shapes[0]):
                    _replace(graph, apart, site)
            erase(graph, merged)


def move_masks_up(graph: Graph, operators: Collection[Any], regions: Regions) -> None:
    """What masks are made of, to where it can be computed first: rows leave a region behind its mask only.

    Parameters and buffers move with it: under ``freezing`` each is read where it is used first.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    masks = {mask for site in graph.nodes if site.target in operators for mask in mask_of(site).nodes}
    if not inputs or not masks:
        return
    effects, last = Effects(graph), inputs[-1]
    state, moved = regions.of(last), set[Node]()

    def may_move(node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        same = regions.of(node) == state and is_pure(node) and not may_draw(node)
        return same and not any(effects.mutations(n) for n in (node, *node.all_input_nodes))

    for mask in masks:
        made_of = ancestors([mask])
        if all(may_move(node) for node in made_of):
            moved |= made_of
    for node in [n for n in graph.nodes if n in moved and n.op != "placeholder"]:
        last.append(node)
        last = node


def erase_unread_writes(graph: Graph) -> None:
    """Takes out what writes to memory that nobody reads any more, as a sum in place does that a kernel takes over."""
    effects = Effects(graph)
    for node in reversed(list(graph.nodes)):
        call, writes = understand(node), call_writes(node)
        if call is None or not call.in_place or node.users or len(writes) != 1:
            continue
        target = writes[0].target
        aliases, at = effects.aliases(target), effects.position[node]
        read = any(effects.position[user] > at for alias in aliases for user in alias.users)
        if not read and effects.is_internal(target, set(aliases)):
            made_of = node.all_input_nodes
            graph.erase_node(node)
            erase(graph, *made_of)


def _is_view(node: Node) -> bool:
    call = understand(node)
    value = tensor_value(node)
    source = None if call is None or call.op != "reshape" else tensor_value(call["input"])
    return value is not None and source is not None and source.dtype == value.dtype


def _replace(graph: Graph, view: Node, site: Node) -> None:
    """In the memory order that it had: users may see it in another shape."""
    with graph.inserting_before(view):
        copied = graph.call_function(torch.ops.aten.clone.default, (site,), {"memory_format": torch.contiguous_format})
    copied.meta = dict(view.meta)
    view.replace_all_uses_with(copied)
    graph.erase_node(view)


def erase(graph: Graph, *nodes: Node) -> None:
    """Nodes and what they were made of, where nothing else uses it."""
    waiting, seen = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node.users:
            continue
        seen.add(node)
        if node.op in ("call_function", "call_method") and is_pure(node):
            made_of = node.all_input_nodes
            graph.erase_node(node)
            waiting += made_of

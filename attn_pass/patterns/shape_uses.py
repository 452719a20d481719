"""Users of the scores' shape: they disappear with the scores, or get another tensor of that shape."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from attn_pass.graph.effects import is_metadata_assertion, is_pure
from attn_pass.graph.names import torch_name
from attn_pass.graph.random_draws import draws_random_numbers
from attn_pass.graph.stand_in import ShapeUse, can_stand_in
from attn_pass.reading.reader import Reader
from attn_pass.reading.views import VIEWS

_MOST = 64


def with_shape_uses(
    reader: Reader, internal: Iterable[Node], sources: Iterable[Node], result: Node
) -> tuple[Node, ...]:
    """The inner nodes and those that take no more than a shape from them on the way to the site, or end nowhere.

    ``zeros_like(scores)``, ``mask.expand_as(scores)``: once the site is read from the mask itself, nothing needs them;
    nor does anything need what torch.export leaves of weights that a caller throws away.
    """
    inside = dict.fromkeys(internal)
    read = set(sources)
    for node in list(inside):
        for user in node.users:
            if user in inside or user is result:
                continue
            ends_here = _takes_a_shape(reader, user, node) is not None
            inside |= dict.fromkeys(_leads_nowhere_else(reader, user, {*inside, result}, read, ends_here))
    return tuple(inside)


def remaining_shape_uses(reader: Reader, internal: Iterable[Node], result: Node) -> tuple[ShapeUse, ...]:
    """The other calls that use only the shape of the inner nodes: index arithmetic does not use the scores.

    The mask that is made of it stays where something needs it: ``torch.ones_like(scores).tril()``.
    """
    inside = {*internal, result}
    uses = []
    for node in inside - {result}:
        for user in node.users:
            use = None if user in inside or is_metadata_assertion(user) else _takes_a_shape(reader, user, node)
            if use is not None and can_stand_in(use, reader.sizes):
                uses.append(use)
    return tuple(uses)


_LIKE = ("expand_as", "view_as", "reshape_as", "type_as")  # of the second operand
_OF_A_DTYPE = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
_SIZES = ("size", "sym_size", "dim", "numel", "ndimension")
_AS_LARGE = ("zeros_like", "ones_like", "full_like", "empty_like", "copy")
_ATTRIBUTES = ("shape", "dtype", "device", "ndim")


def _takes_a_shape(reader: Reader, user: Node, node: Node) -> ShapeUse | None:
    """Whether all that ``user`` takes from ``node`` is its shape, its type or where it lies."""
    name = torch_name(user)
    first = user.args[0] if user.args else user.kwargs.get("input", user.kwargs.get("self"))
    mentions = sum(a is node for a in (*user.args, *user.kwargs.values()))
    if mentions != 1 or "out" in user.kwargs:
        return None
    if name in _LIKE:
        return None if first is node else ShapeUse(user, node, strides=False)
    if first is not node:
        return None
    if name == "getattr":
        return ShapeUse(user, node, strides=False) if user.args[1] in _ATTRIBUTES else None
    if name in _OF_A_DTYPE or name in _SIZES:
        return ShapeUse(user, node, strides=False)
    return ShapeUse(user, node, strides=True) if name in _AS_LARGE or _is_view_for_a_shape(reader, user) else None


def _is_view_for_a_shape(reader: Reader, node: Node, steps: int = 4) -> bool:
    """Whether a node is a view of which only the shape is used: ``zeros_like(scores[..., :1])``.

    A slice has gaps in memory, so the whole tensor is replaced; the view is then a view of the replacement.
    """
    call = reader.call(node)
    if call is None or steps == 0 or call.op not in VIEWS or not reader.is_alias(node, call):
        return False
    if node in reader.needed or not node.users:  # what a call that is taken apart is going to give back
        return False
    return all(
        _takes_a_shape(reader, u, node) is not None or _is_view_for_a_shape(reader, u, steps - 1) for u in node.users
    )


def _leads_nowhere_else(
    reader: Reader, start: Node, site: set[Node], read: set[Node], ends_here: bool
) -> tuple[Node, ...]:
    """The nodes from ``start`` to nowhere, or with ``ends_here`` to the site; none if one leads anywhere else.

    Nor if the site reads one of them, or there are too many to look at.
    """
    nodes: dict[Node, None] = {}
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node in nodes or (ends_here and node in site):
            continue
        stops = node in site or node in read or node.op == "output" or len(nodes) > _MOST
        stops = stops or node in reader.needed
        if stops or not is_pure(node) or draws_random_numbers(node) or reader.effects.mutations(node):
            return ()
        nodes[node] = None
        waiting += node.users
    return tuple(nodes)

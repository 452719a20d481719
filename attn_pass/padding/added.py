"""Masks that are added to scores in training: which number of a sum says what is kept, found when the program runs.

The gradient of a row that such a mask masks fully passes through the sum, and that of a learned bias is a sum over all
sequences. So an attention with either is called as it was, with its operands in their places, and only what surrounds
it runs on packed rows. A key whose score is absorbed has the weight 0 for every row that has another one, and passes no
gradient on; a sequence that has none is kept whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.graph.writes import call_writes
from attn_pass.model.mask import ABSORBING
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import understand

_WIDE = (torch.float32, torch.bfloat16)  # their lowest numbers absorb a score
_BOTH, _ONE = ("input", "other"), ("input",)
# What makes a mask of numbers, and the operands that the numbers are in.
_OF_NUMBERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "where", "method_where"), _BOTH),
    **dict.fromkeys(("cast", "copy", "neg", "detach", *VIEWS), _ONE),
    "clamp": _ONE,
    "masked_fill": ("input", "value"),
    "full": ("fill_value",),
    "scalar": ("value",),
}
_FILLED = {"zeros": 0.0, "ones": 1.0}
_COMBINING: Mapping[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda x, y: y - x,
    "mul": operator.mul,
}


def added_mask(site: Node) -> Node | None:
    """What an attention with gradients adds to its scores to mask keys, (B, 1, 1 or L, S): numbers, or truth values
    where a number that masks stands in the place of something learned.

    None where it masks by something else as well, or where what is added beside it is not learned, the same for all
    sequences: it may mask, too. If the kernel is given the two apart, what is added beside is known to mask nothing.
    """
    bias, keep = site.kwargs.get("bias"), site.kwargs.get("keep")
    if not has_gradients(site) or any(site.kwargs.get(name) is not None for name in ("starts", "ends")):
        return None
    if site.kwargs.get("fill_is_added"):
        return keep if isinstance(keep, Node) and all(map(_is_shared, _beside(site))) else None
    if not isinstance(bias, Node) or keep is not None:
        return None
    parts = list(_parts(bias))
    masks = [n for n in parts if not is_trained(n)]
    if len(masks) != 1 or not _masks(masks[0]) or not all(_is_shared(n) for n in parts if n is not masks[0]):
        return None
    return masks[0]


def has_gradients(site: Node) -> bool:
    """Whether a call is one of the kernel's with gradients, which has several results."""
    return isinstance(fake_value(site), (tuple, list))


def is_called_whole(site: Node) -> bool:
    """Whether an attention of a region is called as it was: its mask is added, or what it adds is learned."""
    captured = _nodes(site.kwargs.get("captured") or ())  # type: ignore[arg-type]
    return has_gradients(site) and (added_mask(site) is not None or any(map(is_trained, (*_beside(site), *captured))))


def adds_learned(site: Node) -> bool:
    """Whether an attention adds its mask to something learned, which is taken to mask no key itself."""
    return added_mask(site) is not None and any(map(is_trained, _beside(site)))


def is_trained(node: Node) -> bool:
    """Whether a tensor may have a gradient, by what it is made of."""
    return any(value.requires_grad for n in ancestors((node,)) if (value := tensor_value(n)) is not None)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are made of."""
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def behind_views(node: Node) -> Node:
    """What a node is a view of, or a copy."""
    call = understand(node)
    while call is not None and (call.op in VIEWS or call.op == "copy") and isinstance(call["input"], Node):
        node = call["input"]
        call = understand(node)
    return node


Range = tuple[float, float] | None


def range_of_numbers(value: object, known: dict[Node, Range] | None = None) -> Range:
    """The lowest and the highest number that a mask of numbers holds, as its program is written; None if they are not
    known. What it is made of, truth values or integers, is taken for ones and zeros.
    """
    if not isinstance(value, Node):
        return (float(value), float(value)) if isinstance(value, (int, float)) else None
    known = {} if known is None else known
    if value not in known:
        known[value] = None if _is_written(value) else _range_of(value, known)
    return known[value]


def _range_of(node: Node, known: dict[Node, Range]) -> Range:
    fake, call = tensor_value(node), understand(node)
    if call is not None and call.op in _FILLED:
        return (_FILLED[call.op],) * 2
    if fake is None or not fake.is_floating_point():
        return None if fake is None else (0.0, 1.0)
    if call is None or call.op not in _OF_NUMBERS or call.get("alpha", 1) != 1:
        return None
    parts = [range_of_numbers(call[name], known) for name in _OF_NUMBERS[call.op]]
    ranges = [part for part in parts if part is not None]
    if len(ranges) < len(parts):
        return None
    if call.op in _COMBINING:
        (one, other), combine = ranges, _COMBINING[call.op]
        ends = [combine(x, y) for x in one for y in other]
        return min(ends), max(ends)
    if call.op == "neg":
        return -ranges[0][1], -ranges[0][0]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _is_written(node: Node) -> bool:
    """Whether something writes to a tensor, or to a view of it."""
    written = any(write.target is node for user in node.users for write in call_writes(user))
    views = (user for user in node.users if (call := understand(user)) is not None and call.op in VIEWS)
    return written or any(map(_is_written, views))


def between_sum_and_mask(site: Node) -> list[Node]:
    """What an attention adds, and the parts of it that its mask is in: none of them may have been written."""
    bias = site.kwargs.get("bias")
    seen: list[Node] = []
    if isinstance(bias, Node) and added_mask(site) is not None:
        list(_parts(bias, seen.append))
    return seen


def _parts(node: Node, see: Callable[[Node], object] = lambda _: None) -> Iterator[Node]:
    """What a sum is made of, as far as it has a gradient; of a number in its place the condition that there is none.

    ``see`` gets everything on the way.
    """
    see(node)
    call = understand(node) if is_trained(node) else None
    if call is not None and not call.in_place:
        if call.op == "add" and call["alpha"] == 1 and all(isinstance(call[name], Node) for name in ("input", "other")):
            yield from _parts(call["input"], see)
            yield from _parts(call["other"], see)
            return
        if call.op in ("cast", "copy") and isinstance(call["input"], Node):
            yield from _parts(call["input"], see)
            return
        if call.op == "where" and isinstance(call["input"], Node) and _absorbs(call["other"]):
            yield from _parts(call["input"], see)
            yield call["condition"]
            return
    yield node


def _masks(node: Node) -> bool:
    """Whether a tensor is a condition, or a number that absorbs scores is among those that it is made of."""
    value = tensor_value(node)
    if value is None or value.dim() != 4:
        return False
    numbers = (x for n in ancestors((node,)) for x in (*n.args, *n.kwargs.values()))
    return value.dtype == torch.bool or (value.dtype in _WIDE and any(map(_absorbs, numbers)))


def _absorbs(number: Any) -> bool:
    return type(number) in (int, float) and number <= ABSORBING


def _is_shared(node: Node) -> bool:
    """Whether a tensor is the same for all sequences."""
    value = tensor_value(node)
    return value is not None and (value.dim() < 4 or (isinstance(value.shape[0], int) and value.shape[0] == 1))


def _beside(site: Node) -> tuple[Node, ...]:
    """What is added to scores as it is: a matrix or a vector of distances."""
    return tuple(_nodes(site.kwargs.get(name) for name in ("bias", "distances")))


def _nodes(values: Iterable[Any]) -> Iterator[Node]:
    return (x for x in values if isinstance(x, Node))

"""Block lists whose values are known when the program is read: checks by computation whether they equal `mask_mod`.

An exported program holds the lists of a `BlockMask` that was made outside of it as constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from attn_pass.graph.expand import CannotExpand, run_again
from attn_pass.graph.subgraphs import placeholders
from attn_pass.patterns.flex_bodies import on_grid
from attn_pass.patterns.flex_lists import Lists, keep_by_lists, listed_once

_MOST = 1 << 26  # scores that are looked at: an image of 8192 by 8192
Known = Mapping[Node, tuple[str, Tensor]]


class _Torch:
    def again(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_again(node, args, kwargs)


def known_to_agree(
    lists: Lists, mask: GraphModule, arguments: Mapping[str, Any], scores: Sequence[Any], known: Known
) -> tuple[str, ...] | None:
    """The names of the tensors by whose values the lists keep what ``mask_mod`` keeps, each block listed once.

    None where a value is not known, or they do not.
    """
    captured = arguments.get("mask_mod_other_buffers", ())
    needed = [x for x in (lists.partial, lists.partial_at, lists.full, lists.full_at, *captured) if x is not None]
    nodes = [x for x in needed if isinstance(x, Node)]
    if any(node not in known for node in nodes) or not all(isinstance(n, int) for n in scores):
        return None
    # A function that does not look at the batch entry or the head says the same of all.
    looked_at = [bool(p.users) for p in placeholders(mask)[:2]]
    shape = [n if used else 1 for n, used in zip(scores[:2], looked_at)] + list(scores[2:])
    if math.prod(shape) > _MOST:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        agree = _agree(lists, mask, captured, shape, scores, known)
    return tuple(dict.fromkeys(known[node][0] for node in nodes)) if agree else None


def _agree(
    lists: Lists, mask: GraphModule, captured: Sequence[Any], shape: Sequence[int], scores: Sequence[int], known: Known
) -> bool:
    def value(x: Any) -> Any:
        return known[x][1] if isinstance(x, Node) else x

    held = replace(lists, **{n: value(getattr(lists, n)) for n in ("partial", "partial_at", "full", "full_at")})
    if any(n not in (1, all_of) for n, all_of in zip(held.partial.shape[:2], scores[:2])):
        return False
    device = held.partial.device
    grid = [
        torch.arange(n, device=device).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(shape)
    ]
    try:
        keep = on_grid(_Torch(), mask, grid, [value(x) for x in captured])
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or not listed_once(held):
            return False
        listed_keep = keep_by_lists(held, keep, (grid[2].view(-1, 1), grid[3].view(-1)))
    except (CannotExpand, RuntimeError, IndexError):
        return False  # lists that are too short, an index that is out of range
    return torch.equal(*torch.broadcast_tensors(listed_keep, keep))

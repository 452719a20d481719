"""Keeps Inductor's own attention patterns away from softmaxes that attn_pass left, and knows Inductor's pass slots.

Inductor's patterns ignore literals, so code that only looks like attention is rewritten to something else
(pytorch/pytorch#196468, #195320). A pattern match is dropped when its nodes lie in more
than one mutation region (`torch._inductor.pattern_matcher.PatternMatcherPass.apply`), and every attention pattern
holds the softmax's exponential: a region of its own for that one node refuses them all and changes nothing else.
Left alone are softmaxes of which the patterns are proved to make what was written (`rewriting/left_to_stock.py`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from attn_pass.compat import pre_grad_slot_takes_list
from attn_pass.devices.registry import families, of_type
from attn_pass.entries.identity import identity
from attn_pass.entries.saved_values import SavedValues
from attn_pass.graph.provenance import is_left_to_stock
from attn_pass.options import Options

log = logging.getLogger(__name__)

GraphPass = Callable[[Graph], None]

PRE_SLOT, POST_SLOT, SAVED_SLOT = "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass"
SLOTS = (PRE_SLOT, POST_SLOT, SAVED_SLOT)

_REGION = "mutation_region_id"
_WHOLE_SOFTMAX = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})


class Shield(CustomGraphPass):
    """A `joint_custom_pre_pass`: gives softmaxes of the joint graph a mutation region of their own; never raises.

    Attributes:
        options: the user's, by which sites were left.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, graph: Graph) -> None:
        """Mark the softmaxes of this graph, which Inductor is about to search for attention."""
        try:
            _separate_softmaxes(graph)
        except Exception:
            log.debug("the shield failed, so Inductor's own attention patterns stay on for this graph", exc_info=True)

    def uuid(self) -> str:
        """Identity for Inductor's caches: of this file, the CPU kernel, and all that decides what is left to stock."""
        return f"{_identity('shield')}:{identity(self.options)}"


class Unshield(CustomGraphPass):
    """A `joint_custom_post_pass`: takes the marks back, so that post-grad patterns (online softmax) still match."""

    def __call__(self, graph: Graph) -> None:
        """Give every node of a marked graph its plain mutation region again."""
        try:
            if any(node.meta.get(_REGION, 0) < 0 for node in graph.nodes):
                _number_regions(graph)
        except Exception:
            log.debug("the shield's marks stay", exc_info=True)

    def uuid(self) -> str:
        """Identity for Inductor's caches: a hash of this file and of the CPU kernel."""
        return _identity("unshield")


OWN = (Shield, Unshield, SavedValues)
"""The passes of this package in these slots."""


def shield_patches(slots: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Inductor config patches that add the shield, and the layout of saved values, to what the slots hold.

    Without the shield its second pass, which then has nothing to do, still tells Inductor's caches which kernels the
    graph was lowered by.

    Args:
        slots: current values of `SLOTS`; what others put there stays.
        options: the user's.
    """
    before, after, last = (without(slots.get(name), OWN) for name in SLOTS)
    patches = {POST_SLOT: slot_of([Unshield(), *after]), SAVED_SLOT: slot_of([*last, SavedValues()])}
    return {PRE_SLOT: slot_of([*before, Shield(options)]), **patches} if options.shield else patches


# ---- Inductor's slots for custom passes: one callable on torch 2.11, also a list of them on 2.13 ----


class Chain(CustomGraphPass):
    """Several graph passes in the place of one, for a torch whose slots take one callable."""

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run the passes in order."""
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The identities of all passes; None (Inductor then skips its cache) if one has none."""
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return tuple(ids) if all(ids) else None


def passes_of(slot: Any) -> tuple[Any, ...]:
    """The passes a slot's value stands for: None, one pass, a Chain, a list or a tuple."""
    if slot is None:
        return ()
    if isinstance(slot, Chain):
        return slot.passes
    return tuple(slot) if isinstance(slot, list | tuple) else (slot,)


def without(slot: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The passes of a slot that are not of these classes."""
    return [p for p in passes_of(slot) if not isinstance(p, kinds)]


def slot_of(passes: Sequence[Any]) -> Any:
    """A value for a slot that runs these passes in order, in the form this torch takes; None for no pass."""
    if not passes:
        return None
    return list(passes) if pre_grad_slot_takes_list() else Chain(passes)


# ---- the marks ----


def _separate_softmaxes(graph: Graph) -> None:
    softmaxes = list(_softmaxes(graph))
    if not softmaxes:
        return
    _number_regions(graph)
    for own_region, node in enumerate(softmaxes, start=1):
        node.meta[_REGION] = -own_region  # Inductor numbers regions from 0 upwards


def _is_shielded(node: Node) -> bool:
    """Where attn_pass has no rules of its own yet, what Inductor does is left to it: never slower than stock."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or of_type(value.device.type).keeps_inductors_patterns_off


def _softmaxes(graph: Graph) -> Iterator[Node]:
    """One node of each softmax: the call, or the exponential that its own sum divides once it is decomposed."""
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.op != "call_function" or is_left_to_stock(node) or not _is_shielded(node):
            continue
        if node.target in _WHOLE_SOFTMAX or (
            node.target is aten.exp.default and any(user.target is aten.sum.dim_IntList for user in node.users)
        ):
            yield node


def _number_regions(graph: Graph) -> None:
    from torch._inductor.pattern_matcher import compute_mutation_region_ids

    compute_mutation_region_ids(graph)


@functools.cache
def _identity(role: str) -> str:
    # A graph that holds a kernel's operator says nothing of the source that its lowering writes.
    of_kernels = "".join(family.sources() for family in families())
    return f"attn_pass.{role}:{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}:{of_kernels}"

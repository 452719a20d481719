"""Builds an `Attention` from what a finder read, in three steps: axes, scores and mask, assembly."""

from __future__ import annotations

from collections.abc import Mapping

from attn_pass.reading.arrangement import Arrangement, arranged, roles_of
from attn_pass.reading.assembly import assemble, operands_of, unviewable
from attn_pass.reading.masked_scores import read_scores
from attn_pass.reading.parts import Described, Parts, Shallower
from attn_pass.reading.reader import Used
from attn_pass.reading.unreadable import Unreadable

__all__ = ["Described", "Parts", "describe"]


def describe(parts: Parts, used: Used) -> Described:
    """Sorts out the parts, lifted while ``used`` was noted. Raises `Unreadable` with what does not fit first.

    Every operand is taken as far back as it was followed, and one step less far each time that does not fit.
    """
    chosen = {name: len(forms) - 1 for name, forms in parts.forms.items()}
    while True:
        try:
            return _described(parts, chosen, used)
        except Shallower as shallower:
            name = shallower.operand
            if chosen[name] == 0:
                raise Unreadable(f"the {name} is not a view of a tensor: {shallower.why}", parts.result) from None
            chosen = {**chosen, name: chosen[name] - 1}


def _described(parts: Parts, chosen: Mapping[str, int], used: Used) -> Described:
    """The description with one choice of operands; a mask that is not a view is loaded as it was written."""
    arrangement: Arrangement = arranged(parts, chosen)
    roles = roles_of(arrangement)
    while True:
        read = read_scores(arrangement, roles)
        operands = operands_of(arrangement, roles)
        load = unviewable(arrangement, roles, read)
        if load is None:
            return assemble(arrangement, roles, read, operands, used)
        arrangement = arrangement.by_written(load)

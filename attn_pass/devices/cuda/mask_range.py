"""A range of keys that is looked up in the mask: nothing is known of it before the program runs.

A mask that is made outside of the layers and passed in is a tensor like any other. Two reductions over it, which stay
on the device, give the first and the last key that any row of a batch entry keeps. They run once for all attentions
that have the same mask, and the mask goes on holding inside the range; where that may pay (`targets.looking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.model.expression import expression_axes, loads
from attn_pass.targets import given_masks, looking
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import MaskKind

_KERNELS = 3  # that Inductor makes of the reductions over a long mask; one over a short one (torch 2.13)
_FAR = 1 << 30  # behind any cache


@dataclass(frozen=True)
class MaskRange:
    """The keys from the first that any row of a batch entry keeps to the last.

    With ``averages``, a row that the condition masks fully is the mean of all values, and keeps all of them.
    """

    averages: bool = False
    mean: ClassVar[bool] = False  # the operator's argument: the mask says it here

    def lengths_and_starts(self, lower: Lowering) -> tuple[Value, Value]:
        """The operator's ``lengths`` and ``starts``, int32, (B,) or (1,)."""
        a, call = lower.attention, lower.plan.call
        with lower.plan.sharing():
            keeps = self._keeps(lower)
            int32 = {"dtype": torch.int32, "device": a.sources[a.query.source].device}
            keys = call(aten.arange.default, lower.plan.size(a.kv_len), **int32)

            def largest(number: Value) -> Value:
                return call(aten.amax.default, call(aten.mul.Tensor, keeps, number), [1, 2, 3])

            before = largest(call(aten.rsub.Scalar, keys, _FAR))  # how far the first one is from there
            return largest(call(aten.add.Tensor, keys, 1)), call(aten.rsub.Scalar, before, _FAR)

    def _keeps(self, lower: Lowering) -> Value:
        condition = lower.attention.mask.deep_condition
        if condition is None:
            return given_masks.keep_of_added(lower)
        return given_masks.keep_of_condition(lower, condition, averages=self.averages)


def range_of(a: Attention, kind: MaskKind, setting: Setting) -> MaskRange | None:
    """The range of a mask that is a tensor of the program's; None where it says nothing of which keys count."""
    if kind not in ("boolean", "additive") or setting.numerics == "strict":
        return None
    if any(setting.can_be_zero(x.size) for x in (*a.heads, *a.rows, a.keys)):  # nothing is the largest of no numbers
        return None
    condition = a.mask.deep_condition
    if condition is None:
        read = given_masks.added(a)
        return MaskRange() if read is not None and a.keys in expression_axes(read) else None
    if a.mask.bias is not None or not loads(condition) or a.keys not in expression_axes(condition):
        return None
    nonempty = a.mask.never_empty or setting.assume_nonempty_rows
    return MaskRange(averages=a.mask.replaces_with_number and not nonempty)


def microseconds(problem: Problem, setting: Setting) -> float:
    """What looking takes, for one of the attentions that have the mask."""
    return looking.microseconds(_KERNELS, problem, setting)

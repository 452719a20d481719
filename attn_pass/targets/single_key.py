"""One key: its weight is 1 in every row, so the result is the value, copied for every query.

Becomes: ``value.expand(B, H, L, Dv).clone()``.

    (q @ k.mT * scale).softmax(-1) @ v
    ->
    v.expand(B, H, L, Dv).clone()

Exact because: the softmax of one finite number is 1.

Offers in inference, on any device, if there is one key that no mask can hide. Queries and keys are not read, so a
score that is not finite has no effect: the report lists that as an assumption, and ``numerics="strict"`` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from attn_pass.devices import roofline
from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import Plan, Value, aten
from attn_pass.model.attention import Attention
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import Attended, Constraint, HasAttention, refusal
from attn_pass.targets.lower import Lowering
from attn_pass.targets.problem import problem_of

FINITE = "the scores are finite: with a single key they are not computed"


class SingleKey:
    """A copy of the one value for every query, on any device."""

    name = "single_key"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[None] | Refusal:
        """Takes attention over one key that no mask can hide."""
        reason = refusal(CONSTRAINTS, Attended(attention, setting))
        if reason is not None:
            return Refusal(self.name, reason)
        problem = problem_of(attention, setting.hint)
        written = problem.batch * problem.heads * problem.q_len * problem.value_dim * problem.dtype.itemsize
        predicted = setting.device.kernel_us + roofline.traffic(setting.device, 2 * written)
        return Offer(self.name, variant, attention, predicted, fused=True, assumptions=(FINITE,))

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[None], setting: Setting) -> Value:
        """Plans a copy, so that writing to the result does not write to the values."""
        a = offer.attention
        lower = Lowering(plan, nodes, a)
        groups = (a.batch, a.heads, a.rows, a.value_dim)
        value = lower.operand(a.value, groups, a.compute_dtype, expand=True)
        return lower.result(plan.call(aten.clone.default, value, memory_format=torch.contiguous_format))


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint("keys", "there is more than one key", lambda c: c.attention.kv_len == 1),
    Constraint("mask", "a mask may hide the one key", lambda c: c.attention.mask.is_none),
    Constraint("sink", "a sink takes a share of the weight", lambda c: c.attention.sink is None),
    Constraint(
        "gradient",
        "queries and keys would get no gradient, where the program gives zeros",
        lambda c: not c.attention.needs_grad,
    ),
    Constraint(
        "dropout",
        lambda c: f"dropout {c.attention.dropout:g} would apply to the only weight",
        lambda c: not c.attention.dropout,
    ),
    Constraint(
        "inputs",
        "queries and keys would not be read, and the runtime leaves out inputs that nothing reads",
        lambda c: not family_of(c.setting.device).drops_unread_inputs,
    ),
    Constraint(
        "numerics",
        "numerics='strict': a score that is not finite gives NaN",
        lambda c: c.setting.numerics != "strict",
    ),
)

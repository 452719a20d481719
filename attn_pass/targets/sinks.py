"""A sink beside torch's call: from the logarithm of a kernel's sum of exponentials, or as one more key.

A sink is a logit that takes its share of each row's weights, and has no value.
"""

from __future__ import annotations

import operator

from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import MaskForm, additive_mask, shifts_rows
from attn_pass.targets.operands import settled

Three = tuple[Value, Value, Value]


def sink_refusal(a: Attention, setting: Setting) -> str | None:
    """Why torch's call cannot have a sink beside it there; None where it can, or where there is none."""
    if a.sink is None:
        return None
    family = family_of(setting.device)
    if family.joins_sinks:
        if shifts_rows(a):
            return "a sink beside scores in float64, whose rows are shifted for the kernel"
        if setting.numerics == "strict":
            return "numerics='strict': a sink would become a key of zeros, which an infinite query makes NaN"
        return None
    if family.kernel_with_logarithm is None:
        return f"torch's call gives no sum of exponentials on {setting.device.type} devices, which a sink needs"
    if setting.may_be_trained(a):
        return "the sum of exponentials, which a sink needs, has no gradient in the fused kernel"
    return None


def is_joined(a: Attention, setting: Setting) -> bool:
    """Whether its sink becomes a key."""
    return a.sink is not None and family_of(setting.device).joins_sinks


def with_key_of_zeros(lower: Lowering, sink: Expr, key: Value, value: Value, setting: Setting) -> Three:
    """Key and value with one more key, and what is added to their scores (B or 1, H or 1, L, S + 1).

    The key and its value are zeros: its score is what is added to it, the sink, and it adds nothing to the result.
    """
    a, plan = lower.attention, lower.plan
    key, value = (plan.call(aten.constant_pad_nd.default, x, [0, 0, 0, 1], 0.0) for x in (key, value))
    mask = additive_mask(lower, setting)
    logit: Value | float | None = lower.scalar(sink)
    if logit is None:
        logit = plan.call(aten.to.dtype, lower.expression(sink, (a.batch, a.heads, a.rows, ())), fake_of(mask).dtype)
    else:
        logit = plan.call(aten.full_like.default, plan.call(aten.slice.Tensor, mask, 3, 0, 1), logit)
    leading = [
        plan.size(size) if any(_is_long(plan, x, dim) for x in (mask, logit)) else 1
        for dim, size in enumerate((a.batch_size, a.query_heads))
    ]
    rows = plan.size(a.q_len)
    mask = plan.call(aten.expand.default, mask, [*leading, rows, plan.size(a.kv_len)])
    logit = plan.call(aten.expand.default, logit, [*leading, rows, 1])
    return key, value, plan.call(aten.cat.default, [mask, logit], 3)


def _is_long(plan: Plan, value: Value, dim: int) -> bool:
    return plan.sizes.index(fake_of(value).shape[dim]) != 1


def with_logarithm(lower: Lowering, sink: Expr, inputs: Three, form: MaskForm, setting: Setting) -> Value:
    """The kernel that torch's call takes, where it also gives the logarithm of the sum of exponentials of a row.

    ``exp(s) / (sum exp(s) + exp(sink))`` is the softmax without the sink times ``sigmoid(logsumexp - sink)``.
    """
    a, call = lower.attention, lower.plan.call
    causal = form.kind == "causal"
    mask = None if not form.is_tensor else settled(lower.plan, additive_mask(lower, setting))
    query, key, value = (settled(lower.plan, x) for x in inputs)
    kernel = family_of(setting.device).kernel_with_logarithm
    both = call(kernel, query, key, value, 0.0, causal, attn_mask=mask, scale=abs(a.scale))
    out = joined_with_sink(lower, sink, call(operator.getitem, both, 0), call(operator.getitem, both, 1))
    return call(aten.slice.Tensor, out, 3, 0, a.value_head_dim) if a.head_dim != a.value_head_dim else out


def joined_with_sink(lower: Lowering, sink: Expr, out: Value, lse: Value) -> Value:
    """A kernel's result (B, H, L, Dv) and logarithm of the sum of exponentials (B, H, L), with a sink in that sum.

    A fully masked row has -inf as its logarithm, and stays 0.
    """
    a, call = lower.attention, lower.plan.call
    logit: Value | float | None = lower.scalar(sink)  # a number has no type of its own: log(3) in float64
    if logit is None:
        logit = lower.expression(sink, (a.batch, a.heads, a.rows, a.value_dim))
    share = call(aten.sub.Tensor, call(aten.unsqueeze.default, lse, 3), logit)
    out = call(aten.mul.Tensor, out, call(aten.sigmoid.default, share))
    return call(aten.to.dtype, out, a.compute_dtype)

"""What the CPU kernel adds to scores: a matrix, one vector of distances, or numbers that are looked up."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from attn_pass.devices.cpu.looked_up import looked_up
from attn_pass.graph.edit import Plan, Value, fake_of
from attn_pass.graph.values import memory_order
from attn_pass.model.attention import Attention
from attn_pass.model.distance import ByDistance
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import additive_mask, shifts_rows
from attn_pass.targets.operands import dense_last


def gives_apart(a: Attention) -> bool:
    """Whether bias and keep-condition are given to the kernel each for itself, and not as one matrix.

    The bias stays as small as it is, and in training the gradient of a score that is replaced goes nowhere. A score
    that is replaced by -inf has no weight whatever is added to it; beside another fill a fully masked row needs more
    care (`training.fill_that_counts`).
    """
    if a.mask.bias is None or a.mask.keep is None:
        return False
    return a.needs_grad or a.dropout > 0 or not a.mask.replaces_with_number


def is_alone(a: Attention) -> bool:
    """Whether the kernel adds the bias as it is: a condition beside it, if there is one, says which keys are kept."""
    return a.mask.bias_is_learned or gives_apart(a)


def distances_of(a: Attention) -> ByDistance | None:
    """What is added, over distances, if it depends on ``key - row`` alone: ALiBi, T5's buckets, decay."""
    whole = a.mask.by_distance
    if a.needs_grad and a.mask.keep is None and a.mask.apart is None:
        whole = a.mask.bias_by_distance  # the same, of what may need a gradient
    by = a.mask.bias_by_distance if is_alone(a) else whole
    if by is None or by.bias is None or not by.is_over(a.rows) or shifts_rows(a):
        return None
    return by


def arguments(lower: Lowering, distances: ByDistance | None, setting: Setting) -> dict[str, object]:
    """The operator's arguments for it; a tensor is made once for all sites that add it."""
    a = lower.attention
    if distances is None and (is_alone(a) or a.mask.keep is None) and not (a.needs_grad or a.dropout):
        known = looked_up(lower)
        if known is not None:
            return known
    source = Lowering(lower.plan, lower.nodes, replace(a, mask=replace(a.mask, keep=None))) if is_alone(a) else lower
    with nullcontext() if a.needs_grad else lower.plan.sharing():
        bias = additive_mask(source, replace(setting, autocast=None), distances)  # which does not touch the kernel
        if distances is not None:
            return {"distances": dense_last(lower.plan, bias)}
        first = setting.runner != "other" and not a.needs_grad
        return {"bias": _with_dense_keys(lower.plan, bias, computed_first=first)}


def _with_dense_keys(plan: Plan, bias: Value, *, computed_first: bool) -> Value:
    """The bias, or a copy where its keys lie apart, as in T5's (L, S, H): the kernel reads vectors of keys.

    Inductor would compute the copy in one loop with its source, and T5's buckets again for each head, which takes three
    times as long as the source in its own order and a copy of it (seen in torch 2.13.0).
    """
    dense, fake = dense_last(plan, bias), fake_of(bias)
    if dense is bias or not computed_first or memory_order(fake, plan.sizes) is None:
        return dense
    from torch._inductor.inductor_prims import force_stride_order  # as it is: the source becomes a buffer

    try:
        strides = [plan.size(plan.sizes.index(s)) for s in fake.stride()]
    except ValueError:
        return dense
    return dense_last(plan, plan.call(force_stride_order, bias, strides))

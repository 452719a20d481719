"""The range of valid keys as tensors: a first key and an end for each row of the batch, as kernels are told it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attn_pass.graph.edit import Value, aten, fake_of
from attn_pass.model.expression import Expr, expression_axes
from attn_pass.targets.lower import Lowering

_FAR = 1 << 62  # behind any key: the largest number of int64, which means that all are valid, has no successor


def first_key(lower: Lowering, bounds: Sequence[Expr]) -> Value | None:
    """The first key that any row of a batch entry may keep, int64, (B,) or (1,); None without bounds.

    It may lie before the first key there is, or behind the last. ``bounds`` are those of `ValidRange.first`.
    """
    return _reduced(lower, [for_batch(lower, e, aten.amin.default) for e in bounds], aten.maximum.default)


def end_of_keys(lower: Lowering, bounds: Sequence[Expr]) -> Value | None:
    """One past the last key that any row may keep, the same way; ``bounds`` are those of `ValidRange.last`."""
    last = _reduced(lower, [for_batch(lower, e, aten.amax.default) for e in bounds], aten.minimum.default)
    if last is None:
        return None
    return lower.plan.call(aten.add.Tensor, lower.plan.call(aten.clamp_max.default, last, _FAR), 1)


def for_batch(lower: Lowering, value: Expr, extreme: Callable[..., object]) -> Value:
    """A value as int64 numbers, (B,) or (1,): what it is at most, or at least, over heads and queries."""
    a, call = lower.attention, lower.plan.call
    if expression_axes(value) <= set(a.batch):
        value_at_extreme = lower.expression(value, (a.batch,))
    else:
        value_at_extreme = call(extreme, lower.expression(value, (a.batch, a.heads, a.rows)), [1, 2])
    return (
        value_at_extreme
        if fake_of(value_at_extreme).dtype == torch.int64
        else call(aten.to.dtype, value_at_extreme, torch.int64)
    )


def _reduced(lower: Lowering, values: list[Value], both: Callable[..., object]) -> Value | None:
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        result = lower.plan.call(both, result, value)
    return result

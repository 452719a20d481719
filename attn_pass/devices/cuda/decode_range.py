"""A cache of which a part is valid, as arguments of `attn_pass::decode`: numbers that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.model.expression import TRUE, Expr, apply, index_value
from attn_pass.model.index import Index, is_at_most
from attn_pass.targets.base import Refusal, Setting
from attn_pass.targets.key_bounds import Bounds, bounds_of
from attn_pass.targets.key_ranges import end_of_keys, first_key
from attn_pass.targets.lower import Lowering

_FAR = 1 << 30  # behind any cache, and far enough from the ends of int32


@dataclass(frozen=True)
class DecodeRange:
    """Bounds on the keys as expressions, and whether they are the whole mask.

    With ``causal``, row ``i`` of ``L`` keeps keys up to ``i + 1 - L`` behind the last one that ``ends`` give, and
    ``window`` keys before that one; ``in_cache``: that last one is proved to be a key of the cache. With ``mean``, a
    fully masked row is the mean of all values.
    """

    starts: tuple[Expr, ...]
    ends: tuple[Expr, ...]
    is_complete: bool
    causal: bool = False
    window: int = -1
    mean: bool = False
    in_cache: bool = False

    def lengths_and_starts(self, lower: Lowering) -> tuple[Value | None, Value | None]:
        """The operator's ``lengths`` and ``starts``, int32, (B,) or (1,)."""
        values = end_of_keys(lower, self.ends), first_key(lower, self.starts)
        return _in_int32(lower, values[0]), _in_int32(lower, values[1])


def range_of(a: Attention, setting: Setting, target: str) -> DecodeRange | Refusal:
    """The valid range of an attention that has one: as the whole mask, or as what of the keys is read beside it."""
    assert a.valid is not None
    bounds = bounds_of(a, setting)
    as_whole_mask = _as_whole_mask(a, bounds)
    in_cache = bounds.shift is None and bounds.upper is not None and _ends_inside(a, bounds.upper)
    nonempty = a.mask.never_empty or setting.assume_nonempty_rows
    averages = a.mask.replaces_with_number and not nonempty
    if as_whole_mask is not None and not (averages and a.sink is not None):
        starts, ends, causal, window = as_whole_mask
        return DecodeRange(starts, ends, True, causal, window, averages, causal and in_cache)
    if averages:
        return Refusal(
            target, "a fully masked row is the mean of all values, of which a range beside a mask reads a part"
        )
    return DecodeRange(a.valid.first, a.valid.last, is_complete=False)


def _as_whole_mask(a: Attention, bounds: Bounds) -> tuple[tuple[Expr, ...], tuple[Expr, ...], bool, int] | None:
    """The bounds as the operator's, if they are the whole mask: starts, ends, causal, window."""
    if a.mask.bias is not None or bounds.rest != TRUE or not bounds.is_range:
        return None
    starts, ends = (*bounds.starts, *_number(bounds.first)), (*bounds.ends, *_number(bounds.last))
    if (bounds.shift, bounds.lower, bounds.upper) == (None, None, None):
        return starts, ends, False, -1
    if bounds.upper is None or ends:
        return None
    window: Index = -1 if bounds.lower is None else bounds.upper - bounds.lower
    if not isinstance(window, int) or (window < 0 and bounds.lower is not None):
        return None
    after = bounds.upper + a.q_len - 1
    last = index_value(after) if bounds.shift is None else _plus(bounds.shift, after)
    return starts, (last,), True, window


def _ends_inside(a: Attention, upper: Index) -> bool:
    return is_at_most(0, upper + a.q_len) and is_at_most(upper + a.q_len, a.kv_len)


def _number(bound: Index | None) -> tuple[Expr, ...]:
    return () if bound is None else (index_value(bound),)


def _plus(value: Expr, number: Index) -> Expr:
    return value if number == 0 else apply("add", value, index_value(number))


def _in_int32(lower: Lowering, value: Value | None) -> Value | None:
    if value is None:
        return None
    near = lower.plan.call(aten.clamp.default, value, -_FAR, _FAR)
    return lower.plan.call(aten.to.dtype, near, torch.int32)

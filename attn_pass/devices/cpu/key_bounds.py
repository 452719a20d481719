"""The parts of a mask that become bounds of the CPU kernel's loops: keys outside of them are not read.

Bounds that follow from sizes are numbers: causal masks with any offset, windows, ranges. Bounds that are known at run
time are a number for each row of the batch: how many keys of a cache are valid, where left padding ends, at which
position the first query is. If a bound differs from query to query, the loop runs over the keys that any query keeps,
and the rest of the condition stays a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attn_pass.graph.edit import Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.conditions import conjuncts, structure_of
from attn_pass.model.expression import FALSE, TRUE, Expr, apply, expression_axes
from attn_pass.model.index import Index, is_at_most
from attn_pass.model.key_limits import Limit, limit_of
from attn_pass.model.mask import ABSORBING, Computed, Keep
from attn_pass.model.piecewise import pieces
from attn_pass.model.structure import Band, Keys
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering


@dataclass(frozen=True)
class Bounds:
    """Row ``i`` keeps the keys from ``i + lower`` to ``i + upper``, and ``first`` to ``last``, where ``rest`` holds.

    ``shift`` is added to ``i``. Keys before one of ``starts`` and behind one of ``ends`` are not kept either. These
    three are run-time values; those of ``starts`` and ``ends`` may differ from query to query, and count for all then.
    """

    lower: Index | None = None
    upper: Index | None = None
    first: Index | None = None
    last: Index | None = None
    rest: Expr = TRUE
    shift: Expr | None = None
    starts: tuple[Expr, ...] = ()
    ends: tuple[Expr, ...] = ()

    @property
    def at_run_time(self) -> bool:
        """Whether some bound is a value that the program computes."""
        return self.shift is not None or bool(self.starts or self.ends)

    def given(self, lower: Lowering) -> dict[str, object]:
        """The operator's arguments."""
        sizes = {
            "before": None if self.lower is None else -1 * self.lower,
            "after": self.upper,
            "start": self.first,
            "end": None if self.last is None else self.last + 1,
        }
        given: dict[str, object] = {n: lower.plan.size(size) for n, size in sizes.items() if size is not None}
        if self.shift is not None:
            given["shift"] = _for_batch(lower, self.shift, aten.amax.default)
        starts = [_for_batch(lower, e, aten.amin.default) for e in self.starts]
        ends = [_for_batch(lower, e, aten.amax.default) for e in self.ends]
        if starts:
            given["starts"] = _reduced(lower, starts, aten.maximum.default)
        if ends:
            last = _reduced(lower, ends, aten.minimum.default)
            given["ends"] = lower.plan.call(aten.add.Tensor, last, 1)
        return given


def _for_batch(lower: Lowering, value: Expr, extreme: Callable[..., object]) -> Value:
    """A value as int64 numbers, (B,) or (1,): what it is at most, or at least, over heads and queries."""
    a, call = lower.attention, lower.plan.call
    if expression_axes(value) <= set(a.batch):
        made = lower.expression(value, (a.batch,))
    else:
        made = call(extreme, lower.expression(value, (a.batch, a.heads, a.rows)), [1, 2])
    return made if fake_of(made).dtype == torch.int64 else call(aten.to.dtype, made, torch.int64)


def _reduced(lower: Lowering, values: list[Value], both: Callable[..., object]) -> Value:
    result = values[0]
    for value in values[1:]:
        result = lower.plan.call(both, result, value)
    return result


def with_keep(a: Attention) -> Attention:
    """The same with a keep-condition in the place of a matrix that adds 0 where a key is kept, and masks elsewhere.

    Where a row may be fully masked the number that is added must be one that leaves nothing of its scores, so that they
    could as well have been replaced by it.
    """
    mask = a.mask
    if mask.keep is not None or mask.bias is None or mask.computed is None or mask.computed.bias is None:
        return a
    values = pieces(mask.computed.bias)
    fills = {float(v.value) for _, v in values or () if v.value != 0}
    if values is None or mask.fills is None or len(fills) != 1:
        return a
    fill = fills.pop()
    absorbs = fill <= ABSORBING and a.score_dtype in (torch.float32, torch.bfloat16)
    if not (absorbs or mask.never_empty or fill == float("-inf")):
        return a
    condition: Expr = FALSE
    for when, value in values:
        condition = apply("or", condition, when) if value.value == 0 else condition
    kept = replace(mask, bias=None, keep=Keep(condition, fill), fills=None, computed=Computed(None, condition))
    with_condition = replace(a, mask=replace(kept, by_distance=None))
    return with_condition if _bounded(with_condition) != Bounds(rest=condition) else a


def bounds_of(a: Attention, setting: Setting) -> Bounds:
    """The mask as bounds on a row's keys, and what of it they do not say.

    Beside a bias whose fully masked rows average all keys, what is masked with a number is left to the bias.
    """
    bounds = _bounded(a)
    if any(setting.can_be_zero(x.size) for x in (*a.heads, *a.rows)):  # nothing is the largest of no numbers
        bounds = replace(bounds, starts=_of_batch(a, bounds.starts), ends=_of_batch(a, bounds.ends))
    return bounds


def _of_batch(a: Attention, values: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(e for e in values if expression_axes(e) <= set(a.batch))


def _bounded(a: Attention) -> Bounds:
    if a.mask.keep is None or (a.mask.bias is not None and not a.mask.never_empty):
        return Bounds()
    bounds = Bounds()
    for condition in conjuncts(a.mask.deep_condition or TRUE):
        bounds = _by_sizes(a, bounds, condition) or _by_values(a, bounds, condition)
    exact = replace(bounds, rest=TRUE, starts=_of_batch(a, bounds.starts), ends=_of_batch(a, bounds.ends)) != Bounds()
    # Where no bound says all of a condition the program's own tensor serves.
    return bounds if exact else replace(bounds, rest=a.mask.keep.condition)


def _by_sizes(a: Attention, bounds: Bounds, condition: Expr) -> Bounds | None:
    """The bounds with a condition on indices in them; None where it is none that bounds say."""
    tighter: Bounds | None = bounds
    for part in structure_of(condition, a.keys, a.rows).parts:
        tighter = None if tighter is None else _tightened(tighter, part)
    return tighter


def _by_values(a: Attention, bounds: Bounds, condition: Expr) -> Bounds:
    """The bounds with any other condition in them: by a run-time value, or as the rest of the mask."""
    limit = limit_of(condition, a.keys, a.rows, lambda load: a.sources[load.source].dtype)
    rest = replace(bounds, rest=apply("and", bounds.rest, condition))
    if limit is None:
        return rest
    used = {axis for _, term in limit.terms for axis in expression_axes(term)}
    if limit.with_row:
        return (used <= set(a.batch) and _shifted(bounds, limit)) or rest
    value = limit.value
    if not expression_axes(value) <= set(a.batch):
        bounds = rest
    if limit.is_upper:
        return replace(bounds, ends=(*bounds.ends, value))
    return replace(bounds, starts=(*bounds.starts, value))


def _shifted(bounds: Bounds, limit: Limit) -> Bounds | None:
    """The bounds with a limit that moves with the row; all that do are counted from one position."""
    free = bounds.lower is None and bounds.upper is None
    if bounds.shift != limit.shift and not free:
        return None
    low = bounds.lower if limit.is_upper else _larger(bounds.lower, limit.offset)
    high = _smaller(bounds.upper, limit.offset) if limit.is_upper else bounds.upper
    if low is _UNKNOWN or high is _UNKNOWN:
        return None
    return replace(bounds, shift=limit.shift, lower=low, upper=high)


def _tightened(bounds: Bounds, part: object) -> Bounds | None:
    """The bounds with one part of a mask in them; None where it is none, or nobody knows which bound is tighter."""
    if isinstance(part, Band):
        low, high = _larger(bounds.lower, part.lower), _smaller(bounds.upper, part.upper)
        counted_otherwise = bounds.shift is not None
        if counted_otherwise or low is _UNKNOWN or high is _UNKNOWN:
            return None
        return replace(bounds, lower=low, upper=high)
    if isinstance(part, Keys):
        low, high = _larger(bounds.first, part.lower), _smaller(bounds.last, part.upper)
        return None if low is _UNKNOWN or high is _UNKNOWN else replace(bounds, first=low, last=high)
    return None


_UNKNOWN: Index = -(1 << 62)


def _larger(one: Index | None, other: Index | None) -> Index | None:
    if one is None or other is None:
        return other if one is None else one
    return other if is_at_most(one, other) else one if is_at_most(other, one) else _UNKNOWN


def _smaller(one: Index | None, other: Index | None) -> Index | None:
    if one is None or other is None:
        return other if one is None else one
    return one if is_at_most(one, other) else other if is_at_most(other, one) else _UNKNOWN

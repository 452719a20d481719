"""The parts of a mask that become bounds of a kernel's loop over the keys: keys outside of them are not read.

Bounds that follow from sizes are numbers: causal masks with any offset, windows, ranges, prefixes, chunks. Bounds that
are known at run time (`poor_cases/valid_range.py`) are a number for each row of the batch: how many keys of a cache are
valid, where left padding ends, at which position the first query is. If a bound differs from query to query, the loop
runs over the keys that any query keeps, and the rest of the condition stays a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_pass.model.added_masks import kept_in_place_of_added
from attn_pass.model.attention import Attention
from attn_pass.model.conditions import conjuncts, structure_of
from attn_pass.model.expression import TRUE, Expr, apply, expression_axes
from attn_pass.model.index import Index, is_at_most
from attn_pass.model.key_limits import Limit
from attn_pass.model.structure import Band, Chunk, Either, Keys
from attn_pass.targets.base import Setting

VALID_SHARE = 0.5  # of the keys, where only the program knows how many are: a cache fills up


@dataclass(frozen=True)
class Bounds:
    """Row ``i`` keeps the keys from ``i + lower`` to ``i + upper``, and ``first`` to ``last``, where ``rest`` holds.

    Keys before ``prefix`` are kept whatever ``upper`` says. With a ``chunk`` a row keeps the keys of its own chunk
    alone. ``shift`` is added to ``i``; there is no prefix and no chunk then. Keys before one of ``starts`` and behind
    one of ``ends`` are not kept either. These three are run-time values; those of ``starts`` and ``ends`` may differ
    from query to query, and count for all then.
    """

    lower: Index | None = None
    upper: Index | None = None
    first: Index | None = None
    last: Index | None = None
    prefix: Index | None = None
    chunk: Chunk | None = None
    rest: Expr = TRUE
    shift: Expr | None = None
    starts: tuple[Expr, ...] = ()
    ends: tuple[Expr, ...] = ()

    @property
    def is_range(self) -> bool:
        """Whether they are nothing but ranges of keys, fixed and moving with the row, as most kernels take them."""
        return self.prefix is None and self.chunk is None

    @property
    def at_run_time(self) -> bool:
        """Whether some bound is a value that the program computes."""
        return self.shift is not None or bool(self.starts or self.ends)


def with_keep(a: Attention) -> Attention:
    """The same with a keep-condition in the place of an added matrix of zeros and a number that masks.

    The kernel reads a byte of a key instead of a number, and neither keys nor values where no row of a block keeps any.
    """
    return kept_in_place_of_added(a) or a


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
    masks_too = a.mask.bias is not None and not a.mask.bias_is_learned
    if a.mask.keep is None or (masks_too and not a.mask.never_empty):
        return Bounds()
    bounds = Bounds()
    conjunction: Expr = TRUE
    for condition in conjuncts(a.mask.deep_condition or TRUE):
        conjunction = apply("and", conjunction, condition)
        bounds = _by_sizes(a, bounds, condition) or _by_values(a, bounds, condition)
    # Where no bound says all of a condition the program's own tensor serves, unless it repeats a smaller one.
    own = a.mask.keep.condition
    repeats = expression_axes(conjunction) < expression_axes(own)
    return replace(bounds, rest=own) if bounds.rest == conjunction and not repeats else bounds


def _by_sizes(a: Attention, bounds: Bounds, condition: Expr) -> Bounds | None:
    """The bounds with a condition on indices in them; None where it is none that bounds say."""
    tighter: Bounds | None = bounds
    for part in structure_of(condition, a.keys, a.rows).parts:
        tighter = None if tighter is None else _tightened(tighter, part)
    return tighter


def _by_values(a: Attention, bounds: Bounds, condition: Expr) -> Bounds:
    """The bounds with any other condition in them: by a run-time value, or as the rest of the mask."""
    bounded = None if a.valid is None else a.valid.of(condition)
    rest = replace(bounds, rest=apply("and", bounds.rest, condition))
    if bounded is None:
        return rest
    for limit in bounded.limits:
        used = {axis for _, term in limit.terms for axis in expression_axes(term)}
        if limit.with_row:
            return (used <= set(a.batch) and _shifted(bounds, limit)) or rest
        is_complete = bounded.exact and expression_axes(limit.value) <= set(a.batch)
        bounds = replace(bounds, rest=bounds.rest if is_complete else rest.rest)
        if limit.is_upper:
            bounds = replace(bounds, ends=(*bounds.ends, limit.value))
        else:
            bounds = replace(bounds, starts=(*bounds.starts, limit.value))
    return bounds


def _shifted(bounds: Bounds, limit: Limit) -> Bounds | None:
    """The bounds with a limit that moves with the row; all that do are counted from one position."""
    free = bounds.lower is None and bounds.upper is None and bounds.is_range
    if bounds.shift != limit.shift and not free:
        return None
    low = bounds.lower if limit.is_upper else _larger(bounds.lower, limit.offset)
    high = _smaller(bounds.upper, limit.offset) if limit.is_upper else bounds.upper
    if low is _UNKNOWN or high is _UNKNOWN:
        return None
    return replace(bounds, shift=limit.shift, lower=low, upper=high)


def _tightened(bounds: Bounds, part: object) -> Bounds | None:
    """The bounds combined with one part of a mask; None if the part is no bound, or the tighter bound is not known."""
    if isinstance(part, Keys):
        low, high = _larger(bounds.first, part.lower), _smaller(bounds.last, part.upper)
        return None if low is _UNKNOWN or high is _UNKNOWN else replace(bounds, first=low, last=high)
    if bounds.shift is not None:  # positions are counted otherwise
        return None
    if isinstance(part, Band):
        low, high = _larger(bounds.lower, part.lower), _smaller(bounds.upper, part.upper)
        beside_prefix = bounds.prefix is not None and part.upper is not None
        return None if beside_prefix or low is _UNKNOWN or high is _UNKNOWN else replace(bounds, lower=low, upper=high)
    if isinstance(part, Chunk):
        return replace(bounds, chunk=part) if bounds.chunk is None else None
    prefix = _prefix(part)
    if prefix is None or bounds.upper is not None:
        return None
    return replace(bounds, prefix=prefix[0], upper=prefix[1])


def _prefix(part: object) -> tuple[Index, Index] | None:
    """How many first keys all rows keep, and the upper bound of a row's others; None for any other part."""
    match part:
        case Either(((Band(None, upper),), (Keys(None, last),))):  # in the order of `structure.ORDER`
            return None if last is None or upper is None else (last + 1, upper)
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

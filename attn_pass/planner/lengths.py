"""A query length that is known only at run time: forms are also compared at the ends of its range.

One program serves a prompt of many tokens and the steps of one token after it, and it may have been traced with either
length. A form is therefore judged by its worst loss: the largest ratio of its time to the best form's at any of these
lengths. Other symbolic sizes keep their traced values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.index import Index, Symbol, atoms, substitute
from attn_pass.options import LEAVE
from attn_pass.targets.base import Setting
from attn_pass.targets.problem import mask_elements

# One row, fixed, is a form of its own for Inductor (a multiply-and-sum); one row of a length that varies is none.
_FEW = 2
_MANY = 1024  # further up a form loses what it loses here
_FARTHEST = 1 << 20  # of the symbol


@dataclass(frozen=True)
class Length:
    """One length for the comparison: the setting of the targets, and the code that runs there without a rewrite."""

    queries: int
    setting: Setting
    written: AsWritten


def lengths(
    attention: Attention, setting: Setting, written: AsWritten, copied_bytes: Callable[[Callable[[Index], int]], int]
) -> tuple[Length, ...]:
    """The lengths besides the one traced with; none where the query length is a number, or of several symbols.

    ``copied_bytes`` are those of `AsWritten`, for a hint.
    """
    symbols = {a for a in atoms(attention.q_len) if isinstance(a, Symbol)}
    if len(symbols) != 1:
        return ()
    (symbol,) = symbols
    traced = setting.hint(attention.q_len)
    masked = mask_elements(attention, setting.hint)
    by_queries: dict[int, Length] = {}
    for value in _ends(symbol, lambda n: _at(setting.hint, symbol, n)(attention.q_len)):
        hint = _at(setting.hint, symbol, value)
        queries = hint(attention.q_len)
        if queries == traced or queries in by_queries or not _FEW <= queries <= _MANY:
            continue
        elements = written.mask_elements * mask_elements(attention, hint) // masked if masked else 0
        there = replace(written, mask_elements=elements, copied_bytes=copied_bytes(hint))
        by_queries[queries] = Length(queries, replace(setting, hint=hint), there)
    return tuple(by_queries.values())


def _ends(symbol: Symbol, queries: Callable[[int], int]) -> tuple[int, ...]:
    """Values of the symbol at which there are few queries, and many: the length may be any function of it.

    Where the length does not grow with the symbol they are values of no account, which the caller looks at again.
    """
    last = _FARTHEST if symbol.upper is None else min(_FARTHEST, symbol.upper)
    values = range(symbol.lower, last + 1)
    if not values:
        return ()
    few, beyond = (bisect_left(values, n, key=queries) for n in (_FEW, _MANY + 1))
    return tuple(values[n] for n in (min(few, len(values) - 1), max(beyond - 1, 0)))


def _at(hint: Callable[[Index], int], symbol: Symbol, value: int) -> Callable[[Index], int]:
    return lambda index: hint(substitute(index, {symbol: value}))


def worst_losses(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each form of the first table its time over the best form's, where that is most; a row of times a length.

    A form that no target offers at another length counts as leaving there. Where the best form costs nothing, every
    other one loses without bound.
    """
    worst = dict.fromkeys(tables[0], 1.0)
    for times in tables:
        best = min(times[name] for name in times if name in worst)
        for name in worst:
            worst[name] = max(worst[name], _loss(times.get(name, times[LEAVE]), best))
    return worst


def _loss(time: float, best: float) -> float:
    if best > 0:
        return time / best
    return 1.0 if time <= best else math.inf

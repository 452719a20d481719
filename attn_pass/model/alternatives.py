"""Alternatives of a mask without what they repeat: a prefix, or after it a causal mask, is causal with an offset."""

from __future__ import annotations

from collections.abc import Sequence

from attn_pass.model.index import Index, is_nonnegative
from attn_pass.model.structure import Band, Keys, Part

Option = tuple[Part, ...]  # parts that hold together


def simplified(options: Sequence[Option], key: Index, row: Index) -> list[Option]:
    """Fewer and shorter options, of which one holds where one of the given ones does, and nowhere else.

    ``(p and q) or r`` is ``q or r`` where r holds wherever p does not. An option that another one follows from goes.
    """
    left = [tuple(side for part in option for side in _sides(part)) for option in options]
    for number, option in enumerate(left):
        others = left[:number] + left[number + 1 :]
        left[number] = tuple(p for p in option if not any(_covers(other, p, key, row) for other in others))
    kept: list[Option] = []
    for number, option in enumerate(left):
        wider = kept + left[number + 1 :]
        if not any(_follows(other, option, key, row) for other in wider):
            kept.append(option)
    return kept


def _sides(part: Part) -> list[Part]:
    """A part with two bounds as two parts with one."""
    if not isinstance(part, Band | Keys) or part.lower is None or part.upper is None:
        return [part]
    return [type(part)(part.lower, None), type(part)(None, part.upper)]


def _margin(part: Part, key: Index, row: Index) -> Index | None:
    """What is not negative where a part with one bound holds, and negative elsewhere; None for any other part."""
    if not isinstance(part, Band | Keys):
        return None
    place = key - row if isinstance(part, Band) else key
    if part.upper is not None:
        return part.upper - place
    return None if part.lower is None else place - part.lower


def _covers(option: Option, part: Part, key: Index, row: Index) -> bool:
    """Whether an option holds wherever a part does not."""
    margin = _margin(part, key, row)
    return margin is not None and all(_holds_where(p, -1 * margin - 1, key, row) for p in option)


def _follows(option: Option, given: Option, key: Index, row: Index) -> bool:
    """Whether an option holds wherever another one does."""
    margins = [m for m in (_margin(p, key, row) for p in given) if m is not None]
    return all(p in given or any(_holds_where(p, m, key, row) for m in margins) for p in option)


def _holds_where(part: Part, bound: Index, key: Index, row: Index) -> bool:
    """Whether a part holds wherever ``bound`` is not negative."""
    margin = _margin(part, key, row)
    return margin is not None and is_nonnegative(margin - bound)

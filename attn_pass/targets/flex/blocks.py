"""Which blocks of a block mask are visited, and which need no mask: interval arithmetic over the parts of a mask.

A block of rows attends to an interval of keys for a band, a chunk or a key range, and to the intersection of the
intervals for several; for alternatives it attends to one interval each. The same arithmetic, on rows, gives the rows
that attend to a block of keys, which a backward needs. It is written once and runs on integers (how much is left to
compute) or on planned tensors (`block_lists`), so that lengths may be symbolic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from attn_pass.model.index import Index
from attn_pass.model.structure import Band, Chunk, Either, Keys, Part

UNKNOWN_SHARE = 1 / 8
"""Of blocks that a mask may hide by what is known at run time only, such as documents."""

_FAR = 1 << 30  # past every block
_MOST_OPTIONS = 8

Conjunction = tuple[Band | Keys | Chunk, ...]


def are_known(parts: Sequence[Part]) -> bool:
    """Whether every bound is a number."""
    return all(
        all(are_known(option) for option in part.options)
        if isinstance(part, Either)
        else all(b is None or isinstance(b, int) for b in vars(part).values())
        for part in parts
    )


def conjunctions(parts: Sequence[Part]) -> tuple[Conjunction, ...]:
    """The parts as alternatives of conjunctions with known bounds; what would make too many is left out."""
    options: tuple[Conjunction, ...] = ((),)
    for part in parts:
        if isinstance(part, (Band, Keys, Chunk)):
            if are_known((part,)):
                options = tuple((*o, part) for o in options)
        elif isinstance(part, Either):
            inner = [c for option in part.options for c in conjunctions(option)]
            if () not in inner and len(options) * len(inner) <= _MOST_OPTIONS:
                options = tuple((*o, *i) for o, i in product(options, inner))
    return options


# ---------------------------------------------------------------- the arithmetic


@dataclass(frozen=True)
class Numbers:
    """What the arithmetic is done with: integers, or one-dimensional tensors of a plan."""

    add: Callable[[Any, int], Any]
    times: Callable[[Any, int], Any]
    floor: Callable[[Any, int], Any]
    larger: Callable[[Any, Any], Any]
    smaller: Callable[[Any, Any], Any]


INTEGERS = Numbers(operator.add, operator.mul, operator.floordiv, max, min)


Bounds = tuple[Any, Any]  # lowest and highest position, None for no bound


def _of_rows(part: Band | Keys | Chunk, first: Any, size: int, do: Numbers) -> tuple[Bounds, Bounds]:
    """The keys that any of the rows ``first`` to ``first + size - 1`` sees, and those that all of them see."""
    last = size - 1
    if isinstance(part, Band):
        low, high = _as_integer(part.lower), _as_integer(part.upper)
        some = (None if low is None else do.add(first, low), None if high is None else do.add(first, last + high))
        every = (None if low is None else do.add(first, last + low), None if high is None else do.add(first, high))
        return some, every
    if isinstance(part, Keys):
        return (part.lower, part.upper), (part.lower, part.upper)
    return _of_chunk(first, last, part.size, part.row_shift, part.key_shift, do)


def _of_keys(part: Band | Keys | Chunk, first: Any, size: int, do: Numbers) -> tuple[Bounds, Bounds]:
    """The rows that see any of the keys ``first`` to ``first + size - 1``, and those that see all of them."""
    if isinstance(part, Band):
        low, high = _as_integer(part.lower), _as_integer(part.upper)
        mirrored = Band(None if high is None else -high, None if low is None else -low)
        return _of_rows(mirrored, first, size, do)
    if isinstance(part, Chunk):
        return _of_chunk(first, size - 1, part.size, part.key_shift, part.row_shift, do)
    low, high = _as_integer(part.lower), _as_integer(part.upper)
    # Every row or none: none is a first row that is out of reach.
    outside, cut = [], []
    if low is not None:
        outside.append(do.add(do.times(first, -1), low - size + 1))
        cut.append(do.add(do.times(first, -1), low))
    if high is not None:
        outside.append(do.add(first, -high))
        cut.append(do.add(first, size - 1 - high))
    return (_if_any_is_positive(outside, do), None), (_if_any_is_positive(cut, do), None)


def _of_chunk(first: Any, last: int, size: Any, shift: Any, other: Any, do: Numbers) -> tuple[Bounds, Bounds]:
    lowest, highest = (do.times(do.floor(do.add(first, shift + n), size), size) for n in (0, last))
    some = (do.add(lowest, -other), do.add(highest, size - 1 - other))
    return some, (do.add(highest, -other), do.add(lowest, size - 1 - other))


def _if_any_is_positive(values: list[Any], do: Numbers) -> Any:
    """Far away where one of the values is above 0; 0 elsewhere."""
    largest: Any = None
    for value in values:
        far = do.times(do.smaller(do.larger(value, 0), 1), _FAR)
        largest = far if largest is None else do.larger(largest, far)
    return largest


def _as_integer(bound: Index | None) -> int | None:
    assert bound is None or isinstance(bound, int)
    return bound


Span = tuple[Any, Any, Any, Any]  # blocks: first and one past the last that is seen, the same of those seen in full


def span(parts: Conjunction, first: Any, own: int, other: int, count: Any, do: Numbers, *, of_keys: bool) -> Span:
    """The blocks of size ``other``, of which there are ``count``, that a block of size ``own`` at ``first`` meets."""
    some: list[Bounds] = []
    every: list[Bounds] = []
    for part in parts:
        bounds = (_of_keys if of_keys else _of_rows)(part, first, own, do)
        some.append(bounds[0])
        every.append(bounds[1])

    nothing = do.times(first, 0)

    def block(value: Any, ahead: int) -> Any:
        return do.larger(do.smaller(do.floor(do.add(value, ahead), other), count), nothing)

    def meet(values: list[Any], choose: Callable[[Any, Any], Any]) -> Any:
        result: Any = None
        for value in values:
            if value is not None:
                result = value if result is None else choose(result, value)
        return result

    low, high = meet([b[0] for b in some], do.larger), meet([b[1] for b in some], do.smaller)
    full_low, full_high = meet([b[0] for b in every], do.larger), meet([b[1] for b in every], do.smaller)
    start = nothing if low is None else block(low, 0)
    end = do.larger(nothing, count) if high is None else block(high, other)
    full_start = start if full_low is None else block(full_low, other - 1)
    full_end = end if full_high is None else block(full_high, 1)
    end = do.larger(start, end)
    full_start = do.smaller(do.larger(full_start, start), end)
    full_end = do.smaller(do.larger(full_end, full_start), end)
    return start, end, full_start, full_end


def share(parts: Sequence[Part], q_len: int, kv_len: int, sizes: tuple[int, int]) -> float:
    """The share of the blocks that is computed."""
    rows, keys = (max(1, -(-n // size)) for n, size in zip((q_len, kv_len), sizes))
    options = conjunctions(parts)
    total = 0
    for row in range(rows):
        spans = [span(o, row * sizes[0], *sizes, keys, INTEGERS, of_keys=False)[:2] for o in options]
        reached = 0
        for start, end in sorted(spans):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total / (rows * keys)

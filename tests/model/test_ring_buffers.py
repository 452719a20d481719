"""Bounds on the slots of a ring buffer, against all slots of small buffers at all positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from attn_pass.model.expression import Apply, Const, Expr, Load, apply, index_value
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.key_limits import Limit
from attn_pass.model.ring_buffers import ring_limits

P, N = Load(0, (0,)), Load(1, (0,))
POSITIONS = range(-9, 25)


def value_of(e: Expr, key: int, given: tuple[int, int]) -> int:
    """An expression of integers."""
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Load):
        return given[e.source]
    if not isinstance(e, Apply):
        text = str(e)
        return int(eval_index(text, key))
    args = [value_of(a, key, given) for a in e.args]
    return {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "neg": lambda x: -x,
        "remainder": lambda x, y: x % y,
        "where": lambda c, x, y: x if c else y,
        "le": lambda x, y: x <= y,
        "lt": lambda x, y: x < y,
        "ge": lambda x, y: x >= y,
        "gt": lambda x, y: x > y,
    }[e.op](*args)


def eval_index(text: str, key: int) -> int:
    """An index over the keys ``j``: a number, ``j``, or a sum of these."""
    total = 0
    for term in text.replace(" - ", " + -").split(" + "):
        factor, sign = (term[1:], -1) if term.startswith("-") else (term, 1)
        number, _, name = factor.rpartition("*")
        total += sign * (int(number) if number else 1) * key if name == "j" else sign * int(factor)
    return total


def number(n: int) -> Expr:
    return index_value(n)


Made = Callable[[Expr, int], Expr]
CONDITIONS: dict[str, Made] = {
    "newest": lambda j, s: apply("le", apply("remainder", apply("sub", P, j), number(s)), number(3)),
    "newest, fewer than a number": lambda j, s: apply("lt", apply("remainder", apply("sub", P, j), number(s)), N),
    "from the slot on": lambda j, s: apply("ge", apply("remainder", apply("sub", j, P), number(s)), number(4)),
    "from the slot on, a number": lambda j, s: apply("gt", apply("remainder", apply("sub", j, P), number(s)), N),
    "written at all": lambda j, s: apply("le", apply("remainder", apply("sub", P, j), number(s)), P),
    "what it holds": lambda j, s: apply(
        "ge", apply("sub", P, apply("remainder", apply("sub", P, j), number(s))), number(0)
    ),
    "what it holds, beside a window": lambda j, s: apply(
        "gt", apply("sub", P, apply("remainder", apply("sub", P, j), number(s))), apply("sub", P, N)
    ),
    "the next one": lambda j, s: apply(
        "le", apply("remainder", apply("sub", apply("add", P, number(1)), j), number(s)), apply("add", P, number(1))
    ),
}


def holds(limit: Limit, key: int, given: tuple[int, int]) -> bool:
    end = value_of(limit.value, key, given)
    return key <= end if limit.is_upper else key >= end


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize(("size", "slots"), [(7, 7), (8, 5), (1, 1)])
def test_every_kept_slot_is_within(name: str, size: int, slots: int) -> None:
    keys = Axis("j", slots)
    condition = CONDITIONS[name](index_value(axis_index(keys)), size)
    limits, exact = ring_limits(condition, keys, (), lambda _: torch.int64)
    narrowed = 0
    for position, n in itertools.product(POSITIONS, (-2, 0, 1, 4, 9)):
        for key in range(slots):
            kept = bool(value_of(condition, key, (position, n)))
            within = all(holds(limit, key, (position, n)) for limit in limits)
            assert within if kept else not (exact and within), (position, n, key)
            narrowed += not within
    assert exact == (name in ("written at all", "what it holds", "the next one")) or size == 1
    assert narrowed or size == 1


@pytest.mark.parametrize("name", CONDITIONS)
def test_not_of_more_slots_than_the_ring_has_nor_of_floats(name: str) -> None:
    keys = Axis("j", 9)
    condition = CONDITIONS[name](index_value(axis_index(keys)), 8)
    assert ring_limits(condition, keys, (), lambda _: torch.int64) == ((), False)
    few = Axis("j", 8)
    condition = CONDITIONS[name](index_value(axis_index(few)), 8)
    assert ring_limits(condition, few, (), lambda _: torch.float32) == ((), False)
    assert ring_limits(condition, few, (), lambda _: torch.int64)[0]

"""Few rows in the lanes of vectors: panels of which every row keeps every key, and the others beside them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kernel_reference import reference
from test_cpu_attention import DTYPES, ERRORS, difference
from torch import Tensor

from attn_pass.devices.cpu.kernel.operator import OPERATOR, WITH_LSE

# Heads of a group, and queries.
ROWS = ((1, 7), (7, 1), (8, 1), (2, 4), (4, 2), (13, 1), (1, 14), (3, 5), (4, 4), (16, 1), (2, 8))
DIMS = (2, 16, 24, 40, 64, 80, 128, 33)


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor, float], dict[str, Any]]:
    """A call with rows that fill most lanes, in which most panels are kept as a whole."""
    (group, q_len), kv_heads, batch = rng.choice(ROWS), rng.choice((1, 2)), rng.choice((1, 2))
    kv_len, dim, value_dim = rng.choice((64, 100, 128, 200, 300, 700)), rng.choice(DIMS), rng.choice(DIMS)
    query = torch.randn(batch, group * kv_heads, q_len, dim).to(dtype)
    key, value = (torch.randn(batch, kv_len, kv_heads, n).to(dtype) for n in (dim, value_dim))
    if rng.random() < 0.5:  # heads first, in memory
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    given: dict[str, Any] = {}
    if rng.random() < 0.4:
        given |= {"after": 0, "shift": torch.randint(0, kv_len, (batch,))}
    if rng.random() < 0.3:
        given["ends"] = torch.randint(1, kv_len + 1, (batch,))
    if rng.random() < 0.3:
        given["before"] = rng.choice((10, 150))
    if rng.random() < 0.4:  # a hole, in some heads perhaps
        by_head = rng.choice((1, group * kv_heads))
        given["keep"] = torch.ones(batch, by_head, rng.choice((1, q_len)), kv_len, dtype=torch.bool)
        given["keep"][:, -1, :, rng.randrange(kv_len) :][..., : rng.choice((1, 20, 100))] = False
    return (query, key.transpose(1, 2), value.transpose(1, 2), rng.choice((dim**-0.5, 0.02, -0.3))), given


def failures(dtype: torch.dtype, count: int, seed: int) -> list[str]:
    """Drawn calls that come out wrong, in words."""
    rng, faults = random.Random(seed), []
    torch.manual_seed(seed)
    for n in range(count):
        operands, given = draw(rng, dtype)
        expected, expected_lse = reference(*operands, **given)
        out, lse = WITH_LSE(*operands, **given)
        wrong = max(difference(out, expected), difference(lse, expected_lse))
        if wrong > ERRORS[dtype]:
            shapes = [tuple(x.shape) for x in operands[:3]]
            faults.append(f"{dtype} {seed}.{n}: {wrong:.1e} {shapes} scale {operands[3]} {sorted(given)}")
    return faults


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_calls_are_right(dtype: torch.dtype) -> None:
    assert failures(dtype, 200, seed=1) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 16])
def test_the_largest_score_may_come_last_or_first(rows: int, dtype: torch.dtype) -> None:
    """What was summed before is made smaller, lane by lane, and what comes after a large score still counts."""
    torch.manual_seed(0)
    query, key, value = torch.ones(1, rows, 1, 16), torch.randn(1, 1, 256, 16), torch.randn(1, 1, 256, 32)
    query[:, ::2] = -1  # every other row sees the order turned round
    key += torch.linspace(-2.0, 2.0, 256)[:, None]
    operands = [x.to(dtype) for x in (query, key, value)]
    expected, _ = reference(*operands, 1.0)
    assert difference(OPERATOR(*operands, 1.0), expected) <= ERRORS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 16])
def test_numbers_that_are_none_stay_in_their_row(rows: int, dtype: torch.dtype) -> None:
    """A query that is NaN, one that is infinite, and keys behind the last, whatever they hold."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, n, 24).to(dtype) for h, n in ((rows, 1), (1, 200), (1, 200)))
    clean = OPERATOR(query, key, value, 0.2, end=170)
    key[:, :, 170:], value[:, :, 170:] = float("nan"), float("inf")
    query[:, 1], query[:, 3, :, 0] = float("nan"), float("inf")
    out = OPERATOR(query, key, value, 0.2, end=170)
    assert out[:, [1, 3]].isnan().all()
    others = [r for r in range(rows) if r not in (1, 3)]
    assert torch.equal(out[:, others], clean[:, others])


@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_roundings_of_many_equal_weights_do_not_add_up(rows: int) -> None:
    """One large score, and thousands of equal ones, in tasks of many panels: in lanes as beside them."""
    count = 8192
    key, value = torch.zeros(1, 1, count, 16), torch.ones(1, 1, count, 16)
    key[:, :, 0, 0], value[:, :, 0] = 3.3, 0
    query = torch.zeros(1, rows, 1, 16)
    query[..., 0] = 1
    expected, expected_lse = reference(query, key, value, 1.0)
    out, lse = WITH_LSE(*(x.expand(64, -1, -1, -1) for x in (query, key, value)), 1.0)
    assert difference(out[:1], expected) <= 1e-6
    assert difference(lse[:1], expected_lse) <= 1e-6


def test_every_score_may_be_minus_infinity() -> None:
    query, key, value = torch.ones(1, 8, 1, 4), torch.full((1, 1, 128, 4), float("-inf")), torch.ones(1, 1, 128, 4)
    assert OPERATOR(query, key, value, 0.5, fully_masked="zero").eq(0).all()
    assert OPERATOR(query, key, value, 0.5, fully_masked="nan").isnan().all()

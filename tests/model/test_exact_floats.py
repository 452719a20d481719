"""Positions as floats are folded to indices where the type holds them, and only there."""

from __future__ import annotations

import pytest
import torch

from attn_pass.model.exact_floats import LARGEST, holds
from attn_pass.model.expression import Apply, Const, Expr, IndexValue, apply, index_value, walk
from attn_pass.model.index import Axis, Index, Poly, Symbol, axis_index
from attn_pass.model.operations import OPERATIONS
from attn_pass.model.reference import Evaluation

I, J = Axis("i", 5), Axis("j", 7)
OPERATIONS_OF_TWO = ("add", "sub", "le", "lt", "ge", "gt", "eq", "ne")
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def positions(first: Index, dtype: torch.dtype | None) -> tuple[Expr, Expr]:
    numbers = [index_value(axis_index(a) + first) for a in (I, J)]
    return tuple(n if dtype is None else apply("cast", n, dtype=dtype) for n in numbers)  # type: ignore[return-value]


def is_folded(expression: Expr) -> bool:
    """Whether at most the result is cast: its operands are integers."""
    inner = expression.args[0] if isinstance(expression, Apply) and expression.op == "cast" else expression
    return not any(isinstance(e, Apply) and e.op == "cast" for e in walk(inner))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", OPERATIONS_OF_TWO)
def test_a_fold_is_what_torch_computes_in_the_type(op: str, dtype: torch.dtype) -> None:
    largest = LARGEST[dtype]
    folded = []
    for first in (0, 1, -largest, -largest - 1, largest // 2 - 6, largest - 6, largest - 5, largest + 1):
        expression = apply(op, positions(first, dtype)[0], positions(first, dtype)[1])
        if is_folded(expression):
            folded.append(first)
            row, column = (torch.arange(n).add(first).to(dtype) for n in (5, 7))
            expected = OPERATIONS[op].torch(row[:, None], column)
            got = Evaluation((I, J), (), {}).expression(expression).expand(5, 7)
            assert torch.equal(got.to(expected.dtype), expected), first
    arithmetic = op == "add"  # of two numbers that are held, what need not be
    assert folded == ([0, 1, largest // 2 - 6] if arithmetic else [0, 1, -largest, largest // 2 - 6, largest - 6])


@pytest.mark.parametrize("one, other", [(a, b) for a in TYPES for b in [*TYPES, None] if a != b])
def test_two_types_are_compared_as_far_as_the_narrower_counts(one: torch.dtype, other: torch.dtype | None) -> None:
    largest = min(LARGEST[t] for t in (one, other) if t is not None)
    for first, held in ((largest - 6, True), (largest - 5, False)):
        for left, right in (
            (positions(first, one)[0], positions(first, other)[1]),
            (positions(first, other)[0], positions(first, one)[1]),
        ):
            compared = apply("le", left, right)
            assert (compared == apply("le", *positions(first, None))) == held
            assert not is_folded(apply("sub", left, right)), "which of the two types it is in depends on dimensions"


@pytest.mark.parametrize(
    "op, operands",
    [
        ("le", (positions(0, torch.float32)[0], Const(2.5))),
        ("le", (positions(0, torch.float16)[0], Const(2049.0))),
        ("le", (positions(0, torch.float32)[0], Const(float("inf")))),
        ("eq", (positions(0, torch.float32)[0], Const(True))),
        ("sub", (Const(-0.0), positions(0, torch.float32)[0])),
        ("mul", (positions(0, torch.float32)[0], Const(-1.0))),
        ("neg", positions(0, torch.float32)[:1]),
        ("le", positions(Poly.of(Symbol("s0")), torch.float32)),
    ],
)
def test_what_stays_a_float(op: str, operands: tuple[Expr, ...]) -> None:
    """No whole number, one that the type does not hold, one of unknown size, or one that may be -0.0."""
    assert apply(op, *operands) == Apply(op, operands)


def test_distances_and_casts() -> None:
    row, column = positions(0, torch.float32)
    distance = apply("abs", apply("sub", row, column))
    assert apply("le", distance, Const(3.0)) == Apply("le", (Apply("abs", (IndexValue(I_J),)), Const(3)))
    assert apply("cast", row, dtype=torch.int64) == IndexValue(axis_index(I))  # type: ignore[arg-type]
    late = apply("cast", IndexValue(axis_index(I) + 2**24), dtype=torch.float32)  # type: ignore[arg-type]
    assert apply("cast", late, dtype=torch.int64) == Apply("cast", (late,), torch.int64)
    assert apply("cast", row, dtype=torch.int8) == Apply("cast", (row,), torch.int8)


I_J = axis_index(I) - axis_index(J)


def test_what_a_type_holds() -> None:
    for dtype, largest in LARGEST.items():
        numbers = torch.tensor([largest - 1, largest, largest + 1]).to(dtype)
        assert numbers[0] != numbers[1] and (numbers[1] == numbers[2]), dtype
        assert holds(dtype, largest) and holds(dtype, -largest)
        assert not holds(dtype, largest + 1) and not holds(dtype, -largest - 1)
    assert not holds(None, 1) and not holds(torch.int64, 1)

"""Constant folding changes no element: every folded expression compared with the unfolded one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Apply,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    apply,
    contains_dot,
    expression_axes,
    is_boolean,
    loads,
    rewrite_indices,
    walk,
)
from attn_pass.model.index import Axis, Index, axis_index
from attn_pass.model.operations import OPERATIONS
from attn_pass.model.reference import Evaluation

property_test = settings(max_examples=400, deadline=None, derandomize=True, database=None)

I, J = Axis("i", 5), Axis("j", 4)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)  # rounding is not what is compared
SOURCES = (
    torch.tensor([True, False, True, True]),
    torch.tensor([0.0, -1.5, float("-inf"), 3.0]),
    torch.tensor([0, 1, 2, 300]),
    torch.tensor([[0.5, -0.5, 0.0, 1.0]] * 5),
)
LEAVES: tuple[Expr, ...] = (
    TRUE,
    FALSE,
    *(Const(c) for c in (0, 1, 2, -3, 300, 0.0, 1.0, -0.5, 2.7, -1e9, float("-inf"), float("nan"))),
    IndexValue(axis_index(I)),
    IndexValue(axis_index(J)),
    IndexValue(axis_index(J) * 2 + 1),
    IndexValue(axis_index(I) - axis_index(J)),
    *(Load(n, (axis_index(J),)) for n in range(3)),
    Load(3, (axis_index(I), axis_index(J))),
)
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
)
UNARY = ("neg", "abs", "not", "tanh", "sigmoid", "exp", "log")


def expressions() -> st.SearchStrategy[Expr]:
    """Trees exactly as written: nothing is folded."""

    def grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.one_of(
            st.builds(lambda op, a, b: Apply(op, (a, b)), st.sampled_from(BINARY), inner, inner),
            st.builds(lambda op, a: Apply(op, (a,)), st.sampled_from(UNARY), inner),
            st.builds(lambda a, dtype: Apply("cast", (a,), dtype), inner, st.sampled_from(DTYPES)),
            st.builds(lambda c, a, b: Apply("where", (c, a, b)), inner, inner, inner),
        )

    return st.recursive(st.sampled_from(LEAVES), grown, max_leaves=6)


def folded(expression: Expr) -> Expr:
    """The same tree built with `apply`."""
    if not isinstance(expression, Apply):
        return expression
    return apply(expression.op, *(folded(a) for a in expression.args), dtype=expression.dtype)


def elements(expression: Expr) -> torch.Tensor:
    """Every element, on the grid of the two axes."""
    return Evaluation((I, J), SOURCES, {}).expression(expression).expand(5, 4)


def as_torch_runs_it(expression: Expr) -> torch.Tensor | None:
    """Every element as a program with these tensors has it; None where torch refuses or leaves it open."""
    if isinstance(expression, Apply):
        args = [as_torch_runs_it(a) for a in expression.args]
        given = [a for a in args if a is not None]
        if len(given) != len(args):
            return None
        if expression.op == "cast":
            (value,) = given
            assert expression.dtype is not None
            if value.is_floating_point() and not expression.dtype.is_floating_point and expression.dtype != torch.bool:
                if not value.isfinite().all() or value.abs().max() > 100 or value.min() < 0:
                    return None  # not defined in C, and so not in torch
            wide = torch.float64 if expression.dtype.is_floating_point else expression.dtype
            return value.to(wide)
        if expression.op == "where" and given[0].dtype != torch.bool:
            return None
        try:
            return OPERATIONS[expression.op].torch(*given)
        except RuntimeError:
            return None
    return elements(expression).clone()


@property_test
@given(expressions())
def test_folding_changes_no_element(expression: Expr) -> None:
    expected = as_torch_runs_it(expression)
    assume(expected is not None)
    assert expected is not None
    short = folded(expression)
    got = elements(short)
    casts = (e for e in walk(expression) if isinstance(e, Apply) and e.op == "cast" and e.dtype is not None)
    rounds = any(e.dtype.is_floating_point for e in casts if e.dtype is not None)
    off = 1e-2 if rounds else 1e-9 if expected.is_floating_point() else 0.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=off, atol=off, equal_nan=True)
    assert not is_boolean(short) or got.dtype == torch.bool
    assert expected.dtype != torch.bool or got.dtype == torch.bool, "a truth value became a number"


@property_test
@given(expressions(), st.sampled_from([(2, 1), (3, 0), (1, 2)]))
def test_rewriting_indices_moves_the_elements(expression: Expr, shift: tuple[int, int]) -> None:
    """``j -> k * 2 + c`` and ``i`` fixed: the elements of the old grid at those places."""
    k = Axis("k", 2)
    row, constant = shift
    new: dict[Axis, Index] = {J: axis_index(k) * 2 + (constant % 2), I: row}
    assume(as_torch_runs_it(expression) is not None)
    old = elements(folded(expression))
    moved = rewrite_indices(folded(expression), new)
    assert expression_axes(moved) <= {k}
    got = Evaluation((k,), SOURCES, {}).expression(moved).reshape(-1).expand(2)
    torch.testing.assert_close(got.double(), old[row, constant % 2 :: 2].double(), equal_nan=True)


def test_numbers_that_compare_equal_are_not_the_same() -> None:
    assert Const(True) != Const(1) != Const(1.0) and Const(0.0) == Const(0.0)
    assert len({Const(1), Const(1.0), Const(True)}) == 3


def test_comparisons_are_decided_by_ranges() -> None:
    """Bidirectional masks (``q >= 0``), prefixes as long as the keys, and what stays open."""
    i, j = IndexValue(axis_index(I)), IndexValue(axis_index(J))
    assert apply("ge", i, Const(0)) == TRUE and apply("lt", j, Const(4)) == TRUE and apply("gt", i, Const(4)) == FALSE
    assert apply("ne", i, Const(7)) == TRUE and apply("eq", i, i) == TRUE and apply("eq", i, Const(7)) == FALSE
    assert apply("ne", i, i) == FALSE and apply("le", i, Const(4)) == TRUE and apply("le", Const(5), i) == FALSE
    assert apply("le", j, i) == Apply("le", (j, i)) and apply("eq", i, Const(2)) == Apply("eq", (i, Const(2)))


def test_a_cast_mask_compared_is_the_mask() -> None:
    """``mask.float() == 0`` and ``mask.int() != 0``, and the where that tril of ones is."""
    mask = Apply("eq", (Load(2, (axis_index(J),)), Const(1)))
    for dtype in (torch.float32, torch.int64):
        number = apply("cast", mask, dtype=dtype)
        assert apply("ne", number, Const(0)) == mask
        assert apply("eq", number, Const(0)) == Apply("not", (mask,))
        assert apply("eq", number, Const(2)) == FALSE and apply("lt", number, Const(2)) == TRUE
    triangle = apply(
        "where", Apply("le", (IndexValue(axis_index(J)), IndexValue(axis_index(I)))), Const(1.0), Const(0.0)
    )
    below = triangle.args[0]  # type: ignore[union-attr]
    assert apply("ne", triangle, Const(0)) == apply("cast", triangle, dtype=torch.bool) == below
    assert apply("eq", triangle, Const(0)) == apply("not", below)


def test_casts_to_integers_truncate_and_wrap() -> None:
    """Casts are no decoration: buckets of relative positions are made by truncation."""
    assert apply("cast", Const(2.7), dtype=torch.int64) == Const(2)
    assert apply("cast", Const(-2.7), dtype=torch.int64) == Const(-2)
    assert apply("cast", Const(0.1), dtype=torch.float16) == Const(float(torch.tensor(0.1, dtype=torch.float16)))
    assert apply("cast", Const(-1e9), dtype=torch.float16).value == -math.inf  # type: ignore[union-attr]
    for number in (300, -1):
        wrapped = apply("cast", Const(number), dtype=torch.uint8)
        assert wrapped in (Const(number % 256), Apply("cast", (Const(number),), torch.uint8))


def test_what_an_expression_is_made_of() -> None:
    row, column = Load(0, (axis_index(J),)), Load(3, (axis_index(I), axis_index(J)))
    score = apply("add", apply("mul", Dot(), Const(0.5)), apply("where", row, column, Const(0.0)))
    assert contains_dot(score) and not contains_dot(column)
    assert loads(score) == (row, column)
    assert expression_axes(score) == {I, J} and expression_axes(row) == {J} and expression_axes(Dot()) == set()
    assert sum(isinstance(e, Const) for e in walk(score)) == 2
    assert str(score) == "((dot * 0.5) + where(t0[j], t3[i, j], 0))"


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_operation_runs_on_tensors(op: str) -> None:
    count = {"where": 3}.get(op, 1 if op in UNARY else 2)
    args = [torch.tensor([0.5, 2.0])] * count
    if op == "where":
        args[0] = torch.tensor([True, False])
    assert OPERATIONS[op].torch(*args).shape == (2,)


def test_floats_that_a_narrow_type_makes_equal_are_not_compared_for_it() -> None:
    """``full(-1e9, dtype=bfloat16) == -1e9`` holds in torch, where the full holds -998244352."""
    filled = apply("cast", Const(-1e9), dtype=torch.bfloat16)
    assert filled != Const(-1e9)
    compared = apply("eq", filled, Const(-1e9))
    assert compared == Apply("eq", (filled, Const(-1e9)))
    assert apply("eq", filled, Const(0.0)) == FALSE and apply("eq", Const(0.5), Const(0.5)) == TRUE
    assert apply("lt", Const(-math.inf), Const(-1e9)) == TRUE and apply("ne", Const(math.nan), Const(0.0)) == TRUE

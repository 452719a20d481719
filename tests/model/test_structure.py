"""A structure equals the condition it was derived from, and a row that is proven to keep a key keeps one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import TRUE, Apply, Const, Expr, Load, apply, index_value
from attn_pass.model.index import Axis, Poly, Symbol, axis_index
from attn_pass.model.piecewise import as_condition, pieces
from attn_pass.model.reference import Evaluation
from attn_pass.model.structure import Band, Chunk, Keys, Opaque, keeps_a_key

property_test = settings(max_examples=300, deadline=None, derandomize=True, database=None)
LENGTH, PAST = Poly.of(Symbol("s0", 1)), Poly.of(Symbol("s1", 0))
SIZES = {"s0": 5, "s1": 3}
I, J = Axis("i", LENGTH), Axis("j", LENGTH + PAST)
ROWS: tuple[Axis, ...] = (I,)
row, key = index_value(axis_index(I)), index_value(axis_index(J))
MASK = (torch.tensor([True, False, True, True, False, False, True, True]),)
LOADED = apply("cast", Load(0, (axis_index(J),)), dtype=torch.bool)


def grid(expression: Expr) -> torch.Tensor:
    return Evaluation((I, J), MASK, SIZES).expression(expression).expand(5, 8)


NUMBERS = st.integers(-4, 9).map(Const)
LEAVES = st.sampled_from((row, key, apply("floordiv", key, Const(3)), apply("floordiv", row, Const(3)))) | NUMBERS
INDICES = st.recursive(
    LEAVES | st.just(index_value(PAST)),
    lambda inner: (
        st.builds(lambda op, a, b: apply(op, a, b), st.sampled_from(("add", "sub")), inner, inner)
        | st.builds(lambda a, n: apply("mul", a, Const(n)), inner, st.integers(-2, 2))
        | st.builds(lambda a: apply("abs", a), inner)
    ),
    max_leaves=4,
)
COMPARISONS = st.builds(
    lambda op, a, b: apply(op, a, b), st.sampled_from(("le", "lt", "ge", "gt", "eq", "ne")), INDICES, INDICES
)
CONDITIONS = st.recursive(
    COMPARISONS | st.just(LOADED),
    lambda inner: (
        st.builds(lambda op, a, b: apply(op, a, b), st.sampled_from(("and", "or", "mul")), inner, inner)
        | st.builds(lambda a: apply("not", a), inner)
        | st.builds(lambda c, a, b: apply("where", c, a, b), inner, inner, inner)
    ),
    max_leaves=5,
)


@property_test
@given(CONDITIONS)
def test_an_exact_structure_is_the_condition(condition: Expr) -> None:
    kept = grid(condition)
    structure = structure_of(as_condition(condition), J, ROWS)
    if structure.is_exact:
        assert torch.equal(grid(structure.condition()), kept), structure
    for part in structure.parts:
        if not isinstance(part, Opaque):
            assert grid(part.condition(structure.key, structure.row))[kept].all(), structure
    if keeps_a_key(structure, J):
        assert kept.any(-1).all(), structure


NUMERIC = st.recursive(
    st.sampled_from((0.0, 1.0, -1e9, 2.0)).map(Const) | CONDITIONS.map(lambda c: apply("cast", c, dtype=torch.float32)),
    lambda inner: (
        st.builds(
            lambda op, a, b: Apply(op, (a, b)),
            st.sampled_from(("add", "sub", "mul", "maximum", "minimum")),
            inner,
            inner,
        )
        | st.builds(lambda c, a, b: apply("where", c, a, b), CONDITIONS, inner, inner)
    ),
    max_leaves=3,
)


@property_test
@given(NUMERIC)
def test_pieces_are_the_values(expression: Expr) -> None:
    parts = pieces(expression)
    if parts is None:
        return
    values = grid(expression).double()
    total = torch.zeros(5, 8)
    for condition, value in parts:
        where = grid(condition)
        total = total + where
        assert (values[where] == value.value).all()
    assert (total == 1).all()
    assert torch.equal(grid(as_condition(apply("ne", expression, Const(0.0)))), values != 0)


def test_values_are_left_out_where_positions_exclude_them() -> None:
    """What is loaded may be another value by then."""
    later, near = apply("gt", key, row), apply("gt", key, apply("add", row, Const(2)))
    for condition, inner, left in (
        (later, later, {0.0, -1e9}),
        (later, near, {0.0, -1e9}),
        (near, later, {0.0, 1.0, -1e9}),
        (apply("or", later, apply("eq", key, row)), later, {0.0, -1e9}),
        (LOADED, LOADED, {0.0, 1.0, -1e9}),
    ):
        filled = apply("where", condition, Const(-1e9), apply("cast", inner, dtype=torch.float32))
        assert {v.value for _, v in pieces(filled) or ()} == left


def test_parts_by_name() -> None:
    """With symbolic lengths; the diagonal of the last keys is a key of its row."""
    last = apply("le", key, apply("add", row, index_value(PAST)))
    window = apply("gt", key, apply("sub", apply("add", row, index_value(PAST)), Const(4)))
    chunk = apply("eq", apply("floordiv", key, Const(3)), apply("floordiv", row, Const(3)))
    for condition, parts, nonempty in (
        (TRUE, (), True),
        (apply("le", key, row), (Band(None, 0),), True),
        (last, (Band(None, PAST),), True),
        (apply("and", last, window), (Band(PAST - 3, PAST),), True),
        (apply("and", chunk, apply("le", key, row)), (Band(None, 0), Chunk(3)), True),
        (apply("lt", key, row), (Band(None, -1),), False),
        (apply("lt", key, Const(4)), (Keys(None, 3),), True),
        (apply("ge", key, Const(1)), (Keys(1, None),), False),
        (apply("and", LOADED, last), (Band(None, PAST), Opaque("padding")), False),
    ):
        structure = structure_of(condition, J, ROWS)
        assert structure.parts == parts
        assert keeps_a_key(structure, J) == nonempty

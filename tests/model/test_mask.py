"""A mask is one value: its name, and that rewriting it leaves none of its expressions behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from attn_pass.model.distance import ByDistance
from attn_pass.model.expression import Expr, Load, apply, index_value, loads, rewrite_indices
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.mask import Apart, Computed, Keep, Mask
from attn_pass.model.structure import Band, Opaque, Structure

NEG_INF = float("-inf")
I, J, DISTANCE = Axis("i", 3), Axis("j", 5), Axis("distance", 7)
ROW, KEY = axis_index(I), axis_index(J)
CONDITION = apply("le", Load(1, (KEY,)), index_value(ROW))
FULL = Mask(
    bias=Load(0, (ROW, KEY)),
    keep=Keep(CONDITION, NEG_INF),
    fills=(NEG_INF,),
    structure=Structure(KEY, ROW, (Band(None, 0), Opaque("padding"))),
    never_empty=True,
    by_distance=ByDistance(DISTANCE, I, Load(2, (axis_index(DISTANCE),)), Load(3, (axis_index(DISTANCE),))),
    bias_by_distance=ByDistance(DISTANCE, I, Load(6, (axis_index(DISTANCE),)), None),
    computed=Computed(Load(4, (KEY,)), Load(5, (KEY,))),
    apart=Apart(Load(7, (KEY,)), Keep(apply("le", Load(8, (KEY,)), index_value(ROW)), NEG_INF, is_added=True)),
)


def expressions(value: object) -> Iterator[Expr]:
    """Every expression anywhere in a value."""
    if isinstance(value, Expr):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from expressions(getattr(value, field.name))


def test_no_mask_keeps_every_key() -> None:
    none = Mask.none()
    assert none.is_none and none.never_empty and none.parts() == [] and none.axes() == set() and str(none) == "none"
    assert none.deep_bias is none.deep_condition is none.condition is None
    assert not none.only_hides and not none.replaces_with_number


@pytest.mark.parametrize(
    ("mask", "only_hides", "with_number"),
    [
        (Mask(keep=Keep(CONDITION, NEG_INF)), True, False),
        (Mask(keep=Keep(CONDITION, -1e9)), False, True),
        (Mask(bias=FULL.bias), False, False),
        (Mask(bias=FULL.bias, keep=Keep(CONDITION, NEG_INF)), False, False),
        (Mask(bias=FULL.bias, keep=Keep(CONDITION, -1e9)), False, True),
    ],
)
def test_what_it_does_to_a_score(mask: Mask, only_hides: bool, with_number: bool) -> None:
    assert not mask.is_none
    assert (mask.only_hides, mask.replaces_with_number) == (only_hides, with_number)


def test_what_is_computed_stands_in_for_what_is_read() -> None:
    assert (FULL.deep_bias, FULL.deep_condition) == (Load(4, (KEY,)), Load(5, (KEY,)))
    alone = Mask(FULL.bias, FULL.keep, computed=Computed(None, Load(5, (KEY,))))
    assert (alone.deep_bias, alone.deep_condition) == (FULL.bias, Load(5, (KEY,)))


def test_its_axes_are_those_of_bias_and_condition() -> None:
    assert FULL.axes() == {I, J} and Mask(bias=Load(0, (ROW,))).axes() == {I}


def test_by_distance_is_named_if_the_structure_is_not_all() -> None:
    assert str(FULL) == "causal and padding, by distance"
    assert str(Mask(structure=Structure(KEY, ROW, (Band(None, 0),)), by_distance=FULL.by_distance)) == "causal"


def test_rewriting_leaves_no_expression_behind() -> None:
    every = list(expressions(FULL))
    assert len(every) == 9 and {x.source for e in every for x in loads(e)} == set(range(9))
    moved = FULL.rewritten(lambda e: Load(9, ()))
    assert set(expressions(moved)) == {Load(9, ())} and len(list(expressions(moved))) == 9
    assert (moved.fills, moved.structure, moved.never_empty) == (FULL.fills, FULL.structure, FULL.never_empty)
    assert Mask.none().rewritten(lambda e: rewrite_indices(e, {J: 0})) == Mask.none()

"""Alternatives of a mask, with what they repeat left out, are the same mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_pass.model.alternatives import simplified
from attn_pass.model.index import Axis, Poly, Symbol, axis_index
from attn_pass.model.reference import Evaluation
from attn_pass.model.structure import Band, Chunk, Either, Keys, Part

LENGTH, PAST = Poly.of(Symbol("s0", 1)), Poly.of(Symbol("s1", 0))
I, J = Axis("i", LENGTH), Axis("j", LENGTH + PAST)
ROW, KEY = axis_index(I), axis_index(J)


def grid(*options: tuple[Part, ...], length: int = 5, past: int = 3) -> torch.Tensor:
    condition = Either(options).condition(KEY, ROW)
    values = Evaluation((I, J), (), {"s0": length, "s1": past}).expression(condition)
    return values.expand(length, length + past)


BOUNDS = st.none() | st.integers(-4, 9) | st.sampled_from([PAST, PAST - 1, LENGTH])
PARTS = st.one_of(
    st.builds(Band, BOUNDS, BOUNDS), st.builds(Keys, BOUNDS, BOUNDS), st.sampled_from([Chunk(3), Chunk(3, 1)])
)
OPTIONS = st.lists(st.lists(PARTS, max_size=3).map(tuple), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(OPTIONS)
def test_the_mask_stays_what_it_is(options: list[tuple[Part, ...]]) -> None:
    fewer = simplified(options, KEY, ROW)
    assert fewer and len(fewer) <= len(options)
    for length, past in ((5, 3), (1, 0), (1, 4), (4, 0)):
        assert torch.equal(grid(*fewer, length=length, past=past), grid(*options, length=length, past=past))


BEHIND, BEFORE = Keys(PAST, None), Keys(None, PAST - 1)


@pytest.mark.parametrize(
    "options, fewer",
    [
        ([(Band(None, PAST), BEHIND), (BEFORE,)], [(Band(None, PAST),)]),
        ([(BEFORE,), (Band(None, PAST),)], [(Band(None, PAST),)]),
        ([(Band(None, 0),), (Band(-2, None),)], [()]),
        ([(Band(None, 0),), (Band(2, None),)], [(Band(None, 0),), (Band(2, None),)]),
        ([(Band(None, 0),), (BEFORE,)], [(Band(None, 0),), (BEFORE,)]),
        ([(Band(None, PAST), Keys(PAST + 1, None)), (BEFORE,)], [(Band(None, PAST), Keys(PAST + 1, None)), (BEFORE,)]),
        ([(Band(0, None), BEHIND), (BEFORE,)], [(Band(0, None),), (BEFORE,)]),
        ([(Chunk(4),), (Chunk(4), Band(None, 0))], [(Chunk(4),)]),
        ([(Chunk(4),), (Chunk(4, 1), Band(None, 0))], [(Chunk(4),), (Chunk(4, 1), Band(None, 0))]),
    ],
)
def test_what_is_repeated(options: list[tuple[Part, ...]], fewer: list[tuple[Part, ...]]) -> None:
    assert simplified(options, KEY, ROW) == fewer

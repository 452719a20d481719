"""`view_steps` applied to real tensors gives the elements that indexing by the position gives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_pass.model.index import Axis, Index, Poly, Symbol, axes, axis_index, divide, product
from attn_pass.model.reference import Evaluation
from attn_pass.model.views import Expand, NoView, Permute, Reshape, Slice, Step, shape_after, view_steps

Group = tuple[Axis, ...]
property_test = settings(max_examples=250, deadline=None, derandomize=True, database=None)


def applied(x: torch.Tensor, steps: Sequence[Step], sizes: Mapping[str, int]) -> torch.Tensor:
    """The steps as torch runs them; each must be what its shape says, and all but a reshape a view."""
    number = Evaluation((), (), sizes).size
    for step in steps:
        expected = [number(s) for s in shape_after(tuple(x.shape), step)]
        before = x
        if isinstance(step, Slice):
            x = x.narrow(step.dim, number(step.start), number(step.length))
        elif isinstance(step, Reshape):
            x = x.reshape([number(s) for s in step.shape])
        elif isinstance(step, Permute):
            x = x.permute(step.dims)
        elif isinstance(step, Expand):
            x = x.expand([number(s) for s in step.shape])
        assert list(x.shape) == expected
        assert isinstance(step, Reshape) or x.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return x


def indexed(x: torch.Tensor, index: Sequence[Index], groups: Sequence[Group], sizes: Mapping[str, int]) -> torch.Tensor:
    """What the operand must hold, element by element: one dimension a group, size 1 where the source has none of it."""
    order = [a for group in groups for a in group]
    grid = Evaluation(order, [x], sizes)
    position = [torch.as_tensor(grid.index(i)).expand(grid.shape) for i in index]
    full = x[tuple(position)] if position else x.expand(grid.shape)
    used = set().union(*(axes(i) for i in index))
    shape = []
    for group in groups:
        if used & set(group):
            shape.append(int(product(grid.size(a.size) for a in group)))  # type: ignore[arg-type]
        else:
            shape.append(1)
            for place in (order.index(a) for a in group):
                full = full.narrow(place, 0, 1)
    return full.reshape(shape)


def agree(
    shape: Sequence[int | Index],
    index: Sequence[Index],
    groups: Sequence[Group],
    sizes: Mapping[str, int] | None = None,
) -> tuple[Step, ...]:
    """The steps, once they are known to give what indexing gives."""
    known = dict(sizes or {})
    numbers = [Evaluation((), (), known).size(s) for s in shape]
    x = torch.arange(int(torch.tensor(numbers).prod())).reshape(numbers)
    steps = view_steps(tuple(shape), index, groups)
    torch.testing.assert_close(applied(x, steps, known), indexed(x, index, groups, known))
    return steps


def axis(name: str, size: Index) -> tuple[Axis, Index]:
    made = Axis(name, size)
    return made, axis_index(made)


# ---------------------------------------------------------------- any layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Index], list[Index], list[Group], dict[str, int]]:
    """A source whose dimensions hold any axes in any order, sliced or not, and groups of these axes and of others."""
    symbol = Symbol("s0", 1)
    sizes: dict[str, int] = {"s0": draw(st.integers(1, 4))}
    size = st.sampled_from([1, 2, 3, 4, Poly.of(symbol)])
    made = [Axis(f"a{n}", draw(size)) for n in range(draw(st.integers(1, 5)))]
    held = draw(st.permutations(made))[: draw(st.integers(0, len(made)))]
    present = list(held)
    shape: list[Index] = []
    index: list[Index] = []
    while held:
        taken, held = held[: (count := draw(st.integers(1, 3)))], held[count:]
        flat: Index = 0
        for one in taken:
            flat = flat * one.size + axis_index(one)
        start, end = draw(st.sampled_from([(0, 0), (0, 0), (0, 2), (1, 0), (2, 3)]))
        shape.append(product(a.size for a in taken) + start + end)
        index.append(flat + start)
    for _ in range(draw(st.integers(0, 2))):  # dimensions read at one place
        place, length = draw(st.integers(0, len(shape))), draw(st.integers(1, 3))
        shape.insert(place, length)
        index.insert(place, length - 1)
    absent = [a for a in made if a not in present]
    ordered = draw(st.permutations(present + absent))
    groups: list[Group] = [()] if draw(st.booleans()) else []
    while ordered:
        count = draw(st.integers(1, 3))
        groups.append(tuple(ordered[:count]))
        ordered = ordered[count:]
    return shape, index, groups, sizes


@property_test
@given(layouts())
def test_any_layout_is_a_view_or_reshape_of_its_source(
    layout: tuple[list[Index], list[Index], list[Group], dict[str, int]],
) -> None:
    """Merged and split dimensions, any order, slices, axes of size 1, broadcast axes, a symbolic size."""
    agree(*layout)


# ---------------------------------------------------------------- what attention asks for


def test_heads_last() -> None:
    """(B, L, H * D) shown as (B, H, L, D): one reshape and one permute."""
    (b, bi), (h, hi), (i, ii), (d, di) = axis("b", 2), axis("h", 3), axis("i", 5), axis("d", 4)
    steps = agree((2, 5, 12), (bi, ii, hi * 4 + di), ((b,), (h,), (i,), (d,)))
    assert steps == (Reshape((2, 5, 3, 4)), Permute((0, 2, 1, 3)))


def test_nothing_to_do_gives_no_step() -> None:
    (b, bi), (h, hi), (i, ii), (d, di) = axis("b", 2), axis("h", 3), axis("i", 5), axis("d", 4)
    assert agree((2, 3, 5, 4), (bi, hi, ii, di), ((b,), (h,), (i,), (d,))) == ()


def test_a_part_of_a_fused_projection() -> None:
    """The keys in (B, L, 3 * H * D) with a symbolic length."""
    length = Poly.of(Symbol("s0", 2))
    (b, bi), (h, hi), (j, ji), (d, di) = axis("b", 2), axis("h", 3), axis("j", length), axis("d", 4)
    steps = agree((2, length, 36), (bi, ji, hi * 4 + di + 12), ((b,), (h,), (j,), (d,)), {"s0": 7})
    assert steps == (Slice(2, 12, 12), Reshape((2, length, 3, 4)), Permute((0, 2, 1, 3)))


def test_heads_folded_into_the_batch() -> None:
    """(B * H, L, D), and queries packed for a group: (B, Hkv, G * L, D) of (B, H, L, D)."""
    (b, bi), (h, hi), (g, gi), (i, ii), (d, di) = axis("b", 2), axis("h", 3), axis("g", 2), axis("i", 5), axis("d", 4)
    agree((12, 5, 4), ((bi * 3 + hi) * 2 + gi, ii, di), ((b,), (h,), (g, i), (d,)))
    agree((2, 6, 5, 4), (bi, hi * 2 + gi, ii, di), ((b,), (h,), (g, i), (d,)))
    agree((2, 6, 5, 4), (bi, gi * 3 + hi, ii, di), ((b,), (h,), (g, i), (d,)))


def test_every_other_element_of_a_dimension() -> None:
    """Heads in pairs: the dimension is seen as pairs, and one place of each is taken."""
    length = Poly.of(Symbol("s0", 2))
    (b, bi), (h, hi), (i, ii), (d, di) = axis("b", 2), axis("h", 3), axis("i", length), axis("d", 4)
    steps = agree((2, 6, length, 4), (bi, hi * 2 + 1, ii, di), ((b,), (h,), (i,), (d,)), {"s0": 5})
    assert steps == (Reshape((2, 3, 2, length, 4)), Slice(2, 1, 1), Reshape((2, 3, length, 4)))
    agree((2, 12, 5), (bi, hi * 4 + 2, 3), ((b,), (h,)))
    agree((6, 24), (hi * 2, di * 6 + bi * 3 + 2), ((b, h), (d,)))
    agree((2, 7 * 6, 4), (bi, hi * 6 + 20, di), ((b,), (d,), (h,)))


def test_what_the_source_does_not_have_is_broadcast() -> None:
    """Alone an axis becomes size 1; in a group with axes the source has it is expanded."""
    (b, _), (h, hi), (i, ii), (j, ji) = axis("b", 2), axis("h", 3), axis("i", 5), axis("j", 7)
    assert agree((1, 3, 5, 7), (0, hi, ii, ji), ((b,), (h,), (i,), (j,))) == ()
    assert agree((5, 7), (ii, ji), ((b,), (h,), (i,), (j,))) == (Reshape((1, 1, 5, 7)),)
    steps = agree((5, 7), (ii, ji), ((), (h,), (b, i), (j,)))
    assert Expand((1, 1, 2, 5, 7)) in steps and steps[-1] == Reshape((1, 1, 10, 7))
    assert agree((), (), ((b,), (h, i))) == (Reshape((1, 1)),)


def test_an_axis_of_one_element_is_found_nowhere() -> None:
    (b, bi), (h, hi), (i, ii) = axis("b", 1), axis("h", 3), axis("i", 1)
    assert bi == ii == 0
    assert agree((3,), (hi,), ((b,), (h,), (i,))) == (Reshape((1, 3, 1)),)
    assert agree((4, 1, 3), (2, 0, hi), ((b,), (i, h))) == (Slice(0, 2, 1), Reshape((1, 3)))


@pytest.mark.parametrize(
    "index, why",
    [
        (lambda i, j: (i * 2 + 1, j), "steps over"),  # x[1::2] of an odd size
        (lambda i, j: (4 - i, j), "steps over"),  # flipped
        (lambda i, j: (i + j, 0), "steps over"),  # sliding windows
        (lambda i, j: (i, i), "twice"),  # a diagonal
        (lambda i, j: (i * 5 + j, i), "twice"),
        (lambda i, j: (divide(i, 2)[0], j), "unevenly"),
        (lambda i, j: (i * j, 0), "not affine"),
    ],
)
def test_no_view(index: object, why: str) -> None:
    """What steps, flips, overlaps, divides or repeats an axis is no chain of slices, reshapes, permutes and expands."""
    (i, ii), (j, ji) = axis("i", 5), axis("j", 5)
    with pytest.raises(NoView, match=why):
        view_steps((31, 31), index(ii, ji), ((i,), (j,)))  # type: ignore[operator]


@pytest.mark.parametrize(
    "index",
    [
        lambda i, j: (i, divide(j, 4)[0], divide(j, 4)[1]),  # rows and columns of an image: joined
        lambda i, j: (i, divide(j, 4)[1], divide(j, 4)[0]),  # numbered down the columns
        lambda i, j: (divide(j, 4)[0], i, 2),  # rows alone: repeated
        lambda i, j: (divide(j, 6)[0], divide(divide(j, 2)[0], 3)[1], i),
        lambda i, j: (divide(i, 2)[1], divide(j, 3)[1], divide(j, 6)[0]),
    ],
)
def test_an_axis_that_is_divided_is_split_in_its_place(index: object) -> None:
    (i, ii), (j, ji) = axis("i", 4), axis("j", 12)
    agree((4, 6, 6), index(ii, ji), ((i,), (j,)))  # type: ignore[operator]


def test_no_view_of_an_axis_the_operand_lacks() -> None:
    (i, ii), (_, ji) = axis("i", 5), axis("j", 5)
    with pytest.raises(NoView, match="does not have"):
        view_steps((5, 5), (ii, ji), ((i,),))


def test_every_order_of_four_axes() -> None:
    """All 24 permutations of an operand, each at most one permute."""
    made = [axis(n, s) for n, s in zip("bhid", (2, 3, 4, 5))]
    groups = [(a,) for a, _ in made]
    for order in itertools.permutations(range(4)):
        steps = agree([made[n][0].size for n in order], [made[n][1] for n in order], groups)
        assert len(steps) == (order != (0, 1, 2, 3))

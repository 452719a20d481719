"""From element indices to views: the steps that turn a source tensor into an operand.

Given where each element of an operand lies in its source, `view_steps` finds the slices, reshapes, permutes and
expands that produce it. Whatever chain of views the program went through, only what they amount to is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from attn_pass.model.index import (
    Axis,
    Index,
    Quotient,
    Remainder,
    axis_index,
    digits,
    divide_exactly,
    is_less,
    is_nonnegative,
    product,
    substitute,
    terms_of,
    unsplit_axis,
)


class NoView(Exception):
    """The elements are not a view of the source that slices, reshapes, permutes and expands can express."""


@dataclass(frozen=True, slots=True)
class Slice:
    """``x[start : start + length]`` along ``dim``."""

    dim: int
    start: Index
    length: Index


@dataclass(frozen=True, slots=True)
class Reshape:
    """``x.reshape(shape)``."""

    shape: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Permute:
    """``x.permute(dims)``."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expand:
    """``x.expand(shape)``."""

    shape: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Pad:
    """Zeros before and behind ``dim``: for places that are read under a condition only, which is false there."""

    dim: int
    before: int
    after: int


Step = Slice | Reshape | Permute | Expand | Pad
Group = tuple[Axis, ...]


def digit_axes(index: Index) -> tuple[Index, tuple[Axis, ...], Index]:
    """``(constant, axes slowest first, extent)`` of a dense mixed-radix index."""
    split = digits(index)
    if split is None:
        raise NoView(f"index {index} is not affine")
    constant, in_order = split
    remaining = list(in_order)
    chain: list[Axis] = []
    stride: Index = 1
    while remaining:
        following = next((d for d in remaining if d.stride == stride), None)
        if following is None:
            raise NoView(f"index {index} steps over elements")
        remaining.remove(following)
        chain.append(following.axis)
        stride = stride * following.axis.size
    return constant, tuple(reversed(chain)), stride


def view_steps(shape: Sequence[Index], index: Sequence[Index], groups: Sequence[Group]) -> tuple[Step, ...]:
    """The steps from a tensor of ``shape`` to one with one dimension per group.

    ``index`` gives for each dimension of the source the element to load. An axis of ``groups`` that the source
    does not depend on is broadcast: a group of such axes alone becomes size 1, within a larger group they are
    expanded. Raises `NoView`.
    """
    return _view_steps(tuple(shape), tuple(index), tuple(groups))


@lru_cache(maxsize=4096)  # the layers of a model have the same
def _view_steps(shape: tuple[Index, ...], index: Sequence[Index], groups: Sequence[Group]) -> tuple[Step, ...]:
    index, groups, padding = _inside(shape, index, groups)
    index, groups = split_axes(index, groups)
    whole, (shape, index) = shape, _by_strides(shape, index)
    steps: list[Step] = [] if shape == whole else [Reshape(shape)]
    chains: list[tuple[Axis, ...]] = []
    sizes: list[Index] = []
    for dim, (size, position) in enumerate(zip(shape, index)):
        constant, chain, extent = digit_axes(position)
        if constant != 0 or extent != size:
            steps.append(Slice(dim, constant, extent))
        chains.append(chain)
        sizes.append(extent)
    flat = [a for chain in chains for a in chain]
    wanted_axes = [a for group in groups for a in group if a.size != 1]
    if len(set(flat)) != len(flat) or len(set(wanted_axes)) != len(wanted_axes):
        raise NoView("an axis occurs twice (a diagonal)")
    if not set(flat) <= set(wanted_axes):
        raise NoView("the source depends on an axis the operand does not have")

    units = _units(chains, groups)
    unit_of = {axis: unit for unit in units for axis in unit}
    split = [unit for chain in chains for unit in _in_order(chain, unit_of)]
    _reshape(steps, sizes, [product(a.size for a in unit) for unit in split])

    present = [unit for group in groups for unit in _in_order(tuple(a for a in group if a in unit_of), unit_of)]
    order = tuple(split.index(unit) for unit in present)
    if order != tuple(range(len(order))):
        steps.append(Permute(order))
    current: list[Index] = [product(a.size for a in unit) for unit in present]

    opened: list[Index] = []
    expanded: list[Index] = []
    final: list[Index] = []
    for group in groups:
        axes = [a for a in group if a.size != 1]
        has = [a for a in axes if a in unit_of]
        final.append(product(a.size for a in (axes if has else ())))
        if has and len(has) != len(axes):
            for axis in axes:
                opened.append(axis.size if axis in unit_of else 1)
                expanded.append(axis.size)
        else:
            opened.append(final[-1])
            expanded.append(final[-1])
    if opened != expanded:
        _reshape(steps, current, opened)
        steps.append(Expand(tuple(expanded)))
        current = expanded
    _reshape(steps, current, final)
    return (*_without_round_trips(whole, steps), *padding)


def _by_strides(shape: tuple[Index, ...], index: Sequence[Index]) -> tuple[tuple[Index, ...], Sequence[Index]]:
    """Each dimension of which only every n-th element is read as two: the number of the run of n, and the place in it.

    ``weights[:, ::2]`` are the first of each pair.
    """
    sizes: list[Index] = []
    places: list[Index] = []
    for size, position in zip(shape, index):
        stride = common_stride(position)
        runs, start = divide_exactly(size, stride), dict(terms_of(position)).get((), 0)
        if stride == 1 or runs is None or not is_nonnegative(start):
            sizes.append(size)
            places.append(position)
            continue
        run = divide_exactly(position - start, stride)
        assert run is not None
        sizes += [runs, stride]
        places += [run + start // stride, start % stride]
    return tuple(sizes), places


def common_stride(index: Index) -> int:
    """How far one step of an affine index goes at least: every step is a multiple of it; 1 for any other index."""
    split = digits(index)
    strides = [] if split is None else [d.stride for d in split[1]]
    known = [s for s in strides if isinstance(s, int)]
    stride = min(known, default=1)
    fits = stride > 1 and split is not None and isinstance(split[0], int)
    return stride if fits and all(divide_exactly(s, stride) is not None for s in strides) else 1


def _inside(
    shape: Sequence[Index], index: Sequence[Index], groups: Sequence[Group]
) -> tuple[Sequence[Index], Sequence[Group], list[Step]]:
    """If elements outside the source are read (``x[i - 1]`` from ``i = 0`` on): the elements inside, and the padding.

    Raises `NoView` if that is not padding of a whole dimension.
    """
    padding: list[Step] = []
    for axis, (before, after) in _outside(shape, index).items():
        number = next((n for n, g in enumerate(groups) if [a for a in g if a.size != 1] == [axis]), None)
        if number is None or not is_less(before + after, axis.size):
            raise NoView(f"axis {axis.key} reaches outside the source")
        rest = Axis(f"{axis.key}+{before}", axis.size - before - after)
        index = [substitute(i, {axis: axis_index(rest) + before}) for i in index]
        groups = [(rest,) if n == number else group for n, group in enumerate(groups)]
        padding.append(Pad(number, before, after))
    if padding and not all(is_nonnegative(i) and is_less(i, size) for i, size in zip(index, shape)):
        raise NoView("places outside the source are read")
    return index, groups, padding


def _outside(shape: Sequence[Index], index: Sequence[Index]) -> dict[Axis, tuple[int, int]]:
    """For each axis that is read by itself how many places before and behind the source it reaches."""
    widths: dict[Axis, tuple[int, int]] = {}
    waiting: list[tuple[Index, Index | None]] = list(zip(index, shape))
    while waiting:
        current, size = waiting.pop()
        terms = dict(terms_of(current))
        constant = terms.pop((), 0)
        waiting += [(a.value, None) for m in terms for a in m if isinstance(a, (Quotient, Remainder))]
        if len(terms) != 1:
            continue
        ((monomial, coefficient),) = terms.items()
        if coefficient != 1 or len(monomial) != 1 or not isinstance(monomial[0], Axis):
            continue
        axis = monomial[0]
        reach = 0 if size is None else axis.size + constant - size
        behind = reach if isinstance(reach, int) else 0  # of sizes that cannot be compared `_inside` proves nothing
        before, after = widths.get(axis, (0, 0))
        if constant < 0 or behind > 0:
            widths[axis] = (max(before, -constant), max(after, behind))
    return widths


def split_axes(index: Sequence[Index], groups: Sequence[Group]) -> tuple[Sequence[Index], Sequence[Group]]:
    """Where ``axis // n`` or ``axis % n`` is read, the axis as the pair it stands for, in its place in its group.

    A bias over rows and columns of an image is read like that by keys that are numbered through. Raises `NoView`.
    """
    while (split := unsplit_axis(index)) is not None:
        axis, by = split
        size = divide_exactly(axis.size, by)
        if size is None:
            raise NoView(f"axis {axis.key} is divided unevenly")
        high, low = Axis(f"{axis.key}h", size), Axis(f"{axis.key}l", by)
        parts = {axis: axis_index(high) * by + axis_index(low)}
        index = [substitute(i, parts) for i in index]
        groups = [tuple(b for a in group for b in ((high, low) if a == axis else (a,))) for group in groups]
    return index, groups


def _reshape(steps: list[Step], before: list[Index], after: list[Index]) -> None:
    if before != after:
        steps.append(Reshape(tuple(after)))


def shape_after(shape: tuple[Index, ...], step: Step) -> tuple[Index, ...]:
    """The shape a step leaves behind."""
    if isinstance(step, Slice):
        return (*shape[: step.dim], step.length, *shape[step.dim + 1 :])
    if isinstance(step, Permute):
        return tuple(shape[d] for d in step.dims)
    if isinstance(step, Pad):
        return (*shape[: step.dim], shape[step.dim] + step.before + step.after, *shape[step.dim + 1 :])
    return step.shape


def _without_round_trips(shape: tuple[Index, ...], steps: list[Step]) -> tuple[Step, ...]:
    """Reshapes in a row become the last of them, and none where the shape is back to what it was."""
    steps_left: list[tuple[Step, tuple[Index, ...]]] = []  # with the shape before each
    for step in steps:
        before = shape
        shape = shape_after(shape, step)
        if isinstance(step, Reshape):
            while steps_left and isinstance(steps_left[-1][0], Reshape):
                before = steps_left.pop()[1]
            if before == shape:
                continue
        steps_left.append((step, before))
    return tuple(step for step, _ in steps_left)


def _units(chains: Sequence[tuple[Axis, ...]], groups: Sequence[Group]) -> list[tuple[Axis, ...]]:
    """Runs of axes that stay next to each other from source to operand: they need not be split at all."""
    follows = {a: b for group in groups for a, b in pairwise(x for x in group if x.size != 1)}
    units: list[tuple[Axis, ...]] = []
    for chain in chains:
        run: list[Axis] = []
        for axis in chain:
            if run and follows.get(run[-1]) != axis:
                units.append(tuple(run))
                run = []
            run.append(axis)
        if run:
            units.append(tuple(run))
    return units


def _in_order(axes: tuple[Axis, ...], unit_of: dict[Axis, tuple[Axis, ...]]) -> list[tuple[Axis, ...]]:
    """The units the axes belong to, each once, in order."""
    units: list[tuple[Axis, ...]] = []
    for axis in axes:
        unit = unit_of[axis]
        if not units or units[-1] != unit:
            units.append(unit)
    return units

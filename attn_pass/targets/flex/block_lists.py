"""The lists of a block mask as planned tensors: of each block of one side, which of the other it meets.

They are made by the interval arithmetic of `blocks`, when the program runs, so that lengths may be symbolic; and from a
map of the blocks that a tensor of the program's keeps (`kept_blocks`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.index import Index
from attn_pass.model.structure import Part
from attn_pass.targets.flex.blocks import Conjunction, Numbers, conjunctions, span


def _tensors(plan: Plan) -> Numbers:
    def with_number(overload: Callable[..., Any], plain: Callable[[Any, int], Any], identity: int) -> Any:
        def of(x: Any, n: int) -> Any:
            return plain(x, n) if isinstance(x, int) else x if n == identity else plan.call(overload, x, n)

        return of

    def of_two(overload: Callable[..., Any], plain: Callable[[Any, Any], Any], limit: str) -> Any:
        def of(x: Any, y: Any) -> Any:
            x, y = (y, x) if isinstance(x, int) else (x, y)
            if isinstance(x, int):
                return plain(x, y)
            return plan.call(aten.clamp.default, x, **{limit: y}) if isinstance(y, int) else plan.call(overload, x, y)

        return of

    return Numbers(
        with_number(aten.add.Scalar, operator.add, 0),
        with_number(aten.mul.Scalar, operator.mul, 1),
        with_number(aten.floor_divide.Scalar, operator.floordiv, 1),
        of_two(aten.maximum.default, max, "min"),
        of_two(aten.minimum.default, min, "max"),
    )


@dataclass(frozen=True)
class Lists:
    """Of each block of one side how many of the other it meets, and which: (B, H, blocks), (B, H, blocks, others).

    B and H are 1 where the lists are the same for all.
    """

    partial: Value
    partial_at: Value
    full: Value | None
    full_at: Value | None


@dataclass(frozen=True)
class ValidKeys:
    """The first key that any row keeps, and one past the last: tensors of int32 with one element, or None for no bound.

    They may lie outside of the cache.
    """

    first: Value | None
    end: Value | None

    def within(self, plan: Plan, start: Value, end: Value, size: int) -> tuple[Value, Value]:
        """A range of blocks without those in which no key is valid."""
        do, call = _tensors(plan), plan.call
        if self.first is not None:
            start = call(aten.minimum.default, do.larger(start, do.floor(self.first, size)), end)
        if self.end is not None:
            end = do.larger(start, do.smaller(end, do.floor(do.add(self.end, size - 1), size)))
        return start, end


@dataclass(frozen=True)
class Sides:
    """Lengths in positions and in blocks. ``room`` is the number of blocks that fit, never 1 by accident."""

    lengths: tuple[Index, Index]
    sizes: tuple[int, int]
    blocks: tuple[Any, Any]
    room: tuple[Any, Any]

    @staticmethod
    def of(plan: Plan, lengths: tuple[Index, Index], sizes: tuple[int, int]) -> Sides:
        """Of query rows and keys."""
        rows, keys = (_ceil(plan, n, size) for n, size in zip(lengths, sizes))
        # One more than there are: torch guards on a symbolic size of 1 being one.
        return Sides(lengths, sizes, (rows, keys), (_one_more(plan, rows), _one_more(plan, keys)))

    def transposed(self) -> Sides:
        """Of keys and query rows."""
        return Sides(self.lengths[::-1], self.sizes[::-1], self.blocks[::-1], self.room[::-1])


def block_mask(
    plan: Plan,
    device: torch.device,
    parts: Sequence[Part],
    sides: Sides,
    mask: GraphModule,
    *,
    masks: bool,
    parts_are_exact: bool,
    backward: bool = False,
    valid: ValidKeys | None = None,
    block_map: Value | None = None,
) -> tuple[Any, ...]:
    """The block-mask argument: the blocks the parts let any key of through.

    Without ``masks`` all of them are full, and which keys of a block count is left to the score function.
    ``parts_are_exact``: they are all of the mask, so blocks inside it are full; otherwise none is. ``backward`` adds
    the lists of each block of keys. ``valid``: blocks outside of these keys are in no list; not with several
    alternatives or a backward, nor if the parts are exact. ``block_map``: of which blocks any are in a list, (B or 1,
    H or 1, rows or 1, keys); for known lengths, and not if the parts are exact.
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    options = conjunctions(parts)
    if not masks and len(options) > 1:
        options = ((),)
    exact = parts_are_exact and masks

    def lists(of_keys: bool) -> Lists:
        if block_map is not None:
            return _of_map(plan, device, options, sides, block_map, masks, of_keys=of_keys)
        around = sides.transposed() if of_keys else sides
        if len(options) == 1:
            return _of_one(plan, device, options[0], around, masks, exact, of_keys=of_keys, valid=valid)
        return _of_several(plan, device, options, sides, exact, of_keys=of_keys)

    of_rows = lists(False)
    values_given = [of_rows.partial, of_rows.partial_at, of_rows.full, of_rows.full_at]
    if backward:
        of_keys = lists(True)
        values_given += [of_keys.partial, of_keys.partial_at, of_keys.full, of_keys.full_at]
    else:
        values_given += [None] * 4
    fakes = [None if v is None else fake_of(v) for v in values_given]
    fields: Any = dict(zip(_FIELDS, fakes))
    mask_object = BlockMask(seq_lengths=(0, 0), BLOCK_SIZE=sides.sizes, mask_mod=noop_mask, **fields)
    values: dict[int, Any] = {id(f): v for f, v in zip(fakes, values_given) if f is not None}
    lengths = (plan.size(n) for n in sides.lengths)
    return (*lengths, *(values.get(id(x), x) for x in mask_object.as_tuple()[2:-1]), plan.module("flex_mask_mod", mask))


_FIELDS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


def _firsts(plan: Plan, device: torch.device, sides: Sides) -> tuple[Value, Value]:
    """The first position of each block of the one side, and the number of blocks of the other as a tensor."""
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    firsts = plan.call(aten.mul.Scalar, plan.call(aten.arange.default, sides.room[0], **int32), sides.sizes[0])
    return firsts, plan.call(aten.full.default, [], sides.blocks[1], **int32)


def _of_one(
    plan: Plan,
    device: torch.device,
    parts: Conjunction,
    sides: Sides,
    masks: bool,
    exact: bool,
    *,
    of_keys: bool,
    valid: ValidKeys | None = None,
) -> Lists:
    """An interval of blocks each: the full ones inside, the others in front and behind."""
    call = plan.call
    firsts, count = _firsts(plan, device, sides)
    rows, keys = sides.room
    start, end, full_start, full_end = span(parts, firsts, *sides.sizes, count, _tensors(plan), of_keys=of_keys)
    if not masks:
        full_start, full_end = start, end
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    number = call(aten.expand.default, call(aten.arange.default, keys, **int32), [1, 1, rows, keys])

    def row(values: Value) -> Value:
        return call(aten.view.default, values, [1, 1, -1, 1])

    def counted(values: Value) -> Value:
        return call(aten.clone.default, call(aten.view.default, values, [1, 1, -1]))

    def laid_out(values: Value) -> Value:
        return call(aten.clone.default, values, memory_format=torch.contiguous_format)

    def from_to(first: Value, end: Value) -> tuple[Value, Value]:
        listed = laid_out(call(aten.add.Tensor, number, row(first)))
        return counted(call(aten.sub.Tensor, end, first)), listed

    if valid is not None:
        start, end = valid.within(plan, start, end, sides.sizes[1])
    if masks and not exact:
        return Lists(*from_to(start, end), None, None)
    full, full_at = from_to(full_start, full_end)
    before, after = call(aten.sub.Tensor, full_start, start), call(aten.sub.Tensor, end, full_end)
    partial = counted(call(aten.add.Tensor, before, after))
    behind = call(aten.add.Tensor, number, row(call(aten.sub.Tensor, full_end, before)))
    in_front = call(aten.lt.Tensor, number, row(before))
    partial_at = laid_out(call(aten.where.self, in_front, call(aten.add.Tensor, number, row(start)), behind))
    return Lists(partial, partial_at, full, full_at)


def _of_several(
    plan: Plan,
    device: torch.device,
    options: Sequence[Conjunction],
    sides: Sides,
    exact: bool,
    *,
    of_keys: bool,
) -> Lists:
    """Blocks that any of several intervals holds: a matrix of blocks, of which the true columns are listed."""
    any_seen, all_full = _matrices(plan, device, options, sides)
    if not exact:
        return Lists(*_listed(plan, device, any_seen, sides, of_keys), None, None)
    partial = plan.call(aten.logical_and.default, any_seen, plan.call(aten.logical_not.default, all_full))
    return Lists(*(v for m in (partial, all_full) for v in _listed(plan, device, m, sides, of_keys)))


def _matrices(plan: Plan, device: torch.device, options: Sequence[Conjunction], sides: Sides) -> tuple[Value, Value]:
    """Which blocks any of several intervals holds, and holds in full: boolean, (rows, keys)."""
    call, do = plan.call, _tensors(plan)
    firsts, count = _firsts(plan, device, sides)
    columns = call(aten.arange.default, sides.room[1], dtype=torch.int32, device=device)

    def inside(first: Value, end: Value) -> Value:
        after, before = (call(aten.unsqueeze.default, v, 1) for v in (first, end))
        return call(
            aten.logical_and.default, call(aten.ge.Tensor, columns, after), call(aten.lt.Tensor, columns, before)
        )

    some: list[Value] = []
    full: list[Value] = []
    for option in options:
        start, end, full_start, full_end = span(option, firsts, *sides.sizes, count, do, of_keys=False)
        some.append(inside(start, end))
        full.append(inside(full_start, full_end))
    any_seen, all_full = (_any(plan, table) for table in (some, full))
    if not isinstance(sides.blocks[0], int):  # the row of blocks there is room for, and none
        there = call(aten.lt.Tensor, firsts, plan.call(aten.full.default, [], plan.size(sides.lengths[0])))
        there = call(aten.unsqueeze.default, there, 1)
        any_seen, all_full = (call(aten.logical_and.default, m, there) for m in (any_seen, all_full))
    return any_seen, all_full


def _of_map(
    plan: Plan,
    device: torch.device,
    options: Sequence[Conjunction],
    sides: Sides,
    block_map: Value,
    masks: bool,
    *,
    of_keys: bool,
) -> Lists:
    """Blocks that a map keeps and the parts let a key of through, in the lists that would hold all of them."""
    call, (rows, keys) = plan.call, sides.blocks
    if any(options):
        block_map = call(aten.logical_and.default, block_map, _matrices(plan, device, options, sides)[0])
    if of_keys:
        block_map = call(aten.transpose.int, call(aten.expand.default, block_map, [-1, -1, rows, keys]), -2, -1)
        rows, keys = keys, rows
    counts, at = _ordered(plan, block_map, device, keys)
    if fake_of(counts).shape[-1] != rows:
        counts = call(aten.expand.default, counts, [-1, -1, rows])
        at = call(aten.expand.default, at, [-1, -1, rows, keys])
        counts, at = (call(aten.clone.default, v, memory_format=torch.contiguous_format) for v in (counts, at))
    if masks:
        return Lists(counts, at, None, None)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    nothing, nowhere = (call(aten.full.default, list(fake_of(v).shape), 0, **int32) for v in (counts, at))
    return Lists(nothing, nowhere, counts, at)


def _any(plan: Plan, matrices: list[Value]) -> Value:
    total = matrices[0]
    for more in matrices[1:]:
        total = plan.call(aten.logical_or.default, total, more)
    return total


def _listed(plan: Plan, device: torch.device, matrix: Value, sides: Sides, of_columns: bool) -> tuple[Value, Value]:
    """How many columns (rows, if ``of_columns``) of each row are true, and which, in order."""
    call = plan.call
    if of_columns:
        matrix = call(aten.transpose.int, matrix, 0, 1)
    ordered = _ordered(plan, matrix, device, sides.room[0 if of_columns else 1])
    return tuple(call(aten.unsqueeze.default, call(aten.unsqueeze.default, v, 0), 0) for v in ordered)  # type: ignore[return-value]


def _ordered(plan: Plan, matrix: Value, device: torch.device, columns: Any) -> tuple[Value, Value]:
    """How many columns of each row are true, (..., rows), and which, in order, (..., rows, columns).

    The one of number ``n`` has as many columns before it as have ``n`` true ones or fewer up to them. Sorting says the
    same, but as Inductor sorts it takes most of a minute to compile for a hundred columns (pytorch #182060).
    """
    call, numbers = plan.call, plan.call(aten.to.dtype, matrix, torch.int32)
    counts = call(aten.sum.dim_IntList, numbers, [-1], dtype=torch.int32)
    so_far = call(aten.slice.Tensor, call(aten.cumsum.default, numbers, -1, dtype=torch.int32), -1, 0, -1)
    number = call(aten.unsqueeze.default, call(aten.arange.default, columns, dtype=torch.int32, device=device), 1)
    before = call(aten.le.Tensor, call(aten.unsqueeze.default, so_far, -2), number)
    order = call(aten.sum.dim_IntList, before, [-1], dtype=torch.int32)
    return counts, call(aten.clone.default, order, memory_format=torch.contiguous_format)


def _ceil(plan: Plan, size: Index, by: int) -> Any:
    if isinstance(size, int):
        return -(-size // by)
    return plan.call(operator.floordiv, plan.call(operator.add, plan.size(size), by - 1), by)


def _one_more(plan: Plan, size: Any) -> Any:
    return size if isinstance(size, int) else plan.call(operator.add, size, 1)

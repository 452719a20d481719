"""Layouts of Ascend's attention operators: operands in their memory layout, and the result converted from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_pass.devices.npu.generations import INFERENCE
from attn_pass.devices.npu.rules import merged_fits, width
from attn_pass.graph.edit import Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Load
from attn_pass.model.index import Index, product
from attn_pass.model.views import Group, NoView, Permute, digit_axes, view_steps
from attn_pass.targets.lower import Lowering

Order = tuple[int, int, int, int]


@dataclass(frozen=True)
class Layout:
    """``order`` is that of batch, heads, positions and head dim in memory; ``merged``: heads and head dim are one."""

    name: str
    order: Order
    merged: bool = False
    in_inference: bool = True


# Of layouts in one order the merged one is taken where the program has such tensors.
LAYOUTS: tuple[Layout, ...] = (
    Layout("BNSD", (0, 1, 2, 3)),
    Layout("BSND", (0, 2, 1, 3)),
    Layout("BSH", (0, 2, 1, 3), merged=True),
    Layout("SBH", (2, 0, 1, 3), merged=True, in_inference=False),
)
ROWS_FIRST_RESULT = "BNSD_BSND"  # of the inference operator, for more than one query row


@dataclass(frozen=True)
class Operand:
    """One of query, key and value: what it loads, and its axes by batch, heads, positions and head dim."""

    load: Load
    groups: tuple[Group, Group, Group, Group]

    @staticmethod
    def of(a: Attention) -> tuple[Operand, Operand, Operand]:
        """Query, key and value."""
        return (
            Operand(a.query, (a.batch, a.heads, a.rows, (a.dim,))),
            Operand(a.key, (a.batch, a.kv_heads, (a.keys,), (a.dim,))),
            Operand(a.value, (a.batch, a.kv_heads, (a.keys,), a.value_dim)),
        )

    def elements(self) -> Index:
        """How many there are, what is broadcast counted as often as it is seen."""
        return product(axis.size for group in self.groups for axis in group)


def allowed(a: Attention, operator: str) -> tuple[Layout, ...]:
    """The layouts an operator takes for these sizes."""
    return tuple(
        layout
        for layout in LAYOUTS
        if (layout.in_inference or operator != INFERENCE)
        and (layout.name == "BNSD" or merged_fits(a, operator))
        and not (layout.merged and _is_padded(a, operator))
    )


def best(a: Attention, operator: str, hint: Callable[[Index], int]) -> tuple[Layout, int]:
    """The layout that copies the fewest bytes of operands, and how many."""
    candidates: list[tuple[int, Layout]] = []
    for layout in allowed(a, operator):
        fits = all(lies(a, operand, layout) for operand in Operand.of(a))
        copied = sum(hint(o.elements()) for o in Operand.of(a) if not lies(a, o, layout))
        if layout.merged and not fits:
            continue  # positions before heads without it
        candidates.append((copied * a.compute_dtype.itemsize, layout))
    least = min(copied for copied, _ in candidates)
    ties = [layout for copied, layout in candidates if copied == least]
    merged = next((layout for layout in ties if layout.merged and _has_steps_less(a, layout)), None)
    return merged or ties[0], least


def _has_steps_less(a: Attention, layout: Layout) -> bool:
    """Whether the program's own tensors are operands in this layout as they are."""
    if a.factors or a.scale < 0:
        return False
    try:
        return all(
            view_steps(a.sources[o.load.source].shape, o.load.index, _in_order(o, layout)) == () for o in Operand.of(a)
        )
    except NoView:
        return False


def lies(a: Attention, operand: Operand, layout: Layout) -> bool:
    """Whether an operand is all of a tensor whose axes lie in memory in the layout's order."""
    source = a.sources[operand.load.source]
    if source.order is None or operand.elements() != product(source.shape):
        return False
    in_order = [axis for g in _in_order(operand, layout) for axis in g if axis.size != 1]
    try:
        order = [axis for dim in source.order for axis in digit_axes(operand.load.index[dim])[1]]
    except NoView:
        return False
    return [axis for axis in order if axis.size != 1] == in_order


def _in_order(operand: Operand, layout: Layout) -> tuple[Group, ...]:
    groups = tuple(operand.groups[n] for n in layout.order)
    return (*groups[:2], groups[2] + groups[3]) if layout.merged else groups


def _is_padded(a: Attention, operator: str) -> bool:
    return (a.head_dim, a.value_head_dim) != (width(a, operator),) * 2


# ---------------------------------------------------------------- emission


def operands(lower: Lowering, layout: Layout, wide: int | None) -> tuple[Value, Value, Value]:
    """Query, key and value in the layout, contiguous; head dims padded with zeros to the one of the call.

    A negative scale is taken into the query.
    """
    a, plan = lower.attention, lower.plan
    values: list[Value] = []
    for number, operand in enumerate(Operand.of(a)):
        value = _operand(lower, operand, layout, is_query=number == 0)
        have = fake_of(value).shape[-1]
        if not layout.merged and wide is not None and have != wide:
            value = plan.call(aten.constant_pad_nd.default, value, [0, wide - have], 0.0)
        if number == 0 and a.scale < 0:
            value = plan.call(aten.neg.default, value)
        values.append(plan.call(aten.contiguous.default, value))
    query, key, value = values
    return query, key, value


def _operand(lower: Lowering, operand: Operand, layout: Layout, *, is_query: bool) -> Value:
    a, plan = lower.attention, lower.plan
    if is_query and a.factors:
        value = plan.steps(lower.query(a.compute_dtype), [Permute(layout.order)])
        return plan.call(aten.flatten.using_ints, value, 2, 3) if layout.merged else value
    return lower.operand(operand.load, _in_order(operand, layout), a.compute_dtype, expand=True)


def wants_rows_first(a: Attention) -> bool:
    """Whether the program's result has positions before heads, where there are several of both."""
    order = [axis for dims in a.output for axis in dims]
    rows = [n for n, axis in enumerate(order) if axis in a.rows and axis.size != 1]
    heads = [n for n, axis in enumerate(order) if axis in a.heads and axis.size != 1]
    return bool(rows) and bool(heads) and rows[0] < heads[0]


def heads_first(lower: Lowering, out: Value, layout: Layout) -> Value:
    """(B, H, L, Dv) of a result in a layout, without what was padded."""
    a, plan = lower.attention, lower.plan
    if layout.merged:
        sizes = (a.batch_size, a.query_heads, a.q_len, a.value_head_dim)
        out = plan.call(aten.reshape.default, out, plan.shape([sizes[n] for n in layout.order]))
    back: Sequence[int] = [layout.order.index(n) for n in range(4)]
    if list(back) != [0, 1, 2, 3]:
        out = plan.call(aten.permute.default, out, back)
    if fake_of(out).shape[-1] != a.value_head_dim:
        out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
    return out

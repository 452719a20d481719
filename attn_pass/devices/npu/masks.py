"""A mask as Ascend's attention operators take it: none, a mode with the compressed mask, or a boolean tensor.

These operators report no error for a wrong mask: True is masked out, a mode without its mask is full attention, and
a float mask is ignored. So a mask is passed only if the description proves what it keeps.

Modes (torch_npu's documentation): 0 takes a full-size mask; 2 keeps ``key <= row``; 3 keeps ``key <= row + S - L``; 4
keeps keys from ``row + S - L - pre`` to ``row + S - L + next``. Modes 2 to 4 ask for one triangle of 2048 x 2048,
whatever the lengths. A fully masked row is undefined but for ``inner_precise=2``, which makes it zeros; at one query
row the inference operator knows neither modes nor ``inner_precise=2``, and torch_npu does not ask the other one for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.devices.npu.generations import INFERENCE
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import apply
from attn_pass.model.index import is_nonnegative
from attn_pass.model.structure import Band, row_index
from attn_pass.targets.base import Setting
from attn_pass.targets.empty_rows import EmptyRows, why_indistinguishable
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import is_dense

UNBOUNDED = 2147483647
SIDE = 2048  # of the compressed mask
_NEG_INF = float("-inf")


class NoForm(Exception):
    """The operator does not take the mask; the message says why."""


@dataclass(frozen=True)
class MaskPlan:
    """The mask arguments of an operator.

    ``kind`` is "none", "compressed" or "boolean". Where ``repaired``, fully masked rows are unmasked for the operator
    and replaced in its result.
    """

    kind: str = "none"
    mode: int = 0
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    inner_precise: int = 0
    repaired: bool = False


def mask_plan(a: Attention, setting: Setting, operator: str) -> MaskPlan:
    """The plan for a mask. Raises `NoForm`."""
    if a.mask.is_none:
        return MaskPlan()
    nonempty = a.mask.never_empty or setting.assume_nonempty_rows
    one_row = a.q_len == 1
    plan = None if one_row and operator == INFERENCE else _by_mode(a)
    if plan is not None and nonempty:
        return plan  # its structure is all there is to the mask, whatever stands where it masks
    fills = _fills(a)
    zeros = fills == {_NEG_INF}  # the program gives zeros, or NaN
    if plan is not None and zeros and not one_row:
        return plan
    if operator == INFERENCE and a.mask.axes() & {axis for axis in a.heads if axis.size != 1}:
        raise NoForm("the mask differs from head to head, which the inference operator has no shape for")
    if not nonempty and not zeros and (why := _cannot_be_replaced(a, fills)) is not None:
        raise NoForm(f"{why}; assume_nonempty_rows says that there is no such row")
    if nonempty or zeros:
        return MaskPlan("boolean", repaired=not nonempty) if one_row else MaskPlan("boolean", inner_precise=2)
    return MaskPlan("boolean", repaired=True)


def _cannot_be_replaced(a: Attention, fills: set[float]) -> str | None:
    """Why rows whose every key is masked by a number are not known to be the mean of the values, or None."""
    if len(fills) > 1:
        return "a row may be fully masked by several numbers, and what it then is depends on them"
    if a.dropout:
        return "a row may be fully masked, and dropout would draw there as well"
    return why_indistinguishable(a) if a.needs_grad else None


def _fills(a: Attention) -> set[float]:
    """The numbers that stand where a key is masked."""
    fills: set[float] = set()
    if a.mask.keep is not None:
        fills.add(a.mask.keep.fill)
    if a.mask.bias is not None:
        if a.mask.fills is None:
            raise NoForm(
                "what is added to the scores is not proved to be 0 or masking everywhere: the operator takes boolean "
                "masks, and its bias (pse) is not used until it is seen on hardware"
            )
        fills |= set(a.mask.fills)
    return fills


def _by_mode(a: Attention) -> MaskPlan | None:
    """The mode that is the whole mask; None if none is."""
    if a.mask.structure.row != row_index(a.rows) or len(a.mask.structure.parts) != 1:
        return None
    (band,) = a.mask.structure.parts
    if not isinstance(band, Band):
        return None
    inner = 0 if a.mask.never_empty else 2
    if band == Band(None, 0):
        return MaskPlan("compressed", 2, UNBOUNDED, 0, inner)
    last = a.kv_len - a.q_len
    after = None if band.upper is None else band.upper - last
    before = None if band.lower is None else last - band.lower
    if before is None and after == 0:
        return MaskPlan("compressed", 3, UNBOUNDED, 0, inner)
    bounds = [UNBOUNDED if bound is None else bound for bound in (before, after)]
    left, right = bounds
    if isinstance(left, int) and isinstance(right, int) and is_nonnegative(left) and is_nonnegative(right):
        return MaskPlan("compressed", 4, min(left, UNBOUNDED), min(right, UNBOUNDED), inner)
    return None


# ---------------------------------------------------------------- emission


class FilledRows(EmptyRows):
    """Rows whose every key is masked, where the mask is a boolean tensor, True where masked out."""

    def __post_init__(self) -> None:
        self.rows = self.plan.call(aten.all.dim, self.mask, -1, True)

    def unmasked(self) -> Value:
        """The mask for the operator, keeping everything in those rows."""
        not_empty = self.plan.call(aten.logical_not.default, self.rows)
        return self.plan.call(aten.logical_and.default, self.mask, not_empty)

    def with_zeros(self, out: Value) -> Value:
        """The operator's (B, H, L, Dv) result with zeros in those rows."""
        return self.plan.call(aten.masked_fill.Scalar, out, self.rows, 0.0)

    def with_mean(self, lower: Lowering, out: Value) -> Value:
        """The operator's (B, H, L, Dv) result with the mean of the values in those rows."""
        a, call = self.attention, self.plan.call
        value = lower.value(a.compute_dtype)
        if a.needs_grad and a.mask.bias is not None:  # what is added hides a score, and passes its gradient on
            key = lower.key(a.compute_dtype)
            return self.replaced(out, lower.query(a.compute_dtype), key, value, a.scale)
        wide = call(aten.to.dtype, value, torch.promote_types(a.compute_dtype, torch.float32))
        return self.put(self.mean_of(wide), out)


def emitted_mask(lower: Lowering, plan: MaskPlan, operator: str) -> tuple[Value | None, FilledRows | None]:
    """The mask's tensor, and what replaces fully masked rows where they are repaired.

    Made once for all sites of a graph that take the same one.
    """
    if plan.kind == "none":
        return None, None
    with lower.plan.sharing():
        if plan.kind == "compressed":
            return compressed(lower.plan, lower.attention), None
        masked = _masked_out(lower)
        rows = FilledRows(lower.plan, lower.attention, masked) if plan.repaired else None
        mask = masked if rows is None else rows.unmasked()
        return _shaped(lower, mask, decodes=operator == INFERENCE and lower.attention.q_len == 1), rows


def compressed(plan: Plan, a: Attention) -> Value:
    """True above the diagonal, 2048 x 2048."""
    device = a.sources[a.query.source].device
    ones = plan.call(aten.ones.default, [SIDE, SIDE], dtype=torch.bool, device=device)
    return plan.call(aten.triu.default, ones, 1)


def _masked_out(lower: Lowering) -> Value:
    """(B, H, L, S), at size 1 where it does not vary; True where masked out."""
    a, call = lower.attention, lower.plan.call
    parts: list[Value] = []
    if a.mask.condition is not None:
        parts.append(lower.condition(apply("not", a.mask.condition), lower.mask_groups()))
    if a.mask.bias is not None:
        parts.append(call(aten.ne.Scalar, lower.expression(a.mask.bias, lower.mask_groups()), 0))
    return parts[0] if len(parts) == 1 else call(aten.logical_or.default, *parts)


def _shaped(lower: Lowering, mask: Value, *, decodes: bool) -> Value:
    """In one of the shapes the operators take, contiguous: (B, H, L, S), (B, 1, L, S), (1, 1, L, S), or (B, S)."""
    plan, a = lower.plan, lower.attention
    have = plan.sizes.shape(fake_of(mask))
    batch, heads = a.batch_size, a.query_heads
    by_head = have[1] != 1
    first = batch if by_head or decodes else have[0]
    shape = (first, heads if by_head else 1, a.q_len, a.kv_len)
    if shape != have:
        mask = plan.call(aten.expand.default, mask, [plan.size(n) for n in shape])
    if shape != have or not is_dense(plan, fake_of(mask), range(4)):
        mask = plan.call(aten.clone.default, mask, memory_format=torch.contiguous_format)
    if decodes:
        mask = plan.call(aten.reshape.default, mask, [plan.size(n) for n in (batch, a.kv_len)])
    return mask

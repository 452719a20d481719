"""Blocks that a mask hides, found in the mask itself when the program runs: nothing is known of it before.

A padding mask that is passed in is a tensor like any other. Reduced over blocks of rows and keys it says which of them
hold a key that counts; the others need not be visited. What a block keeps is left to the functions of the template, as
it is where every block is visited. The map may hold blocks too many, and never one too few: where a fully masked row is
the mean of all values, it keeps all blocks of its row.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.conditions import conjuncts
from attn_pass.model.expression import TRUE, Expr, apply, expression_axes, loads
from attn_pass.targets import given_masks
from attn_pass.targets.base import Setting
from attn_pass.targets.flex.rules import no_decoding
from attn_pass.targets.flex.score import Function
from attn_pass.targets.lower import Lowering

_KERNELS = 2  # that Inductor (torch 2.13) makes for a map and its lists, beside those for lists that are known


@dataclass(frozen=True)
class KeptBlocks:
    """What says which keys count: conditions that all have to hold, or, without any, what is added to the scores.

    With ``averages`` a row that keeps no key keeps all of them.
    """

    conditions: tuple[Expr, ...] = ()
    averages: bool = False

    def kernels(self, *, backward: bool) -> int:
        """How many more small kernels there are than for lists that are known.

        A backward takes as many again. Finding the empty rows takes as many, and so do the lists of partial blocks
        that are empty beside those of full ones.
        """
        tells_empty_rows = self.averages or not self.conditions
        return _KERNELS * (max(1, len(self.conditions)) + 2 * tells_empty_rows + backward)

    def map(self, lower: Lowering, sizes: tuple[int, int]) -> Value:
        """Which blocks hold a key that counts for one of their rows: boolean, (B or 1, H or 1, rows or 1, keys)."""
        if not self.conditions:
            return _of_blocks(lower.plan, given_masks.keep_of_added(lower), sizes)
        first, *others = (
            _of_blocks(lower.plan, given_masks.keep_of_condition(lower, c, averages=self.averages), sizes)
            for c in self.conditions
        )
        for other in others:
            first = lower.plan.call(aten.logical_and.default, first, other)
        return first


def kept_blocks(a: Attention, function: Function, sizes: tuple[int, int], setting: Setting) -> KeptBlocks | None:
    """What of a mask says which blocks count; None where nothing does, or where that is known without looking."""
    if setting.numerics == "strict" or a.mask.is_none or a.valid is not None:
        return None
    if function.mask is not None and function.parts_are_exact:
        return None
    if not all(isinstance(n, int) for n in (a.batch_size, a.query_heads, a.q_len, a.kv_len)):
        return None  # the map has as many blocks as there are when it is compiled
    if setting.hint(a.kv_len) <= sizes[1]:
        return None
    if a.mask.keep is None:
        added = given_masks.added(a)
        return KeptBlocks() if added is not None and _is_read(added, a) else None
    condition = a.mask.deep_condition or TRUE
    if a.mask.replaces_with_number and function.mask is None:  # a fully masked row is told by all of the condition
        return KeptBlocks((condition,), averages=True) if a.mask.bias is None and _is_read(condition, a) else None
    return _together(a, [c for c in conjuncts(condition) if _is_read(c, a)])


def _together(a: Attention, conditions: list[Expr]) -> KeptBlocks | None:
    """As few maps as there can be: one for all conditions that a tensor is as large as."""
    merged: list[Expr] = []
    for condition in conditions:
        for number, other in enumerate(merged):
            if _is_read(both := apply("and", other, condition), a):
                merged[number] = both
                break
        else:
            merged.append(condition)
    return KeptBlocks(tuple(merged)) if merged else None


def _is_read(condition: Expr, a: Attention) -> bool:
    """Whether a condition on keys is in a tensor that has an element for each of its values: no larger one is made.

    Where few queries are grouped, the template takes lists that are the same for all heads.
    """
    used = expression_axes(condition)
    if a.groups != 1 and no_decoding(a) is None and used & set(a.heads):
        return False
    return a.keys in used and any(expression_axes(load) >= used for load in loads(condition))


def _of_blocks(plan: Plan, keeps: Value, sizes: tuple[int, int]) -> Value:
    """Whether any element of a block holds; rows that are alike are one block."""
    batch, heads, rows, keys = fake_of(keeps).shape
    size = sizes[0] if rows != 1 else 1
    missing = [0, -keys % sizes[1], 0, -rows % size]
    if any(missing):
        keeps = plan.call(aten.constant_pad_nd.default, keeps, missing, False)
    shape = [batch, heads, -(-rows // size), size, -(-keys // sizes[1]), sizes[1]]
    return plan.call(aten.any.dims, plan.call(aten.reshape.default, keeps, shape), [3, 5])

"""Sliding windows and chunks by the fused kernel over blocks: a few query rows, and only the keys they can attend to.

With a dense mask the kernel computes every score and discards most of them. Row block ``t`` of ``rows`` queries attends
only to the keys ``t * rows + first`` to ``t * rows + first + width - 1``, so the blocks of queries become heads of the
kernel, and their keys become overlapping views of one padded copy.

Becomes: one call of ``scaled_dot_product_attention`` with queries ``(B * Hkv, blocks, groups * rows, D)``, keys and
values ``(B * Hkv, blocks, width, D)`` and the mask of a block, ``(1, blocks, groups * rows, width)``; and reshapes that
put the rows back in order.

    F.scaled_dot_product_attention(q, k, v, abs(row - key) <= 64)
    ->
    F.scaled_dot_product_attention(q.view(...), k.as_strided(...), v.as_strided(...), mask_of_a_block)

Exact because: a masked score has weight zero, and the mask within a block is the original mask, at the same rows and
keys.

Offers on the CPU, in inference and training, if the whole mask is proven to be a sliding window (on either side) or
chunks of a known size, in which every row keeps a key. It is not offered with padding, a bias or a sink, or for keys
that the batch shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.devices import roofline
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import TRUE, Expr, apply, index_value
from attn_pass.model.index import Axis, Index, axis_index, divide, product
from attn_pass.model.mask import Mask
from attn_pass.model.structure import Band, Chunk, Structure, row_index
from attn_pass.targets.base import FINITE_KEYS, Offer, Refusal, Setting
from attn_pass.targets.constraints import Attended, Constraint, HasAttention, refusal
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import ALL_KEYS_COUNT, hides_keys
from attn_pass.targets.operands import common_head_dim, operands
from attn_pass.targets.problem import not_served, problem_of, serves
from attn_pass.targets.sdpa import Sdpa, sdpa_function

_ROWS = (32, 64, 128, 256)  # rows of a block that are tried


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``rows`` queries; block ``t`` sees ``width`` keys from ``t * rows + first`` on."""

    rows: int
    first: int
    width: int

    def count(self, a: Attention) -> Index:
        """How many there are; the last one may have rows the attention does not have.

        Where the length is not known there are always two, and rows that are not there: torch decides for every length
        what it sees for the one the program was traced with, a size of 1 or padding by nothing.
        """
        if isinstance(a.q_len, int):
            return -(-a.q_len // self.rows)
        return divide(a.q_len, self.rows)[0] + 2

    def is_known_to_fit(self, a: Attention) -> bool:
        """Whether keys are padded by an amount that is known, or positive for every length."""
        beyond = a.kv_len - a.q_len
        known = isinstance(a.q_len, int) and isinstance(a.kv_len, int)
        return known or (isinstance(beyond, int) and self.first + self.width >= beyond)


@dataclass(frozen=True)
class LocalPlan:
    """The blocks, and the one head dim that operands are filled up to where they differ."""

    blocks: Blocks
    head_dim: int | None


class Local:
    """`scaled_dot_product_attention` over blocks of queries, on the CPU."""

    name = "local"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[LocalPlan] | Refusal:
        """Takes masks proved to be a window or chunks of a known size, in which every row keeps a key."""
        choices = _choices(attention)
        reason = refusal(CONSTRAINTS, Attended(attention, setting)) or Sdpa().unfit(
            replace(attention, mask=Mask.none()), setting
        )
        if reason is not None:
            return Refusal(self.name, reason, other_device=not serves(self.name, setting))
        predicted, blocks = min(((_cost(attention, b, setting), b) for b in choices), key=lambda of: of[0])
        return Offer(
            self.name,
            variant,
            attention,
            predicted,
            fused=True,
            plan=LocalPlan(blocks, common_head_dim(attention)),
            assumptions=(FINITE_KEYS,) if hides_keys(attention, setting) else (),
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[LocalPlan], setting: Setting) -> Value:
        """Plans operands in blocks, the mask of a block, the call and the way back."""
        a, blocks = offer.attention, offer.plan.blocks
        lower = Lowering(plan, nodes, a)
        query, key, value = operands(lower, offer.plan.head_dim)
        count = blocks.count(a)
        rows = count * blocks.rows
        out = plan.call(
            sdpa_function(plan),
            _query_blocks(plan, a, blocks, query, count, rows - a.q_len),
            *(_key_blocks(plan, a, blocks, x, count) for x in (key, value)),
            _mask(lower, blocks, count, rows),
            0.0,
            False,
            scale=a.scale,
        )
        return lower.result(_rows_again(plan, a, out, count, blocks, rows))


def _differ_unknown(*dims: Index) -> bool:
    return dims[0] != dims[1] and not all(isinstance(d, int) for d in dims)


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint(
        "mask",
        "the mask is neither a sliding window nor chunks of a known size",
        lambda c: bool(_choices(c.attention)),
    ),
    Constraint("device", lambda c: not_served(c.setting), lambda c: serves(Local.name, c.setting)),
    Constraint(
        "mask",
        "part of the mask depends on run-time values, or a row may be fully masked",
        lambda c: c.attention.mask.structure.is_exact and c.attention.mask.never_empty,
    ),
    Constraint(
        "query rows",
        "the query rows are several positions packed together",
        lambda c: c.attention.mask.structure.row == row_index(c.attention.rows),
    ),
    Constraint("sink", "a sink needs the whole row's sum of exponentials", lambda c: c.attention.sink is None),
    Constraint(
        "dropout",
        lambda c: f"dropout {c.attention.dropout:g}: torch's fused CPU kernel has no dropout",
        lambda c: not c.attention.dropout,
    ),
    Constraint(
        "batch",
        "keys and values shared over the batch would be copied for every block",
        lambda c: not c.attention.batch_is_shared,
    ),
    Constraint(
        "head dim",
        "the head dims differ, and are not known",
        lambda c: not _differ_unknown(c.attention.head_dim, c.attention.value_head_dim),
    ),
    ALL_KEYS_COUNT,
)


def _choices(a: Attention) -> list[Blocks]:
    """The blocks a window or a chunk can be computed in."""
    choices = []
    for part in a.mask.structure.parts:
        if isinstance(part, Band) and isinstance(part.lower, int) and isinstance(part.upper, int):
            choices += [Blocks(r, part.lower, r + part.upper - part.lower) for r in _ROWS if part.upper >= part.lower]
        if isinstance(part, Chunk) and part.key_shift == part.row_shift and isinstance(part.size, int):
            if part.row_shift == 0:
                choices.append(Blocks(part.size, 0, part.size))
    return [blocks for blocks in choices if blocks.is_known_to_fit(a)]


def _cost(a: Attention, blocks: Blocks, setting: Setting) -> float:
    problem = problem_of(a, setting.hint)
    count, groups = setting.hint(blocks.count(a)), setting.hint(a.groups)
    width = max(problem.head_dim, problem.value_dim)
    copies = 2 * problem.operand_bytes if groups > 1 else problem.expanded_kv_bytes
    inner = replace(
        problem,
        batch=problem.batch * problem.kv_heads,
        kv_batch=problem.kv_batch * problem.kv_heads,
        heads=count,
        kv_heads=count,
        q_len=blocks.rows * groups,
        kv_len=blocks.width,
        head_dim=width,
        value_dim=width,
        mask_elements=count * blocks.rows * groups * blocks.width,
        causal=False,
        copied_bytes=copies,
    )
    return roofline.fused(setting.device, inner)


def _query_blocks(plan: Plan, a: Attention, blocks: Blocks, query: Value, count: Index, extra: Index) -> Value:
    """(B, H, L, D) as (B * Hkv, blocks, groups * rows, D)."""
    if extra != 0:
        query = plan.call(aten.constant_pad_nd.default, query, [0, 0, 0, plan.size(extra)], 0.0)
    width = plan.sizes.index(fake_of(query).shape[-1])
    pairs = a.batch_size * product(x.size for x in a.kv_heads)
    split = plan.call(aten.reshape.default, query, [plan.size(n) for n in (pairs, a.groups, count, blocks.rows, width)])
    if a.groups != 1:
        split = plan.call(aten.permute.default, split, [0, 2, 1, 3, 4])
    return plan.call(aten.reshape.default, split, [plan.size(n) for n in (pairs, count, a.groups * blocks.rows, width)])


def _key_blocks(plan: Plan, a: Attention, blocks: Blocks, value: Value, count: Index) -> Value:
    """(B, Hkv, S, D) as (B * Hkv, blocks, width, D): overlapping views of a copy from the first key needed on."""
    total = (count - 1) * blocks.rows + blocks.width
    after = blocks.first + total - a.kv_len
    moved = plan.call(aten.constant_pad_nd.default, value, [0, 0, -blocks.first, plan.size(after)], 0.0)
    pairs, width = a.batch_size * product(x.size for x in a.kv_heads), plan.sizes.index(fake_of(value).shape[-1])
    sizes = [plan.size(n) for n in (pairs, count, blocks.width, width)]
    if blocks.rows == blocks.width:
        return plan.call(aten.reshape.default, moved, sizes)
    if a.needs_grad:  # the gradient of as_strided is computed element by element
        flat = plan.call(aten.reshape.default, moved, [plan.size(n) for n in (pairs, total, width)])
        windows = plan.call(aten.unfold.default, flat, 1, blocks.width, blocks.rows)
        transposed = plan.call(aten.transpose.int, windows, -1, -2)
        if isinstance(total, int):
            return transposed
        # Inductor takes the strides of the first length for those of every length (seen in torch 2.13.0).
        return plan.call(aten.clone.default, transposed, memory_format=torch.contiguous_format)
    dense = plan.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
    strides = [plan.size(n) for n in (total * width, blocks.rows * width, width, 1)]
    return plan.call(aten.as_strided.default, dense, sizes, strides)


def _mask(lower: Lowering, blocks: Blocks, count: Index, rows: Index) -> Value | None:
    """What each block keeps, (1, blocks, groups * rows, width); rows that are not there keep everything."""
    a = lower.attention
    block, row, key = Axis("t", count), Axis("ti", blocks.rows), Axis("tj", blocks.width)
    first = axis_index(block) * blocks.rows
    at_row, at_key = first + axis_index(row), first + axis_index(key) + blocks.first
    condition: Expr = Structure(at_key, at_row, a.mask.structure.parts).condition()
    condition = apply("and", condition, apply("ge", index_value(at_key), index_value(0)))
    condition = apply("and", condition, apply("lt", index_value(at_key), index_value(a.kv_len)))
    if rows != a.q_len:
        condition = apply("or", condition, apply("ge", index_value(at_row), index_value(a.q_len)))
    if condition == TRUE:
        return None
    shared = tuple(x for x in a.heads if x not in a.kv_heads)
    return lower.expression(condition, ((), (block,), (*shared, row), (key,)))


def _rows_again(plan: Plan, a: Attention, out: Value, count: Index, blocks: Blocks, rows: Index) -> Value:
    """(B * Hkv, blocks, groups * rows, D) as the (B, H, L, D) it was cut from."""
    width = plan.sizes.index(fake_of(out).shape[-1])
    if a.groups != 1:
        pairs = a.batch_size * product(x.size for x in a.kv_heads)
        out = plan.call(aten.reshape.default, out, [plan.size(n) for n in (pairs, count, a.groups, blocks.rows, width)])
        out = plan.call(aten.permute.default, out, [0, 2, 1, 3, 4])
    out = plan.call(aten.reshape.default, out, [plan.size(n) for n in (a.batch_size, a.query_heads, rows, width)])
    if rows != a.q_len:
        out = plan.call(aten.slice.Tensor, out, 2, 0, plan.size(a.q_len))
    if width != a.value_head_dim:
        out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
    return out

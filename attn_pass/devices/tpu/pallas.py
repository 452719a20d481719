"""JAX's Pallas kernels for TPUs as targets: flash attention, and splash attention for windows and grouped heads.

Becomes: one call of ``attn_pass_xla::attention``, the operator of this package that calls the kernel. Head dims are
padded with zeros, and the result is sliced; for flash attention keys and values are repeated for the heads that share
them.

    F.scaled_dot_product_attention(q, k, v, (row >= key) & (row - key < 128), scale=scale)
    ->
    attn_pass_xla.attention(q, k, v, None, None, "splash", scale, -127, 0, blocks)

Exact because: bounds stand for a mask only if the mask was proved to be this band. Zeros that pad a head dim add
nothing to a product, and a key with another segment id than the queries' has weight zero.

Offers for TPUs (v5e, v5p, v6e, TPU7x), by name or where torch_xla runs on one; in bfloat16 and float32, forward and
backward, without dropout, for sizes that are known when the graph is compiled. A causal mask is a flag, a window is
splash attention's band, padding keys are segment ids, and any other mask is a float32 matrix, which flash attention
adds. Fully masked rows are replaced beside the kernel. The kernels compile for these TPUs and give right results when
interpreted; they are not verified on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.devices.roofline import Problem
from attn_pass.devices.tpu import cost as cost_xla
from attn_pass.devices.tpu.kernels import Blocks
from attn_pass.devices.tpu.masks import KernelMask, mask_of
from attn_pass.devices.tpu.rules import FLASH, GENERATIONS, SPLASH, Sizes, blocks_for, refusal, width
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr
from attn_pass.model.index import Axis
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import STRICT_ROWS
from attn_pass.targets.empty_rows import replaced_and_added
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import additive_mask, assumed
from attn_pass.targets.problem import problem_of

_NEG_INF = float("-inf")


@dataclass(frozen=True)
class PallasPlan:
    """The mask as the kernel takes it, its one head dim and tiles, and whether fully masked rows are replaced."""

    mask: KernelMask
    head_dim: int
    blocks: Blocks
    replaces_rows: bool


class _Pallas:
    """What both kernels share."""

    name = ""
    kind = ""

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[PallasPlan] | Refusal:
        """An offer at the kernel's cost, or the first reason why not."""
        device = setting.device
        if self.name not in device.kernels or device.name not in GENERATIONS:
            return Refusal(self.name, f"there is no Pallas TPU kernel for {device.name}", other_device=True)
        a = replace(attention, needs_grad=setting.may_be_trained(attention))
        reason = refusal(a, setting)
        mask = KernelMask() if reason else mask_of(a)
        problem = problem_of(a, setting.hint)
        reason = reason or self._refusal_of(a, mask, problem) or _refusal_of_rows(a, mask, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        sizes = self.sizes(a, mask, problem)
        blocks = blocks_for(self.name, device.name, sizes)
        if blocks is None:
            return Refusal(self.name, f"no tile of such a head dim fits in the on-chip memory of {device.name}")
        copied = self._copied(a, problem, sizes.head_dim)
        problem = replace(
            problem,
            head_dim=sizes.head_dim,
            value_dim=sizes.head_dim,
            causal=mask.is_causal,
            kv_len=sizes.keys if sizes.window is None else min(sizes.keys, sizes.window + blocks.rows + blocks.keys),
            mask_elements=problem.scores if mask.matrix else 0,
            copied_bytes=copied,
        )
        steps = -(-problem.q_len // blocks.rows) * -(-problem.kv_len // blocks.keys) * problem.batch * problem.heads
        return Offer(
            self.name,
            variant,
            attention,
            cost_xla.pallas(device, problem, steps),
            fused=True,
            plan=PallasPlan(mask, sizes.head_dim, blocks, _may_be_empty(a, setting)),
            assumptions=assumed(a, setting),
            moved=problem.moved_bytes,
        )

    def sizes(self, a: Attention, mask: KernelMask, problem: Problem) -> Sizes:
        """The sizes that tiles follow from."""
        return Sizes(
            problem.q_len,
            problem.kv_len,
            width(problem.head_dim, problem.value_dim),
            a.compute_dtype.itemsize,
            biased=mask.matrix,
            masked=mask.kept is not None,
            training=a.needs_grad,
            window=mask.width,
        )

    def _refusal_of(self, a: Attention, mask: KernelMask, problem: Problem) -> str | None:
        raise NotImplementedError

    def _copied(self, a: Attention, p: Problem, dim: int) -> int:
        """Bytes of operands that are written out: wider, or repeated for the heads that share them."""
        repeated = a.batch_is_shared or (self.kind == "flash" and a.groups != 1)
        padded = {p.head_dim, p.value_dim} != {dim}
        kv_heads = p.heads if self.kind == "flash" else p.kv_heads
        copied = 2 * p.batch * kv_heads * p.kv_len if repeated or padded else 0
        return (copied + (2 * p.batch * p.heads * p.q_len if padded else 0)) * dim * p.dtype.itemsize

    # ------------------------------------------------------------ emission

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[PallasPlan], setting: Setting) -> Value:
        """Plans the operator's call, and what replaces fully masked rows."""
        import attn_pass.devices.tpu.operators  # noqa: F401  registers them

        a, decided = offer.attention, offer.plan
        lower, mask = Lowering(plan, nodes, a), decided.mask
        query, key, value = self._operands(lower, decided.head_dim, a.heads if self.kind == "flash" else a.kv_heads)
        matrix = _matrix(lower, setting) if mask.matrix else None
        out: Value = plan.call(
            torch.ops.attn_pass_xla.attention.default,
            query,
            key,
            value,
            matrix,
            None if mask.kept is None else _keep_tensor(lower, mask.kept),
            self.kind,
            abs(a.scale),
            mask.lower,
            mask.upper,
            _block_sizes(decided.blocks),
        )
        if decided.head_dim != a.value_head_dim:
            out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        if decided.replaces_rows:
            out = _without_empty_rows(lower, out, value, matrix)
        return lower.result(out)

    def _operands(self, lower: Lowering, dim: int, heads: tuple[Axis, ...]) -> tuple[Value, Value, Value]:
        """Query, key and value (B, H, L or S, D), their head dims filled up with zeros; ``heads`` are those of keys."""
        plan, a = lower.plan, lower.attention
        dtype = a.compute_dtype
        operands = [
            lower.query(dtype),
            lower.operand(a.key, (a.batch, heads, (a.keys,), (a.dim,)), dtype, expand=True),
            lower.operand(a.value, (a.batch, heads, (a.keys,), a.value_dim), dtype, expand=True),
        ]
        if a.scale < 0:
            operands[0] = plan.call(aten.neg.default, operands[0])
        for number, operand in enumerate(operands):
            missing = dim - fake_of(operand).shape[-1]
            if missing:
                operands[number] = plan.call(aten.constant_pad_nd.default, operand, [0, missing], 0.0)
        query, key, value = operands
        return query, key, value


class PallasFlash(_Pallas):
    """`jax.experimental.pallas.ops.tpu.flash_attention`: causal, or with any mask as a matrix."""

    name, kind = FLASH, "flash"

    def _refusal_of(self, a: Attention, mask: KernelMask, problem: Problem) -> str | None:
        if mask.has_band and not mask.is_causal:
            return "flash attention's causal flag counts from the first key; splash attention takes any other band"
        return None


class PallasSplash(_Pallas):
    """`jax.experimental.pallas.ops.tpu.splash_attention`: bands of distances, and heads that share keys and values."""

    name, kind = SPLASH, "splash"

    def _refusal_of(self, a: Attention, mask: KernelMask, problem: Problem) -> str | None:
        if mask.matrix:
            return "splash attention takes no bias, and the mask is not a band of distances"
        rows, keys = problem.q_len, problem.kv_len
        if mask.has_band:
            if not mask.leaves_no_row_empty(rows, keys):
                return "some row lies entirely outside the band, and splash attention divides by its sum of weights"
            if a.needs_grad and not mask.leaves_no_row_empty(*(-(-n // 128) * 128 for n in (rows, keys))):
                return "the number of query rows is not a multiple of 128, and padded rows would be fully masked"
        return None


def _refusal_of_rows(a: Attention, mask: KernelMask, setting: Setting) -> str | None:
    """Why the rows a mask may leave fully masked would not be the program's."""
    if not _may_be_empty(a, setting):
        return None
    if setting.numerics == "strict" and a.empty_row_is_nan:
        return STRICT_ROWS
    return replaced_and_added(a) if a.needs_grad else None


def _may_be_empty(a: Attention, setting: Setting) -> bool:
    return not a.mask.is_none and not a.mask.never_empty and not setting.assume_nonempty_rows


def _block_sizes(b: Blocks) -> list[int]:
    """The tiles in the order the operator takes them: rows and keys, and those of the backward where it has one."""
    return [b.rows, b.keys, *((b.rows_back, b.keys_back) if b.rows_back else ())]


def _keep_tensor(lower: Lowering, condition: Expr) -> Value:
    """The keys that are kept, (B, S)."""
    plan, a = lower.plan, lower.attention
    keep = lower.condition(condition, (a.batch, (a.keys,)))
    return plan.call(aten.expand.default, keep, [plan.size(a.batch_size), plan.size(a.kv_len)])


def _matrix(lower: Lowering, setting: Setting) -> Value:
    """Bias and mask as one float32 matrix, broadcastable to (B, H, L, S)."""
    matrix = additive_mask(lower, setting)
    return matrix if fake_of(matrix).dtype == torch.float32 else lower.plan.call(aten.to.dtype, matrix, torch.float32)


def _without_empty_rows(lower: Lowering, out: Value, value: Value, matrix: Value | None) -> Value:
    """The result with fully masked rows as the program has them: 0 for NaN, or the mean of the values.

    A row that an added matrix fills with a number is that mean already, and its scores have the gradient of one: a
    number that is added hides a score and passes its gradient on, one that replaces it does not.
    """
    plan, a = lower.plan, lower.attention
    if a.mask.bias is not None:
        assert matrix is not None
        not_empty = plan.call(aten.gt.Scalar, plan.call(aten.amax.default, matrix, [-1], True), _NEG_INF)
        return plan.call(aten.where.ScalarOther, not_empty, out, 0.0)
    assert a.mask.condition is not None
    not_empty = plan.call(aten.any.dim, lower.condition(a.mask.condition, lower.mask_groups()), -1, True)
    if a.mask.only_hides:
        return plan.call(aten.where.ScalarOther, not_empty, out, 0.0)
    width_ = fake_of(out).shape[-1]
    mean: Value = plan.call(aten.mean.dim, value, [-2], True, dtype=torch.float32)
    if fake_of(mean).shape[-1] != width_:
        mean = plan.call(aten.slice.Tensor, mean, 3, 0, width_)
    groups = fake_of(out).shape[1] // fake_of(mean).shape[1]
    if groups != 1:
        mean = plan.call(aten.repeat_interleave.self_int, mean, groups, 1)
    mean = plan.call(aten.to.dtype, mean, fake_of(out).dtype)
    return plan.call(aten.where.self, not_empty, out, mean)

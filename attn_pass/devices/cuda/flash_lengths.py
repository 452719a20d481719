"""FlashAttention over a cache of which a part is valid: the keys of each batch row end at a number on the device.

``aten._flash_attention_forward`` takes sequences that lie one after another, and uses the first ``seqused_k`` keys of
each. A cache (B, S, Hkv, D) is such a tensor of B sequences of S keys, if it lies in memory like that: one batch row
always does, several do in a cache that keeps its heads last, and any other would be copied, which is refused. Causal
rows are aligned to the last valid key, as a chunk of a prompt over a cache is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attn_pass.devices.cuda.cost import Shape, fused
from attn_pass.devices.cuda.decode_range import range_of
from attn_pass.devices.cuda.torch_kernel import Dims, KernelPlan
from attn_pass.devices.device import Device, Shares
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr, Load
from attn_pass.model.index import Axis, Index, axes, axis_index, substitute
from attn_pass.targets.base import Refusal, Setting
from attn_pass.targets.key_bounds import VALID_SHARE
from attn_pass.targets.key_ranges import end_of_keys
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import MaskForm

IN_CACHE = "the queries' positions are in the cache: elsewhere the kernel would align the mask to an end of it"


_ONE: Index = 1


@dataclass(frozen=True)
class OfCache(KernelPlan):
    """The kernel's call over a cache: where the valid keys end, and whether rows are causal up to there."""

    ends: tuple[Expr, ...] = ()
    causal: bool = False
    left: int = -1  # keys before a causal row's own; -1 for all

    @property
    def kind(self) -> str:
        """The mask's kind, as `Call` has it: with lengths, a window aligned to the last key."""
        return "none"


def plan_of(a: Attention, dims: Dims, setting: Setting) -> OfCache | Refusal:
    """The call for an attention that has a valid range, or why there is none."""
    valid = range_of(a, setting, "flash")
    if isinstance(valid, Refusal):
        return valid
    reason = None
    if not valid.says_all or valid.starts or not valid.ends:
        reason = "lengths of the keys, with or without a causal mask, are all the flash kernel can be told of a cache"
    elif valid.mean:
        reason = "a fully masked row is the mean of all values, and zero in the flash kernel"
    elif setting.device.flash != "FA2":
        reason = f"{setting.device.flash} was not read for lengths of a cache"
    elif a.needs_grad or setting.may_need_grad or a.dropout:
        reason = "with lengths of a cache the flash kernel has no backward and no dropout"
    elif valid.causal and setting.numerics == "strict":
        reason = f"numerics='strict' does not assume that {IN_CACHE}"
    elif dims != (a.head_dim, a.value_head_dim) or not all(_is_in_sequence(a, *of) for of in _operands(a)):
        reason = "the cache would be copied for the flash kernel: it takes whole sequences, one after another"
    if reason is not None:
        return Refusal("flash", reason)
    return OfCache(MaskForm("none"), dims, None, valid.ends, valid.causal, valid.window)


def microseconds(device: Device, shares: Shares, shape: Shape, problem: Problem, decided: OfCache) -> float:
    """As of half of the keys, which it does not split."""
    valid = max(1, int(VALID_SHARE * problem.kv_len))
    problem = replace(problem, kv_len=valid, mask_elements=0)
    if decided.left >= 0:
        problem = replace(problem, kv_len=min(valid, decided.left + problem.q_len))
    return fused(device, shares, replace(shape, splits_keys=False), problem)


def called(lower: Lowering, operands: tuple[Value, Value, Value], decided: OfCache) -> Value:
    """The kernel's (B, H, L, D) result."""
    a, plan, call = lower.attention, lower.plan, lower.plan.call
    batch, q_len, kv_len = (plan.size(n) for n in (a.batch_size, a.q_len, a.kv_len))
    in_sequence = []
    for value, length in zip(operands, (a.q_len, a.kv_len, a.kv_len)):
        heads_last = call(aten.transpose.int, value, 1, 2)
        shape = [plan.size(a.batch_size * length), -1, plan.size(a.head_dim)]
        in_sequence.append(call(aten.reshape.default, heads_last, shape))
    if not _is_dense(lower, in_sequence[0]):  # the result lies like the query, or densely: here they are one
        in_sequence[0] = call(aten.clone.default, in_sequence[0], memory_format=torch.contiguous_format)
    device = {"dtype": torch.int32, "device": a.sources[a.query.source].device}
    starts = [
        call(aten.arange.start_step, 0, plan.size(a.batch_size * length + 1), plan.size(length), **device)
        for length in (a.q_len, a.kv_len)
    ]
    ends = end_of_keys(lower, decided.ends)
    assert ends is not None
    ends = call(aten.to.dtype, call(aten.clamp.default, ends, 0, kv_len), torch.int32)
    used = call(aten.clone.default, call(aten.expand.default, ends, [batch]), memory_format=torch.contiguous_format)
    both = call(
        aten._flash_attention_forward.default,
        *in_sequence,
        *starts,
        q_len,
        kv_len,
        0.0,
        decided.causal,
        False,
        scale=abs(a.scale),
        window_size_left=decided.left if decided.left >= 0 else None,
        window_size_right=0 if decided.left >= 0 else None,
        seqused_k=used,
    )
    out = call(operator.getitem, both, 0)
    if a.q_len == 1:
        return call(aten.reshape.default, out, [batch, -1, 1, plan.size(a.value_head_dim)])
    out = call(aten.reshape.default, out, [batch, q_len, -1, plan.size(a.value_head_dim)])
    return call(aten.transpose.int, out, 1, 2)


def _is_dense(lower: Lowering, value: Value) -> bool:
    tensor, sizes, step = fake_of(value), lower.plan.sizes, _ONE
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if sizes.index(stride) != step:
            return False
        step = step * sizes.index(size)
    return True


def _operands(a: Attention) -> Sequence[tuple[Load, Sequence[Axis]]]:
    return (a.key, (a.dim,)), (a.value, a.value_dim)


def _is_in_sequence(a: Attention, load: Load, dims: Sequence[Axis]) -> bool:
    """Whether batch rows follow each other in memory as their keys do, in the kernel's dtype."""
    source = a.sources[load.source]
    flat = source.place(load.index)
    if flat is None or source.dtype != a.compute_dtype:
        return False
    step = substitute(flat, {a.keys: 1}) - substitute(flat, {a.keys: 0})
    row: Index = 0
    for axis in a.batch:
        row = row * axis.size + axis_index(axis)
    place = row * a.kv_len + axis_index(a.keys)
    dense = substitute(flat, {dims[-1]: 1}) - substitute(flat, {dims[-1]: 0}) == 1
    return dense and not axes(flat - place * step) & {a.keys, *a.batch}

"""FlashAttention over a cache of which a part is valid: each batch row's keys are a range that lies on the device.

``aten._flash_attention_forward`` takes keys as rows of one tensor (tokens, Hkv, D). Those of batch row ``b`` begin at
row ``cum_seq_k[b]`` and are ``seqused_k[b]`` (block_info.h); where the next batch row begins does not matter to them.
So left padding moves the beginning, and leaves fewer keys. A cache (B, S, Hkv, D) is such a tensor, and a cache
(B, Hkv, S, D) is one too, as a view whose heads lie S rows apart: batch row ``b`` begins at row ``b * Hkv * S`` of it.
Any other layout would be copied, which is refused. Causal rows are aligned to the last valid key, as a chunk of a
prompt over a cache is.
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
from attn_pass.model.index import Axis, Index, axes, axis_index, product, substitute
from attn_pass.model.structure import row_index
from attn_pass.targets.base import Refusal, Setting
from attn_pass.targets.constraints import trained_export
from attn_pass.targets.key_bounds import VALID_SHARE
from attn_pass.targets.key_ranges import end_of_keys, first_key
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import MaskForm

IN_CACHE = "the queries' positions are in the cache: elsewhere the kernel would align the mask to an end of it"
_MOST_TOKENS = 1 << 31
_ONE: Index = 1


@dataclass(frozen=True)
class OfCache(KernelPlan):
    """The kernel's call over a cache: where the valid keys end, and whether rows are causal up to there."""

    ends: tuple[Expr, ...] = ()
    causal: bool = False
    left: int = -1  # keys before a causal row's own; -1 for all
    starts: tuple[Expr, ...] = ()
    heads_first: bool = False  # the cache lies in memory as (B, Hkv, S, D), with several rows and heads
    assumes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The mask's kind, as `KernelCall` has it: with lengths, a window aligned to the last key."""
        return "none"


def plan_of(a: Attention, dims: Dims, setting: Setting) -> OfCache | Refusal:
    """The call for an attention that has a valid range, or why there is none."""
    valid = range_of(a, setting, "flash")
    if isinstance(valid, Refusal):
        return valid
    reason = None
    heads_first = [_are_heads_first(a, *of) for of in _operands(a)]
    if not valid.is_complete:
        reason = "the flash kernel is told a range of keys, with or without a causal mask, and this one masks more"
    elif valid.mean:
        reason = "a fully masked row is the mean of all values, and zero in the flash kernel"
    elif setting.device.flash != "FA2":
        reason = f"{setting.device.flash} was not read for lengths of a cache"
    elif a.needs_grad or a.dropout:
        reason = "with lengths of a cache the flash kernel has no backward and no dropout"
    elif setting.may_need_grad:
        reason = trained_export("the flash kernel with lengths of a cache")
    elif valid.causal and not valid.in_cache and setting.numerics == "strict":
        reason = f"numerics='strict' does not assume that {IN_CACHE}"
    elif dims != (a.head_dim, a.value_head_dim) or None in heads_first or heads_first[0] != heads_first[1]:
        reason = "the cache would be copied for the flash kernel, which takes whole caches with heads first or last"
    elif heads_first[0] and not all(isinstance(x.size, int) for x in (*a.batch, *a.kv_heads, a.keys)):
        reason = "with heads first the flash kernel's view of a cache needs sizes that are known"
    elif isinstance(rows := product(x.size for x in (*a.batch, *a.kv_heads, a.keys)), int) and rows >= _MOST_TOKENS:
        reason = "the flash kernel counts the rows of a cache in int32, and these are more"
    if reason is not None:
        return Refusal("flash", reason)
    first = bool(heads_first[0])
    assumes = (IN_CACHE,) if valid.causal and not valid.in_cache else ()
    return OfCache(
        MaskForm("none"),
        dims,
        ends=valid.ends,
        causal=valid.causal,
        left=valid.window,
        starts=valid.starts,
        heads_first=first,
        assumes=assumes,
    )


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
    batch, q_len = (plan.size(n) for n in (a.batch_size, a.q_len))
    query = _one_after_another(lower, operands[0], a.q_len)
    if not _is_dense(lower, query):  # the result lies like the query, or densely: here they are one
        query = call(aten.clone.default, query, memory_format=torch.contiguous_format)
    lay = _heads_apart if decided.heads_first else _one_after_another
    begins, used = _ranges(lower, decided)
    both = call(
        aten._flash_attention_forward.default,
        query,
        *(lay(lower, x, a.kv_len) for x in operands[1:]),
        _every(lower, a.q_len),
        begins,
        q_len,
        plan.size(a.kv_len),
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


def _ranges(lower: Lowering, decided: OfCache) -> tuple[Value, Value]:
    """Where each batch row's keys begin, (B + 1,), of which the kernel reads B; and how many they are, (B,); int32."""
    a, plan, call = lower.attention, lower.plan, lower.plan.call
    batch, kv_len = plan.size(a.batch_size), plan.size(a.kv_len)

    def of_rows(value: Value) -> Value:
        inside = call(aten.clamp.default, value, 0, kv_len)
        return call(aten.expand.default, call(aten.to.dtype, inside, torch.int32), [batch])

    begins = _every(lower, a.kv_len * product(x.size for x in a.kv_heads) if decided.heads_first else a.kv_len)
    start, end = first_key(lower, decided.starts), end_of_keys(lower, decided.ends)
    used: Value | int = kv_len if end is None else of_rows(end)
    if start is not None:
        start = of_rows(start)
        begins = call(aten.add.Tensor, begins, call(aten.constant_pad_nd.default, start, [0, 1], 0))
        used = call(aten.sub.Tensor, used, start) if end is not None else call(aten.rsub.Scalar, start, used)
        used = call(aten.clamp.default, used, 0)
    assert not isinstance(used, int)  # a range has one end or the other
    return begins, call(aten.clone.default, used, memory_format=torch.contiguous_format)


def _every(lower: Lowering, length: Index) -> Value:
    """Where sequences of so many rows begin, and the last one ends: (B + 1,), int32."""
    a, plan = lower.attention, lower.plan
    device = {"dtype": torch.int32, "device": a.sources[a.query.source].device}
    return plan.call(aten.arange.start_step, 0, plan.size(a.batch_size * length + 1), plan.size(length), **device)


def _one_after_another(lower: Lowering, value: Value, length: Index) -> Value:
    """An operand (B, H, L, D) as rows of all heads: (B * L, H, D)."""
    a, plan = lower.attention, lower.plan
    heads_last = plan.call(aten.transpose.int, value, 1, 2)
    return plan.call(aten.reshape.default, heads_last, [plan.size(a.batch_size * length), -1, plan.size(a.head_dim)])


def _heads_apart(lower: Lowering, value: Value, length: Index) -> Value:
    """A cache (B, Hkv, S, D) as rows whose heads lie S rows apart: ((B * Hkv - Hkv + 1) * S, Hkv, D), a view."""
    a, plan = lower.attention, lower.plan
    heads = product(x.size for x in a.kv_heads)
    rows = plan.call(aten.reshape.default, value, [plan.size(a.batch_size * heads * length), plan.size(a.head_dim)])
    tokens = (a.batch_size * heads - heads + 1) * length
    apart = plan.call(aten.unfold.default, rows, 0, plan.size(tokens), plan.size(length))  # (Hkv, D, tokens)
    return plan.call(aten.permute.default, apart, [2, 0, 1])


def _is_dense(lower: Lowering, value: Value) -> bool:
    tensor, sizes, step = fake_of(value), lower.plan.sizes, _ONE
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if sizes.index(stride) != step:
            return False
        step = step * sizes.index(size)
    return True


def _operands(a: Attention) -> Sequence[tuple[Load, Sequence[Axis]]]:
    return (a.key, (a.dim,)), (a.value, a.value_dim)


def _are_heads_first(a: Attention, load: Load, dims: Sequence[Axis]) -> bool | None:
    """Whether a cache in the kernel's dtype has its heads before its keys in memory; None if it lies in neither way.

    What has one batch row, or one head, lies in both.
    """
    source = a.sources[load.source]
    flat = source.place(load.index)
    if flat is None or source.dtype != a.compute_dtype:
        return None
    step = substitute(flat, {a.keys: 1}) - substitute(flat, {a.keys: 0})
    if substitute(flat, {dims[-1]: 1}) - substitute(flat, {dims[-1]: 0}) != 1:
        return None
    row, head, key = row_index(a.batch), row_index(a.kv_heads), axis_index(a.keys)
    if not axes(flat - (row * a.kv_len + key) * step) & {a.keys, *a.batch}:
        return False
    heads = product(x.size for x in a.kv_heads)
    first = (row * heads + head) * a.kv_len + key
    return True if not axes(flat - first * step) & {a.keys, *a.batch, *a.kv_heads} else None

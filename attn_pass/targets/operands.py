"""Operands (B, H, L or S, D) as kernels take them: of one head dim, with rows that are dense, without strides of 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.index import Index
from attn_pass.targets.lower import Lowering


class Unfit(Exception):
    """A kernel cannot take an attention; the message says why."""


def common_head_dim(a: Attention) -> int | None:
    """The head dim that operands are filled up to; None where they have one. Raises `Unfit` where it is not known."""
    if a.head_dim == a.value_head_dim:
        return None
    if isinstance(a.head_dim, int) and isinstance(a.value_head_dim, int):
        return max(a.head_dim, a.value_head_dim)
    raise Unfit("the head dims differ, and are not known")


def operands(lower: Lowering, head_dim: int | None) -> tuple[Value, Value, Value]:
    """Query, key and value (B, H, L or S, D) in the compute dtype, of one head dim, the last dimension dense."""
    plan, dtype = lower.plan, lower.attention.compute_dtype
    query, key, value = lower.query(dtype), lower.key(dtype), lower.value(dtype)
    if head_dim is not None:
        query, key, value = (widened(plan, x, head_dim) for x in (query, key, value))
    query, key, value = (dense_last(plan, x) for x in (query, key, value))
    return query, key, value


def widened(plan: Plan, value: Value, head_dim: int) -> Value:
    """The operand with its head dim filled up with zeros, which add zeros to every product."""
    missing = head_dim - plan.sizes.index(fake_of(value).shape[-1])
    return value if missing == 0 else plan.call(aten.constant_pad_nd.default, value, [0, plan.size(missing)], 0.0)


def dense_last(plan: Plan, value: Value) -> Value:
    """The operand with its last dimension dense in memory."""
    tensor = fake_of(value)
    stride = plan.sizes.index(tensor.stride(-1))
    if stride == 1 or plan.sizes.index(tensor.shape[-1]) == 1:
        return value
    return plan.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def unbroadcast(plan: Plan, value: Value) -> Value:
    """The operand without dimensions of stride 0."""
    tensor = fake_of(value)
    repeated = any(plan.sizes.index(s) == 0 and plan.sizes.index(n) != 1 for s, n in zip(tensor.stride(), tensor.shape))
    return plan.call(aten.clone.default, value, memory_format=torch.contiguous_format) if repeated else value


def settled(plan: Plan, value: Value) -> Value:
    """The operand for a kernel that is called without torch's own checks: dense however the graph is lowered.

    Strides known here are the program's; a decomposition further down may give others, and the kernel reads wrong
    elements of an operand whose last dimension is not dense (seen in torch 2.13.0). ``contiguous`` is decided when the
    graph is traced, and copies nothing where the layout, heads first or heads last, is the one seen here.
    """
    tensor = fake_of(value)
    if tensor.dim() == 4 and is_dense(plan, tensor, (0, 2, 1, 3)) and not is_dense(plan, tensor, (0, 1, 2, 3)):
        transposed = plan.call(aten.transpose.int, value, 1, 2)
        return plan.call(aten.transpose.int, plan.call(aten.contiguous.default, transposed), 1, 2)
    return plan.call(aten.contiguous.default, value)


def is_dense(plan: Plan, tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the dimensions lie in memory in this order, slowest first, without gaps."""
    expected: Index = 1
    for dim in reversed(order):
        size = plan.sizes.index(tensor.shape[dim])
        if size != 1 and plan.sizes.index(tensor.stride(dim)) != expected:
            return False
        expected = expected * size
    return True

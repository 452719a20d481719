"""ExecuTorch: attention becomes ``llama.custom_sdpa``, the fused operator of its library for language models.

ExecuTorch has no operator for torch's call: its edge lowering writes each one out as products and a softmax. The fused
operator takes query, key and value with positions before heads, (B, L, H, D) and (B, S, Hkv, D), grouped heads as they
are, and as its mask none, a triangle that begins at a position, or one matrix (L, S) for every batch row and head. What
it does not take is left, and lowered as ExecuTorch lowers it. It was tried with ExecuTorch 1.5
(docs/howto/runtimes.md).

Becomes: one call of ``llama.custom_sdpa`` on operands in that order, and a transpose of its result.

    F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    ->
    llama.custom_sdpa(positions_first(q, k, v), 0, None, 0.0, True, scale).transpose(1, 2)

Exact because: the triangle begins where the mask was proved to begin, and any other mask is the program's own matrix.

Offers for programs that are exported to ExecuTorch, if its library is installed, in inference, in float32 and half
precision, with one mask for all batch rows and heads, and without sinks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices import roofline
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.devices.runtimes.runtime import INFERENCE_ONLY, Runtime
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import Load, expression_axes
from attn_pass.model.index import Index, is_at_most, is_nonnegative
from attn_pass.model.views import Group
from attn_pass.targets.bands import band_of
from attn_pass.targets.base import FINITE_KEYS, Offer, Refusal, Setting, Target
from attn_pass.targets.constraints import AFFINE, NOT_EMPTY, Attended, Constraint, refusal, takes
from attn_pass.targets.kernel_rules import HALF
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import ALL_KEYS_COUNT, additive_mask, gives_zero_for_empty_rows, hides_keys, mask_refusal
from attn_pass.targets.operands import Unfit, common_head_dim, widened
from attn_pass.targets.problem import cost_of, problem_of

NAME = "custom_sdpa"
LIBRARY = "executorch.extension.llm.custom_ops.custom_ops"
"""What registers the operator, with torch and with the runtime of this process."""
_KERNEL = "executorch/extension/llm/custom_ops/op_sdpa_impl.h"
_SCHEMA = "executorch/extension/llm/custom_ops/custom_ops.py"


@dataclass(frozen=True)
class CallPlan:
    """How the operator is called.

    Attributes:
        operator: the overload.
        first: the position of the first query where the mask is a triangle; None for another mask.
        has_mask: whether it gets a matrix that is added.
        head_dim: the one that operands are filled up to; None where they have one.
    """

    operator: Any
    first: Index | None
    has_mask: bool
    head_dim: int | None


def _first(a: Attention) -> Index | None:
    """The position of the first query, where row ``i`` keeps the keys up to ``i`` and that position."""
    if a.mask.bias is not None or (band := band_of(a)) is None:
        return None
    first = band.upper
    if first is None or band.lower is not None or not is_nonnegative(first):
        return None
    return first if is_at_most(first + a.q_len, a.kv_len) else None


def _is_one_matrix(a: Attention) -> bool:
    """Whether what is added to the scores is the same for every batch row and head."""
    used = {axis for part in a.mask.parts() for axis in expression_axes(part)}
    return not any(axis in used and axis.size != 1 for axis in (*a.batch, *a.heads))


RULES: tuple[Constraint[Attended], ...] = (
    Constraint(
        "gradient",
        "an exported program runs without gradients, and this one needs them",
        lambda c: not c.attention.needs_grad or c.setting.program == "export",
        INFERENCE_ONLY,
    ),
    Constraint(
        "dropout",
        lambda c: f"dropout {c.attention.dropout:g}: {NAME} ignores it",
        lambda c: not c.attention.dropout,
        f"cpu_flash_attention in {_KERNEL}: dropout_p is not read",
    ),
    Constraint("sink", f"{NAME} has no sink", lambda c: c.attention.sink is None, f"custom_sdpa in {_SCHEMA}"),
    Constraint(
        "mask",
        f"the mask differs from batch row to batch row or from head to head, and {NAME} takes one for all",
        lambda c: _is_one_matrix(c.attention),
        f"cpu_flash_attention in {_KERNEL}: attn_mask must be 2D",
    ),
    Constraint(
        "fully masked rows",
        f"a row may be fully masked with -inf: {NAME} gives NaN there, where the program gives 0",
        lambda c: not gives_zero_for_empty_rows(c.attention, c.setting),
        f"cpu_flash_attention in {_KERNEL}: a row's maximum of -inf is subtracted from its scores",
    ),
    ALL_KEYS_COUNT.written_in(f"cpu_flash_attention in {_KERNEL}: weights of 0 are multiplied by the values"),
    takes(NAME, torch.float32, *HALF).written_in(
        "validate_flash_attention_args in executorch/extension/llm/custom_ops/op_sdpa.cpp"
    ),
    AFFINE.written_in(f"custom_sdpa in {_SCHEMA}: it has no score function"),
    NOT_EMPTY.written_in(f"cpu_flash_attention in {_KERNEL}: it divides by the number of rows"),
)


_TRIANGLES = ((1024, 0.5), (512, 0.9))
"""From so many rows on, what a triangle takes, in times of products and a softmax."""


class CustomSdpa:
    """`torch.ops.llama.custom_sdpa`."""

    name = NAME

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[CallPlan] | Refusal:
        """Takes what the operator takes, where its library is installed."""
        if NAME not in setting.device.kernels:
            return Refusal(self.name, f"{NAME} is an operator of ExecuTorch", other_device=True)
        reason = refusal(RULES, Attended(attention, setting)) or mask_refusal(attention, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        try:
            head_dim = common_head_dim(attention)
        except Unfit as unfit:
            return Refusal(self.name, str(unfit))
        operator = _operator()
        if operator is None:
            return Refusal(self.name, f"{LIBRARY} does not import, which registers {NAME}", package="executorch")
        first = _first(attention)
        problem = problem_of(attention, setting.hint)
        padded = 0 if head_dim is None else problem.operand_bytes
        problem = replace(problem, causal=first is not None, copied_bytes=padded)
        return Offer(
            self.name,
            variant,
            attention,
            cost_of(NAME, attention, problem, setting),
            fused=True,
            plan=CallPlan(operator, first, first is None and not attention.mask.is_none, head_dim),
            assumptions=(FINITE_KEYS,) if hides_keys(attention, setting) else (),
            moved=problem.moved_bytes,
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[CallPlan], setting: Setting) -> Value:
        """Plans the call; a negative scale is taken into the query, beside which a triangle would be turned over."""
        a, decided = offer.attention, offer.plan
        lower = Lowering(plan, nodes, a)
        query, key, value = _operands(lower, decided.head_dim)
        if a.scale < 0:
            query = plan.call(aten.neg.default, query)
        mask = _matrix(lower, setting) if decided.has_mask else None
        causal = decided.first is not None
        # Whatever the mask, the operator reads ``first + q_len`` keys, as of a cache that ends with its last query.
        # Without a triangle all keys are read only if the queries are told to be the last of them.
        first = plan.size(a.kv_len - a.q_len if decided.first is None else decided.first)
        out: Value = plan.call(decided.operator, query, key, value, first, mask, 0.0, causal, abs(a.scale))
        if decided.head_dim is not None:
            out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        return lower.result(plan.call(aten.transpose.int, out, 1, 2))


def _operands(lower: Lowering, head_dim: int | None) -> tuple[Value, Value, Value]:
    """Query, key and value with positions before heads, in the compute dtype and of one head dim."""
    a, plan, dtype = lower.attention, lower.plan, lower.attention.compute_dtype

    def laid(load: Load, positions: Group, heads: Group, dim: Group) -> Value:
        return lower.operand(load, (a.batch, positions, heads, dim), dtype, expand=True)

    query = laid(a.query, a.rows, a.heads, (a.dim,))
    if a.factors:
        query = plan.call(aten.transpose.int, lower.query(dtype), 1, 2)
    key, value = laid(a.key, (a.keys,), a.kv_heads, (a.dim,)), laid(a.value, (a.keys,), a.kv_heads, a.value_dim)
    if head_dim is None:
        return query, key, value
    return widened(plan, query, head_dim), widened(plan, key, head_dim), widened(plan, value, head_dim)


def _matrix(lower: Lowering, setting: Setting) -> Value:
    """What is added to the scores, (L, S) in float32, an element for every row and key."""
    a, plan = lower.attention, lower.plan
    mask = plan.call(aten.select.int, plan.call(aten.select.int, additive_mask(lower, setting), 0, 0), 0, 0)
    if fake_of(mask).dtype != torch.float32:
        mask = plan.call(aten.to.dtype, mask, torch.float32)
    return plan.call(aten.expand.default, mask, [plan.size(a.q_len), plan.size(a.kv_len)])


def _operator() -> Any | None:
    """The operator, which its library registers; None where that is not installed."""
    with contextlib.suppress(ImportError):
        import_module(LIBRARY)
    packet = getattr(torch.ops.llama, NAME, None)
    return None if packet is None else packet.default


class ExecuTorch(Runtime):
    """``executorch.exir.to_edge_transform_and_lower(program)``, and what runs the result.

    Products and a softmax are lowered for XNNPACK, whose products are faster than the operator's: it wins with one
    query row, and with a triangle, which XNNPACK does not mask.
    """

    name = "executorch"
    types = ("executorch",)
    product = "ExecuTorch"
    most_general = (NAME,)
    same_call = {NAME: NAME}
    one_row = (0.7, 0.2)
    many_rows = (4.0, 3.0)
    packages = (("executorch", "lowers programs for devices, and has custom_sdpa", "pip install executorch"),)

    def here(self, at: torch.device) -> Device:
        """What is decided for: a processor's rates under the runtime's name."""
        return replace(super().here(at), kernels=(NAME,))

    def targets(self) -> Sequence[Target]:
        """The operator for language models."""
        return (CustomSdpa(),)

    def rules(self) -> Sequence[Constraint[Any]]:
        """What the operator is asked about."""
        return RULES

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """The operator, measured against XNNPACK (docs/howto/runtimes.md)."""
        for rows, ratio in _TRIANGLES if problem.causal else ():
            if problem.q_len >= rows:
                return ratio * roofline.unfused(setting.device, problem, materialised_kv=False)
        return super().kernel_cost(kernel, attention, problem, setting)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """None: torch's call is written out as products and a softmax."""
        return None


FAMILY = ExecuTorch()

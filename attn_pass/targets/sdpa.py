"""One canonical ``scaled_dot_product_attention`` call: rank 4, explicit scale, a mask of a legal dtype.

Becomes: a call with ``is_causal`` or a mask, and ``enable_gqa`` for grouped heads. Head dims that differ are padded
with zeros and the result is sliced: that adds zeros to every dot product, and columns of zeros that are cut off. A last
dimension that is not dense is copied.

    (q @ k.repeat_interleave(4, 1).mT * scale).masked_fill(row < key, -inf).softmax(-1) @ v.repeat_interleave(4, 1)
    ->
    aten.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=scale, enable_gqa=True)

Exact because: the call computes this expression; ``is_causal`` stands for a mask only if the mask was proved to be
that triangle, and heads are grouped only if each was proved to use the keys that the call gives it.

With a sink, in inference on CPUs, the target emits the kernel that torch's call takes there, whose logarithm of the
sum of exponentials gives the sink's share of each row; in training that logarithm has no gradient. For runtimes the
sink becomes a key of zeros.

A mask that depends only on the difference of key and row (ALiBi, T5's buckets, decay, dilated windows), is computed in
the program and needs no gradient becomes one vector of distances, computed by the program's own operations. The kernel
sees it as a matrix whose strides are both 1, with the queries in reverse order, so no matrix is materialised.

Offers where torch would use a fused kernel; the family of the device has the constraints of each (``kernel_rules``), so
that nothing is offered that would fall back to the unfused path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices import roofline
from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.distance import ByDistance
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import ANY_BACKEND, AUTOCAST, RANDOM_NUMBERS, Attended, not_measured
from attn_pass.targets.kernel_rules import KernelCall
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import (
    MaskForm,
    additive_mask,
    assumed,
    dense_keys,
    gives_zero_for_empty_rows,
    mask_form,
    mask_kind,
    mask_refusal,
    mask_tensor,
    repaired,
    shifts_rows,
    wants_mask_gradient,
)
from attn_pass.targets.operands import Unfit, common_head_dim, operands
from attn_pass.targets.problem import cost_of, moved_query_bytes, problem_of
from attn_pass.targets.sinks import is_joined, sink_refusal, with_key_of_zeros, with_logarithm
from attn_pass.targets.torch_call import order, picked_by_torch, refusal, rules_of


@dataclass(frozen=True)
class SdpaPlan:
    """What torch's call is given, and the fused kernel that it ends in; ``by_distance``: the mask as one vector.

    ``head_dim``: the one that operands are filled up to where they differ.
    """

    mask: MaskForm
    kernel: str
    head_dim: int | None
    by_distance: ByDistance | None = None
    joins_sink: bool = False  # the sink becomes a key


class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[SdpaPlan] | Refusal:
        """Takes whatever torch has a fused CPU kernel for, padding unequal head dims."""
        try:
            decided = self._plan(attention, setting)
        except Unfit as reason:
            family = family_of(setting.device)  # another may have kernels of its own, and reasons that say more
            others = not family.kernel_rules and bool(family.targets())
            return Refusal(self.name, str(reason), other_device=others)
        hint = setting.hint
        copied = moved_query_bytes(attention, hint)
        problem = problem_of(attention, hint, copied)
        by_distance = decided.by_distance
        if by_distance is not None:
            copied += problem_of(attention, setting.hint).query_bytes
        repaired = problem.operand_bytes if decided.mask.repairs else 0
        dims = (problem.head_dim, problem.value_dim)
        if decided.head_dim is not None:
            dims, copied = (max(dims), max(dims)), copied + problem.operand_bytes
        mask_elements = problem.mask_elements if by_distance is None else setting.hint(by_distance.axis.size)
        if decided.joins_sink:
            mask_elements, copied = problem.scores, copied + problem.operand_bytes
        problem = replace(
            problem,
            causal=decided.mask.kind == "causal",
            copied_bytes=copied + repaired,
            head_dim=dims[0],
            value_dim=dims[1],
            mask_elements=mask_elements if decided.mask.is_tensor else 0,
        )
        predicted = cost_of(decided.kernel, attention, problem, setting)
        return Offer(
            self.name,
            variant,
            attention,
            predicted,
            fused=True,
            plan=decided,
            assumptions=assumed(attention, setting),
            moved=problem.moved_bytes,
        )

    def _plan(self, a: Attention, setting: Setting) -> SdpaPlan:
        """Raises `Unfit`."""
        if (reason := sink_refusal(a, setting)) is not None:
            raise Unfit(reason)
        kernel = self._kernel(a, setting, mask_needs_grad=wants_mask_gradient(a))
        if (reason := mask_refusal(a, setting)) is not None:
            raise Unfit(reason)
        joins_sink = is_joined(a, setting)
        form = MaskForm("additive") if joins_sink else mask_form(a, setting)
        head_dim = None if family_of(setting.device).takes_unequal_head_dims else common_head_dim(a)
        return SdpaPlan(form, kernel, head_dim, _distance_mask(a, form, setting), joins_sink)

    def unfit(self, a: Attention, setting: Setting) -> str | None:
        """Why torch has no fused kernel for it, but for what its mask does to a row; None if it has."""
        try:
            self._kernel(a, setting)
        except Unfit as reason:
            return str(reason)
        return None

    def _kernel(self, a: Attention, setting: Setting, *, mask_needs_grad: bool = False) -> str:
        """The fused kernel that torch's call ends in. Raises `Unfit`."""
        if a.not_affine:
            raise Unfit(a.not_affine)
        if not family_of(setting.device).kernel_rules:
            raise Unfit(not_measured(setting.device))
        if not setting.device.kernels:
            raise Unfit("no GPU is here, or torch's fused kernels are switched off")
        case = Attended(a, setting)
        if not RANDOM_NUMBERS.holds(case):
            raise Unfit(RANDOM_NUMBERS.why(case))
        allowed = setting.allowed_backends
        kernels = [
            k for k in order(setting.device) if allowed is None or rules_of(k, setting.device).backend in allowed
        ]
        if not kernels:
            raise Unfit(ANY_BACKEND.why(case))
        call = _call(a, setting, mask_needs_grad=mask_needs_grad)
        picked = picked_by_torch(call, allowed)
        if picked is None:
            reason = refusal(kernels[-1], call, by_torch=True)
            raise Unfit(reason or f"torch's call pads no head dims for the {kernels[-1]} kernel")
        if (reason := refusal(picked, call)) is not None:
            raise Unfit(reason)
        if not AUTOCAST.holds(case):
            raise Unfit(AUTOCAST.why(case))
        return picked

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[SdpaPlan], setting: Setting) -> Value:
        """Plans the call. Operands get a dense last dimension, which the kernel requires."""
        a, decided, family = offer.attention, offer.plan, family_of(setting.device)
        lower = Lowering(plan, nodes, a)
        mask: Value | None
        query, key, value = operands(lower, decided.head_dim)
        if a.scale < 0:
            # The fused CPU kernel multiplies the -inf of is_causal by the scale, too (seen in torch 2.13.0).
            query = plan.call(aten.neg.default, query)
        by_distance = decided.by_distance
        if a.sink is not None and decided.joins_sink:
            key, value, mask = with_key_of_zeros(lower, a.sink, key, value, setting)
        elif a.sink is not None:
            return lower.result(with_logarithm(lower, a.sink, (query, key, value), decided.mask, setting))
        elif by_distance is not None:
            query = plan.call(aten.flip.default, query, [2])
            mask = _over_distances(lower, setting, by_distance)
        else:
            mask = mask_tensor(lower, decided.mask.kind, setting)
        empty = None
        arguments: dict[str, object] = {}
        # Torch-TensorRT rounds a scale that is given to half precision, and not the one that follows from the head dim.
        if not (family.is_runtime and _is_default_scale(a, decided.head_dim)):
            arguments["scale"] = abs(a.scale)
        if a.groups != 1:
            arguments["enable_gqa"] = True
        target = sdpa_function(plan)
        if mask is not None:
            mask, empty = repaired(lower, mask, decided.mask, setting, decided.kernel)
            if not (family.takes_any_mask_strides or family.is_runtime):
                mask = dense_keys(plan, mask)
            if not family.broadcasts_masks and a.sink is None:
                mask = plan.call(aten.expand.default, mask, [-1, -1, plan.size(a.q_len), plan.size(a.kv_len)])
        causal = decided.mask.kind == "causal"
        safe_query = query if empty is None else empty.queried(query)
        out: Value = plan.call(target, safe_query, key, value, mask, a.dropout, causal, **arguments)
        if by_distance is not None:
            out = plan.call(aten.flip.default, out, [2])
        if empty is not None:
            out = empty.replaced(out, query, key, value, abs(a.scale))
        if decided.head_dim is not None:
            out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        if mask is not None and family.is_runtime:
            # Exporters trace the call more than once, and where the mask is learned one trace needs gradients, another
            # does not: torch's call gives the result of one kernel, then of another, in another layout.
            out = plan.call(aten.clone.default, out, memory_format=torch.contiguous_format)
        return lower.result(out)


def _is_default_scale(a: Attention, padded: int | None) -> bool:
    dim = a.head_dim if padded is None else padded
    return isinstance(dim, int) and math.isclose(abs(a.scale), dim**-0.5, rel_tol=1e-12)


def _call(a: Attention, setting: Setting, *, mask_needs_grad: bool = False) -> KernelCall:
    return KernelCall(
        a,
        mask_kind(a, setting),
        setting.device,
        mask_needs_grad,
        setting.deterministic,
        together=True,
        may_train=setting.program == "export",
        reached=setting.kernel_as_written,
        empty_rows_are_zero=gives_zero_for_empty_rows(a, setting),
        eager_form=setting.eager_form,
        hint=setting.hint,
    )


def _distance_mask(a: Attention, form: MaskForm, setting: Setting) -> ByDistance | None:
    """The mask over distances, where handing over a vector of them is cheaper than the matrix they make."""
    by = a.mask.by_distance
    if by is None or not by.is_over(a.rows) or a.sink is not None or form.repairs:
        return None
    if not family_of(setting.device).takes_any_mask_strides or shifts_rows(a):  # a vector of distances has no rows
        return None
    problem = problem_of(a, setting.hint)
    matrix = roofline.traffic(setting.device, 2 * problem.mask_elements * problem.mask_bytes)
    flips = roofline.traffic(setting.device, 2 * problem.query_bytes) + setting.device.kernel_us
    return by if flips < matrix else None


def _over_distances(lower: Lowering, setting: Setting, by: ByDistance) -> Value:
    """The mask (B, H, L, S) of queries in reverse order, as a view that steps over a vector of distances.

    Row ``L - 1 - i`` and key ``j`` have element ``i + j`` of it, so that both steps are 1; forwards one would be -1,
    which no view has.
    """
    a, plan = lower.attention, lower.plan
    vector = additive_mask(lower, setting, by)
    dense = plan.call(aten.clone.default, vector, memory_format=torch.contiguous_format)
    batch, heads = (plan.sizes.index(n) for n in fake_of(dense).shape[:2])
    length = by.axis.size
    sizes = [plan.size(n) for n in (batch, heads, a.q_len, a.kv_len)]
    return plan.call(aten.as_strided.default, dense, sizes, [plan.size(n) for n in (heads * length, length, 1, 1)])


def sdpa_function(plan: Plan) -> Callable[..., Any]:
    """The call in the dialect of the graph."""
    if "example_value" in plan.result.meta:
        return torch.nn.functional.scaled_dot_product_attention
    return aten.scaled_dot_product_attention.default

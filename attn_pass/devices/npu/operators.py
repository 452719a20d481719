"""Ascend's fused attention through torch_npu: ``npu_fused_infer_attention_score`` and ``npu_fusion_attention``.

Becomes: one call of the first in inference in half precision, and of the second in training and in float32: of its
version for graphs (``npu_fusion_attention_v3``) on A2 and A3, of the first version on 950. Operands keep their memory
layout, heads or positions first (BNSD, BSND, BSH, SBH), and grouped heads need no copies. Causal masks from either end
and windows become a mode with one compressed mask for the whole graph. Other masks become boolean tensors, True where
masked out; additive matrices do so only if they are proven to be 0 or masking. Scale, heads, bounds and
``inner_precise`` are always passed, because their defaults silently give wrong results. Sites with dropout are left in
checkpoints and where two calls may be equal, because v3 draws random numbers without declaring it to the compiler.

    F.scaled_dot_product_attention(q, k, v, row >= key, scale=scale)
    ->
    npu.npu_fusion_attention_v3(q, k, v, heads, "BNSD", scale=scale, inner_precise=0, sparse_mode=2, atten_mask=m)[0]

Exact because: a mode stands for a mask only if the mask was proved to be the one that the mode is documented to be,
and a mask that is passed is True exactly where the program masks. Rows that it masks fully are replaced beside the
operator.

Offers on Ascend devices, if torch_npu has registered its operators; [npu.md](npu.md) lists the supported forms and the
reasons for the others. The tests check every call against the documented contract; nothing has run on an NPU, and
nothing was measured.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices.npu import generations
from attn_pass.devices.npu.cost import operator as operator_cost
from attn_pass.devices.npu.generations import INFERENCE, TRAINING, TRAINING_V1
from attn_pass.devices.npu.layouts import (
    LAYOUTS,
    ROWS_FIRST_RESULT,
    Layout,
    best,
    heads_first,
    operands,
    wants_rows_first,
)
from attn_pass.devices.npu.masks import FilledRows, MaskPlan, NoForm, emitted_mask, mask_plan
from attn_pass.devices.npu.rules import Case, has_many_rows, merged_fits, refusal, width
from attn_pass.devices.roofline import Problem, traffic
from attn_pass.graph.edit import Plan, Value
from attn_pass.model.attention import Attention
from attn_pass.report.units import duration
from attn_pass.targets.base import EMPTY_ROWS, NONEMPTY_ROWS, Offer, Refusal, Setting
from attn_pass.targets.lower import Lowering
from attn_pass.targets.problem import problem_of

_FAMILY = f"the NPU does not report its family, so it is planned for {generations.UNKNOWN}"
_ROWS_FIRST = next(layout for layout in LAYOUTS if layout.name == "BSND")


@dataclass(frozen=True)
class OperatorPlan:
    """Which operator is called, and how: the mask, the operands' layout and one head dim, and the result's layout."""

    operator: str
    overload: Any
    mask: MaskPlan
    layout: Layout
    result_layout: Layout
    head_dim: int | None
    kv_heads: int


class _Operator:
    """What both targets share: the offer, the reasons, operands, mask and result."""

    name = ""
    operators: tuple[str, ...] = ()  # of which a family has at most one

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[OperatorPlan] | Refusal:
        """An offer at the operator's predicted cost, or the first reason why not."""
        device = setting.device
        operator = self._operator(setting)
        if operator is None:
            return Refusal(self.name, self._why_absent(setting), other_device=device.type != "npu")
        reason = refusal(Case(attention, setting, operator))
        if reason is not None:
            return Refusal(self.name, reason)
        try:
            mask = mask_plan(attention, setting, operator)
        except NoForm as none:
            return Refusal(self.name, str(none))
        layout, copied = best(attention, operator, setting.hint)
        wide = width(attention, operator)
        problem = _problem(attention, mask, copied, wide, setting)
        predicted = operator_cost(device, operator, problem) + _around(
            problem, mask, setting, again=attention.needs_grad and attention.mask.bias is not None
        )
        overload = _overload(operator)
        if overload is None:
            return Refusal(self.name, _uninstalled(operator, predicted), package="torch-npu")
        return Offer(
            self.name,
            variant,
            attention,
            predicted,
            fused=True,
            plan=OperatorPlan(
                operator,
                overload,
                mask,
                layout,
                self.result_layout(attention, layout, setting),
                wide,
                problem.kv_heads,
            ),
            assumptions=_assumed(attention, setting),
            moved=problem.moved_bytes,
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[OperatorPlan], setting: Setting) -> Value:
        """Plans the call."""
        a, decided = offer.attention, offer.plan
        lower, mask_form = Lowering(plan, nodes, a), decided.mask
        query, key, value = operands(lower, decided.layout, decided.head_dim)
        mask, rows = emitted_mask(lower, mask_form, decided.operator)
        optional: dict[str, Any] = {
            "scale": abs(a.scale),
            "inner_precise": mask_form.inner_precise,
            "sparse_mode": mask_form.mode,
        }
        if mask is not None:
            optional["atten_mask"] = mask
        positional, more = self.arguments(a, decided)
        results = plan.call(decided.overload, query, key, value, *positional, **more, **optional)
        out = heads_first(lower, plan.call(operator.getitem, results, 0), decided.result_layout)
        if rows is not None:
            out = _replaced(lower, rows, out)
        return lower.result(out)

    def result_layout(self, a: Attention, layout: Layout, setting: Setting) -> Layout:
        """The layout of the result, of operands in ``layout``."""
        return layout

    def arguments(self, a: Attention, plan: OperatorPlan) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments that the operators spell differently: positional ones, and those by name."""
        raise NotImplementedError

    def _operator(self, setting: Setting) -> str | None:
        return next((name for name in self.operators if name in setting.device.kernels), None)

    def _why_absent(self, setting: Setting) -> str:
        device = setting.device
        if device.type != "npu":
            return f"{self.name} does not run on {device.type} devices"
        if not device.kernels and not device.generation:
            return f"which operators {device.name} has is not known"
        family = generations.generation(device.generation or generations.UNKNOWN)
        return family.refusal or f"{self.name} is not documented for Ascend {family.name} devices"


class InferAttention(_Operator):
    """`torch.ops.npu.npu_fused_infer_attention_score`."""

    name = INFERENCE
    operators = (INFERENCE,)

    def result_layout(self, a: Attention, layout: Layout, setting: Setting) -> Layout:
        """With positions first, where the program's is, from operands without."""
        transposes = (
            layout.name == "BNSD" and has_many_rows(a, setting) and wants_rows_first(a) and merged_fits(a, INFERENCE)
        )
        return _ROWS_FIRST if transposes else layout

    def arguments(self, a: Attention, plan: OperatorPlan) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Grouped heads by number."""
        return (), {
            "num_heads": a.query_heads,
            "num_key_value_heads": plan.kv_heads,
            "input_layout": plan.layout.name if plan.result_layout is plan.layout else ROWS_FIRST_RESULT,
            "pre_tokens": plan.mask.before,
            "next_tokens": plan.mask.after,
        }


class FusionAttention(_Operator):
    """`torch.ops.npu.npu_fusion_attention_v3`, or `npu_fusion_attention` where that is refused."""

    name = TRAINING_V1
    operators = (TRAINING, TRAINING_V1)

    def arguments(self, a: Attention, plan: OperatorPlan) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Dropout as what is kept; the bounds by the operator's own spelling."""
        bounds = {"pre_tockens": plan.mask.before, "next_tockens": plan.mask.after}
        return (a.query_heads, plan.layout.name), {"keep_prob": 1.0 - a.dropout, **bounds}


def _overload(name: str) -> Any | None:
    """The operator; None where nothing has registered it."""
    packet = getattr(torch.ops.npu, name, None)
    return None if packet is None else packet.default


def _uninstalled(name: str, microseconds: float) -> str:
    version = ".".join(str(torch.__version__).split("+")[0].split(".")[:2])
    return (
        f"{name} would be taken ({duration(microseconds)} predicted), but nothing has registered it: "
        f"pip install 'torch-npu=={version}.*' with CANN, and import torch_npu"
    )


def _assumed(a: Attention, setting: Setting) -> tuple[str, ...]:
    assumptions: list[str] = []
    if not a.mask.is_none and not a.mask.never_empty:
        keep = () if a.mask.keep is None else (a.mask.keep.fill,)
        infinite = float("-inf") in (*keep, *(a.mask.fills or ()))
        if setting.assume_nonempty_rows:
            assumptions.append(NONEMPTY_ROWS)
        elif a.empty_row_is_nan and infinite:
            assumptions.append(EMPTY_ROWS)
    if not setting.device.generation:
        assumptions.append(_FAMILY)
    return tuple(assumptions)


def _problem(a: Attention, mask: MaskPlan, copied: int, wide: int | None, setting: Setting) -> Problem:
    problem = problem_of(a, setting.hint, copied)
    if wide is not None and (problem.head_dim, problem.value_dim) != (wide, wide):
        problem = replace(problem, copied_bytes=problem.copied_bytes + problem.operand_bytes)
        problem = replace(problem, head_dim=wide, value_dim=wide)
    kv_len, elements = problem.kv_len, 0
    if mask.kind == "boolean":
        elements = max(problem.mask_elements, problem.q_len * problem.kv_len)
    elif mask.mode == 4:
        kv_len = max(1, min(kv_len, mask.before + mask.after + 1))
    return replace(problem, causal=mask.mode in (2, 3), kv_len=kv_len, mask_elements=elements, mask_bytes=1)


def _around(problem: Problem, mask: MaskPlan, setting: Setting, *, again: bool) -> float:
    """Making a boolean mask, and replacing fully masked rows; ``again``: with the gradient of what is added."""
    device, total = setting.device, 0.0
    if mask.kind == "boolean":
        total += traffic(device, 3 * problem.mask_elements) + device.kernel_us
    if mask.repaired and again:
        total += traffic(device, 6 * problem.operand_bytes) + 4 * device.kernel_us
    if mask.repaired:
        total += traffic(device, 2 * problem.query_bytes + problem.mask_elements) + 2 * device.kernel_us
    return total


def _replaced(lower: Lowering, rows: FilledRows, out: Value) -> Value:
    """The result with fully masked rows as the program has them: the mean of the values, or zeros."""
    a = lower.attention
    filled = a.mask.keep.fill if a.mask.keep is not None else (a.mask.fills or (float("-inf"),))[0]
    return rows.with_zeros(out) if filled == float("-inf") else rows.with_mean(lower, out)

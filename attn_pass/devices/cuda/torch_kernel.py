"""What the targets for torch's CUDA kernels share: the offer, the reasons, and operands in the kernels' layout.

The kernels are called as the aten operators that torch's own call ends in, so that the choice is this project's: torch
would make it when the graph is traced, by its own order, on the machine that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.devices.cuda.kernel import CudaKernel
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.index import Index, divide
from attn_pass.targets import constraints
from attn_pass.targets.bands import Window, window_of
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import AUTOCAST, MAY_BE_EMPTY, RANDOM_NUMBERS, Attended, backend, sizes_of
from attn_pass.targets.empty_rows import EmptyRows
from attn_pass.targets.kernel_rules import KernelCall, KernelRules, padded
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import (
    LOWEST_CUDA,
    MaskForm,
    additive_mask,
    assumed,
    mask_form,
    mask_refusal,
    repaired,
    wants_mask_gradient,
)
from attn_pass.targets.operands import dense_last, widened
from attn_pass.targets.problem import cost_of, moved_query_bytes, problem_of
from attn_pass.targets.torch_call import refusal

_VECTOR = 16  # bytes
_BLOCK = 128  # rows, and keys, that are computed together


Dims = tuple[int | None, int | None]
"""The head dims of a call, of query and key and of the values; None where one is not known."""


@dataclass(frozen=True)
class KernelPlan:
    """How one of torch's kernels is called: its mask or window, the head dims, what it keeps for a backward."""

    mask: MaskForm
    dims: Dims
    window: Window | None = None
    saves: bool = False  # what a backward reads is kept
    dense_result: bool = False  # the result lies densely, whatever the query's strides are

    @property
    def kind(self) -> str:
        """The mask's kind, as `KernelCall` has it."""
        return self.mask.kind if self.window is None else "band"

    @property
    def is_causal(self) -> bool:
        """Whether the kernel's own causal flag is the whole mask."""
        return self.kind == "causal"


class Kernel(CudaKernel):
    """One of torch's kernels as a target: its name, and the form of its mask."""

    rules: KernelRules
    takes_window = False
    pads_together = False  # query, key and value need one head dim
    finite_mask = False  # its mask has a finite number instead of -inf

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[KernelPlan] | Refusal:
        """An offer at the kernel's cost, or the first reason why not."""
        if self.name not in setting.device.kernels:
            return Refusal(self.name, f"there is no such kernel on {setting.device.name}", other_device=True)
        decided = self.kernel_plan(attention, setting)
        reason = self.refusal_of(attention, decided.kind, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        hint = setting.hint
        problem = problem_of(attention, hint)
        dims = decided.dims
        widened = 0 if dims == (problem.head_dim, problem.value_dim) else problem.operand_bytes
        problem = replace(
            problem,
            head_dim=dims[0] or problem.head_dim,
            value_dim=dims[1] or problem.value_dim,
            causal=decided.is_causal,
            kv_len=_keys_visited(attention, decided.window, hint),
            mask_elements=problem.mask_elements if decided.mask.is_tensor else 0,
            copied_bytes=moved_query_bytes(attention, hint) + widened,
        )
        predicted = cost_of(self.name, attention, problem, setting)
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

    def kernel_plan(self, a: Attention, setting: Setting) -> KernelPlan:
        """A causal mask of unequal lengths is a window where that can be said."""
        form = mask_form(a, setting)
        flag = form.kind == "none" or (form.kind == "causal" and a.q_len == a.kv_len)
        window = None if flag or not self.takes_window else window_of(a)
        saves = a.needs_grad or setting.program == "export"  # which may be trained
        return KernelPlan(form if window is None else MaskForm("none"), self.padded_dims(a), window, saves)

    def refusal_of(self, a: Attention, kind: str, setting: Setting) -> str | None:
        """Why the kernel cannot take an attention whose mask has this form; None if it can."""
        if a.not_affine:
            return a.not_affine
        if a.sink is not None:
            return "the sum of exponentials, which a sink needs, has no gradient in the fused kernel"
        case = Attended(a, setting)
        if (reason := constraints.refusal((RANDOM_NUMBERS, backend(self.rules.backend)), case)) is not None:
            return reason
        call = KernelCall(
            a,
            kind,
            setting.device,
            wants_mask_gradient(a),
            setting.deterministic,
            together=self.pads_together,
            may_train=setting.program == "export",
            reached=setting.kernel_as_written,
            finite_mask=self.finite_mask,
            hint=setting.hint,
        )
        reason = refusal(self.name, call)
        if reason is not None:
            return reason
        if any(map(setting.can_be_zero, sizes_of(a))):
            return MAY_BE_EMPTY  # torch's own call looks when it runs
        if not AUTOCAST.holds(case):
            return AUTOCAST.why(case)
        if a.scale == 0 and kind != "none":
            return "a scale of 0 would also be multiplied into the mask"
        return mask_refusal(a, setting)

    def padded_dims(self, a: Attention) -> Dims:
        """The head dims of keys and values as the kernel gets them; None where one is not known."""
        multiple = self.rules.multiple(a.compute_dtype)
        dims = padded(a.head_dim, multiple), padded(a.value_head_dim, multiple)
        if self.pads_together and dims[0] is not None and dims[1] is not None:
            return max(dims[0], dims[1]), max(dims[0], dims[1])
        return dims

    # ------------------------------------------------------------ emission

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[KernelPlan], setting: Setting) -> Value:
        """Plans the call, and what replaces fully masked rows where they are repaired."""
        a, decided = offer.attention, offer.plan
        lower = Lowering(plan, nodes, a)
        query, key, value = _operands(lower, decided.dims)
        mask, empty = self._masked(lower, decided.mask, setting) if decided.mask.is_tensor else (None, None)
        safe_query = query if empty is None else empty.queried(query)
        out = self.called(lower, (safe_query, key, value), mask, decided)
        if empty is not None:
            out = empty.replaced(out, query, key, value, abs(a.scale))
        if fake_of(out).shape[-1] != a.value_head_dim:
            out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        return lower.result(out)

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
    ) -> Value:
        """The kernel's (B, H, L, Dv) result."""
        raise NotImplementedError

    def _masked(self, lower: Lowering, form: MaskForm, setting: Setting) -> tuple[Value | None, EmptyRows | None]:
        """The mask to add, and what replaces fully masked rows where they are repaired.

        With ``finite_mask`` -inf becomes a number that absorbs every score, which is the same in rows with a key.
        Float16 has none, and a mask that the kernel was given before stays what it was.
        """
        mask, empty = repaired(lower, additive_mask(lower, setting), form, setting, self.name)
        if self.finite_mask and fake_of(mask).dtype != torch.float16 and setting.kernel_as_written != self.name:
            mask = lower.plan.call(aten.clamp.default, mask, LOWEST_CUDA)
        return aligned(lower.plan, mask, lower.attention.kv_len), empty


def _keys_visited(a: Attention, window: Window | None, hint: Callable[[Index], int]) -> int:
    """The keys a block of rows goes through."""
    if window is None or window.left is None or window.right is None:
        return hint(a.kv_len)
    return max(1, min(hint(a.kv_len), hint(window.left) + hint(window.right) + 1 + _BLOCK))


def _operands(lower: Lowering, dims: Dims) -> tuple[Value, Value, Value]:
    """Query, key and value (B, H, L, D) as the kernels take them.

    Head dims are padded with zeros, which add zeros to every product; the last dimension is dense. A negative scale is
    taken into the query: the kernels look for the highest score before they multiply by it.
    """
    plan, a = lower.plan, lower.attention
    dtype = a.compute_dtype
    operands = []
    for value, to in zip((lower.query(dtype), lower.key(dtype), lower.value(dtype)), (dims[0], dims[0], dims[1])):
        value = value if to is None else widened(plan, value, to)
        operands.append(in_vectors(plan, dense_last(plan, value)))
    if a.scale < 0:
        operands[0] = plan.call(aten.neg.default, operands[0])
    query, key, value = operands
    return query, key, value


def in_vectors(plan: Plan, value: Value) -> Value:
    """The operand with rows that begin at multiples of 16 bytes: kernels read them in vectors of so many."""
    tensor = fake_of(value)
    multiple = _VECTOR // tensor.element_size()
    strides = [plan.sizes.index(s) for s, n in zip(tensor.stride()[:-1], tensor.shape) if plan.sizes.index(n) != 1]
    starts = [plan.sizes.index(tensor.storage_offset()), *strides]
    if all(divide(start, multiple)[1] == 0 for start in starts):
        return value
    return plan.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def aligned(plan: Plan, mask: Value, keys: Index, multiple: int = 8) -> Value:
    """An additive mask (B, H, L, S) whose rows lie ``multiple`` elements or a multiple of it apart.

    Kernels load it in vectors. What varies with no key is written out for all of them.
    """
    tensor = fake_of(mask)
    length = plan.sizes.index(tensor.shape[-1])
    if length != keys:
        mask = plan.call(aten.expand.default, mask, [*tensor.shape[:-1], plan.size(keys)])
        return aligned(plan, plan.call(aten.clone.default, mask, memory_format=torch.contiguous_format), keys, multiple)
    strides = [plan.sizes.index(s) for s, n in zip(tensor.stride(), tensor.shape[:-1]) if plan.sizes.index(n) != 1]
    dense = plan.sizes.index(tensor.stride(-1)) == 1
    starts = [plan.sizes.index(tensor.storage_offset()), *strides]
    if dense and all(isinstance(s, int) and s % multiple == 0 for s in starts):
        return mask
    if isinstance(length, int) and length % multiple == 0:
        return plan.call(aten.clone.default, mask, memory_format=torch.contiguous_format)
    missing = divide(length + (multiple - 1), multiple)[0] * multiple - length
    wide = plan.call(aten.constant_pad_nd.default, mask, [0, plan.size(missing)], 0.0)
    return plan.call(aten.slice.Tensor, wide, -1, 0, plan.size(length))

"""FlashAttention-2 as torch builds it in, for CUDA devices: no mask, a causal one, or a window.

Becomes: ``aten._scaled_dot_product_flash_attention`` if there is no mask, or a causal one over equal lengths, and
``aten._flash_attention_forward``, in its own (B, L, H, D) layout, for windows and for causal masks that are aligned to
the last key of more keys than queries; torch's own call computes these from a dense mask. Windows are offered only with
no more queries than keys: see ``bands``. If only a part of a cache is valid, the kernel receives where the valid keys
of each batch row begin, and how many there are (`flash_lengths`).

    F.scaled_dot_product_attention(q, k, v, row >= key, scale=scale)
    ->
    aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]

Exact because: a flag or a window stands for a mask only if the reading proved that the mask keeps these keys and no
others. A key outside of the valid part of a cache is masked, so that its weight is zero.

Offers in float16 and bfloat16, forward and backward, with grouped heads and dropout, for head dims up to 256. Both are
C++ operators and can be part of AOTInductor packages. If ``torch.nn.attention.activate_flash_attention_impl`` has
replaced them by FlashAttention-3 or -4, those run.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor

from attn_pass.devices.cuda import flash_lengths
from attn_pass.devices.cuda.cost import Shape, fused
from attn_pass.devices.cuda.rules.flash import FLASH
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan
from attn_pass.devices.device import Device, Shares
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import assumed
from attn_pass.targets.problem import problem_of

_NEWER = {"FA3": 0.80, "FA4": 0.80}  # 640 TFLOP/s on H100 (FA3), 1613 on B200 (FA4), less where it is causal


class Flash(Kernel):
    """`aten._scaled_dot_product_flash_attention`, or `aten._flash_attention_forward` for a window."""

    name = "flash"
    settled = aten._scaled_dot_product_flash_attention.default
    takes_valid_range = True
    rules = FLASH
    takes_window = True
    pads_together = True
    torch_check = "can_use_flash_attention"
    padded_by_torch = True
    sweeps = ("prefill", "decoding", "launch")
    measured = ("H200",)
    flex_wide = 0.85
    # flash_api.cpp: num_splits_heuristic, and seqlenq_ngroups_swapped; run_mha_fwd_splitkv_dispatch: blocks of 64 rows
    shape = Shape(128, (32, 64, 96, 128, 192, 256), splits_keys=True, split_rows=64, packs_one_row=True)
    shares = {  # few rows are shared out in blocks of 128
        "hopper": Shares(0.54, few_rows=0.75, narrow=0.51, wide=0.45),
        "H200": Shares(0.485, one_row=0.97, few_rows=0.97, narrow=0.46, wide=0.43),
        "ampere": Shares(0.72, few_rows=0.75),
        "ada": Shares(0.70, few_rows=0.75),
        "blackwell": Shares(0.22, few_rows=0.75),
    }

    def is_usable(self) -> bool:
        """Whether torch was built with it, and ``torch.backends.cuda`` has not switched it off."""
        of = torch.backends.cuda
        return of.is_flash_attention_available() and of.flash_sdp_enabled()

    def shares_with(self, flash: str, shares: Shares) -> Shares:
        """FlashAttention-3 and -4 make more of a GPU with many rows."""
        return replace(shares, prefill=_NEWER[flash], narrow=None, wide=None) if flash in _NEWER else shares

    def microseconds(self, device: Device, problem: Problem, *, growing: bool = False) -> float:
        """FlashAttention-4 in its place shares no keys out."""
        shape = replace(self.shape, splits_keys=device.flash != "FA4")
        return fused(device, device.shares[self.name], shape, problem, growing=growing)

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[KernelPlan] | Refusal:
        """Over a cache of which a part is valid, by the lengths of its rows."""
        a = attention
        if a.valid is None or self.name not in setting.device.kernels:
            return super().consider(attention, variant, setting)
        decided = flash_lengths.plan_of(a, self.padded_dims(a), setting)
        if isinstance(decided, Refusal):
            return decided
        if (reason := self.refusal_of(a, decided.kind, setting)) is not None:
            return Refusal(self.name, reason)
        device, problem = setting.device, problem_of(a, setting.hint)
        predicted = flash_lengths.microseconds(device, device.shares[self.name], self.shape, problem, decided)
        return Offer(
            self.name,
            variant,
            a,
            predicted,
            fused=True,
            plan=decided,
            assumptions=(*assumed(a, setting), *decided.assumes),
            moved=problem.moved_bytes,
        )

    def kernel_plan(self, a: Attention, setting: Setting) -> KernelPlan:
        """FlashAttention-3 and -4 allocate their result, which torch takes to lie like the query."""
        return replace(super().kernel_plan(a, setting), dense_result=setting.device.flash in _NEWER)

    def bare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Torch's operator."""
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]
        return out

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
    ) -> Value:
        """It takes no mask that is a tensor; windows are for operands (B, L, H, D)."""
        if isinstance(decided, flash_lengths.OfCache):
            return flash_lengths.called(lower, operands, decided)
        a, plan = lower.attention, lower.plan
        window = decided.window
        if window is None:
            kernel = aten._scaled_dot_product_flash_attention.default
            both = plan.call(kernel, *operands, a.dropout, decided.is_causal, False, scale=abs(a.scale))
            return plan.call(operator.getitem, both, 0)
        causal = window.left is None and window.right == 0
        bounds = {} if causal else {"window_size_left": window.left, "window_size_right": window.right}
        query, key, value = (plan.call(aten.transpose.int, x, 1, 2) for x in operands)
        if decided.dense_result:
            query = plan.call(aten.clone.default, query, memory_format=torch.contiguous_format)
        both = plan.call(
            aten._flash_attention_forward.default,
            *(query, key, value),
            None,
            None,
            plan.size(a.q_len),
            plan.size(a.kv_len),
            a.dropout,
            causal,
            False,
            scale=abs(a.scale),
            # None, and no -1, which FlashAttention-4 took for a bound before torch 2.13 (_fa4.py).
            **{name: plan.size(bound) for name, bound in bounds.items() if bound is not None},
        )
        return plan.call(aten.transpose.int, plan.call(operator.getitem, both, 0), 1, 2)


KERNEL = Flash()

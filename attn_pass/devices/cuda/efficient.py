"""The memory-efficient kernel (CUTLASS) as torch builds it in: any mask, float32, and gradients of a learned bias.

Becomes: one call of ``aten._scaled_dot_product_efficient_attention``, causal by its flag or with the mask as one
additive tensor, which is expanded to (B, H, L, S). Fully masked rows that the kernel does not compute as the program
does are replaced beside it.

    torch.where(keep, q @ k.mT * scale + bias, -inf).softmax(-1) @ v
    ->
    aten._scaled_dot_product_efficient_attention(q, k, v, torch.where(keep, bias, -inf), False, scale=scale)[0]

Exact because: the mask and the bias are one matrix that is added to the scores: a score plus -inf is -inf, and -inf
has weight zero. A finite fill becomes -inf only where that leaves every row that keeps a key as it is.

Offers in float32, float16 and bfloat16, forward and backward, with any mask or bias, for any head dim, without grouped
heads (the poor case ``grouped_heads`` packs them into rows first). float32 stays float32.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from attn_pass.devices.cuda.cost import Shape
from attn_pass.devices.cuda.rules.efficient import EFFICIENT
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan
from attn_pass.devices.device import Shares
from attn_pass.graph.edit import Value, aten
from attn_pass.targets.lower import Lowering


class Efficient(Kernel):
    """`aten._scaled_dot_product_efficient_attention`."""

    name = "efficient"
    settled = aten._scaled_dot_product_efficient_attention.default
    rules = EFFICIENT
    torch_check = "can_use_efficient_attention"
    sweeps = ("prefill", "decoding", "float32")
    measured = ("H200",)
    takes_groups = False
    shape = Shape(64, (64, 128), one_core=0.83)
    # It pads 1 to 4 rows to 64 and shares no keys out: 0.6 of a copy's rate on an H200, elsewhere a cautious guess.
    shares = {
        "hopper": Shares(0.30, one_row=0.5, few_rows=0.5),
        "H200": Shares(0.23, one_row=0.58, few_rows=0.58, narrow=0.185, wide=0.205),
        "ampere": Shares(0.45, one_row=0.5, few_rows=0.5),
        "ada": Shares(0.50, one_row=0.5, few_rows=0.5),
        "blackwell": Shares(0.17, one_row=0.5, few_rows=0.5),
    }

    def is_usable(self) -> bool:
        """As ``torch.backends.cuda`` has it."""
        return bool(torch.backends.cuda.mem_efficient_sdp_enabled())

    def bare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Keeps what a backward reads where the query has one."""
        out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, None, q.requires_grad, 0.0, causal)[0]
        return out

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
    ) -> Value:
        """Its mask is expanded to (B, H, L, S)."""
        a, plan = lower.attention, lower.plan
        if mask is not None:
            shape = [plan.size(n) for n in (a.batch_size, a.query_heads, a.q_len, a.kv_len)]
            mask = plan.call(aten.expand.default, mask, shape)
        both = plan.call(
            aten._scaled_dot_product_efficient_attention.default,
            *operands,
            mask,
            decided.saves,
            a.dropout,
            decided.is_causal,
            scale=abs(a.scale),
        )
        return plan.call(operator.getitem, both, 0)


KERNEL = Efficient()

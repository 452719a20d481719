"""The memory-efficient kernel (CUTLASS) as torch builds it in: any mask, float32, and gradients of a learned bias.

Offers in float32, float16 and bfloat16, forward and backward, with any mask or bias, for any head dim, without grouped
heads (they are packed into rows first, another form of the same attention). float32 stays float32.
"""

from __future__ import annotations

import operator

from attn_pass.devices.cuda.rules.efficient import EFFICIENT
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan
from attn_pass.graph.edit import Value, aten
from attn_pass.targets.lower import Lowering


class Efficient(Kernel):
    """`aten._scaled_dot_product_efficient_attention`."""

    name = "efficient"
    rules = EFFICIENT

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
        *,
        saves: bool,
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
            saves,
            a.dropout,
            decided.is_causal,
            scale=abs(a.scale),
        )
        return plan.call(operator.getitem, both, 0)

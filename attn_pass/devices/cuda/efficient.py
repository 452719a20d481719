"""The memory-efficient kernel (CUTLASS) as torch builds it in: any mask, float32, and gradients of a learned bias.

Offers in float32, float16 and bfloat16, forward and backward, with any mask or bias, for any head dim, without grouped
heads (they are packed into rows first, another form of the same attention). float32 stays float32.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node

from attn_pass.devices.cuda.rules.efficient import EFFICIENT
from attn_pass.devices.cuda.torch_kernel import Kernel, masked
from attn_pass.graph.edit import Plan, Value, aten
from attn_pass.targets.base import Offer, Setting
from attn_pass.targets.lower import Lowering


class Efficient(Kernel):
    """`aten._scaled_dot_product_efficient_attention`."""

    name = "efficient"
    rules = EFFICIENT

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        """Plans the call, its mask expanded to (B, H, L, S)."""
        a = offer.attention
        lower = Lowering(plan, nodes, a)
        kind = self.mask(a, setting)
        query, key, value = self.operands(lower)
        mask, empty = masked(lower, kind, setting, self.name)
        if mask is not None:
            shape = [plan.size(n) for n in (a.batch_size, a.query_heads, a.q_len, a.kv_len)]
            mask = plan.call(aten.expand.default, mask, shape)
        both = plan.call(
            aten._scaled_dot_product_efficient_attention.default,
            query if empty is None else empty.queried(query),
            key,
            value,
            mask,
            a.needs_grad or setting.program == "export",  # whose gradients nobody knows
            a.dropout,
            kind == "causal",
            scale=abs(a.scale),
        )
        out: Value = plan.call(operator.getitem, both, 0)
        if empty is not None:
            out = empty.replaced(out, query, key, value, abs(a.scale))
        return self.result(lower, out)

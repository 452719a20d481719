"""FlashAttention-2 as torch builds it in, for CUDA devices: no mask, a causal one, or a window.

``aten._scaled_dot_product_flash_attention`` where there is no mask, or a causal one over equal lengths;
``aten._flash_attention_forward``, in its own (B, L, H, D) layout, for windows and for causal masks that are aligned to
the last key of more keys than queries, which torch's own call computes from a dense mask. Windows only where there are
no more queries than keys: see `bands`.

Offers in float16 and bfloat16, forward and backward, with grouped heads and dropout, for head dims up to 256. Both are
C++ operators and go into AOTInductor packages. Where ``torch.nn.attention.activate_flash_attention_impl`` has put
FlashAttention-3 or -4 in their place, those run.
"""

from __future__ import annotations

import operator

from attn_pass.devices.cuda.rules.flash import FLASH
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan
from attn_pass.graph.edit import Value, aten
from attn_pass.targets.lower import Lowering


class Flash(Kernel):
    """`aten._scaled_dot_product_flash_attention`, or `aten._flash_attention_forward` for a window."""

    name = "flash"
    rules = FLASH
    takes_window = True
    pads_together = True

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
        *,
        saves: bool,
    ) -> Value:
        """It takes no mask that is a tensor; windows are for operands (B, L, H, D)."""
        a, plan = lower.attention, lower.plan
        window = decided.window
        if window is None:
            kernel = aten._scaled_dot_product_flash_attention.default
            both = plan.call(kernel, *operands, a.dropout, decided.is_causal, False, scale=abs(a.scale))
            return plan.call(operator.getitem, both, 0)
        causal = window.left is None and window.right == 0
        sizes = {} if causal else {"window_size_left": window.left, "window_size_right": window.right}
        both = plan.call(
            aten._flash_attention_forward.default,
            *(plan.call(aten.transpose.int, x, 1, 2) for x in operands),
            None,
            None,
            plan.size(a.q_len),
            plan.size(a.kv_len),
            a.dropout,
            causal,
            False,
            scale=abs(a.scale),
            **{name: -1 if bound is None else plan.size(bound) for name, bound in sizes.items()},
        )
        return plan.call(aten.transpose.int, plan.call(operator.getitem, both, 0), 1, 2)

"""cuDNN's fused attention as torch calls it: the fastest kernel for prefill and training on Hopper.

Offers in float16 and bfloat16, forward and backward, with grouped heads, masks that need no gradient and leave no row
without a key, and dropout in steps of 1/16. A plan is built for each new shape, which takes tens of milliseconds, so
that with lengths that are not known when compiled other kernels are cheaper for all but the largest shapes.

What is known to be wrong in some versions is not offered (`attn_pass.devices.cuda.rules.cudnn` names the reports).
Masks reach it with a finite number in the place of -inf, so that nothing rests on what it makes of a tile of keys that
are all masked; float16 has no such number, and is offered with masks over one tile of keys alone.
"""

from __future__ import annotations

import operator

from attn_pass.devices.cuda.rules.cudnn import CUDNN
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan, unbroadcast
from attn_pass.graph.edit import Value, aten
from attn_pass.targets.lower import Lowering


class Cudnn(Kernel):
    """`aten._scaled_dot_product_cudnn_attention`."""

    name = "cudnn"
    rules = CUDNN
    finite_mask = True

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
        *,
        saves: bool,
    ) -> Value:
        """Expanded operands are written out, since strides of 0 are not known to be taken."""
        a, call = lower.attention, lower.plan.call
        both = call(
            aten._scaled_dot_product_cudnn_attention.default,
            *(unbroadcast(lower.plan, x) for x in operands),
            mask,
            saves,
            a.dropout,
            decided.is_causal,
            False,
            scale=abs(a.scale),
        )
        return call(operator.getitem, both, 0)

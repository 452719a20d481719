"""cuDNN's fused attention as torch calls it: the fastest kernel for prefill and training on Hopper.

Becomes: one call of ``aten._scaled_dot_product_cudnn_attention``, causal by its flag or with the mask as one additive
tensor. Head dims that the kernel does not have are padded with zeros, and the result is sliced.

    (q @ k.mT * scale + mask).softmax(-1) @ v
    ->
    aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, scale=scale)[0]

Exact because: the kernel computes this expression, with sums in another order. Zeros that pad a head dim add nothing
to a product, and the number that stands for -inf is so low that a masked key has weight zero in every row that keeps
a key.

Offers in float16 and bfloat16, forward and backward, with grouped heads, dropout in steps of 1/16, and masks that need
no gradient and leave no row fully masked. cuDNN builds a plan for each new shape, which takes tens of milliseconds, so
if lengths are not known at compile time, other kernels are cheaper for all but the largest shapes.

Versions that are known to give wrong results are refused (``attn_pass.devices.cuda.rules.cudnn`` names the reports).
Masks are passed with a finite number instead of -inf, so that the result does not depend on how cuDNN handles a fully
masked tile of keys. float16 has no such number, so there masks are offered only over a single tile of keys.
"""

from __future__ import annotations

import operator
import os

import torch
from torch import Tensor

from attn_pass.devices.cuda.cost import Shape
from attn_pass.devices.cuda.rules.cudnn import CUDNN
from attn_pass.devices.cuda.torch_kernel import Kernel, KernelPlan
from attn_pass.devices.device import Device, Shares
from attn_pass.graph.edit import Value, aten
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import unbroadcast

BEHIND = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""Set to 1 it puts cuDNN behind the unfused form, which takes everything."""


def is_put_behind() -> bool:
    """Whether the environment of this process says so."""
    return os.environ.get(BEHIND) == "1"


class Cudnn(Kernel):
    """`aten._scaled_dot_product_cudnn_attention`."""

    name = "cudnn"
    settled = aten._scaled_dot_product_cudnn_attention.default
    rules = CUDNN
    finite_mask = True
    torch_check = "can_use_cudnn_attention"
    sweeps = ("prefill", "decoding")
    measured = ("H200",)
    # One row is near the memory roof, two take nine times as long (62208 keys of 9 heads, H200). The plan of a shape is
    # found by its key, on the host, and built for each new one.
    shape = Shape(
        128,
        (32, 64, 96, 128, 192, 256),
        splits_one_row=True,
        packs_one_row=True,
        lookup_us=0.5,
        builds_plans=True,
    )
    shares = {
        "hopper": Shares(0.95, narrow=0.67, wide=0.78),
        "H200": Shares(1.03, one_row=0.99, narrow=0.83, wide=1.0),
        "ampere": Shares(0.59),
        "ada": Shares(0.65),
        "blackwell": Shares(0.70),
    }

    def is_usable(self) -> bool:
        """As ``torch.backends.cuda`` has it."""
        return bool(torch.backends.cuda.cudnn_sdp_enabled())

    def is_tried(self, device: Device) -> bool:
        """It stands behind the unfused form, which takes everything, unless it is moved to the front.

        ``check_prefer_cudnn_attention`` does that above cuDNN 9.15.0, on compute capability 9 and 10.
        """
        behind = device.is_here and is_put_behind()
        return device.cudnn > 91500 and device.capability[0] in (9, 10) and not behind

    def bare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Keeps what a backward reads where the query has one."""
        out: Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, None, q.requires_grad, 0.0, causal, False)[0]
        return out

    def called(
        self,
        lower: Lowering,
        operands: tuple[Value, Value, Value],
        mask: Value | None,
        decided: KernelPlan,
    ) -> Value:
        """Expanded operands are written out, since strides of 0 are not known to be taken."""
        a, call = lower.attention, lower.plan.call
        both = call(
            aten._scaled_dot_product_cudnn_attention.default,
            *(unbroadcast(lower.plan, x) for x in operands),
            mask,
            decided.saves,
            a.dropout,
            decided.is_causal,
            False,
            scale=abs(a.scale),
        )
        return call(operator.getitem, both, 0)


KERNEL = Cudnn()

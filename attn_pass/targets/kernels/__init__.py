"""Which of torch's fused attention kernels takes a call: one row a rule, with its reason and where it is from.

For torch 2.11 to 2.15. Head dims are what they are after padding (`width`), to `KernelRules.multiple`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from attn_pass.hardware.device import Device
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets.kernels import own_check
from attn_pass.targets.kernels.cpu import CPU_FLASH
from attn_pass.targets.kernels.cudnn import CUDNN
from attn_pass.targets.kernels.efficient import EFFICIENT
from attn_pass.targets.kernels.flash import FLASH
from attn_pass.targets.kernels.rules import Call, KernelRules, Rule, padded
from attn_pass.targets.npu_rules import stock_operator

__all__ = [
    "KERNELS",
    "LIBRARY",
    "LIBRARY_3",
    "Call",
    "Rule",
    "as_written",
    "order",
    "padded",
    "picked_by_torch",
    "refusal",
]

KERNELS: Mapping[str, KernelRules] = {
    "cpu flash": CPU_FLASH,
    "flash": FLASH,
    "cudnn": CUDNN,
    "efficient": EFFICIENT,
}
LIBRARY = "flash_attn"  # the package's kernel, which a program calls itself
LIBRARY_3 = "flash_attn_3"  # FlashAttention-3's own package


def is_padded(kernel: str, call: Call) -> bool:
    """Whether the kernel takes the head dims as they are."""
    multiple = KERNELS[kernel].multiple(call.dtype)
    return multiple == 1 or all(isinstance(d, int) and d % multiple == 0 for d in call.head_dims)


def refusal(kernel: str, call: Call, *, by_torch: bool = False) -> str | None:
    """The first reason why a kernel does not take a call; None if it does. ``by_torch``: torch's own rules alone.

    Where the GPU is here torch's own check is asked as well.
    """
    of = KERNELS[kernel]
    for rule in of.rules:
        if (rule.checked_by(call.torch_version) or not by_torch) and not rule.holds(call):
            return rule.why(call)
    if own_check.refuses(kernel, call, 1 if by_torch else of.multiple(call.dtype)):
        return f"torch's own check of the {kernel} kernel refuses the call on this GPU"
    return None


def order(device: Device) -> tuple[str, ...]:
    """The kernels torch's own call tries on this device, first to last.

    cuDNN stands behind the unfused form, which takes everything, unless ``check_prefer_cudnn_attention`` moves it to
    the front: above cuDNN 9.15.0, on compute capability 9 and 10.
    """
    kernels = [k for k in device.kernels if k in KERNELS and k != "cudnn"]
    behind = device.is_here and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    if "cudnn" in device.kernels and device.cudnn > 91500 and device.capability[0] in (9, 10) and not behind:
        kernels.insert(0, "cudnn")
    return tuple(kernels)


def picked_by_torch(call: Call, allowed: tuple[str, ...] | None = None) -> str | None:
    """The kernel torch's own call picks among the backends that are allowed; None where it falls to the unfused form.

    It pads head dims for the flash kernel, to a multiple of 8, and does not make them equal.
    """
    for kernel in order(call.device):
        equal = call.head_dims[0] == call.head_dims[1]
        ready = equal if kernel == "flash" else kernel == "cpu flash" or is_padded(kernel, call)
        may = allowed is None or KERNELS[kernel].backend in allowed
        if may and ready and not refusal(kernel, call, by_torch=True):
            return kernel
    return None


def as_written(attention: Attention, written: AsWritten, device: Device, *, deterministic: bool) -> str | None:
    """The fused kernel that runs if nothing is done; None where none does."""
    if written.from_library:
        return written.library
    if device.type == "npu":
        return stock_operator(attention, written, device)
    if device.type == "cpu":
        return "cpu flash" if written.fused else None
    if not written.plain:
        return None
    mask = "causal" if written.causal else written.mask
    return picked_by_torch(Call(attention, mask, device, written.mask_needs_grad, deterministic))

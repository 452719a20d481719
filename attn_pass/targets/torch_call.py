"""Torch's own call: which of its fused kernels takes it, in torch's order, and why the others do not."""

from __future__ import annotations

from attn_pass.devices.device import Device
from attn_pass.devices.registry import family_of
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets import constraints
from attn_pass.targets.kernel_rules import KernelCall, KernelRules


def rules_of(kernel: str, device: Device) -> KernelRules:
    """The rules of one of the fused kernels torch has on this kind of device."""
    return family_of(device).kernel_rules[kernel]


def is_padded(kernel: str, call: KernelCall) -> bool:
    """Whether the kernel takes the head dims as they are."""
    multiple = rules_of(kernel, call.device).multiple(call.dtype)
    return multiple == 1 or all(isinstance(d, int) and d % multiple == 0 for d in call.head_dims)


def refusal(kernel: str, call: KernelCall, *, by_torch: bool = False) -> str | None:
    """The first reason why a kernel refuses a call; None if it accepts. ``by_torch``: only torch's own rules.

    If the device is present, torch's own check is called as well.
    """
    of = rules_of(kernel, call.device)
    rules = (rule for rule in of.rules if not by_torch or rule.checked_by(call.torch_version))
    if (reason := constraints.refusal(rules, call)) is not None:
        return reason
    if family_of(call.device).refused_by_torch(kernel, call, 1 if by_torch else of.multiple(call.dtype)):
        return f"torch's own check of the {kernel} kernel refuses the call on this GPU"
    return None


def order(device: Device) -> tuple[str, ...]:
    """The kernels torch's own call tries on this device, first to last."""
    return family_of(device).order(device)


def picked_by_torch(call: KernelCall, allowed: tuple[str, ...] | None = None) -> str | None:
    """The kernel torch's own call picks among the backends that are allowed; None where it is unfused."""
    family = family_of(call.device)
    for kernel in family.order(call.device):
        may = allowed is None or family.kernel_rules[kernel].backend in allowed
        if may and family.takes_head_dims(kernel, call) and not refusal(kernel, call, by_torch=True):
            return kernel
    return None


def picked_as_written(attention: Attention, written: AsWritten, device: Device, *, deterministic: bool) -> str | None:
    """The kernel a program's own call ends in; None where it is unfused, or is no plain call."""
    if not (written.plain or written.plain_but_for_mask):
        return None
    rules = family_of(device).kernel_rules.values()
    allowed = None if written.plain else tuple(of.backend for of in rules if of.takes_any_mask_rank)
    mask = "causal" if written.causal else written.mask
    return picked_by_torch(KernelCall(attention, mask, device, written.mask_needs_grad, deterministic), allowed)

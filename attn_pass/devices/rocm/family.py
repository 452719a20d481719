"""The family of AMD's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.device import Device
from attn_pass.devices.rocm import facts, gates
from attn_pass.devices.rocm.rules import EFFICIENT, EFFICIENT_NAME, FLASH, FLASH_NAME
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets.kernel_rules import KernelCall
from attn_pass.targets.torch_call import is_padded, picked_as_written


class Rocm(Family):
    """AMD's GPUs: torch's own call ends in AOTriton's kernels there."""

    name = "rocm"
    names = facts.NAMES
    kernel_rules = {FLASH_NAME: FLASH, EFFICIENT_NAME: EFFICIENT}
    masks_in_compute_dtype = True
    fused_operators = {
        "_scaled_dot_product_flash_attention": FLASH_NAME,
        "_scaled_dot_product_efficient_attention": EFFICIENT_NAME,
    }
    widens_unfused_half = True

    def claims(self, kind: str) -> bool:
        """Where torch is built for ROCm, its "cuda" devices are AMD's."""
        return kind == "cuda" and torch.version.hip is not None

    def here(self, at: torch.device) -> Device:
        """The GPU of this process; one without a kernel where there is none."""
        return facts.here(at)

    def by_name(self, name: str) -> Device | None:
        """A GPU of the table of data sheets."""
        return facts.by_name(name)

    def identity(self) -> Iterator[str]:
        """The architecture of every GPU that is here, its kernels that are switched on, and the gates."""
        if torch.version.hip is not None:
            for device in (facts.here(torch.device("cuda", n)) for n in _numbers()):
                yield repr((device.generation, device.kernels, device.flash))
            yield from gates.identity()

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The GPUs, and which gates of torch's call are closed."""
        if torch.version.hip is None:
            yield "ROCm device", "", "torch is not built for ROCm; decide for one with device='MI300X'"
            return
        yield "ROCm", str(torch.version.hip), f"FlashAttention is {gates.library()}'s ({gates.CK_GATE} asks for CK's)"
        for number in _numbers():
            device = facts.here(torch.device("cuda", number))
            closed = gates.why_closed(device.generation, device.flash) or ", ".join(
                f"{kernel} is switched off" for kernel in self.kernel_rules if kernel not in device.kernels
            )
            note = closed or f"torch's call may use {device.flash}"
            yield f"cuda:{number}", f"{device.name} ({device.generation})", note

    def takes_head_dims(self, kernel: str, call: KernelCall) -> bool:
        """Torch's call pads head dims for the flash kernel alone, and does not make them equal.

        AOTriton's other kernel takes unequal ones, and in float32 multiples of 4, since torch 2.13, with AOTriton 0.12.
        """
        first, second = call.head_dims
        if kernel == FLASH_NAME or call.torch_version < (2, 13):
            return first == second and (kernel == FLASH_NAME or (isinstance(first, int) and first % 8 == 0))
        return is_padded(kernel, call)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch's own call picks."""
        return picked_as_written(attention, written, device, deterministic=deterministic)


def _numbers() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


FAMILY = Rocm()

"""The family of Intel's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.device import Device
from attn_pass.devices.xpu import facts
from attn_pass.devices.xpu.rules import NAME, ONEDNN
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets.torch_call import picked_as_written


class Xpu(Family):
    """Intel's GPUs: torch's own call ends in oneDNN's kernel there, in inference."""

    name = "xpu"
    types = ("xpu",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    kernel_rules = {NAME: ONEDNN}
    masks_in_compute_dtype = True
    fused_operators = {"_scaled_dot_product_fused_attention_overrideable": NAME}

    def here(self, at: torch.device) -> Device:
        """The GPU of this process; one without a kernel where there is none."""
        return facts.here(at)

    def by_name(self, name: str) -> Device | None:
        """A GPU of the table of data sheets."""
        return facts.by_name(name)

    def identity(self) -> Iterator[str]:
        """The name of every GPU that is here, and whether torch's kernel is switched on."""
        for device in (facts.here(torch.device("xpu", n)) for n in range(torch.xpu.device_count())):
            yield repr((device.name, device.kernels))

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The GPUs, and whether the switch of torch's call is closed."""
        for number in range(torch.xpu.device_count()):
            note = facts.why_closed() or "torch's call may use oneDNN's kernel"
            yield f"xpu:{number}", torch.xpu.get_device_name(number), note
        if not torch.xpu.is_available():
            why = "torch is not built for Intel's GPUs" if torch.version.xpu is None else "torch sees none"
            yield "XPU device", "", f"{why}; decide for one with device='Arc B580'"

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch's own call picks."""
        return picked_as_written(attention, written, device, deterministic=deterministic)


FAMILY = Xpu()

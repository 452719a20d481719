"""The family of Apple's GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.device import Device
from attn_pass.devices.mps import facts
from attn_pass.devices.mps.rules import PREFILL, PREFILL_NAME, VECTOR, VECTOR_NAME
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets.torch_call import picked_as_written

GATE = "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION"
"""Set to anything but 0 it switches the kernel for many rows off."""


class Mps(Family):
    """Apple's GPUs: in inference torch's own call ends in a Metal kernel there, for some head dims."""

    name = "mps"
    types = ("mps",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    kernel_rules = {VECTOR_NAME: VECTOR, PREFILL_NAME: PREFILL}
    masks_in_compute_dtype = True

    def here(self, at: torch.device) -> Device:
        """The GPU of this process; one without a kernel where there is none."""
        return facts.here(at)

    def by_name(self, name: str) -> Device | None:
        """A GPU of the table of data sheets."""
        return facts.by_name(name)

    def identity(self) -> Iterator[str]:
        """The GPU that is here, and the gate."""
        if torch.backends.mps.is_available():
            yield f"{facts.chip()} {GATE}={os.environ.get(GATE, '')}"

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The GPU, and the gate of the kernel for many rows."""
        if not torch.backends.mps.is_available():
            why = "torch sees none" if torch.backends.mps.is_built() else "torch is not built for Apple's GPUs"
            yield "MPS device", "", f"{why}; decide for one with device='M4'"
            return
        closed = "" if self._prefills() else f"; its kernel for many rows is switched off by {GATE}"
        yield "mps", facts.chip(), f"torch's call may use Metal kernels{closed}"

    def order(self, device: Device) -> tuple[str, ...]:
        """The kernel for few rows, then the one for many where it is not switched off."""
        return tuple(k for k in super().order(device) if k != PREFILL_NAME or self._prefills())

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch's own call picks."""
        return picked_as_written(attention, written, device, deterministic=deterministic)

    @staticmethod
    def _prefills() -> bool:
        return os.environ.get(GATE, "0") == "0"


FAMILY = Mps()

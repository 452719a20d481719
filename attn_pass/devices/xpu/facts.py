"""Intel's GPUs in numbers: those of data sheets, by name, and the one that is present. None of it was measured."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.device import Device
from attn_pass.devices.xpu.rules import NAME

# 80 to 90 % of the data sheets: Xe cores, matrix rate in half precision, vector rate in float32, memory, cache.
SHEETS: tuple[Sheet, ...] = (
    Sheet("xpu", "Arc B580", 20, 90e3, 12e3, 600, 400, 18 << 20),
    Sheet("xpu", "Arc A770", 32, 110e3, 15e3, 700, 480, 16 << 20),
    Sheet("xpu", "Max 1550", 128, 700e3, 45e3, 2500, 2600, 408 << 20),
)


def by_name(name: str) -> Device | None:
    """A GPU of the table, which need not be here."""
    sheet = row_of(name, SHEETS)
    return None if sheet is None else _of(sheet)


def here(at: torch.device | None = None) -> Device:
    """The GPU of this process by its name, else one like the first row; without a kernel where torch sees none."""
    if not torch.xpu.is_available():
        return replace(_of(SHEETS[0]), kernels=())
    name = torch.xpu.get_device_name(at)
    kernels = () if why_closed() else (NAME,)
    return replace(_of(_named(name) or SHEETS[0]), name=name, kernels=kernels, is_here=True)


def _of(sheet: Sheet) -> Device:
    return device_of(sheet, (NAME,))


def _named(name: str) -> Sheet | None:
    """The row of a GPU that calls itself so: "Intel(R) Arc(TM) B580 Graphics", "Intel(R) Data Center GPU Max 1550"."""
    words = re.sub(r"\((R|TM)\)", "", name).split()
    return next((s for s in SHEETS if all(word in words for word in s.name.split())), None)


def why_closed() -> str:
    """Why torch's call may not reach the kernel in this process; "" where it may.

    There is a switch for it from Python since torch has that backend.
    """
    if torch._C._get_overrideable_sdp_enabled():
        return ""
    return (
        "oneDNN's kernel is switched off in this process: by sdpa_kernel without SDPBackend.OVERRIDEABLE, or by "
        "torch._C._set_sdp_use_overrideable(False)"
    )

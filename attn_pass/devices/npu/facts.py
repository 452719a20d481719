"""Ascend NPUs in numbers: those of data sheets, by name, and the one that is present. None of it was measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.device import Device
from attn_pass.devices.npu.generations import UNKNOWN, Generation, generation, generation_of

SHEETS: tuple[Sheet, ...] = (
    Sheet("npu", "Ascend 910B", 24, 280e3, 70e3, 1500, 1400, 192 << 20, generation="A2"),
    Sheet("npu", "Ascend 910C", 48, 600e3, 140e3, 3000, 2800, 192 << 20, generation="A3"),
    # Announced for Ascend 950DT: 500 TFLOP/s in half precision, 4 TB/s. 310P: Atlas 300I Pro, 70 and 204 GB/s.
    Sheet("npu", "Ascend 950", 32, 400e3, 50e3, 2000, 3400, 128 << 20, generation="950"),
    Sheet("npu", "Ascend 310P", 8, 56e3, 4e3, 200, 170, 16 << 20, generation="310P"),
)


def by_name(name: str) -> Device | None:
    """An NPU by its name, with or without the space, or by what its runtime calls it ("Ascend910B3")."""
    if (sheet := row_of(name, SHEETS)) is not None:
        # "Ascend910B" is also what the runtime calls a first generation's variant: meant is the row.
        soc = generation_of(name) if name.lower() != sheet.name.lower() else None
        return replace(_device(sheet), name=sheet.name if soc is None else name)
    known = generation_of(name) if name.lower().startswith("ascend") else None
    return None if known is None else replace(_device(_of_generation(known)), name=name)


def _device(sheet: Sheet) -> Device:
    return device_of(sheet, generation(sheet.generation).operators)


def _of_generation(known: Generation) -> Sheet:
    row = next((s for s in SHEETS if s.generation == known.name), None)
    return row or replace(SHEETS[-1], name=f"Ascend {known.name}", generation=known.name)


def here(at: torch.device | None = None) -> Device:
    """The NPU of this process, by the name its runtime has for it.

    Where no runtime says it, the rates and rules are those of `UNKNOWN`, and ``generation`` is empty. A name that is in
    no row has the same rates, and no operators.
    """
    soc = _soc_name(at)
    known = None if soc is None else generation_of(soc)
    device = _device(_of_generation(known or generation(UNKNOWN)))
    if soc is not None and known is None:
        device = replace(device, kernels=())
    return replace(device, name=soc or "npu", generation="" if known is None else known.name, is_here=True)


def _soc_name(at: torch.device | None) -> str | None:
    """What torch_npu says the device is; it puts itself into torch where it is imported."""
    runtime = getattr(torch, "npu", None)
    if not hasattr(runtime, "get_device_name"):
        return None
    try:
        return str(runtime.get_device_name(at))  # type: ignore[union-attr]
    except (RuntimeError, AssertionError, ValueError):
        return None

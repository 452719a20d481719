"""Apple's GPUs in numbers: those of data sheets, by name, and the one that is present. None of it was measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.device import Device
from attn_pass.devices.mps.rules import PREFILL_NAME, VECTOR_NAME

# 80 to 90 % of the data sheets: GPU cores, rates in half precision and in float32 (which are nearly the same), a guess
# at exponentials, memory, the last cache.
SHEETS: tuple[Sheet, ...] = (
    Sheet("mps", "M4", 10, 4.0e3, 3.6e3, 120, 103, 8 << 20),
    Sheet("mps", "M4 Pro", 20, 8.0e3, 7.2e3, 240, 235, 24 << 20),
    Sheet("mps", "M4 Max", 40, 16.0e3, 14.4e3, 480, 470, 48 << 20),
)
_KERNELS = (VECTOR_NAME, PREFILL_NAME)


def by_name(name: str) -> Device | None:
    """A GPU of the table, which need not be here."""
    sheet = row_of(name, SHEETS)
    return None if sheet is None else device_of(sheet, _KERNELS)


def here(at: torch.device | None = None) -> Device:
    """The GPU of this process by its name, else one like the first row; without a kernel where torch sees none."""
    if not torch.backends.mps.is_available():
        return device_of(SHEETS[0], ())
    name = chip()
    return replace(device_of(_named(name), _KERNELS), name=name, is_here=True)


def chip() -> str:
    """What torch says the GPU is: "Apple M4 Pro"."""
    named = getattr(torch.backends.mps, "get_name", None)
    return "Apple GPU" if named is None else str(named())


def _named(name: str) -> Sheet:
    words = name.split()
    rows = [s for s in SHEETS if all(word in words for word in s.name.split())]
    return max(rows, key=lambda s: len(s.name), default=SHEETS[0])

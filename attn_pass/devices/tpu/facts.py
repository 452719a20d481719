"""TPUs in numbers: those of data sheets, by name, and the one that is present. None of it was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.device import Device

KERNELS = ("pallas_flash", "pallas_splash")
SHEETS: tuple[Sheet, ...] = (
    Sheet("xla", "TPU v4", 2, 240e3, 30e3, 1500, 1100, 128 << 20),
    Sheet("xla", "TPU v5e", 1, 175e3, 22e3, 1000, 740, 128 << 20),
    Sheet("xla", "TPU v5p", 2, 410e3, 50e3, 2000, 2500, 128 << 20),
    Sheet("xla", "TPU v6e", 1, 820e3, 100e3, 2500, 1480, 128 << 20),
    Sheet("xla", "TPU7x", 1, 1000e3, 125e3, 2500, 3300, 64 << 20),  # one of a chip's two halves, as JAX counts devices
)
_CLOUD_NAMES = {"v5litepod": "v5e", "v7x": "tpu7x"}


def by_name(name: str) -> Device | None:
    """A TPU of the table, which need not be here, by its name ("TPU v5e") or its short one ("v5e")."""
    sheet = row_of(name, SHEETS) or row_of(f"tpu {name}", SHEETS)
    return None if sheet is None else device_of(sheet, KERNELS)


def here(generation: str | None) -> Device | None:
    """A TPU of this process, by what Google Cloud calls its generation ("v5litepod"); None if it is not known."""
    device = by_name(_CLOUD_NAMES.get(generation or "", generation or ""))
    return None if device is None else replace(device, is_here=True)


@lru_cache(maxsize=1)
def tpu_generation() -> str | None:
    """The generation of the TPU that torch_xla runs on, "v5e" or "v5litepod" and the like; None if it is not a TPU."""
    try:
        from torch_xla import runtime
        from torch_xla._internal import tpu

        return str(tpu.get_tpu_type()).lower() if runtime.device_type() == "TPU" else None
    except Exception:  # no such package, or no answer from the machine's metadata
        return None

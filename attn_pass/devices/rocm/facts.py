"""AMD's GPUs in numbers: those of data sheets, by name, and the one that is present. None of it was measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.device import Device
from attn_pass.devices.rocm import gates
from attn_pass.devices.rocm.rules import EFFICIENT_NAME, FLASH_NAME

# About 80 % of the data sheets: compute units, matrix rate in half precision and in float32, exponentials (a guess),
# memory, the last cache. An MI250X is two GPUs to torch: the row is about one of them.
SHEETS: tuple[Sheet, ...] = (
    Sheet("cuda", "MI300X", 304, 1000e3, 130e3, 3500, 4300, 256 << 20, generation="gfx942"),
    Sheet("cuda", "MI325X", 304, 1000e3, 130e3, 3500, 4900, 256 << 20, generation="gfx942"),
    Sheet("cuda", "MI355X", 256, 1900e3, 125e3, 4000, 6500, 256 << 20, generation="gfx950"),
    Sheet("cuda", "MI250X", 110, 150e3, 38e3, 1300, 1300, 8 << 20, generation="gfx90a"),
    Sheet("cuda", "RX 7900 XTX", 96, 98e3, 48e3, 1200, 780, 96 << 20, generation="gfx1100"),
    Sheet("cuda", "RX 9070 XT", 64, 150e3, 39e3, 1000, 510, 64 << 20, generation="gfx1201"),
)
NAMES = tuple(sheet.name for sheet in SHEETS)
_KERNELS = (FLASH_NAME, EFFICIENT_NAME)


def by_name(name: str) -> Device | None:
    """A GPU of the table, which need not be here."""
    sheet = row_of(name, SHEETS)
    return None if sheet is None else _of(sheet)


def here(at: torch.device | None = None) -> Device:
    """The GPU of this process: its row by its name, else by its architecture; sized by its compute units."""
    if not torch.cuda.is_available():
        return replace(_of(SHEETS[0]), kernels=())
    properties = torch.cuda.get_device_properties(at)
    architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    row = _row(properties.name, architecture)
    share = properties.multi_processor_count / row.cores
    rates = ("half_gflops", "single_gflops", "exp_gops", "memory_gbytes", "cache_gbytes")
    sized = {name: getattr(row, name) * share for name in rates}
    sheet = replace(row, cores=properties.multi_processor_count, generation=architecture, **sized)
    return replace(_of(sheet), name=properties.name, kernels=_switched_on(), is_here=True)


def _row(name: str, architecture: str) -> Sheet:
    words = name.split()
    named = (s for s in SHEETS if all(word in words for word in s.name.split()))
    alike = (s for s in SHEETS if s.generation[:5] == architecture[:5])
    return next(named, None) or next(alike, SHEETS[0])


def _of(sheet: Sheet) -> Device:
    return replace(device_of(sheet, _KERNELS), family="rocm", flash=gates.library())


def _switched_on() -> tuple[str, ...]:
    """The kernels that ``torch.backends.cuda`` has not switched off."""
    names = ("flash_sdp_enabled", "mem_efficient_sdp_enabled")
    return tuple(kernel for kernel, name in zip(_KERNELS, names) if getattr(torch.backends.cuda, name)())

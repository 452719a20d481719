"""Accelerators by name, so that a decision can be made, and tested, for one that is not here. Data sheets, in numbers.

Rates are what products and copies are known to reach where that is known (H200), and 80 to 90 % of the data sheet's
elsewhere. Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from attn_pass.compat import active_flash
from attn_pass.hardware import npu
from attn_pass.hardware.device import Device


@dataclass(frozen=True)
class Sheet:
    """One row of the catalogue: rates in units of 1e9 a second."""

    type: str
    name: str
    cores: int  # streaming multiprocessors, AI cores, tensor cores of a chip
    half_gflops: float
    single_gflops: float
    exp_gops: float
    memory_gbytes: float
    cache_bytes: int
    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)  # of ``half_gflops``, what each kernel reaches
    cache_gbytes: float = 0.0  # where it is known; twice the memory's rate otherwise
    family: str = ""  # of an Ascend NPU


# FlashAttention-3's figures for H100, cuDNN's own for H200; on A100 cuDNN takes 1.2 times as long as flash, on Ada
# 1.07.
# What CUTLASS's kernel reaches is a guess from the instructions it was compiled for, and so is all of Blackwell.
_HOPPER = {"cudnn": 0.85, "flash": 0.47, "efficient": 0.30}
_AMPERE = {"cudnn": 0.59, "flash": 0.72, "efficient": 0.45}
_ADA = {"cudnn": 0.65, "flash": 0.70, "efficient": 0.50}
_BLACKWELL = {"cudnn": 0.70, "flash": 0.22, "efficient": 0.17}
_NEWER_FLASH = {"FA3": 0.80, "FA4": 0.80}  # 640 TFLOP/s on H100 (FA3), 1613 on B200 (FA4), less where it is causal
_CUDNN = 91900  # torch 2.11's and newer's wheels
_SHEETS: tuple[Sheet, ...] = (
    Sheet("cuda", "H200", 132, 790e3, 60e3, 3900, 4300, 60 << 20, (9, 0), _CUDNN, _HOPPER, 5500),
    Sheet("cuda", "H100", 132, 750e3, 60e3, 3700, 3000, 50 << 20, (9, 0), _CUDNN, _HOPPER, 5500),
    Sheet("cuda", "A100", 108, 270e3, 18e3, 2400, 1700, 40 << 20, (8, 0), _CUDNN, _AMPERE),
    Sheet("cuda", "L4", 58, 100e3, 25e3, 1900, 270, 48 << 20, (8, 9), _CUDNN, _ADA),
    Sheet("cuda", "B200", 148, 1600e3, 70e3, 4500, 7000, 126 << 20, (10, 0), _CUDNN, _BLACKWELL),
    Sheet("npu", "Ascend 910B", 24, 280e3, 70e3, 1500, 1400, 192 << 20, family="A2"),
    Sheet("npu", "Ascend 910C", 48, 600e3, 140e3, 3000, 2800, 192 << 20, family="A3"),
    # Announced for Ascend 950DT: 500 TFLOP/s in half precision, 4 TB/s. 310P: Atlas 300I Pro, 70 and 204 GB/s.
    Sheet("npu", "Ascend 950", 32, 400e3, 50e3, 2000, 3400, 128 << 20, family="950"),
    Sheet("npu", "Ascend 310P", 8, 56e3, 4e3, 200, 170, 16 << 20, family="310P"),
    Sheet("xla", "TPU v4", 2, 240e3, 30e3, 1500, 1100, 128 << 20),
    Sheet("xla", "TPU v5e", 1, 175e3, 22e3, 1000, 740, 128 << 20),
    Sheet("xla", "TPU v5p", 2, 410e3, 50e3, 2000, 2500, 128 << 20),
    Sheet("xla", "TPU v6e", 1, 820e3, 100e3, 2500, 1480, 128 << 20),
    Sheet("xla", "TPU7x", 1, 1000e3, 125e3, 2500, 3300, 64 << 20),  # one of a chip's two halves, as JAX counts devices
)
DEFAULT_CUDA = "h200"
_BY_NAME = {sheet.name.lower(): sheet for sheet in _SHEETS}
_WITHOUT_SPACES = {sheet.name.lower().replace(" ", ""): sheet for sheet in _SHEETS}
NAMES = tuple(_BY_NAME)
_SHORT = "tpu "  # what the names of TPUs may be given without: "v5e"
_KERNELS = {"cuda": ("cudnn", "flash", "efficient", "decode"), "xla": ("pallas_flash", "pallas_splash")}
_HALF = (torch.float16, torch.bfloat16)


def is_known(name: str) -> bool:
    """Whether a device has a row: by its name, a TPU's short one ("v5e"), or what an NPU's runtime calls it."""
    return _sheet_of(name) is not None


def by_name(name: str) -> Device:
    """A device of the catalogue, which need not be here: "H200", "v5e", "Ascend 910B", "Ascend910B", "Ascend910B3".

    Raises:
        KeyError: it has no row.
    """
    sheet = _sheet_of(name)
    if sheet is None:
        raise KeyError(name)
    soc = npu.family_of(name) if sheet.type == "npu" and name.lower() not in _BY_NAME else None
    return replace(_device(sheet), name=sheet.name if soc is None else name, is_here=False)


def _sheet_of(name: str) -> Sheet | None:
    for spelled in (name.lower(), _SHORT + name.lower()):
        if spelled in _BY_NAME:
            return _BY_NAME[spelled]
    found = _WITHOUT_SPACES.get(name.lower())
    return found if found is not None or not name.lower().startswith("ascend") else _of_family(npu.family_of(name))


def _of_family(known: npu.Family | None) -> Sheet | None:
    if known is None:
        return None
    row = next((s for s in _SHEETS if s.family == known.name), None)
    return row or replace(_BY_NAME["ascend 310p"], name=f"Ascend {known.name}", family=known.name)


def npu_here(at: torch.device | None = None) -> Device:
    """The NPU of this process, by the name its runtime has for it.

    Where that is not known, or no runtime is loaded, the rates and rules are those of `npu.UNKNOWN`, and ``family`` is
    empty.
    """
    soc = _soc_name(at)
    known = None if soc is None else npu.family_of(soc)
    sheet = _of_family(known or npu.family(npu.UNKNOWN))
    assert sheet is not None
    return replace(_device(sheet), name=soc or "npu", family="" if known is None else known.name)


def _soc_name(at: torch.device | None) -> str | None:
    """What torch_npu says the device is; it puts itself into torch where it is imported."""
    runtime = getattr(torch, "npu", None)
    if not hasattr(runtime, "get_device_name"):
        return None
    try:
        return str(runtime.get_device_name(at))  # type: ignore[union-attr]
    except (RuntimeError, AssertionError, ValueError):
        return None


def tpu_here(generation: str | None) -> Device | None:
    """A TPU of this process, by what Google Cloud calls its generation ("v5litepod"); None if it is not known."""
    sheet = _sheet_of(_CLOUD_NAMES.get(generation or "", generation or ""))
    return None if sheet is None else _device(sheet)


_CLOUD_NAMES = {"v5litepod": "v5e", "v7x": "tpu7x"}


def cuda_here(at: torch.device | None = None) -> Device:
    """A GPU of this process, or the current one.

    By its name where the catalogue has it, else scaled by its size from one of its age. Without the kernels that this
    build of torch lacks or that ``torch.backends.cuda`` has switched off. AMD's GPUs, which torch calls cuda as well,
    have other kernels, and none here.
    """
    properties = torch.cuda.get_device_properties(at)
    capability = (properties.major, properties.minor)
    known = next((s for s in _SHEETS if s.type == "cuda" and s.name in properties.name), None)
    sheet = known or _like(capability, properties.multi_processor_count)
    cudnn = torch.backends.cudnn.version() or 0
    kernels = tuple(k for k in _KERNELS["cuda"] if _usable(k))
    device = replace(_device(sheet), name=properties.name, capability=capability, cudnn=cudnn, kernels=kernels)
    return with_flash(device, active_flash())


def with_flash(device: Device, version: str) -> Device:
    """The device with another FlashAttention behind torch's operators: "FA2", "FA3" or "FA4"."""
    share = _NEWER_FLASH.get(version, device.shares.get("flash", 0.0))
    return replace(device, flash=version, shares={**device.shares, "flash": share})


def _usable(kernel: str) -> bool:
    of = torch.backends.cuda
    if torch.version.hip is not None:
        return False
    switches: Mapping[str, Callable[[], bool]] = {
        "cudnn": of.cudnn_sdp_enabled,
        "flash": lambda: of.is_flash_attention_available() and of.flash_sdp_enabled(),
        "efficient": of.mem_efficient_sdp_enabled,
    }
    return kernel not in switches or switches[kernel]()


def _like(capability: tuple[int, int], cores: int) -> Sheet:
    """A row for a GPU that the catalogue lacks: the nearest older one, scaled by the multiprocessors."""
    rows = sorted((s for s in _SHEETS if s.type == "cuda"), key=lambda s: s.capability)
    row = next((s for s in reversed(rows) if s.capability <= capability), rows[0])
    share = cores / row.cores
    rates = ("half_gflops", "single_gflops", "exp_gops", "memory_gbytes", "cache_gbytes")
    return replace(row, cores=cores, **{name: getattr(row, name) * share for name in rates})


def _device(sheet: Sheet) -> Device:
    single = {torch.float32: sheet.single_gflops, torch.float64: sheet.single_gflops / 2}
    half = dict.fromkeys(_HALF, sheet.half_gflops)
    return Device(
        type=sheet.type,
        name=sheet.name,
        cores=sheet.cores,
        matmul_gflops=single | half,
        fused_gflops=single | {k: 0.6 * v for k, v in half.items()},  # float32 as three products in TF32: a guess
        vector_gflops={torch.float32: sheet.single_gflops},
        exp_gops=sheet.exp_gops,
        memory_gbytes=sheet.memory_gbytes,
        cache_gbytes=sheet.cache_gbytes or 2 * sheet.memory_gbytes,
        cache_bytes=sheet.cache_bytes,
        op_us=3.0,
        kernel_us=2.0,
        fused_op_us=6.0,
        kernels=npu.family(sheet.family).operators if sheet.family else _KERNELS.get(sheet.type, ()),
        shares=sheet.shares,
        capability=sheet.capability,
        cudnn=sheet.cudnn,
        family=sheet.family,
    )

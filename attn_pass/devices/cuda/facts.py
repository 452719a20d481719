"""NVIDIA's GPUs in numbers: those of data sheets, by name, and the one that is present.

This project has measured an H200 and none of the others; `attn-pass calibrate` measures the GPU of a machine.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from attn_pass.compat import active_flash
from attn_pass.devices.catalog import Sheet, device_of, row_of
from attn_pass.devices.cuda.kernel import Generation
from attn_pass.devices.cuda.kernels import KERNELS
from attn_pass.devices.device import Device, Shares

DEFAULT = "H200"


def _shares(generation: Generation, flex: Shares, name: Generation | None = None) -> dict[str, Shares]:
    """Of a GPU's matrix rate with many rows, of a copy's rate with few: each kernel's own, and FlexAttention's.

    Of the GPU of this ``name`` where a kernel has them, else of its generation. FlexAttention shares keys out as
    FlashAttention does; its tiles for head dims over 128 are taken to be small everywhere.
    """
    there = [kernel for kernel in KERNELS if generation in kernel.shares]
    own = {k.name: k.shares[name if name is not None and name in k.shares else generation] for k in there}
    beside = (k.flex_wide * own[k.name].matrix(256) for k in there if k.flex_wide is not None)
    wide = min((flex.prefill, *beside))
    return own | {"flex": replace(flex, one_row=0.75, few_rows=0.75, wide=wide)}


# Hopper's are set so that the cost model's times are within a tenth of FlashAttention-3's paper (H100, 1k to 8k tokens,
# head dims 64, 128 and 256, which has FlashAttention-2, a Triton kernel like FlexAttention's, and cuDNN). On A100
# cuDNN takes 1.2 times as long as flash, on Ada 1.07; FlexAttention reaches 0.85 of FlashAttention-2 on A100 (PyTorch's
# blog). What CUTLASS's kernel reaches is a guess from the instructions it was compiled for, and so is all of Blackwell.
# H200's are those with which the model is nearest to 42 shapes of prefill and 66 of decoding that were measured with
# torch 2.11 and cuDNN 9.19 (docs/results/gpu-nvidia-h200.md): 7 % off on average, a fifth or less in nine of ten.
_FLEX_ON_HOPPER = Shares(0.59, narrow=0.70)
_HOPPER = _shares("hopper", _FLEX_ON_HOPPER)
_H200 = _shares("hopper", _FLEX_ON_HOPPER, "H200")
_AMPERE = _shares("ampere", Shares(0.612))
_ADA = _shares("ada", Shares(0.595))
_BLACKWELL = _shares("blackwell", Shares(0.264))
_CUDNN = 91900  # torch 2.11's and newer's wheels
SHEETS: tuple[Sheet, ...] = (
    Sheet(
        "cuda",
        "H200",
        132,
        784e3,
        51e3,
        3900,
        4250,
        60 << 20,
        (9, 0),
        _CUDNN,
        _H200,
        4970,
        measured=tuple(kernel.name for kernel in KERNELS if "H200" in kernel.measured),
        results="docs/results/gpu-nvidia-h200.md",
    ),
    Sheet("cuda", "H100", 132, 750e3, 60e3, 3700, 3000, 50 << 20, (9, 0), _CUDNN, _HOPPER, 5500),
    Sheet("cuda", "A100", 108, 270e3, 18e3, 2400, 1700, 40 << 20, (8, 0), _CUDNN, _AMPERE),
    Sheet("cuda", "L4", 58, 100e3, 25e3, 1900, 270, 48 << 20, (8, 9), _CUDNN, _ADA),
    Sheet("cuda", "B200", 148, 1600e3, 70e3, 4500, 7000, 126 << 20, (10, 0), _CUDNN, _BLACKWELL),
)


def by_name(name: str) -> Device | None:
    """A GPU of the table, which need not be here."""
    sheet = row_of(name, SHEETS)
    return None if sheet is None else _of(sheet)


def default() -> Device:
    """The GPU that is decided for where one is asked for and none is here; it has no kernels."""
    return replace(_of(_row(DEFAULT)), kernels=())


def _of(sheet: Sheet) -> Device:
    return device_of(sheet, _kernels(sheet))


def _row(name: str) -> Sheet:
    return next(sheet for sheet in SHEETS if sheet.name == name)


def cuda_here(at: torch.device | None = None) -> Device:
    """A GPU of this process, or the current one.

    By its name where the catalogue has it, else by one of its kind (`_like`); its size is what its properties say.
    Without the kernels that this build of torch lacks or that ``torch.backends.cuda`` has switched off.
    """
    properties = torch.cuda.get_device_properties(at)
    capability = (properties.major, properties.minor)
    sheet = _sized(_named(properties.name) or _like(capability), properties)
    cudnn = torch.backends.cudnn.version() or 0
    kernels = _kernels(sheet, of_this_process=True)
    row = device_of(sheet, kernels)
    device = replace(row, name=properties.name, capability=capability, cudnn=cudnn, is_here=True)
    return with_flash(device, active_flash())


def with_flash(device: Device, version: str) -> Device:
    """The device with another FlashAttention behind torch's operators: "FA2", "FA3" or "FA4"."""
    own = {k.name: k.shares_with(version, device.shares[k.name]) for k in KERNELS if k.name in device.shares}
    measured = tuple(name for name in device.measured_kernels if own.get(name) == device.shares[name])
    return replace(device, flash=version, shares={**device.shares, **own}, measured_kernels=measured)


def _kernels(sheet: Sheet, *, of_this_process: bool = False) -> tuple[str, ...]:
    """The kernels that a GPU has a share for; of this process those that it can use."""
    there = (k for k in KERNELS if k.is_listed and k.name in sheet.shares)
    return tuple(k.name for k in there if not of_this_process or k.is_usable())


def _named(name: str) -> Sheet | None:
    """The row of a GPU that calls itself so: "NVIDIA L40S" is no L4, and "NVIDIA RTX A1000" no A100."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((s for s in SHEETS if s.name in words), None)


# Of GPUs that the catalogue lacks, by the first number of their compute capability. 12 has no tensor memory, unlike 10:
# its kernels are Ada's, and cuDNN is slower than flash there (RTX PRO 6000: 0.88 of it, transformers PR #48163).
_KINDS = {9: "H100", 10: "B200", 11: "B200", 12: "L4"}


def _like(capability: tuple[int, int]) -> Sheet:
    """The row a GPU that the catalogue lacks is nearest to; its arithmetic at half the rate a multiprocessor.

    Cards for graphics and workstations have less of it than those for servers, by up to as much.
    """
    name = "A100" if capability == (8, 0) else _KINDS.get(capability[0], "L4")
    row = _row(name)
    return replace(row, half_gflops=row.half_gflops / 2, single_gflops=row.single_gflops / 2)


def _sized(row: Sheet, properties: torch.cuda._CudaDeviceProperties) -> Sheet:
    """The row with the multiprocessors, the memory's rate and the cache of the GPU that is here.

    A part of a GPU (MIG) reports the memory of the whole GPU: only its share of the multiprocessors' counts.
    """
    cores = properties.multi_processor_count
    share = cores / row.cores
    rates = ("half_gflops", "single_gflops", "exp_gops", "memory_gbytes", "cache_gbytes")
    measured = row.measured if cores == row.cores else ()  # a part of a GPU is another one
    sized = replace(row, cores=cores, measured=measured, **{name: getattr(row, name) * share for name in rates})
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    if clock and width:  # kHz, two transfers each, and bits
        memory = _COPIED * 2 * clock * width / 8 / 1e6
        part = "MIG" in properties.name.split()
        sized = replace(sized, memory_gbytes=min(memory, sized.memory_gbytes) if part else memory)
    cache = getattr(properties, "L2_cache_size", 0)
    return replace(sized, cache_bytes=cache) if cache else sized


_COPIED = 0.9  # of the memory's own rate, by a copy (H200: 4.3 of 4.8 TB/s)

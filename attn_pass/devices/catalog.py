"""Accelerators in numbers, by data sheets; they need not be present.

The rates of an accelerator are those that products and copies are known to reach, where this is known (H200), and 80 to
90 % of the data sheet's otherwise. Of a few this project has measured some kernels, and the row says where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

import torch

from attn_pass.devices.device import Device, Shares

_HALF = (torch.float16, torch.bfloat16)


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
    shares: Mapping[str, Shares] = field(default_factory=dict)  # what each kernel reaches of these rates
    cache_gbytes: float = 0.0  # where it is known; twice the memory's rate otherwise
    generation: str = ""  # of an Ascend NPU; the architecture of AMD's GPUs
    measured: tuple[str, ...] = ()  # the kernels whose shares this project has measured on it
    results: str = ""  # and where they are


def row_of(name: str, sheets: Sequence[Sheet]) -> Sheet | None:
    """The row of this name, in any case, with or without its spaces ("Ascend 910B", "ascend910b")."""
    normalized = name.lower().replace(" ", "")
    return next((s for s in sheets if s.name.lower().replace(" ", "") == normalized), None)


_MAKERS = {"nvidia", "amd", "intel", "apple", "huawei", "google", "aws", "instinct", "tesla", "data", "center", "gpu"}


def without_maker(name: str) -> str:
    """The name without the words of its maker in front: "Apple M4", "AMD Instinct MI300X", "Intel(R) Arc(TM) B580"."""
    words = re.sub(r"\((R|TM)\)", "", name, flags=re.IGNORECASE).split()
    return " ".join(dropwhile(lambda word: word.lower() in _MAKERS, words))


def device_of(sheet: Sheet, kernels: tuple[str, ...]) -> Device:
    """The device a row is about, with these fused kernels; it need not be here."""
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
        kernels=kernels,
        shares=sheet.shares,
        capability=sheet.capability,
        cudnn=sheet.cudnn,
        generation=sheet.generation,
        is_here=False,
        measured_kernels=sheet.measured,
        built_in_rates=_rates_from(sheet),
    )


def _rates_from(sheet: Sheet) -> str:
    """Where a row's rates come from, in words."""
    if not sheet.measured:
        return f"data sheets and published figures ({sheet.name}), not measured"
    kernels = ", ".join(sheet.measured)
    return f"measured on an {sheet.name} ({kernels}; {sheet.results}), data sheets and published figures for the rest"

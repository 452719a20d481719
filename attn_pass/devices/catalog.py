"""Devices in numbers: a measured processor, and data sheets of accelerators, which need not be present.

The rates of an accelerator are those that products and copies are known to reach, where this is known (H200), and 80 to
90 % of the data sheet's otherwise; this project has measured none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from attn_pass.devices.device import CoreTimes, Device, Shares

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
    generation: str = ""  # of an Ascend NPU


def row_of(name: str, sheets: Sequence[Sheet]) -> Sheet | None:
    """The row of this name, in any case, with or without its spaces ("Ascend 910B", "ascend910b")."""
    wanted = name.lower().replace(" ", "")
    return next((s for s in sheets if s.name.lower().replace(" ", "") == wanted), None)


def device_of(sheet: Sheet, kernels: tuple[str, ...]) -> Device:
    """The device a row is about, with these fused kernels."""
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
    )


# A core's rates, measured on an AVX-512 x86 machine with two cores (docs/results/cpu-constants.md); a machine with
# more cores is taken to scale with them in arithmetic and up to eight cores' worth in memory.
_CORE_MATMUL = {torch.float32: 88.0, torch.float64: 44.0, torch.bfloat16: 200.0, torch.float16: 6.0}
_CORE_FUSED = {torch.float32: 85.0, torch.float64: 42.0, torch.bfloat16: 80.0, torch.float16: 45.0}
_CORE_VECTOR = {torch.float32: 36.0, torch.bfloat16: 25.0, torch.float16: 25.0}
_CORE_TIMES = CoreTimes(
    task_us=(0.7, 2.0),  # half precision is packed
    score_ns=(1.2, 0.3),
    half_mask_ns=2.5,
    few_rows_rate={torch.float16: 0.35},
    few_rows_traffic=1.4,
)


@lru_cache(maxsize=8)
def processor(cores: int) -> Device:
    """A CPU with that many cores."""
    return Device(
        type="cpu",
        name=f"cpu, {cores} cores",
        cores=cores,
        matmul_gflops={k: v * cores for k, v in _CORE_MATMUL.items()},
        fused_gflops={k: v * cores for k, v in _CORE_FUSED.items()},
        vector_gflops={k: v * cores for k, v in _CORE_VECTOR.items()},
        exp_gops=1.7 * cores,
        memory_gbytes=11.0 * min(cores, 8),
        cache_gbytes=25.0 * cores,
        cache_bytes=12 << 20,
        op_us=6.0,
        kernel_us=3.0,
        fused_op_us=15.0,
        kernels=("cpu flash",),
        core_times=_CORE_TIMES,
        instruction_set="avx512",
        is_measured=True,
    )


def unknown(kind: str) -> Device:
    """A device that nothing is known of: one core's rates, and no kernel."""
    plain = replace(processor(1), kernels=(), core_times=CoreTimes(), instruction_set="", is_measured=False)
    return replace(plain, type=kind, name=kind)

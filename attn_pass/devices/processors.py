"""Processors in numbers: what a core of each instruction set reaches, measured by this project but for NEON.

They are of the family of CPUs, and of the runtimes that compute on CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from attn_pass.devices.device import CoreTimes, Device
from attn_pass.report.units import counted


@dataclass(frozen=True)
class Core:
    """What a CPU's core reaches: rates in units of 1e9 a second, times of a call in microseconds."""

    matmul_gflops: Mapping[torch.dtype, float]
    fused_gflops: Mapping[torch.dtype, float]
    vector_gflops: Mapping[torch.dtype, float]
    exp_gops: float
    memory_gbytes: float
    cache_gbytes: float
    op_us: float
    kernel_us: float
    fused_op_us: float
    template_us: float
    times: CoreTimes


# All measured with two cores (docs/results/cpu-constants.md); a machine with more cores is taken to scale with them in
# arithmetic and up to eight cores' worth in memory.
_AVX512 = Core(
    matmul_gflops={torch.float32: 88.0, torch.float64: 44.0, torch.bfloat16: 200.0, torch.float16: 6.0},
    fused_gflops={torch.float32: 85.0, torch.float64: 42.0, torch.bfloat16: 80.0, torch.float16: 45.0},
    vector_gflops={torch.float32: 36.0, torch.bfloat16: 17.0, torch.float16: 13.0},
    exp_gops=1.7,
    memory_gbytes=11.0,
    cache_gbytes=25.0,
    op_us=6.0,
    kernel_us=3.0,
    fused_op_us=15.0,
    template_us=2.0,
    times=CoreTimes(
        task_us=(0.7, 2.0),  # half precision is packed
        contended_us=(2.7, 5.7),  # Zen 4, two threads, which wait for each other in the kernel: taken for more threads
        score_ns=(1.2, 2.3),
        half_mask_ns=0.7,
        few_rows_rate={torch.float16: 0.35},
        few_rows_traffic=1.4,
    ),
)
# Zen 4: torch's kernel takes twice the time that its products do with 32 keys, and 1.2 times with 256.
_AVX512_BF16 = replace(_AVX512, times=replace(_AVX512.times, row_ns=(100.0, 65.0)))
# Products of float16 have instructions of their own; those of bfloat16 have none without tiles.
_AVX512_FP16 = Core(
    matmul_gflops={torch.float32: 125.0, torch.float64: 62.0, torch.bfloat16: 66.0, torch.float16: 100.0},
    fused_gflops={torch.float32: 100.0, torch.float64: 50.0, torch.bfloat16: 66.0, torch.float16: 90.0},
    vector_gflops={torch.float32: 10.0, torch.bfloat16: 8.0, torch.float16: 9.0},
    exp_gops=1.4,
    memory_gbytes=11.0,
    cache_gbytes=18.0,
    op_us=6.7,
    kernel_us=4.0,
    fused_op_us=20.0,
    template_us=2.0,
    # In float32 torch calls the same library; the rest was not measured with two threads.
    times=replace(_AVX512.times, few_rows_products=0.5, contended_us=(2.7, 0.0)),
)
# With products of bfloat16 in tiles (AMX) beside those of float16.
_AMX = replace(
    _AVX512_FP16,
    matmul_gflops={torch.float32: 190.0, torch.float64: 95.0, torch.bfloat16: 450.0, torch.float16: 160.0},
    fused_gflops={torch.float32: 150.0, torch.float64: 75.0, torch.bfloat16: 400.0, torch.float16: 140.0},
    vector_gflops={torch.float32: 15.0, torch.bfloat16: 12.0, torch.float16: 13.0},
    exp_gops=2.0,
    memory_gbytes=26.0,
    cache_gbytes=40.0,
    op_us=6.0,
    kernel_us=3.5,
    fused_op_us=15.0,
    times=replace(_AVX512_FP16.times, few_rows_traffic=2.4),
)
# Of an AMD EPYC (Zen 3). Half precision has no instructions for products: torch multiplies one number at a time.
_AVX2 = replace(
    _AVX512,
    matmul_gflops={torch.float32: 80.0, torch.float64: 38.0, torch.bfloat16: 3.0, torch.float16: 3.2},
    fused_gflops={torch.float32: 68.0, torch.float64: 34.0, torch.bfloat16: 60.0, torch.float16: 32.0},
    vector_gflops={torch.float32: 20.0, torch.bfloat16: 9.0, torch.float16: 8.5},
    exp_gops=1.05,
    memory_gbytes=9.0,
    cache_gbytes=20.0,
    op_us=10.0,
    kernel_us=8.0,
    fused_op_us=50.0,
    times=CoreTimes(
        task_us=(1.0, 5.0),
        contended_us=(4.0, 4.0),
        score_ns=(1.4, 2.3),
        half_mask_ns=0.7,
        few_rows_rate={torch.bfloat16: 0.6, torch.float16: 0.4},
    ),
)
_UNMEASURED = replace(_AVX512, template_us=40.0)  # where small shapes were not measured with the CPU kernel
# Of data sheets (Neoverse V2 at 2.8 GHz: four units of 128 bits, products of bfloat16 by BFMMLA), times what the first
# row reaches of its own; what a call costs is the first row's.
_NEON = replace(
    _UNMEASURED,
    matmul_gflops={torch.float32: 70.0, torch.float64: 35.0, torch.bfloat16: 180.0, torch.float16: 110.0},
    fused_gflops={torch.float32: 60.0, torch.float64: 30.0, torch.bfloat16: 60.0, torch.float16: 60.0},
    vector_gflops={torch.float32: 30.0, torch.bfloat16: 20.0, torch.float16: 20.0},
    times=replace(_AVX512.times, contended_us=(0.0, 0.0)),
)
_CORES = {
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "avx512_fp16": _AVX512_FP16,
    "amx": _AMX,
    "avx2": _AVX2,
    "neon": _NEON,
}
_MEASURED = ("avx512", "avx512_bf16", "avx512_fp16", "amx", "avx2")
ANOTHERS = "those of another processor, with AVX-512"
"""Where a CPU's rates come from if no processor of its kind is listed."""
_FROM = {
    **{name: f"measured on a processor with the same instruction set ({name})" for name in _MEASURED},
    "neon": "data sheets (Neoverse V2), not measured",
}


@lru_cache(maxsize=8)
def processor(cores: int, instruction_set: str = "avx512") -> Device:
    """A CPU with that many cores; those with AVX-512 or AVX2 are measured; what is not listed has the first's rates."""
    core = _CORES.get(instruction_set, _UNMEASURED)
    return Device(
        type="cpu",
        name=f"cpu, {counted(cores, 'core')}",
        cores=cores,
        matmul_gflops={k: v * cores for k, v in core.matmul_gflops.items()},
        fused_gflops={k: v * cores for k, v in core.fused_gflops.items()},
        vector_gflops={k: v * cores for k, v in core.vector_gflops.items()},
        exp_gops=core.exp_gops * cores,
        memory_gbytes=core.memory_gbytes * min(cores, 8),
        cache_gbytes=core.cache_gbytes * cores,
        cache_bytes=12 << 20,
        op_us=core.op_us,
        kernel_us=core.kernel_us,
        fused_op_us=core.fused_op_us,
        template_us=core.template_us,
        kernels=("cpu flash",),
        core_times=core.times,
        instruction_set=instruction_set,
        is_measured=instruction_set in _MEASURED,
        built_in_rates=_FROM.get(
            instruction_set, f"{ANOTHERS}; none with this instruction set ({instruction_set}) was measured"
        ),
    )


def unknown(kind: str) -> Device:
    """A device that nothing is known of: one core's rates, and no kernel."""
    plain = replace(processor(1), kernels=(), core_times=CoreTimes(), instruction_set="", is_measured=False)
    return replace(plain, type=kind, name=kind, built_in_rates=ANOTHERS)

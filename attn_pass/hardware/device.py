"""`Device`: the numbers the cost model and the targets' rules need, injectable so that no device has to be there."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Shares:
    """What one kernel reaches: of the rate of large matrix products with many rows, of a copy's rate with few.

    ``wide`` and ``narrow`` are for head dims over 128 and up to 64, where they are known to differ.
    """

    prefill: float
    one_row: float = 0.85
    few_rows: float = 0.85  # 2 to 64 query rows
    narrow: float | None = None
    wide: float | None = None

    def matrix(self, head_dim: int) -> float:
        """Of the rate of large matrix products."""
        own = self.narrow if head_dim <= 64 else self.wide if head_dim > 128 else None
        return self.prefill if own is None else own

    def memory(self, q_len: int) -> float:
        """Of the rate of a copy, for operands that are read once."""
        return self.one_row if q_len == 1 else self.few_rows if q_len <= FEW_ROWS else _STREAMED


FEW_ROWS = 64
_STREAMED = 0.85  # of a copy's rate, read by kernels with many rows


@dataclass(frozen=True)
class Device:
    """A device's rates. Bytes and FLOPs in units of 1e9 a second, overheads in microseconds."""

    type: str
    name: str
    cores: int
    matmul_gflops: Mapping[torch.dtype, float]  # a large matrix product
    fused_gflops: Mapping[torch.dtype, float]  # the product work inside the fused kernel, softmax not counted
    vector_gflops: Mapping[torch.dtype, float]  # multiply-and-sum without a matrix product (a product with one row)
    exp_gops: float  # exponentials, with the rest of a softmax around them
    memory_gbytes: float
    cache_gbytes: float  # traffic that stays in the last-level cache
    cache_bytes: int
    op_us: float  # calling one operator that is not fused with its neighbours
    kernel_us: float  # one generated kernel
    fused_op_us: float  # calling the fused attention operator
    kernels: tuple[str, ...] = ()  # the fused kernels there are, as `attn_pass.targets.kernels` names them
    shares: Mapping[str, Shares] = field(default_factory=dict)  # of the rates above, what each kernel reaches
    join_us: float = 2.0  # the second kernel of one that splits the keys, which waits for the first and joins 33 parts
    plan_us: float = 30_000.0  # cuDNN builds a plan for a new shape: 23 to 37 ms on the host
    is_measured: bool = False  # this project set the rates by measurements of such a device, not by data sheets
    is_calibrated: bool = False  # rates were measured on this very machine (`attn_pass.hardware.calibration`)
    measured_kernels: tuple[str, ...] = ()  # those whose shares were measured on it
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability
    cudnn: int = 0  # cuDNN's version as torch has it, 91900 for 9.19
    flash: str = "FA2"  # the FlashAttention behind torch's operators (torch.nn.attention.activate_flash_attention_impl)
    family: str = ""  # of an Ascend NPU, as `attn_pass.hardware.npu` names them
    is_here: bool = True  # False for one that is decided for by its data sheet alone

    def knows(self, kernel: str) -> bool:
        """Whether what the cost model says of a kernel rests on measurements."""
        return self.is_measured or kernel in self.measured_kernels

    def matmul(self, dtype: torch.dtype) -> float:
        """GFLOP/s of a matrix product; half precision where nothing better is known counts as float32."""
        return self.matmul_gflops.get(dtype, self.matmul_gflops[torch.float32])

    def vector(self, dtype: torch.dtype) -> float:
        """GFLOP/s of products with one row."""
        return self.vector_gflops.get(dtype, self.vector_gflops[torch.float32])

    def fused(self, dtype: torch.dtype) -> float:
        """GFLOP/s inside the fused kernel."""
        return self.fused_gflops.get(dtype, self.fused_gflops[torch.float32])


# A core's rates, measured on an AVX-512 x86 machine with two cores (docs/results/cpu-constants.md); a machine with
# more cores is taken to scale with them in arithmetic and up to eight cores' worth in memory.
_CORE_MATMUL = {torch.float32: 88.0, torch.float64: 44.0, torch.bfloat16: 200.0, torch.float16: 6.0}
_CORE_FUSED = {torch.float32: 85.0, torch.float64: 42.0, torch.bfloat16: 80.0, torch.float16: 45.0}
_CORE_VECTOR = {torch.float32: 36.0, torch.bfloat16: 25.0, torch.float16: 25.0}


def cpu() -> Device:
    """This machine's CPU, with as many cores as torch uses threads of those this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpu_with(max(1, min(cores, torch.get_num_threads())))


@lru_cache(maxsize=8)
def cpu_with(cores: int) -> Device:
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
        is_measured=True,
    )


def facts(device: Device) -> dict[str, str]:
    """What a measurement on this device holds for: the hardware by name, and the versions that compile for it."""
    if device.type == "cpu":
        name = f"{device.name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    elif device.type == "npu":
        name = device.name
    else:
        name = f"{device.name}, CUDA {torch.version.cuda}, cuDNN {device.cudnn}"
    return {"device": name, "torch": torch.__version__}


def device_for(tensors: torch.device, asked: str | None = None) -> Device:
    """The device to decide for: the one asked for, or the one the tensors are on, with what was measured of it here.

    ``asked`` is a device as torch names it or one that `attn_pass.hardware.catalog.is_known`. A GPU that is not here
    has no kernels, unless it is asked for. An NPU is known by what its runtime says, where one is loaded.
    """
    from attn_pass.hardware import calibration, catalog

    if asked is not None and catalog.is_known(asked):
        return catalog.by_name(asked)
    wanted = tensors if asked is None else torch.device(asked)
    kind = wanted.type
    if kind == "cpu":
        return calibration.applied(cpu())
    if kind == "cuda":
        if torch.cuda.is_available():
            return calibration.applied(catalog.cuda_here(wanted))
        found = catalog.by_name(catalog.DEFAULT_CUDA)
        return found if asked is not None else replace(found, kernels=())
    if kind == "xla" and (tpu := catalog.tpu_here(tpu_generation())) is not None:
        return tpu
    if kind == "npu":
        return catalog.npu_here(wanted)
    return replace(cpu_with(1), type=kind, name=kind, kernels=(), is_measured=False)


@lru_cache(maxsize=1)
def tpu_generation() -> str | None:
    """The generation of the TPU that torch_xla runs on, "v5e" or "v5litepod" and the like; None where it is no TPU."""
    try:
        from torch_xla import runtime
        from torch_xla._internal import tpu

        return str(tpu.get_tpu_type()).lower() if runtime.device_type() == "TPU" else None
    except Exception:  # no such package, or no answer from the machine's metadata
        return None

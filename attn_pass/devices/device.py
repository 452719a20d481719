"""`Device`: the numbers that the cost model and the targets' rules need; injectable, so no device must be present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class CoreTimes:
    """What a core spends beside arithmetic and traffic. Nothing where the rates of kernels were set with it in them.

    Pairs are for float32 and for half precision.
    """

    task_us: tuple[float, float] = (0.0, 0.0)  # around the work of one task of the fused kernel
    contended_us: tuple[float, float] = (0.0, 0.0)  # more around a task as soon as two threads run
    row_ns: tuple[float, float] = (0.0, 0.0)  # one row of many in the fused kernel, whatever its keys
    score_ns: tuple[float, float] = (0.0, 0.0)  # one score between products, beside its exponential and its traffic
    half_mask_ns: float = 0.0  # more a score with a mask in half precision, which is widened element by element
    few_rows_rate: Mapping[torch.dtype, float] = field(default_factory=dict)  # what is left of the rate with few rows
    few_rows_traffic: float = 1.0  # times the traffic with few rows
    few_rows_products: float = 1.0  # what is left of the rate of products outside of the fused kernel with few rows


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
    template_us: float = 40.0  # what a kernel must gain, a call, to be worth its compile of 3 s
    kernels: tuple[str, ...] = ()  # the fused kernels there are, as its family names them
    shares: Mapping[str, Shares] = field(default_factory=dict)  # of the rates above, what each kernel reaches
    join_us: float = 2.0  # the second kernel of one that splits the keys, which waits for the first and joins 33 parts
    plan_us: float = 30_000.0  # cuDNN builds a plan for a new shape: 23 to 37 ms on the host
    core_times: CoreTimes = field(default_factory=CoreTimes)
    is_measured: bool = False  # this project set the rates by measurements of such a device, not by data sheets
    is_calibrated: bool = False  # rates were measured on this very machine (`attn_pass.devices.calibration`)
    built_in_rates: str = "data sheets and published figures, not measured"  # where they come from without that
    measured_kernels: tuple[str, ...] = ()  # those whose shares were measured on it
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability
    cudnn: int = 0  # cuDNN's version as torch has it, 91900 for 9.19
    flash: str = "FA2"  # the FlashAttention behind torch's operators (torch.nn.attention.activate_flash_attention_impl)
    instruction_set: str = ""  # of a CPU, as `attn_pass.devices.cpu.cost` names them
    generation: str = ""  # of an Ascend NPU, as `attn_pass.devices.npu.generations` names them; AMD's architecture
    family: str = ""  # its family by name, where the type does not tell: AMD's GPUs are of torch's type for NVIDIA's
    is_here: bool = True  # False for one that is decided for by its data sheet alone

    @property
    def kind(self) -> str:
        """Its family where its type does not tell that, else its type: "rocm" for AMD's GPUs."""
        return self.family or self.type

    @property
    def rates_from(self) -> str:
        """Where the rates come from, in words: a calibration of this machine, measurements elsewhere, data sheets."""
        return "calibrated on this machine" if self.is_calibrated else self.built_in_rates

    def knows(self, kernel: str) -> bool:
        """Whether the predictions for a kernel are based on measurements."""
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

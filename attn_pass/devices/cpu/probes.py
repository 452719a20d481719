"""Calibrates the CPU's constants with bare kernels: each constant is scaled by its probe's reading against the fit's.

The constants in use were fitted to attention of many shapes, on one machine (docs/results/cpu-constants.md): a copy
that streams reads 27 GB/s there, keys and values inside a kernel come at 11. So a probe does not replace a constant, it
scales it: on the machine of the fit a calibration changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn_pass.tuning.clock import ROUNDS, Clock, Reading, Run, read


@dataclass(frozen=True)
class Probe:
    """One bare kernel, and the constant it stands for.

    ``work`` is what one call does, in units of 1e9 of it a second for a rate; 0 for a time in microseconds.
    ``reading`` is what the probe read with one thread on the machine where the constant was fitted as ``fitted``.
    """

    constant: str  # a field of `attn_pass.devices.calibration.Calibration`
    dtype: str  # of an entry of it, or empty
    work: float
    reading: float
    fitted: float
    make: Callable[[], Run]

    @property
    def name(self) -> str:
        """The constant, with its dtype."""
        return f"{self.constant}, {self.dtype}" if self.dtype else self.constant

    def value(self, us: float) -> float:
        """What the probe read, in the constant's unit."""
        return self.work / us / 1e3 if self.work else us

    def scaled(self, us: float) -> float:
        """The constant for a machine on which a call takes so many microseconds."""
        return self.value(us) * self.fitted / self.reading


def _product(dtype: torch.dtype, side: int = 512) -> Run:
    a = torch.randn(4, side, side).to(dtype)
    return lambda: a @ a


def _attention(dtype: torch.dtype) -> Run:
    q = torch.randn(1, 8, 2048, 64).to(dtype)
    return lambda: F.scaled_dot_product_attention(q, q, q)


def _one_row(dtype: torch.dtype) -> Run:
    """Multiply and sum, in the cache: Inductor's code for a product with one row, in two kernels instead of one."""
    q, k = torch.randn(8, 1, 64).to(dtype), torch.randn(8, 512, 64).to(dtype)
    return lambda: (q * k).sum(-1)


def _softmax() -> Run:
    x = torch.randn(256, 2048)
    return lambda: torch.softmax(x, -1)


def _copy(elements: int) -> Run:
    x = torch.randn(elements)
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def _small_product() -> Run:
    x = torch.randn(4, 4, 4)
    return lambda: torch.bmm(x, x)


def _small_sum() -> Run:
    x = torch.randn(4, 4, 4)
    return lambda: x + x


def _small_attention() -> Run:
    q = torch.randn(1, 1, 4, 16)
    return lambda: F.scaled_dot_product_attention(q, q, q)


_PRODUCT_FLOPS, _ATTENTION_FLOPS, _ROW_FLOPS = 4 * 2 * 512**3, 4 * 8 * 2048**2 * 64, 2 * 8 * 512 * 64
_SMALL_FLOPS = 4 * 2 * 128**3  # where there is no fast product, of which 512 take half a second
_F32, _F64, _BF16, _F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
_STREAM, _IN_CACHE = 1 << 26, 1 << 20  # elements of float32

# Products, fused attention and copies read there as docs/results/cpu-constants.md has them. The others were read on the
# same machine while it was busy, in the process's own time, and scaled by what the first ones read beside them (0.88).
PROBES: tuple[Probe, ...] = (
    Probe("matmul_gflops", "float32", _PRODUCT_FLOPS, 99.8, 88.0, lambda: _product(_F32)),
    Probe("matmul_gflops", "bfloat16", _PRODUCT_FLOPS, 223.9, 200.0, lambda: _product(_BF16)),
    Probe("matmul_gflops", "float16", _SMALL_FLOPS, 3.2, 6.0, lambda: _product(_F16, 128)),
    Probe("matmul_gflops", "float64", _PRODUCT_FLOPS, 46.4, 44.0, lambda: _product(_F64)),
    Probe("fused_gflops", "float32", _ATTENTION_FLOPS, 85.1, 85.0, lambda: _attention(_F32)),
    Probe("fused_gflops", "bfloat16", _ATTENTION_FLOPS, 80.8, 80.0, lambda: _attention(_BF16)),
    Probe("fused_gflops", "float16", _ATTENTION_FLOPS, 41.8, 45.0, lambda: _attention(_F16)),
    Probe("vector_gflops", "float32", _ROW_FLOPS, 11.3, 36.0, lambda: _one_row(_F32)),
    Probe("vector_gflops", "bfloat16", _ROW_FLOPS, 6.3, 17.0, lambda: _one_row(_BF16)),
    Probe("vector_gflops", "float16", _ROW_FLOPS, 6.9, 13.0, lambda: _one_row(_F16)),
    Probe("exp_gops", "", 256 * 2048, 1.8, 1.7, _softmax),
    Probe("memory_gbytes", "", 8 * _STREAM, 26.6, 11.0, lambda: _copy(_STREAM)),
    Probe("cache_gbytes", "", 8 * _IN_CACHE, 93.3, 25.0, lambda: _copy(_IN_CACHE)),
    Probe("kernel_us", "", 0, 1.1, 3.0, _small_sum),
    Probe("op_us", "", 0, 1.4, 6.0, _small_product),
    Probe("fused_op_us", "", 0, 4.1, 15.0, _small_attention),
)


def readings(seconds: float) -> Iterator[tuple[Probe, Reading]]:
    """Every probe with what it read, with as many threads as torch uses here; ``seconds`` for all of them, about."""
    block, clock = seconds / len(PROBES) / (ROUNDS + 1), Clock()
    with torch.no_grad():
        for probe in PROBES:
            yield probe, read(probe.make(), clock, block)


def fitted(readings: Iterable[tuple[Probe, Reading]]) -> dict[str, Any]:
    """The fields of a `Calibration` that the readings make."""
    fields: dict[str, Any] = {}
    for probe, reading in readings:
        if probe.dtype:
            fields.setdefault(probe.constant, {})[probe.dtype] = probe.scaled(reading.us)
        else:
            fields[probe.constant] = probe.scaled(reading.us)
    return fields

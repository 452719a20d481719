"""Measured rates: a `Calibration` in the cache replaces the built-in rates on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from attn_pass.devices.device import Device, Shares
from attn_pass.report.json_schema import check_fields


@dataclass(frozen=True)
class Calibration:
    """Rates and overheads measured on one device, named and in the units of `Device`. None, or no entry: not measured.

    Dtypes are named as torch does without its own name ("bfloat16"), kernels as in `Device.kernels`, and beside these
    "flex"; what a kernel reaches as the fields of `Shares`.
    """

    facts: dict[str, str]  # the device's name and the versions it holds for: `attn_pass.devices.registry.facts`
    matmul_gflops: dict[str, float] = field(default_factory=dict)
    fused_gflops: dict[str, float] = field(default_factory=dict)
    vector_gflops: dict[str, float] = field(default_factory=dict)
    exp_gops: float | None = None
    memory_gbytes: float | None = None
    cache_gbytes: float | None = None
    op_us: float | None = None
    kernel_us: float | None = None
    fused_op_us: float | None = None
    join_us: float | None = None
    plan_us: float | None = None
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    date: str = ""  # when it was measured
    spread: float = 0.0  # how far readings of one kernel were apart, as a share: the median of all

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, for a value that is not a rate: it came from a disk, or from a clock."""
        check_fields(Calibration, vars(self))
        for name in _BY_DTYPE:
            for dtype, rate in getattr(self, name).items():
                _check_rate(f"{name}, {dtype}", rate)
                if not isinstance(getattr(torch, dtype, None), torch.dtype):
                    raise ValueError(f"{name}: {dtype!r} is not a dtype")
        for name in _PLAIN:
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name))
        for kernel, reached in self.shares.items():
            for name, share in reached.items():
                _check_rate(f"shares, {kernel}, {name}", share)
                if name not in _SHARES:
                    raise ValueError(f"shares, {kernel}: {name!r} is not one of {', '.join(_SHARES)}")


_BY_DTYPE = ("matmul_gflops", "fused_gflops", "vector_gflops")
_PLAIN = tuple(f.name for f in fields(Calibration) if f.default is None)
_SHARES = tuple(f.name for f in fields(Shares))


def _check_rate(name: str, rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"{name} is {rate!r}, which is not a rate")


def with_calibration(device: Device, measured: Calibration) -> Device:
    """The device with what was measured in place of what it was taken to be.

    A kernel that the device has no shares for gets those that were measured only with its ``prefill`` among them.
    """
    changes: dict[str, Any] = {n: getattr(measured, n) for n in _PLAIN if getattr(measured, n) is not None}
    for name in _BY_DTYPE:
        rates = {getattr(torch, dtype): rate for dtype, rate in getattr(measured, name).items()}
        changes[name] = {**getattr(device, name), **rates}
    shares = dict(device.shares)
    for kernel, reached in measured.shares.items():
        if kernel in shares:
            shares[kernel] = replace(shares[kernel], **reached)
        elif "prefill" in reached:
            shares[kernel] = Shares(**reached)
    known = tuple(kernel for kernel, reached in measured.shares.items() if reached and kernel in shares)
    return replace(device, **changes, shares=shares, is_calibrated=True, measured_kernels=known)


def fitted(device: Device, kernel: str, share: str, predict: Callable[[Device], float], microseconds: float) -> float:
    """The share of a kernel with which the cost model predicts what was measured.

    ``share`` is a field of `Shares`; ``predict`` is the cost model's prediction for the call, on a device it is given.
    The least or the largest that is looked for, where no share explains the measurement. What a call costs besides is
    to be calibrated first.
    """
    low, high = _LEAST_SHARE, _MOST_SHARE
    for _ in range(40):
        middle = math.sqrt(low * high)
        tried = replace(device.shares[kernel], **{share: middle})
        slower = predict(replace(device, shares={**device.shares, kernel: tried})) > microseconds
        low, high = (middle, high) if slower else (low, middle)
    return math.sqrt(low * high)


_LEAST_SHARE, _MOST_SHARE = 0.001, 2.0

"""A GPU's rates from bare kernels: products, copies, launches, then what each attention kernel reaches of them.

The order matters: a kernel's share is the number with which the cost model predicts what was measured, so what the
model takes from elsewhere is measured first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_pass.devices import calibration
from attn_pass.devices.calibration import Calibration, with_calibration
from attn_pass.devices.cuda import points
from attn_pass.devices.cuda.points import Point
from attn_pass.devices.device import Device
from attn_pass.devices.registry import facts, of_type
from attn_pass.model.dtype_name import dtype_name
from attn_pass.tuning.clock import Clock, Reading, Run, read

_HALVES = (torch.bfloat16, torch.float16)
_SIDE = 8192  # of a large product in half precision; a fourth of the work in float32
_STREAM_BYTES = 1 << 30
_NEW_LENGTHS = (1000, 1048, 1096, 1144, 1192, 1240)  # of which no kernel has a plan yet
_SENSIBLE = (0.005, 1.5)  # for a share outside, something other than this kernel's rate took the time
_LEAST_US = 0.2  # of a launch: less is the clock's own error


@dataclass
class Readings:
    """What a sweep read: plain kernels by what they stand for, attention by point, and what failed with its reason."""

    plain: dict[str, Reading] = field(default_factory=dict)
    attention: dict[Point, Reading] = field(default_factory=dict)
    plans_us: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """The median spread of all readings: how busy the machine was."""
        spreads = [r.spread for r in (*self.plain.values(), *self.attention.values())]
        return statistics.median(spreads) if spreads else 0.0


def sweep(device: Device, at: torch.device, seconds: float, done: Callable[[str, Reading], None]) -> Readings:
    """Runs the kernels; failures are recorded, and kernels beyond the time limit are omitted. ``done`` gets each
    reading.

    Needs about 4 GB of the GPU's memory.
    """
    readings, end = Readings(), time.monotonic() + seconds
    clock = of_type(at.type).clock
    with torch.no_grad():
        for name, make in _plain(device, at):
            _take(readings, name, readings.plain, name, make, clock, done)
        for kernel in points.BUILD_PLANS:
            if kernel in device.kernels:
                readings.plans_us = _plans(kernel, at, readings)
        for point in attention_points(device):
            if time.monotonic() > end:
                readings.failed["the rest"] = f"{seconds:.0f} s were over"
                break
            _take(readings, point.name, readings.attention, point, lambda p=point: p.run(at), clock, done)  # type: ignore[misc]
    return readings


def _take(
    readings: Readings,
    name: str,
    into: dict[Any, Reading],
    key: object,
    make: Callable[[], Run],
    clock: Clock,
    done: Callable[[str, Reading], None],
) -> None:
    try:
        reading = read(make(), clock)
    except Exception as error:  # a kernel may refuse, or the memory not suffice: the others go on
        readings.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return
    into[key] = reading
    done(name, reading)


def attention_points(device: Device) -> Iterator[Point]:
    """The points that shares are fitted to, the most informative first."""
    kernels, few, single = (
        [k for k in points.swept(sweep) if k in device.kernels] for sweep in ("prefill", "decoding", "float32")
    )
    yield from points.prefill(kernels, (4096,), (128, 64, 256))
    yield from points.decoding(few, (1, 4, 16), (32768, 131072), (1, 8))
    yield from points.prefill(kernels, (1024,), (128, 64, 256))
    for kernel in single:
        yield Point(kernel, 4, 32, 32, 2048, 2048, 64, dtype=torch.float32)


def _plain(device: Device, at: torch.device) -> Iterator[tuple[str, Callable[[], Run]]]:
    """What is not attention, by the constant it stands for."""

    def product(dtype: torch.dtype, side: int) -> Callable[[], Run]:
        def make() -> Run:
            a, b = (torch.randn(side, side, device=at, dtype=dtype) for _ in range(2))
            return lambda: a @ b

        return make

    def copy(size: int) -> Callable[[], Run]:
        def make() -> Run:
            source = torch.ones(size // 2, device=at, dtype=torch.bfloat16)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        return make

    def small(call: Callable[[torch.Tensor], object]) -> Callable[[], Run]:
        def make() -> Run:
            x = torch.randn(1, 1, 16, 64, device=at, dtype=torch.bfloat16)
            return lambda: call(x)

        return make

    for dtype in _HALVES:
        yield f"matmul_gflops, {dtype_name(dtype)}", product(dtype, _SIDE)
    yield "matmul_gflops, float32", product(torch.float32, _SIDE // 2)
    yield "memory_gbytes", copy(_STREAM_BYTES)
    yield "cache_gbytes", copy(device.cache_bytes // 4)
    yield "kernel_us", small(lambda x: x + x)
    yield "op_us", small(lambda x: x @ x.mT)
    for kernel in points.swept("launch"):
        if kernel in device.kernels:
            yield "fused_op_us", small(lambda x, called=kernel: points.call(called, x, x, x, False))  # type: ignore[misc]


def _plans(kernel: str, at: torch.device, readings: Readings) -> list[float]:
    """Microseconds the host takes for a kernel's first call at a length, more than for the second."""
    times_us = []
    try:
        for length in _NEW_LENGTHS:
            run = Point(kernel, 1, 4, 4, length, length, 64).run(at)
            times = []
            for _ in range(2):
                torch.cuda.synchronize()
                began = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e6)
            times_us.append(max(_LEAST_US, times[0] - times[1]))
    except Exception as error:
        readings.failed["plan_us"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return []
    return times_us[1:]  # the first call of all builds the library's handle as well


# ---------------------------------------------------------------- the fit


def fitted(device: Device, readings: Readings) -> Calibration:
    """The calibration that the readings give for a device of the catalogue."""
    plain = Calibration(facts(device), **_rates(device, readings))
    many = replace(plain, shares=_shares(with_calibration(device, plain), readings.attention, _MANY_ROWS))
    few = _shares(with_calibration(device, many), readings.attention, _FEW_ROWS)
    kernels = {*many.shares, *few}
    return replace(plain, shares={k: {**many.shares.get(k, {}), **few.get(k, {})} for k in sorted(kernels)})


# Fields of `Shares`: those of matrix products first, whose time limits what the others can be told from.
_MANY_ROWS, _FEW_ROWS = ("prefill", "narrow", "wide"), ("one_row", "few_rows")


def _rates(device: Device, readings: Readings) -> dict[str, Any]:
    us = {name: reading.us for name, reading in readings.plain.items()}
    fields: dict[str, Any] = {"matmul_gflops": {}}
    for dtype in (*_HALVES, torch.float32):
        name = f"matmul_gflops, {dtype_name(dtype)}"
        if name in us:
            side = _SIDE if dtype in _HALVES else _SIDE // 2
            fields["matmul_gflops"][dtype_name(dtype)] = 2 * side**3 / us[name] / 1e3
    for name, size in (("memory_gbytes", _STREAM_BYTES), ("cache_gbytes", device.cache_bytes // 4)):
        if name in us:
            fields[name] = 2 * size / us[name] / 1e3
    for name in ("kernel_us", "op_us", "fused_op_us"):
        if name in us:
            fields[name] = max(_LEAST_US, us[name])
    if readings.plans_us:
        fields["plan_us"] = statistics.median(readings.plans_us)
    single = [(p, r) for p, r in readings.attention.items() if p.dtype == torch.float32]
    for point, reading in single:
        fields["fused_gflops"] = {"float32": point.flops / reading.us / 1e3}  # what the model takes for its products
    return fields


def _shares(
    device: Device, attention: Mapping[Point, Reading], kernels: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """For every kernel the requested fields of `Shares` that some point determines, each the median over its points."""
    fitted: dict[tuple[str, str], list[float]] = {}
    for point, reading in attention.items():
        name = _share_of(point)
        if name in kernels and point.kernel in device.shares:
            share = calibration.fitted(device, point.kernel, name, point.predicted_us, reading.us)
            if _SENSIBLE[0] < share < _SENSIBLE[1] and _decides(device, point, name, share):
                fitted.setdefault((point.kernel, name), []).append(share)
    shares: dict[str, dict[str, float]] = {}
    for (kernel, name), values in fitted.items():
        shares.setdefault(kernel, {})[name] = statistics.median(values)
    return shares


def _decides(device: Device, point: Point, name: str, share: float) -> bool:
    """Whether the model's time for the point follows this share, and not something else that takes longer."""

    def predicted(value: float) -> float:
        own = replace(device.shares[point.kernel], **{name: value})
        return point.predicted_us(replace(device, shares={**device.shares, point.kernel: own}))

    return predicted(1.25 * share) < 0.95 * predicted(share)


def _share_of(point: Point) -> str:
    """The field of `Shares` that a point determines; empty if it determines none."""
    if point.backward or point.dtype == torch.float32:
        return ""
    if point.q_len == 1:
        return "one_row"
    if point.q_len <= 64:
        return "few_rows"
    return "narrow" if point.dim <= 64 else "wide" if point.dim > 128 else "prefill"

"""The sweep of a GPU's kernels: its calls, by stand-ins that check them; the fit recovers synthetic rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_pass.devices import registry
from attn_pass.devices.calibration import with_calibration
from attn_pass.devices.cuda import points
from attn_pass.devices.cuda import sweep as cuda
from attn_pass.devices.cuda.points import Point
from attn_pass.devices.device import Device, Shares
from attn_pass.tuning.clock import Reading
from bench.gpu import stand_ins

stand_ins.install()
H100 = registry.by_name("H100")
CPU = torch.device("cpu")
TRUE = replace(
    H100,
    matmul_gflops={**H100.matmul_gflops, torch.bfloat16: 640e3},
    memory_gbytes=2800.0,
    op_us=4.0,
    fused_op_us=5.0,
    shares={
        **H100.shares,
        "cudnn": Shares(0.71, one_row=0.61, few_rows=0.35, narrow=0.52, wide=0.44),
        "flash": Shares(0.41, one_row=0.51, few_rows=0.42, narrow=0.36, wide=0.31),
        "efficient": Shares(0.22, one_row=0.31, few_rows=0.28, narrow=0.25),
        "decode": Shares(0.47, one_row=0.73, few_rows=0.66),
    },
)


# No point tells them: the split-KV kernel takes no long query, and in the model cuDNN and flash pad few rows to a block
# of 128, whose products then take longer than reading the keys.
UNTOLD = {("decode", "prefill"), ("cudnn", "few_rows"), ("flash", "few_rows")}


def _readings(device: Device) -> cuda.Readings:
    """What a sweep of a GPU would read that is as the device says."""
    side, copied = cuda._SIDE, device.cache_bytes // 4
    us = {
        "matmul_gflops, bfloat16": 2 * side**3 / device.matmul(torch.bfloat16) / 1e3,
        "memory_gbytes": 2 * cuda._STREAM_BYTES / device.memory_gbytes / 1e3,
        "cache_gbytes": 2 * copied / device.cache_gbytes / 1e3,
        "op_us": device.op_us,
        "fused_op_us": device.fused_op_us,
    }
    readings = cuda.Readings(plain={name: Reading(value, 0.01) for name, value in us.items()})
    for point in cuda.attention_points(device):
        readings.attention[point] = Reading(point.predicted_us(device), 0.01)
    readings.plans_us = [25_000.0, 31_000.0, 28_000.0]
    return readings


def test_the_fit_finds_the_rates_and_the_shares_that_made_the_readings() -> None:
    device = with_calibration(H100, cuda.fitted(H100, _readings(TRUE)))
    assert device.matmul(torch.bfloat16) == pytest.approx(640e3)
    assert device.memory_gbytes == pytest.approx(2800)
    assert (device.op_us, device.fused_op_us, device.plan_us) == (4.0, 5.0, 28_000.0)
    for kernel in ("cudnn", "flash", "efficient", "decode"):
        for name in ("prefill", "one_row", "few_rows", "narrow", "wide"):
            wanted = getattr(TRUE.shares[kernel], name)
            if wanted is not None and (kernel, name) not in UNTOLD:
                assert getattr(device.shares[kernel], name) == pytest.approx(wanted, rel=0.02), (kernel, name)
    assert set(device.measured_kernels) == {"cudnn", "flash", "efficient", "decode"}


def test_what_failed_leaves_the_catalogues_number() -> None:
    readings = _readings(TRUE)
    readings.attention = {p: r for p, r in readings.attention.items() if p.kernel != "efficient"}
    del readings.plain["memory_gbytes"]
    device = with_calibration(H100, cuda.fitted(H100, readings))
    assert device.shares["efficient"] == H100.shares["efficient"] and not device.knows("efficient")
    assert device.memory_gbytes == H100.memory_gbytes


def test_a_reading_that_no_share_explains_is_left_out() -> None:
    readings = _readings(TRUE)
    readings.attention = {p: Reading(r.us * 1e4, 0.0) for p, r in readings.attention.items() if p.q_len > 64}
    assert cuda.fitted(H100, readings).shares == {}


def _tiny(point: Point) -> Point:
    length = min(point.q_len, 16)
    return replace(point, batch=1, heads=4, kv_heads=4 * point.kv_heads // point.heads, q_len=length, kv_len=16)


CALLED = {(p.kernel, p.dim, p.causal, p.q_len > 64, p.dtype): _tiny(p) for p in cuda.attention_points(H100)}.values()


@pytest.mark.parametrize("point", CALLED, ids=lambda p: p.name)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_kernel_of_the_sweep_takes_its_calls(point: Point, backward: bool) -> None:
    if backward and point.kernel == "decode":
        pytest.skip("inference only")
    result = replace(point, backward=backward).run(CPU)()
    shapes = [tuple(x.shape) for x in (result if isinstance(result, tuple) else (result,))]
    key = (1, point.kv_heads, point.kv_len, point.dim)
    query = (1, 4, point.q_len, point.dim)
    assert shapes == ([query, key, key] if backward else [query])


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient", "decode"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_computes_attention(kernel: str, causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float16) for _ in range(3))
    right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    torch.testing.assert_close(points.call(kernel, q, k, v, causal).double(), right, atol=2e-3, rtol=2e-3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """A sweep that a CPU can run."""
    few = [Point(kernel, 1, 2, 2, 8, 8, 16) for kernel in ("cudnn", "flash", "efficient")]
    monkeypatch.setattr(cuda, "_SIDE", 32)
    monkeypatch.setattr(cuda, "_STREAM_BYTES", 1 << 12)
    monkeypatch.setattr(cuda, "attention_points", lambda device: iter(few))
    return few


def test_a_kernel_that_fails_is_named_and_the_others_go_on(small: list[Point], monkeypatch: pytest.MonkeyPatch) -> None:
    real = points.call

    def call(kernel: str, *given: Any) -> torch.Tensor:
        if kernel == "cudnn":
            raise RuntimeError("no valid execution plans built")
        return real(kernel, *given)

    monkeypatch.setattr(points, "call", call)
    heard: list[str] = []
    swept = cuda.sweep(replace(H100, cache_bytes=1 << 12), CPU, 60.0, lambda name, _: heard.append(name))
    assert {p.kernel for p in swept.attention} == {"flash", "efficient"}
    assert swept.failed[small[0].name] == "RuntimeError: no valid execution plans built"
    assert heard == [*swept.plain, *(p.name for p in swept.attention)]
    assert swept.spread > 0


def test_a_sweep_whose_time_is_over_says_so(small: list[Point]) -> None:
    swept = cuda.sweep(replace(H100, cache_bytes=1 << 12), CPU, 0.0, lambda *_: None)
    assert not swept.attention and swept.failed["the rest"] == "0 s were over"

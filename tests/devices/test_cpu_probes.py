"""The CPU's probes: what each measures, and how its reading scales the constant that was fitted with it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_pass.devices.calibration import Calibration, with_calibration
from attn_pass.devices.cpu.probes import PROBES, Probe, fitted
from attn_pass.devices.processors import processor
from attn_pass.devices.registry import facts
from attn_pass.tuning.clock import Reading

DEVICE = processor(1)
NAMES = [probe.name for probe in PROBES]


def _us(probe: Probe, times: float = 1.0) -> float:
    """How long the probe takes where it reads ``times`` what it read on the machine of the fit."""
    value = probe.reading * times
    return probe.work / value / 1e3 if probe.work else value


def _calibrated(times: float) -> Calibration:
    readings = [(p, Reading(_us(p, times if p.work else 1 / times), 0.0)) for p in PROBES]
    return Calibration(facts(DEVICE), **fitted(readings))


def test_on_the_machine_of_the_fit_a_calibration_changes_nothing() -> None:
    device = with_calibration(DEVICE, _calibrated(1.0))
    for probe in PROBES:
        now, before = (getattr(d, probe.constant) for d in (device, DEVICE))
        if probe.dtype:
            now, before = (rates[getattr(torch, probe.dtype)] for rates in (now, before))
        assert now == pytest.approx(before, rel=1e-6), probe.name


def test_a_machine_twice_as_fast_has_twice_the_rates_and_half_the_overheads() -> None:
    device = with_calibration(DEVICE, _calibrated(2.0))
    assert device.matmul_gflops[torch.bfloat16] == pytest.approx(2 * DEVICE.matmul_gflops[torch.bfloat16])
    assert device.memory_gbytes == pytest.approx(2 * DEVICE.memory_gbytes)
    assert device.op_us == pytest.approx(DEVICE.op_us / 2)
    assert device.is_calibrated


def test_every_constant_of_the_cpu_has_a_probe_and_none_has_two() -> None:
    assert len(set(NAMES)) == len(NAMES)
    rates = {f"{name}, {dtype}" for name in ("matmul_gflops", "fused_gflops") for dtype in ("float32", "bfloat16")}
    assert set(NAMES) >= rates | {"exp_gops", "memory_gbytes", "cache_gbytes", "op_us", "kernel_us", "fused_op_us"}


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("matmul")])
def test_a_probe_does_the_work_it_is_taken_for(name: str) -> None:
    probe = PROBES[NAMES.index(name)]
    run = probe.make()
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == probe.work


@pytest.mark.parametrize("name", ["vector_gflops, bfloat16", "exp_gops", "cache_gbytes", "kernel_us", "op_us"])
def test_a_small_probe_runs(name: str) -> None:
    assert isinstance(PROBES[NAMES.index(name)].make()(), torch.Tensor)

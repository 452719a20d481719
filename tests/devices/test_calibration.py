"""A calibration replaces the built-in rates of a device: it is stored on disk, checked, and used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.devices import calibration_store, registry
from attn_pass.devices.calibration import Calibration, fitted, with_calibration
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import cost as cost_cuda
from attn_pass.devices.cuda import facts as cuda_facts
from attn_pass.devices.cuda.kernels import KERNELS
from attn_pass.devices.device import Device
from attn_pass.devices.registry import device_for, facts
from attn_pass.devices.roofline import Problem
from attn_pass.tuning import disk_cache

BF16, FP32 = torch.bfloat16, torch.float32
H100 = registry.by_name("H100")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    return tmp_path


def test_it_is_read_as_it_was_saved() -> None:
    measured = Calibration(
        facts(H100), {"bfloat16": 700e3}, join_us=1.5, op_us=3, shares={"cudnn": {"prefill": 0.8, "narrow": 0.6}}
    )
    assert calibration_store.load(H100) is None
    calibration_store.save(measured)
    assert calibration_store.load(H100) == measured
    assert calibration_store.load(registry.by_name("H200")) is None
    assert calibration_store.load(replace(H100, cudnn=92600)) is None  # another cuDNN is another kernel


def test_what_was_not_measured_stays_as_it_was() -> None:
    measured = Calibration(
        facts(H100),
        matmul_gflops={"bfloat16": 700e3},
        memory_gbytes=2900.0,
        shares={"cudnn": {"prefill": 0.8, "one_row": 0.4}, "flash_attn_3": {"prefill": 0.7}, "odd": {"narrow": 0.5}},
    )
    device = with_calibration(H100, measured)
    assert device.is_calibrated and not H100.is_calibrated and not device.is_measured
    assert (device.matmul(BF16), device.matmul(FP32)) == (700e3, H100.matmul(FP32))
    assert (device.memory_gbytes, device.cache_gbytes) == (2900.0, H100.cache_gbytes)
    assert device.shares["cudnn"] == replace(H100.shares["cudnn"], prefill=0.8, one_row=0.4)
    assert device.shares["flash"] == H100.shares["flash"]
    assert device.shares["flash_attn_3"] == replace(H100.shares["flash_attn_3"], prefill=0.7)
    assert "odd" not in device.shares
    assert [device.knows(k) for k in ("cudnn", "flash_attn_3", "flash", "odd")] == [True, True, False, False]


def test_the_cpu_is_measured_and_a_gpu_of_the_catalogue_is_not() -> None:
    assert cpu().knows("cpu flash") and not cpu().is_calibrated
    assert not any(registry.by_name(name).is_measured for name in registry.names())


def test_the_cpu_of_this_machine_is_decided_for_as_it_was_measured() -> None:
    def attention(q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT).softmax(-1) @ q

    def outcome() -> str:
        with torch.no_grad():
            report = attn_pass.explain(attention, torch.randn(2, 4, 128, 64), attn_pass_options={"targets": ("sdpa",)})
        return report.sites[0].outcome

    assert device_for(torch.device("cpu")) == cpu()
    assert outcome() == "rewritten"
    calibration_store.save(Calibration(facts(cpu()), fused_op_us=1e6))  # a call of the fused operator takes a second
    assert device_for(torch.device("cpu")) == replace(cpu(), fused_op_us=1e6, is_calibrated=True)
    assert outcome() == "left"


def test_a_gpu_that_is_here_is_decided_for_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    bare = cuda_facts.cuda_here()
    assert device_for(torch.device("cuda")) == bare
    calibration_store.save(Calibration(facts(bare), shares={"cudnn": {"prefill": 0.9}}))
    here = device_for(torch.device("cuda"))
    assert here.is_calibrated and here.knows("cudnn") and here.shares["cudnn"].prefill == 0.9
    assert not device_for(torch.device("cpu"), "H100").is_calibrated  # asked for by name, it need not be this one


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda record: [record],
    "an unknown field": lambda record: record | {"speed": 1.0},
    "no facts": lambda record: {k: v for k, v in record.items() if k != "facts"},
    "facts of another version": lambda record: record | {"facts": record["facts"] | {"torch": "1.0"}},
    "text for a rate": lambda record: record | {"op_us": "3"},
    "a negative rate": lambda record: record | {"op_us": -3.0},
    "no number": lambda record: record | {"memory_gbytes": float("nan")},
    "an endless rate": lambda record: record | {"shares": {"cudnn": {"prefill": float("inf")}}},
    "an unknown dtype": lambda record: record | {"matmul_gflops": {"matmul": 1.0}},
    "an unknown share": lambda record: record | {"shares": {"cudnn": {"backward": 0.5}}},
    "shares as a number": lambda record: record | {"shares": {"cudnn": 0.5}},
}


@pytest.mark.parametrize("broken", list(BROKEN.values()), ids=list(BROKEN))
def test_a_record_that_is_none_is_not_used(broken: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    calibration_store.save(Calibration(facts(H100), {"bfloat16": 700e3}, op_us=3.0, shares={"cudnn": {"prefill": 0.8}}))
    (file,) = folder.iterdir()
    record = json.loads(file.read_text())
    assert calibration_store.applied(H100).is_calibrated
    file.write_text(json.dumps(broken(record)))
    assert calibration_store.applied(H100) is H100


def test_a_rate_that_is_none_is_not_saved() -> None:
    with pytest.raises(ValueError, match="op_us is 0"):
        Calibration(facts(H100), op_us=0.0)


def test_what_inductor_caches_was_decided_with_one_calibration() -> None:
    from attn_pass.entries.hook import RewritePass
    from attn_pass.options import make_options

    before = RewritePass(make_options()).uuid()
    assert RewritePass(make_options()).uuid() == before
    calibration_store.save(Calibration(facts(cpu()), op_us=7.0))
    assert RewritePass(make_options()).uuid() != before


PREFILL = Problem(4, 32, 4, 32, 4096, 4096, 128, 128, BF16)
NARROW = replace(PREFILL, head_dim=64, value_dim=64)
WIDE = replace(PREFILL, head_dim=256, value_dim=256)
ROW = Problem(64, 32, 64, 8, 1, 32768, 128, 128, BF16)
ONE_EACH = replace(ROW, kv_heads=32)  # the efficient kernel does not take grouped heads
ROWS = replace(ROW, q_len=8)


def _us(kernel: str, device: Device, problem: Problem) -> float:
    (own,) = (k for k in KERNELS if k.name == kernel)
    return own.microseconds(device, problem)


CALLS: dict[str, tuple[str, str, Callable[[Device], float]]] = {
    "cudnn, prefill": ("cudnn", "prefill", lambda d: _us("cudnn", d, PREFILL)),
    "flash, head dim 64": ("flash", "narrow", lambda d: _us("flash", d, NARROW)),
    "cudnn, head dim 256": ("cudnn", "wide", lambda d: _us("cudnn", d, WIDE)),
    "cudnn, one row": ("cudnn", "one_row", lambda d: _us("cudnn", d, ROW)),
    "efficient, one row": ("efficient", "one_row", lambda d: _us("efficient", d, ONE_EACH)),
    "decode, one row": ("decode", "one_row", lambda d: _us("decode", d, ROW)),
    "decode, 8 rows": ("decode", "few_rows", lambda d: _us("decode", d, ROWS)),
    "flex, prefill": ("flex", "prefill", lambda d: cost_cuda.flex(d, PREFILL, 0.5)),
    "flex, 8 rows": ("flex", "few_rows", lambda d: cost_cuda.flex(d, ROWS, 1.0, splits_keys=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fitted_share_predicts_what_was_measured(name: str) -> None:
    kernel, share, predict = CALLS[name]
    for times in (0.9, 1.7):
        measured = times * predict(H100)
        fit = fitted(H100, kernel, share, predict, measured)
        device = with_calibration(H100, Calibration(facts(H100), shares={kernel: {share: fit}}))
        assert predict(device) == pytest.approx(measured, rel=1e-3)
        assert asdict(device.shares[kernel])[share] != asdict(H100.shares[kernel])[share]


def test_a_time_no_share_explains_gives_the_end_of_the_range() -> None:
    kernel, share, predict = CALLS["cudnn, prefill"]
    assert fitted(H100, kernel, share, predict, 1e12) == pytest.approx(0.001, rel=1e-2)
    assert fitted(H100, kernel, share, predict, 0.01) == pytest.approx(2.0, rel=1e-2)

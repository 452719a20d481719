"""Where the rates come from that a decision was made with: told once a device, in the table, the JSON and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_pass
from attn_pass.cli import doctor
from attn_pass.devices import calibration_store
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.cpu import facts
from attn_pass.devices.registry import facts as valid_for
from attn_pass.report.record import Report
from attn_pass.tuning import disk_cache

MEASURED = "measured on a processor with the same instruction set"


def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for scale in (0.125, 0.25):
        q = (q @ k.mT * scale).softmax(-1) @ v
    return q


def explained(**options: Any) -> Report:
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(two, *torch.randn(3, 1, 4, 64, 32), attn_pass_options=options)


def origin(report: Report) -> str:
    """That of the one device, which the table says once."""
    ((device, text),) = report.rates_from.items()
    assert str(report).splitlines().count(f"rates of {device}: {text}") == 1 and len(report.sites) == 2
    return text


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))


def uncalibrated() -> str:
    return next(finding.note for finding in doctor.calibrations() if finding.what == "calibration of cpu")


@pytest.mark.parametrize("instructions", ["avx512", "avx512_bf16", "avx512_fp16", "amx", "avx2"])
def test_a_processor_of_a_kind_that_was_measured(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "instruction_set", lambda: instructions)
    assert origin(explained()) == f"{MEASURED} ({instructions})" and f"{MEASURED} ({instructions})" in uncalibrated()


def test_a_processor_of_no_such_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "instruction_set", lambda: "plain")
    told = origin(explained())
    assert told.startswith("those of another processor, with AVX-512; none with this instruction set (plain)")
    assert told in uncalibrated()


@pytest.mark.parametrize("instructions", ["avx512", "plain"])
def test_a_processor_that_was_calibrated(instructions: str, monkeypatch: pytest.MonkeyPatch, records: None) -> None:
    monkeypatch.setattr(facts, "instruction_set", lambda: instructions)
    calibration_store.save(Calibration(valid_for(facts.cpu()), op_us=7.0))
    assert origin(explained()) == "calibrated on this machine"


@pytest.mark.parametrize(
    ("device", "sheet"),
    [
        *(("MI300X", "MI300X"), ("Arc B580", "Arc B580"), ("M4", "M4"), ("H100", "H100"), ("v5e", "TPU v5e")),
        *(("Ascend910B3", "Ascend 910B"), ("Graviton4", "Neoverse V2")),
    ],
)
def test_devices_of_data_sheets(device: str, sheet: str) -> None:
    told = origin(explained(device=device))
    assert told.startswith("data sheets") and f"({sheet})" in told and told.endswith("not measured")


def test_a_device_of_which_some_kernels_were_measured() -> None:
    told = origin(explained(device="H200"))
    assert told.startswith("measured on an H200 (cudnn, flash, efficient; docs/results/gpu-nvidia-h200.md)")
    assert told.endswith("data sheets and published figures for the rest")


def test_an_apple_gpu_that_is_not_listed_has_the_nearest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M1", raising=False)
    assert explained(device="mps").rates_from == {"Apple M1": "data sheets and published figures (M4), not measured"}


@pytest.mark.parametrize("runtime", ["onnx", "executorch"])
def test_runtimes_have_a_processors(runtime: str) -> None:
    assert origin(explained(runtime=runtime)) == "those of another processor, with AVX-512"


def test_it_is_in_the_json_and_on_the_page() -> None:
    report = explained()
    told = json.loads(report.to_json())["rates_from"]
    assert told == report.rates_from == {report.sites[0].rates["device"]: f"{MEASURED} (avx512)"}
    assert Report.from_dict(report.to_dict()).rates_from == told
    (device,) = told
    page = report.to_html()
    assert page.count(f"rates of {device}: {MEASURED} (avx512)") == 1


def test_each_device_of_a_report_has_its_own() -> None:
    report = explained()
    report.extend(explained(device="M4"))
    assert len(report.rates_from) == 2 and sum(line.startswith("rates of ") for line in str(report).splitlines()) == 2


def test_nothing_is_told_where_nothing_was_decided() -> None:
    report = attn_pass.explain(torch.relu, torch.randn(4))
    assert report.rates_from == {} and "rates of" not in str(report) and "rates of" not in report.to_html()


def test_a_stored_report_cannot_reach_the_terminal() -> None:
    report = explained()
    report.sites[0].rates["from"] = "\x1b[2Jdata sheets"
    assert "\x1b" not in str(report)

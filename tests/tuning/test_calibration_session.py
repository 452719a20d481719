"""``attn-pass calibrate``: stored and used from then on, refused on a busy machine, shown by doctor, discarded."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_events import Event
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.devices.cpu import probes as cpu
from attn_pass.devices.cuda.clock import EventClock
from attn_pass.devices.registry import device_for
from attn_pass.tuning import clock, disk_cache
from attn_pass.tuning.calibration_session import calibrate
from attn_pass.tuning.clock import Reading

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))


def _reading(monkeypatch: pytest.MonkeyPatch, spread: float, us: float = 50.0) -> None:
    def readings(seconds: float) -> Iterator[tuple[cpu.Probe, Reading]]:
        for probe in cpu.PROBES:
            yield probe, Reading(us, spread)

    monkeypatch.setattr(cpu, "readings", readings)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", "--device", "cpu", *args])


def reported() -> dict[str, Any]:
    document = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (finding,) = (f for f in document["machine"] if f["what"] == "calibration of cpu")
    return dict(finding)


def test_a_calibration_replaces_the_built_in_rates_until_it_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _reading(monkeypatch, spread=0.05)
    before = device_for(CPU)
    result = run()
    assert result.exit_code == 0 and "Kept" in result.stdout and "5% apart" in result.stdout
    after = device_for(CPU)
    assert after.is_calibrated and after.op_us == pytest.approx(50.0 * 6.0 / 1.4)
    assert run("--forget").stdout == "cpu: forgotten\n"
    assert device_for(CPU) == before
    assert run("--forget").stdout == "cpu: nothing was measured of it\n"


def test_on_a_busy_machine_nothing_is_kept_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _reading(monkeypatch, spread=0.6)
    result = run()
    assert result.exit_code == 1
    assert "The machine was busy" in result.stdout and "Nothing was kept" in result.stdout
    assert not device_for(CPU).is_calibrated
    result = run("--keep-if-busy")
    assert result.exit_code == 0 and "The machine was busy" in result.stdout
    assert device_for(CPU).is_calibrated


def test_the_doctor_says_when_and_for_which_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    _reading(monkeypatch, spread=0.05)
    assert reported()["found"] == "" and "attn-pass calibrate --device cpu" in reported()["note"]
    run()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", reported()["found"])
    assert f"torch {torch.__version__}" in reported()["note"] and "differ by 5%" in reported()["note"]


def test_json_has_every_constant_with_its_built_in_value(monkeypatch: pytest.MonkeyPatch) -> None:
    _reading(monkeypatch, spread=0.6)
    result = run("--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["busy"] and not document["kept"]
    assert {row["name"] for row in document["constants"]} == {probe.name for probe in cpu.PROBES}
    assert all(row["taken_for"] and row["measured"] for row in document["constants"])


@pytest.mark.parametrize("name", ["cuda:0", "meta", "H100"])
def test_a_device_that_is_not_here_is_refused_in_a_sentence(name: str) -> None:
    if name.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["calibrate", "--device", name])
    assert result.exit_code == 2 and name in result.stderr and "cpu" in result.stderr.lower()


def test_real_readings_of_small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(p for p in cpu.PROBES if p.constant in ("op_us", "kernel_us", "exp_gops"))
    monkeypatch.setattr(cpu, "PROBES", few)
    assert run("--seconds", "0.3", "--keep-if-busy").exit_code == 0
    device = device_for(CPU)
    assert 0.1 < device.op_us < 1e4 and 1e-3 < device.exp_gops < 1e3


# ---------------------------------------------------------------- the clock


def test_a_gpus_calls_are_queued_behind_a_sleeping_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    reading = clock.read(lambda: done.append("call"), EventClock(), block_s=1e-6)
    assert done[:5] == ["call", "wait", "sleep", "call", "wait"]
    assert done.count("sleep") == 1 + clock.ROUNDS and reading.host_us is not None


def test_a_block_that_was_queued_too_late_is_timed_again_behind_a_longer_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []

    class Late(Event):
        def query(self) -> bool:
            """The host needs as long as 5 million cycles."""
            return slept[-1] < 5_000_000

    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    EventClock().block_us(lambda: None, 3)
    assert slept == [2_000_000, 8_000_000]
    slept.clear()
    monkeypatch.setattr(Late, "query", lambda self: True)  # a queue that is too short
    EventClock().block_us(lambda: None, 3)
    assert slept[-1] == 1 << 26 and len(slept) == 4


def test_readings_that_differ_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    waits = iter([0.0, 0.0] + [0.002, 0.05] * 10)
    reading = clock.read(lambda: time.sleep(next(waits)), clock.Clock(), block_s=0.0)
    assert 1900 < reading.us < 45_000 and reading.spread > 0.5


def test_with_one_thread_other_load_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert clock.read(lambda: time.sleep(0.01), clock.Clock(), block_s=0.0).us < 5000


def test_what_could_not_be_stored_was_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv(disk_cache.VARIABLE, str(blocked))
    disk_cache._warn_once.cache_clear()
    _reading(monkeypatch, 0.0)
    with pytest.warns(attn_pass.AttnPassWarning, match="could not be stored"):
        outcome = calibrate(CPU, 0.1, lambda *_: None)
    assert not outcome.kept


def test_processors_with_other_instructions_do_not_share_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    family = importlib.import_module("attn_pass.devices.cpu.family")
    facts = set()
    for instructions, amd in (("avx512", False), ("amx", False), ("avx512_bf16", True), ("avx512", True)):
        monkeypatch.setattr(family, "instruction_set", lambda name=instructions: name)
        monkeypatch.setattr(family, "is_amd", lambda made_by=amd: made_by)
        facts.add(family.FAMILY.facts(device_for(CPU)))
    assert len(facts) == 4

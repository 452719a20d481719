"""Whatever fails inside attn_pass, the compile goes on: right numbers, the site left, one warning with its line."""

from __future__ import annotations

import importlib
import json
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv

import attn_pass
from attn_pass import store
from attn_pass.errors import AttnPassWarning
from attn_pass.planner import tune

Tensor = torch.Tensor
FAILURES: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, RecursionError, KeyError, AssertionError)


def two_sites(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = (q @ k.mT * 0.3).softmax(-1) @ v
    return torch.nn.functional.scaled_dot_product_attention(q, k, first)


def compiled_with(**options: Any) -> tuple[attn_pass.Report, list[warnings.WarningMessage]]:
    """Compiles and runs two sites; the numbers must be eager's."""
    inputs = qkv(2, 3, 9, 9, 8)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", **options)
    with attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(two_sites, backend=backend)(*inputs)
    torch.testing.assert_close(found, two_sites(*inputs))
    return report, [w for w in caught if issubclass(w.category, AttnPassWarning)]


# Every stage, as module, name, and what becomes of the two sites if it fails once: how many are rewritten, and whether
# the warning can name a line.
STAGES: dict[str, tuple[str, str, bool]] = {
    "finding effects": ("attn_pass.engine", "Effects", False),
    "finding regions": ("attn_pass.engine", "Regions", False),
    "finding calls": ("attn_pass.patterns.calls", "find", False),
    "finding softmaxes": ("attn_pass.patterns.softmax", "find", False),
    "finding flash-attn's calls": ("attn_pass.patterns.flash_attn_calls", "find", False),
    "finding composite calls": ("attn_pass.patterns.composite", "find", False),
    "describing": ("attn_pass.patterns.softmax", "describe", True),
    "naming masks": ("attn_pass.reading.describe", "name_mask", True),
    "variants": ("attn_pass.engine", "variants", True),
    "choosing": ("attn_pass.engine", "choose", True),
    "lengths": ("attn_pass.engine", "lengths", True),
    "the device": ("attn_pass.engine", "device_for", True),
    "planning": ("attn_pass.engine", "Plan", True),
    "source lines": ("attn_pass.engine", "source_line", False),
    "module paths": ("attn_pass.engine", "module_path", False),
    "the record": ("attn_pass.engine", "SiteReport", False),
    "bodies": ("attn_pass.engine", "bodies", False),
}


@pytest.mark.parametrize(
    ("stage", "failure"),
    [(stage, RuntimeError) for stage in STAGES]
    + [(stage, kind) for stage in ("describing", "choosing", "finding effects") for kind in FAILURES[1:]],
)
def test_a_stage_that_fails(stage: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, named = STAGES[stage]

    def fails(*_: Any, **__: Any) -> Any:
        raise failure("put in on purpose")

    monkeypatch.setattr(importlib.import_module(module), name, fails)
    report, told = compiled_with()
    assert told, "a failure that nobody is told of"
    assert any("put in on purpose" in str(w.message) or failure.__name__ in str(w.message) for w in told)
    left = [s for s in report.sites if s.outcome == "left"]
    assert len({str(w.message) for w in told}) == len(told) <= 2
    if named:
        assert left and all("test_faults.py:" in str(w.message) for w in told)


@pytest.mark.parametrize("method", ["consider", "emit"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_target_that_fails(method: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.targets.sdpa import Sdpa

    def fails(*_: Any, **__: Any) -> Any:
        raise failure("put in on purpose")

    monkeypatch.setattr(Sdpa, method, fails)
    report, told = compiled_with()
    assert all(s.outcome == "left" and "put in on purpose" in s.reason for s in report.sites)
    assert 1 <= len(told) <= 2 and all("test_faults.py:" in str(w.message) for w in told)


def test_one_site_that_fails_concerns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass import engine

    choose, calls = engine.choose, []

    def fails_first(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("put in on purpose")
        return choose(*args, **kwargs)

    monkeypatch.setattr(engine, "choose", fails_first)
    report, told = compiled_with()
    assert [s.outcome for s in report.sites] == ["left", "rewritten"] or len(report.sites) == 2
    assert len(told) == 1


def test_keyboard_interrupts_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass import engine

    def stops(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "choose", stops)
    with pytest.raises(KeyboardInterrupt):
        compiled_with()


# ---------------------------------------------------------------- the tuner


def _times_out(*args: Any, **kwargs: Any) -> Any:
    raise subprocess.TimeoutExpired("python", 300.0)


def _cannot_start(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no more processes")


def _killed(*args: Any, **kwargs: Any) -> Any:
    return subprocess.CompletedProcess(args, -9, "", "Killed\n")


def _out_of_memory(*args: Any, **kwargs: Any) -> Any:
    return subprocess.CompletedProcess(args, 1, "", "...\nMemoryError: cannot allocate\n")


def _nonsense(*args: Any, **kwargs: Any) -> Any:
    return subprocess.CompletedProcess(args, 0, "no JSON\n", "")


def _silent(*args: Any, **kwargs: Any) -> Any:
    return subprocess.CompletedProcess(args, 0, "", "")


def _all_failed(*args: Any, **kwargs: Any) -> Any:
    told = json.dumps({"us": {}, "failed": {"leave": "RuntimeError: x"}})
    return subprocess.CompletedProcess(args, 0, told + "\n", "")


WORKERS: dict[str, tuple[Callable[..., Any], str]] = {
    "late": (_times_out, "took more than 300 s"),
    "not started": (_cannot_start, "no worker process could be started"),
    "killed": (_killed, "ended with -9"),
    "out of memory": (_out_of_memory, "MemoryError"),
    "nonsense": (_nonsense, "said what is no result"),
    "silent": (_silent, "said what is no result"),
    "all forms failed": (_all_failed, "RuntimeError: x"),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_that_fails(worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    run, words = WORKERS[worker]
    monkeypatch.setattr(tune.subprocess, "run", run)
    torch._dynamo.reset()
    inputs = qkv(2, 3, 9, 9, 8)
    with attn_pass.record() as report, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", AttnPassWarning)
        found = torch.compile(two_sites, backend=attn_pass.wrap("aot_eager", tune=True))(*inputs)
    torch.testing.assert_close(found, two_sites(*inputs))
    assert len(report.sites) == 2 and all("the model decides" in s.reason and words in s.reason for s in report.sites)
    if worker != "all forms failed":
        assert not list(tmp_path.iterdir()), "a failure must not be remembered"


# ---------------------------------------------------------------- the disk cache


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2", b"null"])
def test_a_torn_file_is_no_record(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    (tmp_path / "key.json").write_bytes(content)
    assert store.load("key") is None
    store.save("key", {"us": {}})
    assert store.load("key") == {"us": {}}


@pytest.mark.parametrize("record", ["[1]", '"text"', '{"us": 3, "failed": {}}', '{"us": {"leave": "x"}}', "{}"])
def test_a_record_of_another_shape_is_measured_again(
    record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune.store, "load", lambda key: json.loads(record))
    monkeypatch.setattr(tune, "_run", lambda job, program: {"us": {n: [1.0] for n in job["labels"]}, "failed": {}})
    torch._dynamo.reset()
    with attn_pass.record() as report, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", AttnPassWarning)
        torch.compile(two_sites, backend=attn_pass.wrap("aot_eager", tune=True))(*qkv(2, 3, 9, 9, 8))
    assert all(s.measured_us for s in report.sites)


def test_many_writers_leave_a_whole_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    wrong: list[Any] = []

    def write(number: int) -> None:
        for turn in range(60):
            store.save("key", {"writer": number, "turn": turn, "filling": "x" * 4000})
            found = store.load("key")
            if found is None or len(found["filling"]) != 4000:
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and [p.name for p in tmp_path.iterdir()] == ["key.json"]


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path / "file" / "below"))
    store.save("key", {})
    assert store.load("key") is None

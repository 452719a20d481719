"""If anything fails inside attn_pass, the compile continues: right results, the site left, one warning."""

from __future__ import annotations

import importlib
import json
import os
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
from attn_pass.compat import TORCH_VERSION
from attn_pass.errors import AttnPassWarning
from attn_pass.tuning import disk_cache, tuner

Tensor = torch.Tensor
FAILURES: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, RecursionError, KeyError, AssertionError)


def two_sites(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = (q @ k.mT * 0.3).softmax(-1) @ v
    return torch.nn.functional.scaled_dot_product_attention(q, k, first)


def compiled_with(**options: Any) -> tuple[attn_pass.Report, list[warnings.WarningMessage]]:
    """Compiles and runs two sites; the numbers must be eager's."""
    inputs = qkv(2, 3, 9, 9, 8)
    torch._dynamo.reset()
    backend = attn_pass.wrap("eager", choose="fused", **options)
    with attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.compile(two_sites, backend=backend)(*inputs)
    torch.testing.assert_close(result, two_sites(*inputs))
    return report, [w for w in caught if issubclass(w.category, AttnPassWarning)]


# Every stage, as module, name, and what becomes of the two sites if it fails once: how many are rewritten, and whether
# the warning can name a line.
STAGES: dict[str, tuple[str, str, bool]] = {
    "what is known": ("attn_pass.entries.transaction", "known_buffers", False),
    "finding effects": ("attn_pass.rewriting.context", "Effects", False),
    "finding regions": ("attn_pass.rewriting.context", "Regions", False),
    "finding calls": ("attn_pass.patterns.calls", "find", False),
    "finding softmaxes": ("attn_pass.patterns.softmax", "find", False),
    "finding flash-attn's calls": ("attn_pass.devices.cuda.flash_attn_calls", "find", False),
    "taking calls apart": ("attn_pass.patterns.composite", "take_apart", False),
    "describing": ("attn_pass.patterns.softmax", "describe", True),
    "naming masks": ("attn_pass.reading.masked_scores", "name_mask", True),
    "variants": ("attn_pass.rewriting.decision", "variants", True),
    "choosing": ("attn_pass.rewriting.decision", "choose", True),
    "lengths": ("attn_pass.rewriting.decision", "lengths", True),
    "the device": ("attn_pass.rewriting.run", "device_for", True),
    "planning": ("attn_pass.rewriting.emission", "Plan", True),
    "source lines": ("attn_pass.report.build", "source_line", False),
    "module paths": ("attn_pass.report.build", "module_path", False),
    "the record": ("attn_pass.report.build", "SiteReport", False),
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
    report, reported = compiled_with()
    assert reported, "a failure that is not reported"
    assert any("put in on purpose" in str(w.message) or failure.__name__ in str(w.message) for w in reported)
    left = [s for s in report.sites if s.outcome == "left"]
    assert len({str(w.message) for w in reported}) == len(reported) <= 2
    if named:
        assert left and all("test_faults.py:" in str(w.message) for w in reported)


@pytest.mark.parametrize("method", ["consider", "emit"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_target_that_fails(method: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.targets.sdpa import Sdpa

    def fails(*_: Any, **__: Any) -> Any:
        raise failure("put in on purpose")

    monkeypatch.setattr(Sdpa, method, fails)
    report, reported = compiled_with()
    assert all(s.outcome == "left" and "put in on purpose" in s.reason for s in report.sites)
    assert 1 <= len(reported) <= 2 and all("test_faults.py:" in str(w.message) for w in reported)


def test_one_site_that_fails_concerns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.rewriting import decision

    choose, calls = decision.choose, []

    def fails_first(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("put in on purpose")
        return choose(*args, **kwargs)

    monkeypatch.setattr(decision, "choose", fails_first)
    report, reported = compiled_with()
    assert sorted(s.outcome for s in report.sites) == ["left", "rewritten"]
    assert len(reported) == 1


def test_keyboard_interrupts_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.rewriting import decision

    def stops(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(decision, "choose", stops)
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
    reported = json.dumps({"us": {}, "failed": {"leave": "RuntimeError: x"}})
    return subprocess.CompletedProcess(args, 0, reported + "\n", "")


WORKERS: dict[str, tuple[Callable[..., Any], str]] = {
    "late": (_times_out, "took more than 300 s"),
    "not started": (_cannot_start, "no worker process could be started"),
    "killed": (_killed, "ended with -9"),
    "out of memory": (_out_of_memory, "MemoryError"),
    "nonsense": (_nonsense, "returned an invalid result"),
    "silent": (_silent, "returned an invalid result"),
    "all forms failed": (_all_failed, "RuntimeError: x"),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_that_fails(worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    run, words = WORKERS[worker]
    monkeypatch.setattr(tuner.subprocess, "run", run)
    torch._dynamo.reset()
    inputs = qkv(2, 3, 9, 9, 8)
    with attn_pass.record() as report, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", AttnPassWarning)
        result = torch.compile(two_sites, backend=attn_pass.wrap("aot_eager", tune=True))(*inputs)
    torch.testing.assert_close(result, two_sites(*inputs))
    assert len(report.sites) == 2 and all(
        "the prediction decides" in s.reason and words in s.reason for s in report.sites
    )
    if worker != "all forms failed":
        assert not list(tmp_path.iterdir()), "a failure must not be remembered"


# ---------------------------------------------------------------- the disk cache


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2", b"null"])
def test_a_damaged_file_is_not_a_record(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    (tmp_path / "key.json").write_bytes(content)
    assert disk_cache.load("key") is None
    disk_cache.save("key", {"us": {}})
    assert disk_cache.load("key") == {"us": {}}


@pytest.mark.parametrize("record", ["[1]", '"text"', '{"us": 3, "failed": {}}', '{"us": {"leave": "x"}}', "{}"])
def test_a_record_of_another_shape_is_measured_again(
    record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner.disk_cache, "load", lambda key: json.loads(record))
    monkeypatch.setattr(tuner, "_run", lambda job, program: {"us": {n: [1.0] for n in job["labels"]}, "failed": {}})
    torch._dynamo.reset()
    with attn_pass.record() as report, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", AttnPassWarning)
        torch.compile(two_sites, backend=attn_pass.wrap("aot_eager", tune=True))(*qkv(2, 3, 9, 9, 8))
    assert len(report.sites) == 2 and all(s.measured_us for s in report.sites)


def test_many_writers_leave_a_whole_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    wrong: list[Any] = []

    def write(number: int) -> None:
        for turn in range(60):
            disk_cache.save("key", {"writer": number, "turn": turn, "filling": "x" * 4000})
            entry = disk_cache.load("key")
            if entry is None or len(entry["filling"]) != 4000:
                wrong.append(entry)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and [p.name for p in tmp_path.iterdir()] == ["key.json"]


def test_a_folder_that_cannot_be_written_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path / "file" / "below"))
    disk_cache.save("key", {})
    assert disk_cache.load("key") is None


def test_a_missing_home_folder_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTN_PASS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where no home folder is known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disk_cache.save("key", {})
    assert disk_cache.load("key") is None and not Path("~").exists()


def test_a_record_that_cannot_be_put_in_place_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    (tmp_path / "key.json" / "below").mkdir(parents=True)
    disk_cache.save("key", {})
    assert [p.name for p in tmp_path.iterdir()] == ["key.json"]


# ---------------------------------------------------------------- an error leaves the program whole


class _Twice(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        first = (q @ q.mT).softmax(-1) @ q
        with torch.fx.traceback.annotate({"attn_pass": "nonsense"}):
            return (first @ first.mT).softmax(-1) @ first


def test_an_option_error_at_a_later_site_leaves_the_program_as_it_was() -> None:
    program = torch.export.export(_Twice(), (torch.randn(1, 2, 9, 8),), strict=True)
    before = program.graph_module.code
    with pytest.raises(attn_pass.errors.OptionError, match="nonsense"):
        attn_pass.rewrite(program, choose="fused")
    program.graph_module.recompile()
    assert program.graph_module.code == before


def test_a_failure_that_is_raised_leaves_the_program_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.rewriting import decision

    program = torch.export.export(_Twice(), (torch.randn(1, 2, 9, 8),), strict=False)
    before, choose, calls = program.graph_module.code, decision.choose, []

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("put in on purpose")
        return choose(*args, **kwargs)

    monkeypatch.setattr(decision, "choose", fails_later)
    with pytest.raises(RuntimeError, match="on purpose"):
        attn_pass.rewrite(program, choose="fused", on_error="raise")
    program.graph_module.recompile()
    assert program.graph_module.code == before


# ---------------------------------------------------------------- what is odd is no fault


@pytest.mark.parametrize("shape", [(0, 3, 9, 8), (2, 0, 9, 8), (2, 3, 0, 8), (2, 3, 9, 0)])
def test_empty_calls_are_left_in_peace(shape: tuple[int, ...]) -> None:
    if not shape[1] and TORCH_VERSION < (2, 13):
        pytest.skip("this torch divides by the number of heads, in eager too, and dies")
    x = torch.randn(shape)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    with attn_pass.record() as report:
        result = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend=backend)(x, x, x)
    assert result.shape == shape and [s.outcome for s in report.sites] == ["left"]


def test_strides_that_cannot_be_kept_are_a_reason() -> None:
    def rows(x: Tensor) -> Tensor:
        assert x.shape[1] % 8 == 0
        y = x.view(x.shape[0], x.shape[1] // 8, 8, x.shape[2])
        return (y @ y.mT).softmax(-1) @ y

    x = torch.randn(2, 64, 8)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    with attn_pass.record() as report:
        torch.testing.assert_close(torch.compile(rows, backend=backend, dynamic=True)(x), rows(x))
    assert "internal error" not in report.sites[0].reason

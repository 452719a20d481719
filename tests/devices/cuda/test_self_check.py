"""The decode kernel's check on first use: what it detects, how long its answer is cached, and who calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from against_eager import qkv

pytest.importorskip("triton")

from checked_kernels import MISTAKES, RIGHT

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda import self_check
from attn_pass.devices.cuda.decode import Decode
from attn_pass.devices.cuda.decode_operator import Inputs, reference_with_lse
from attn_pass.tuning import disk_cache

CPU = torch.device("cpu")
Results = tuple[torch.Tensor, torch.Tensor]
ROOT = Path(__file__).parents[3]


def test_every_mistake_in_the_kernel_is_seen() -> None:
    """The kernel itself, under Triton's interpreter, and copies of it with one mistake each."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])}
    line = [sys.executable, str(Path(__file__).with_name("checked_kernels.py"))]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    assert document.pop(RIGHT) is None
    assert set(document) == set(MISTAKES) and all(document.values()), document


class Kernel:
    """In the place of the operator: the reference, wrong by so much, counted."""

    def __init__(self, off: float = 0.0, error: Exception | None = None) -> None:
        self.off, self.error, self.calls = off, error, 0

    def __call__(self, inputs: Inputs) -> Results:
        self.calls += 1
        assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")
        assert type(inputs.query) is torch.Tensor and inputs.query.device == CPU
        if self.error is not None:
            raise self.error
        out, lse = reference_with_lse(inputs)
        return out + self.off, lse


@pytest.fixture(autouse=True)
def nothing_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has checked nothing, with a disk of its own."""
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(self_check, "_KNOWN", {})
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> Kernel:
    monkeypatch.setattr(self_check, "operator", kernel)
    return kernel


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_KNOWN", {})


def test_a_right_kernel_is_run_once(monkeypatch: pytest.MonkeyPatch, nothing_checked: Path) -> None:
    kernel = use(monkeypatch, Kernel())
    assert self_check.failure(CPU) is None and self_check.failure(CPU) is None
    assert kernel.calls == len(self_check.CASES) == 7
    (record,) = nothing_checked.glob("*.json")
    assert json.loads(record.read_text())["failure"] is None
    another_process(monkeypatch)
    assert self_check.failure(CPU) is None and kernel.calls == 7


def test_the_operator_itself_is_run() -> None:
    assert self_check.failure(CPU) is None


def test_a_wrong_kernel_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(monkeypatch, Kernel(off=0.1))
    why = self_check.failure(CPU)
    assert why is not None and "grouped heads: the result is off by 0.1" in why
    another_process(monkeypatch)
    assert self_check.failure(CPU) == why and kernel.calls == 1


def test_a_kernel_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Kernel(error=RuntimeError("no such instruction\nline 2")))
    assert self_check.failure(CPU) == "RuntimeError: no such instruction"


def test_lack_of_memory_is_forgotten_with_the_process(monkeypatch: pytest.MonkeyPatch, nothing_checked: Path) -> None:
    kernel = use(monkeypatch, Kernel(error=torch.OutOfMemoryError("CUDA out of memory")))
    assert self_check.failure(CPU) == "CUDA out of memory"
    assert not list(nothing_checked.glob("*.json"))
    another_process(monkeypatch)
    kernel.error = None
    assert self_check.failure(CPU) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [("_digest", "another kernel"), ("_triton", "3.0.0"), ("torch", "2.99.0")],
)
def test_another_version_is_checked_again(monkeypatch: pytest.MonkeyPatch, name: str, other: str) -> None:
    kernel = use(monkeypatch, Kernel())
    assert self_check.failure(CPU) is None
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", other)
    else:
        monkeypatch.setattr(self_check, name, lambda: other)
    assert self_check.failure(CPU) is None
    assert kernel.calls == 14


def test_an_invalid_record_is_measured_again(monkeypatch: pytest.MonkeyPatch, nothing_checked: Path) -> None:
    kernel = use(monkeypatch, Kernel())
    self_check.failure(CPU)
    (record,) = nothing_checked.glob("*.json")
    for text in ("[]", "{}", '{"failure": 3}', "half of"):
        record.write_text(text)
        another_process(monkeypatch)
        assert self_check.failure(CPU) is None
    assert kernel.calls == 35


def test_threads_wait_for_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(monkeypatch, Kernel())
    answers: list[str | None] = []
    threads = [threading.Thread(target=lambda: answers.append(self_check.failure(CPU))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [None] * 4 and kernel.calls == 7


def test_it_runs_on_real_tensors_in_the_middle_of_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Kernel` asserts that nothing of the thread that asks is seen: fake tensors, autocast, a default device."""
    from torch._subclasses import FakeTensorMode

    kernel = use(monkeypatch, Kernel())
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert self_check.failure(CPU) is None
    assert kernel.calls == 7


def test_nothing_is_run_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(monkeypatch, Kernel(off=1.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert self_check.failure(torch.device("cuda", 0)) is None and kernel.calls == 0


def decided(monkeypatch: pytest.MonkeyPatch, *, here: bool) -> attn_pass.SiteReport:
    """The report of one attention, decided for an H100 that is here, or known from its data sheet."""
    h100 = replace(registry.by_name("H100"), is_here=here)
    monkeypatch.setattr(registry, "named", lambda name: h100)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    inputs = qkv(1, 2, 2, 40, 64, dtype=torch.float16)
    options = {"device": "H100", "targets": ("decode",), "choose": "fused"}
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(fn, *inputs, attn_pass_options=options).sites[0]


def test_the_target_refuses_on_a_gpu_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(monkeypatch, Kernel(off=0.5))
    site = decided(monkeypatch, here=True)
    assert kernel.calls == 1 and "failed its check on this device: grouped heads" in site.refusals[Decode.name]


def test_the_target_offers_where_it_passed_and_asks_nothing_of_a_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(monkeypatch, Kernel())
    assert decided(monkeypatch, here=True).target == "decode" and kernel.calls == 7
    kernel = use(monkeypatch, Kernel(off=0.5))
    another_process(monkeypatch)
    assert decided(monkeypatch, here=False).target == "decode" and kernel.calls == 0

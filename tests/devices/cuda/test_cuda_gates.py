"""What `attn-pass doctor` says of NVIDIA's GPUs: the kernels that torch may not use, and why there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attn_pass.cli import doctor
from attn_pass.devices.cuda.cudnn import BEHIND


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at=None: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.delenv(BEHIND, raising=False)


def note(what: str) -> str:
    return next(finding.note for finding in doctor.machine() if finding.what == what)


def test_open_gates_are_not_told(gpu: None) -> None:
    assert note("cuda:0") == "compute capability 9.0" and note("cuDNN") == "the target cudnn"


def test_kernels_that_are_switched_off_are_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert note("cuda:0").endswith("; switched off, or not in this build of torch: flash, efficient")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert note("cuda:0").endswith("; switched off, or not in this build of torch: flash")


def test_cudnn_behind_the_unfused_form(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEHIND, "1")
    assert note("cuDNN").endswith(f"torch's call tries it last, as {BEHIND} is 1")


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is not built for CUDA" in note("CUDA device")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch sees none" in note("CUDA device")

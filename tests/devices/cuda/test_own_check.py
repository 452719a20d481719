"""Torch's own check of its kernels: its inputs, that it is called if the GPU is present, and its effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_calls import FP32, H200, UNKNOWN, call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attn_pass.devices.cuda import own_check
from attn_pass.targets.kernel_rules import KernelCall
from attn_pass.targets.torch_call import picked_by_torch, refusal

HERE = replace(H200, is_here=True)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    own_check._refuses.cache_clear()
    yield
    own_check._refuses.cache_clear()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """What torch is to answer by kernel; the arguments of its checks are those of the torch that is installed."""
    given = {"flash": True, "cudnn": True, "efficient": True}
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for kernel, name in own_check._CHECKS.items():
        real = getattr(torch.backends.cuda, name)

        def check(params: torch.backends.cuda.SDPAParams, debug: bool = False, kernel: str = kernel) -> bool:
            return given[kernel]

        assert callable(real)
        monkeypatch.setattr(torch.backends.cuda, name, check)
    yield given


def shown(given: KernelCall, multiple: int = 8) -> Any:
    seen = own_check.shown(given, multiple)
    assert seen is not None
    return seen.parameters()


def test_torch_is_shown_the_operands_as_the_kernel_gets_them() -> None:
    seen = shown(call(batch=3, heads=8, groups=2, q_len=5, kv_len=7, dim=20, value_dim=36, dropout=0.25))
    assert [tuple(t.shape) for t in (seen.query, seen.key, seen.value)] == [(3, 8, 5, 24), (3, 4, 7, 24), (3, 4, 7, 40)]
    for operand in (seen.query, seen.key, seen.value):
        assert isinstance(operand, FakeTensor)
        assert operand.device.type == "cuda" and operand.dtype == torch.bfloat16 and not operand.requires_grad
    assert (seen.attn_mask, seen.dropout, seen.is_causal, seen.enable_gqa) == (None, 0.25, False, True)


def test_gradients_masks_and_causality_are_shown() -> None:
    seen = shown(call(mask="additive", mask_needs_grad=True, grad=True, dtype=FP32, q_len=5), 4)
    assert isinstance(seen.attn_mask, Tensor) and seen.attn_mask.shape == (1, 1, 5, 8)
    assert seen.attn_mask.requires_grad and seen.query.requires_grad and seen.value.requires_grad
    assert shown(call(mask="causal")).is_causal and not shown(call(mask="band")).is_causal
    assert shown(call(mask="band")).attn_mask is None and not shown(call()).enable_gqa


def test_a_size_that_is_not_known_is_shown_as_it_was_traced() -> None:
    unknown = call(kv_len=UNKNOWN)
    assert own_check.shown(unknown, 8) is None
    seen = shown(replace(unknown, hint=lambda index: 77))
    assert seen.key.shape[2] == 77 and all(isinstance(n, int) for n in seen.key.shape)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_torch_can_refuse_and_nothing_more(answers: dict[str, bool], kernel: str) -> None:
    assert refusal(kernel, call(device=HERE)) is None
    answers[kernel] = False
    own_check._refuses.cache_clear()
    assert (
        refusal(kernel, call(device=HERE)) == f"torch's own check of the {kernel} kernel refuses the call on this GPU"
    )
    assert refusal(kernel, call(device=H200)) is None  # it is not here, and another GPU's answer says nothing
    answers[kernel] = True
    own_check._refuses.cache_clear()
    assert "float64" in str(refusal(kernel, call(dtype=torch.float64, device=HERE)))


def test_what_torch_picks_is_what_its_checks_take(answers: dict[str, bool]) -> None:
    assert picked_by_torch(call(device=HERE)) == "cudnn"
    answers["cudnn"] = False
    own_check._refuses.cache_clear()
    assert picked_by_torch(call(device=HERE)) == "flash"
    assert picked_by_torch(call(device=H200)) == "cudnn"


def test_a_torch_without_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert refusal("flash", call(device=HERE)) is None


def test_the_installed_torch_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without CUDA answers no to everything: the question is put as its own signature wants it."""
    if torch.backends.cuda.is_built():
        pytest.skip("a build for CUDA without a driver answers nothing")
    for name in own_check._CHECKS.values():
        assert getattr(torch.backends.cuda, name)(shown(call(mask="boolean", grad=True))) is False
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    own_check._refuses.cache_clear()
    assert "own check" in str(refusal("cudnn", call(device=HERE)))


def test_a_torch_that_asks_otherwise_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: object) -> bool:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", changed)
    own_check._refuses.cache_clear()
    assert refusal("cudnn", call(device=HERE)) is None

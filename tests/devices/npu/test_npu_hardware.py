"""Runs on an Ascend NPU. Elsewhere every test is skipped, and counts as not verified.

`pip install torch-npu` with CANN, then `pytest tests/devices/npu/test_npu_hardware.py`. What these ask is what no test
on the CPU can know: the operators' numbers, fully masked rows, strides, and the layouts of results.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from against_eager import NEG_INF, qkv
from by_hand import plain

import attn_pass

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _is_here() -> bool:
    if find_spec("torch_npu") is None:
        return False
    try:
        import torch_npu

        return bool(torch_npu.npu.is_available())
    except (ImportError, RuntimeError, OSError):
        return False


pytestmark = pytest.mark.skipif(not _is_here(), reason="not verified on hardware: no Ascend NPU is here")


def masked(left: int | None, right: int | None, last: bool) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = torch.arange(q.size(2), device=q.device)[:, None] + (k.size(2) - q.size(2) if last else 0)
        distance = torch.arange(k.size(2), device=q.device) - own
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden = hidden if left is None else hidden | (distance < -left)
        hidden = hidden if right is None else hidden | (distance > right)
        return (q @ k.mT * 0.3).masked_fill(hidden, NEG_INF).softmax(-1) @ v

    return program


PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "plain": (plain, (2, 4, 130, 257, 64)),
    "a prime head dim": (plain, (2, 4, 65, 257, 61)),
    "one row": (plain, (2, 4, 1, 2049, 128)),
    "one key": (plain, (2, 4, 65, 1, 64)),
    "causal from the first key": (masked(None, 0, False), (2, 4, 130, 257, 64)),
    "causal to the last key": (masked(None, 0, True), (2, 4, 130, 257, 64)),
    "fully masked rows": (masked(None, 0, True), (2, 4, 257, 130, 64)),
    "window": (masked(33, 0, True), (2, 4, 257, 257, 64)),
    "window of both sides": (masked(33, 7, True), (2, 4, 257, 257, 64)),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("turned", [False, True], ids=["heads first", "positions first"])
def test_the_operator_computes_what_was_written(name: str, dtype: torch.dtype, turned: bool) -> None:
    fn, shape = PROGRAMS[name]
    inputs = qkv(*shape, dtype=dtype)
    if turned:
        inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)  # type: ignore[assignment]
    truth = fn(*(x.double() for x in inputs)).nan_to_num(0.0)
    eager = (fn(*inputs).double().nan_to_num(0.0) - truth).abs().max()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))
    with torch.no_grad(), attn_pass.record() as report:
        result = compiled(*(x.to("npu") for x in inputs)).cpu().double()
    assert len(report.rewritten) == 1
    assert (result.nan_to_num(0.0) - truth).abs().max() <= 2 * eager + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "fully masked rows"])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    fn, shape = PROGRAMS[name]
    inputs = qkv(*shape, dtype=dtype)
    exact = [x.double().requires_grad_() for x in inputs]
    truth = torch.autograd.grad(fn(*exact).sum(), exact)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=attn_pass.wrap("aot_eager", choose="fused", on_error="raise"))
    leaves = [x.to("npu").requires_grad_() for x in inputs]
    for result, wanted in zip(torch.autograd.grad(compiled(*leaves).sum(), leaves), truth, strict=True):
        limit = 64 * torch.finfo(dtype).eps * max(1.0, float(wanted.abs().max()))
        assert (result.cpu().double() - wanted).abs().max() <= limit

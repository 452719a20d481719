"""ARM's processors, without one: their costs are another's, and what needs vectors of x86 is not offered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from against_eager import FLEX_ON_CPU
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cpu import facts
from attn_pass.devices.cpu.kernel import build, source
from attn_pass.devices.cpu.kernel.operator import WITH_LSE


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20 * torch.tanh(q @ k.mT / 160)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    return (q @ k.mT * 0.125).masked_fill((i - j).abs() > 32, float("-inf")).softmax(-1) @ v


def operands(dtype: torch.dtype = torch.float32, rows: int = 512, batch: int = 16) -> list[Tensor]:
    """Without memory: nothing is computed."""
    return [torch.empty(batch, 12, rows, 64, dtype=dtype, device="meta") for _ in range(3)]


def decided(program: Any, inputs: list[Tensor], **options: Any) -> attn_pass.SiteReport:
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(program, *inputs, attn_pass_options={"device": "Graviton4", **options}).sites[0]


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(facts, "instruction_set", facts.detected)  # the tests have another in its place
    facts.detected.cache_clear()
    yield
    facts.detected.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_by_hand_becomes_torchs_call(dtype: torch.dtype) -> None:
    site = decided(by_hand, operands(dtype))
    assert site.target == "sdpa" and site.decided_for == "Graviton4", site.reason


def test_other_forms_need_a_margin() -> None:
    site = decided(window, operands(rows=4096, batch=1))
    assert site.outcome == "rewritten"
    if site.target != "sdpa":
        assert "this processor is not calibrated" in site.reason


@pytest.mark.skipif(not FLEX_ON_CPU, reason="FlexAttention on the CPU needs torch 2.13")
def test_flex_is_not_offered_where_inductor_has_no_template() -> None:
    site = decided(capped, operands(), targets=("flex",), choose="fused")
    assert site.target is None and "needs AVX2" in site.refusals.get("flex", site.reason)


@pytest.mark.usefixtures("on_arm")
def test_a_machine_of_arms_says_so() -> None:
    assert facts.detected() == "neon"
    device = facts.cpu()
    assert device.instruction_set == "neon" and not device.is_measured
    x86 = registry.by_name("Graviton4").matmul_gflops[torch.float16] / 96
    assert device.matmul_gflops[torch.float16] == pytest.approx(x86 * device.cores)


def test_names_of_the_table() -> None:
    for name in facts.NAMES:
        device = registry.by_name(name.upper())
        assert (device.type, device.name, device.instruction_set) == ("cpu", name, "neon") and not device.is_here
        assert registry.family_of(device).name == "cpu"


@pytest.fixture
def vectors_of_arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel as it is compiled there: with the compiler's own vectors, and as many registers."""
    monkeypatch.setattr(build, "_FLAGS", ("-O1", *build._FLAGS[1:], "-DATTN_AS_ON_ARM"))
    monkeypatch.setattr(build, "of_this_machine", lambda tiles: tuple(s for s in source.ALL if s.name == "plain"))
    build.entry.cache_clear()
    yield
    build.entry.cache_clear()


def test_keys_that_are_not_there_are_none_of_the_largest_scores(vectors_of_arm: None) -> None:
    """A step of products takes 16 keys, and 8 may be left: of scores far below 0 those behind would be the largest."""
    for keys in (7, 8, 16, 24, 72, 100, 104):
        q, k, v = torch.full((1, 1, 20, 4), 10.0), torch.full((1, 1, keys, 4), -10.0), torch.randn(1, 1, keys, 4)
        result, logarithm = WITH_LSE(q, k, v, 0.5)
        scores = q.double() @ k.double().mT * 0.5
        torch.testing.assert_close(result.double(), scores.softmax(-1) @ v.double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logarithm.double(), scores.logsumexp(-1), atol=1e-3, rtol=1e-5)

"""The margin of a prediction: small for measured costs, large where a working call and guesses are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass
from attn_pass.devices import calibration_store, registry
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.cpu import cost
from attn_pass.devices.cpu import facts as cpu_facts
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import decode, flash
from attn_pass.devices.device import Device
from attn_pass.devices.registry import facts
from attn_pass.planner import choose as planner
from attn_pass.planner import margins
from attn_pass.targets.base import Offer, Setting
from attn_pass.targets.flex import flex
from attn_pass.tuning import disk_cache

BF16 = torch.bfloat16
H200, H100 = registry.by_name("H200"), registry.by_name("H100")  # the first was measured, the other was not


def offer(target: str, microseconds: float = 1.0) -> Offer:
    return Offer(target, "", None, microseconds, fused=True, compiled_for_site=target.startswith("flex"))  # type: ignore[arg-type]


def setting(device: Device, before: str | None = None) -> Setting:
    return Setting(device, "compile", kernel_as_written=before, eager_form=before is None)


@pytest.mark.parametrize(
    ("target", "before", "times"),
    [
        ("flash", "cudnn", 1.25),
        ("decode", "flash", 1.25),
        ("cudnn", "cudnn", 1.25),
        ("flex", "efficient", 2.0),
        ("flex_flash", "flash", 2.0),
        ("flash_attn", "flash", 1.25),
        ("flash_attn", "flash_attn", 1 / 0.99),
        ("npu_fusion_attention", "npu_fusion_attention_v3", 1 / 0.99),
        ("npu_fused_infer_attention_score", "npu_fusion_attention_v3", 1.25),
        ("flex", None, 1 / 0.99),
        ("decode", None, 1 / 0.99),
        ("cudnn", None, 1 / 1.05),
    ],
)
def test_what_is_asked_of_guesses(target: str, before: str | None, times: float) -> None:
    device = registry.by_name("Ascend 910B") if target.startswith("npu") else H100
    assert margins.margin(offer(target), setting(device, before)).times == pytest.approx(times)


def test_what_is_asked_of_measured_costs() -> None:
    for before in ("cpu flash", None):
        assert margins.margin(offer("sdpa"), setting(cpu(), before)).times == pytest.approx(1 / 0.99)
    both = replace(H200, measured_kernels=("cudnn", "flash"))
    assert margins.margin(offer("flash"), setting(both, "cudnn")).times == 1.15
    assert margins.margin(offer("flash"), setting(both, "flash")).times == pytest.approx(1 / 0.99)
    assert margins.margin(offer("flash"), setting(both, None)).times == 1 / 1.25  # what it replaces was not measured
    assert margins.margin(offer("decode"), setting(both, "cudnn")).times == 1.25
    assert margins.margin(offer("flash"), setting(both, "efficient")).times == 1.25
    assert margins.margin(offer("flex"), setting(both, "cudnn")).times == 2.0


def ordered(device: Device, **times: float) -> list[str]:
    targets: Any = {"flash": flash.Flash(), "decode": decode.Decode(), "flex": flex.Flex()}
    ranked = sorted(((offer(n, us), targets.get(n)) for n, us in times.items()), key=lambda o: o[0].microseconds)
    return [o.target for o, _ in margins.ties_by_order(ranked, lambda o: o[0].microseconds, device)]


def test_ties_go_to_torch_s_own_order() -> None:
    assert ordered(H100, flex=100, flash=104.9, cudnn=104) == ["cudnn", "flash", "flex"]
    assert ordered(H100, efficient=100, flash=105.1, cudnn=106) == ["efficient", "flash", "cudnn"]
    assert ordered(registry.by_name("A100"), efficient=100, flash=103) == ["flash", "efficient"]
    assert ordered(H100, decode=100, flex=101) == ["decode", "flex"]  # torch's call tries neither
    measured = replace(H100, measured_kernels=("efficient", "flash"))
    assert ordered(measured, efficient=100, flash=104) == ["efficient", "flash"]
    assert ordered(measured, efficient=100, cudnn=104) == ["cudnn", "efficient"]
    assert ordered(cpu(), local=100, sdpa=101) == ["local", "sdpa"]


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped heads written out, before torch's own call."""
    return F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))


def decided(program: Any, device: str, *shape: int) -> attn_pass.SiteReport:
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    with torch.device("meta"), torch.no_grad():
        q = torch.empty(batch, heads, q_len, dim, dtype=BF16)
        k, v = (torch.empty(batch, kv_heads, kv_len, dim, dtype=BF16) for _ in range(2))
        (site,) = attn_pass.explain(program, q, k, v, attn_pass_options={"device": device}).sites
    return site


def test_the_report_says_which_margin_held() -> None:
    site = decided(repeated, "H100", 8, 32, 8, 1, 32768, 128)
    assert site.outcome == "rewritten"
    assert site.reason.endswith(
        "x) (1.25x is required to replace a call that already runs cudnn on an uncalibrated device)"
    )


def test_an_insufficient_gain_is_reported_with_its_margin() -> None:
    """In a long prefill the copies of keys and values are little beside the kernel."""
    site = decided(repeated, "H100", 4, 32, 8, 8192, 8192, 128)
    best = min(us for name, us in site.predicted_us.items() if name != "leave")
    assert 1.01 < site.predicted_us["leave"] / best < 1.25
    assert site.outcome == "left"
    works = "at least 1.25x is required to replace a call that already runs cudnn on an uncalibrated device"
    assert site.reason.startswith("predicted ") and site.reason.endswith(works)


def test_a_calibration_lifts_the_margin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    here = replace(H100, is_here=True)
    calibration_store.save(Calibration(facts(here), shares={"cudnn": {"prefill": 0.9}}))
    known = calibration_store.applied(here)
    monkeypatch.setattr(registry, "named", lambda name: replace(known, is_here=False))
    site = decided(repeated, "H100", 4, 32, 8, 8192, 8192, 128)
    assert (site.outcome, site.target) == ("rewritten", "cudnn") and "required" not in site.reason


def test_measurements_decide_whatever_was_predicted() -> None:
    """With `tune=True`: a form that was measured 1.1 times as fast as the fused call is taken on any device."""
    seen: list[planner.Choice] = []
    real = planner.choose

    def choose(*args: Any, **kwargs: Any) -> planner.Choice:
        def measure(labels: Any) -> dict[str, float]:
            return {label: 100.0 if label.startswith("cudnn") else 200.0 for label in labels} | {"leave": 110.0}

        seen.append(real(*args, **{**kwargs, "measure": measure}))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_pass.rewriting.decision.choose", choose)
        site = decided(repeated, "H200", 4, 32, 8, 2048, 2048, 128)
    assert site.target == "cudnn" and "us as written" in site.reason and "required" not in site.reason


# ---- a processor whose rates are another's ----


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT / 8).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.size(-2))[:, None] - torch.arange(k.size(-2))
    return (q @ k.mT / 8).masked_fill((distance < 0) | (distance > 64), float("-inf")).softmax(-1) @ v


@pytest.fixture
def unknown_processor(monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set that nothing was measured with; the CPU kernel is taken to be about as fast as torch's."""
    monkeypatch.setitem(cost._GAINS, "other", {torch.float32: 0.92, BF16: 1.1, torch.float16: 1.1})
    return "other"


@pytest.mark.parametrize(
    ("program", "dtype", "measured", "unmeasured"),
    [
        (causal, torch.float32, "cpu_kernel", "sdpa"),  # 1.05 times as fast by other rates: not enough
        (window, torch.float32, "cpu_kernel", "cpu_kernel"),
        (F.scaled_dot_product_attention, BF16, "cpu_kernel", ""),  # 1.17 times
        (by_hand, BF16, "cpu_kernel", "sdpa"),  # what stock's own patterns make of it, though left would be faster
    ],
)
def test_an_unmeasured_processor_is_asked_for_more(
    program: Any,
    dtype: torch.dtype,
    measured: str,
    unmeasured: str,
    unknown_processor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = [torch.randn(1, 8, 512, 64, dtype=dtype) for _ in range(3)]
    for instructions, taken in (("avx512_bf16", measured), (unknown_processor, unmeasured)):
        monkeypatch.setattr(cpu_facts, "instruction_set", lambda known=instructions: known)
        torch._dynamo.reset()
        with torch.no_grad():
            (site,) = attn_pass.explain(program, *inputs).sites
        assert site.taken == taken, site.reason
        told = "x is required: this processor is not calibrated; run `attn-pass calibrate`" in site.reason
        cheaper = min(site.predicted_us, key=lambda name: site.predicted_us[name])
        assert told == (instructions == unknown_processor and "cpu_kernel" in (taken, cheaper)), site.reason
        if instructions == unknown_processor and taken == "sdpa" and cheaper == "cpu_kernel":
            faster = site.predicted_us["sdpa"] / site.predicted_us["cpu_kernel"]
            assert f"; cpu_kernel is predicted {faster:.3g}x as fast, and 1.25x is required" in site.reason


@pytest.mark.parametrize(
    ("sizes", "dtype", "unmeasured", "fitted"),
    [
        ((4, 4, 33, 65, 96), BF16, "sdpa", "cpu_kernel"),
        ((2, 8, 50, 50, 32), BF16, "sdpa", "cpu_kernel"),
        ((8, 16, 16, 16, 32), BF16, "sdpa", ""),
        ((1, 8, 1, 2048, 64), torch.float16, "", "leave"),  # predicted to be 19 times as fast
    ],
)
def test_on_guesses_stocks_call_is_followed(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    unmeasured: str,
    fitted: str,
    unknown_processor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes that were slower than stock where products and a softmax were chosen by another processor's rates."""
    batch, heads, queries, keys, dim = sizes
    q, *kv = (torch.randn(batch, heads, length, dim, dtype=dtype) for length in (queries, keys, keys))
    for instructions, taken in ((unknown_processor, unmeasured), ("avx512_fp16", fitted)):
        monkeypatch.setattr(cpu_facts, "instruction_set", lambda known=instructions: known)
        torch._dynamo.reset()
        with torch.no_grad():
            (site,) = attn_pass.explain(by_hand, q, *kv).sites
        if taken != "leave":  # fitted to that processor, either may be chosen
            assert site.taken == taken, site.reason
    assert unmeasured or site.taken != "sdpa"


def test_calibrated_it_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_facts, "instruction_set", lambda: "plain")
    guessed = cpu()
    assert not guessed.is_measured and margins.caution(offer("local"), setting(guessed)) == 1.25
    assert margins.margin(offer("local"), setting(guessed)).times == pytest.approx(1.25 / 0.99)
    assert margins.caution(offer("sdpa"), setting(guessed)) == 1.0
    own = replace(guessed, is_calibrated=True)
    assert margins.caution(offer("local"), setting(own)) == 1.0
    assert margins.margin(offer("local"), setting(own)).times == pytest.approx(1 / 0.99)

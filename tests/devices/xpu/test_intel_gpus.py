"""Intel GPUs, without one: both sides of every rule, the GPU that is here, and what is emitted, run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from other_gpus import by_hand, causal, decided_for, dropped, grouped, operands
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as call

import attn_pass
from attn_pass.cli import doctor
from attn_pass.devices import registry
from attn_pass.devices.xpu import facts
from attn_pass.devices.xpu.rules import ONEDNN

decided = partial(decided_for, device="Arc B580")
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("program", [by_hand, causal])
def test_attention_by_hand_becomes_torchs_call(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    site = decided(program, operands(dtype=dtype))
    assert (site.outcome, site.target) == ("rewritten", "sdpa"), site.reason
    assert site.decided_for == "Arc B580"


@pytest.mark.parametrize(
    ("rule", "taken", "refused", "why"),
    [
        ("dtype", (by_hand, operands()), (by_hand, operands(dtype=torch.float64)), "float64 has no fused kernel"),
        ("dropout", (by_hand, operands(grad=False)), (dropped(0.1), operands()), "dropout 0.1: oneDNN's kernel has"),
        ("head dim", (by_hand, operands(576, 576)), (by_hand, operands(577, 577)), "a head dim of 577"),
        ("head dim", (by_hand, operands(64, 576)), (by_hand, operands(64, 577)), "a head dim of 577"),
        ("sizes", (by_hand, operands(keys=1)), (by_hand, operands(keys=0)), "a size is 0"),
        ("gradient", (by_hand, operands()), (by_hand, operands(grad=True)), "a backward in some versions"),
    ],
)
def test_both_sides_of_a_rule(rule: str, taken: Any, refused: Any, why: str) -> None:
    assert rule in {r.name for r in ONEDNN.rules}
    assert decided(*taken, choose="fused", targets=("sdpa",)).target == "sdpa"
    site = decided(*refused, choose="fused", targets=("sdpa",))
    assert site.target is None and why in site.refusals.get("sdpa", site.reason)


def test_head_dims_that_are_not_known() -> None:
    """One that may be any is taken as it is; of two that may differ, none can be filled up to the other."""
    only = {"choose": "fused", "targets": ("sdpa",), "dynamic": True}
    assert decided(by_hand, operands(64, 64), **only).target == "sdpa"
    site = decided(by_hand, operands(64, 80), **only)
    assert site.target is None and "differ and are not known" in site.refusals.get("sdpa", site.reason)


def test_a_call_is_left_and_named_by_its_kernel() -> None:
    site = decided(call, operands())
    assert site.outcome == "left" and site.predicted_us["leave"] > 0
    other = decided(lambda q, k, v: call(q, *(x.repeat_interleave(4, 1) for x in (k, v))), operands(heads=2))
    assert other.target in (None, "sdpa") and "onednn" in other.reason


@pytest.mark.parametrize(("program", "heads"), [(by_hand, 8), (causal, 8), (grouped, 2)])
def test_what_is_emitted_computes_the_same(program: Callable[..., Tensor], heads: int) -> None:
    inputs = operands(dtype=torch.float32, heads=heads, keys=300 if program is by_hand else 512)
    backend = attn_pass.wrap("aot_eager", device="Arc B580", choose="fused", on_error="raise")
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        got = torch.compile(program, backend=backend)(*inputs)
        expected = program(*(x.double() for x in inputs))
    assert report.sites[0].target == "sdpa"
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


def test_fully_masked_rows_are_told() -> None:
    """A boolean mask that is an input may leave a row nothing: what the kernel gives there is part of the report."""

    def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    site = decided(masked, [*operands(), torch.rand(2, 1, 512, 512) > 0.5], choose="fused")
    assert site.target == "sdpa" and any("fully masked" in a for a in site.assumptions)
    strict = decided(masked, [*operands(), torch.rand(2, 1, 512, 512) > 0.5], choose="fused", numerics="strict")
    assert strict.target is None and "fully masked" in strict.refusals.get("sdpa", strict.reason)


def test_without_a_gpu_nothing_is_taken_away() -> None:
    """torch sees no Intel GPU here: tensors on one would be left, as they are."""
    device = registry.of_type("xpu").here(torch.device("xpu"))
    assert device.kernels == () and not device.is_here
    assert not registry.of_type("xpu").keeps_inductors_patterns_off


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550"),
        ("Intel(R) Graphics", "Arc B580"),
    ],
)
def test_the_gpu_that_is_here(name: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda at=None: name)
    family, of_row = registry.of_type("xpu"), registry.by_name(row)
    device = family.here(torch.device("xpu"))
    assert (device.name, device.memory_gbytes, device.kernels) == (name, of_row.memory_gbytes, of_row.kernels)
    (identity,) = family.identity()
    assert name in identity
    assert [(r[0], r[2]) for r in family.machine()] == [("xpu:0", "torch's call may use oneDNN's kernel")]
    before = torch._C._get_overrideable_sdp_enabled()
    try:
        torch._C._set_sdp_use_overrideable(False)
        assert family.here(torch.device("xpu")).kernels == ()
        (row,) = (f for f in doctor.machine() if f.what == "xpu:0")
        assert "switched off in this process: by sdpa_kernel without SDPBackend.OVERRIDEABLE" in row.note
        assert row.found == name and list(family.identity()) != [identity]
    finally:
        torch._C._set_sdp_use_overrideable(before)


def test_a_restriction_closes_the_kernel_and_doctor_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda at=None: "Intel(R) Arc(TM) B580 Graphics")
    for backend, closed in ((SDPBackend.MATH, True), (SDPBackend.OVERRIDEABLE, False)):
        with torch.nn.attention.sdpa_kernel(backend):
            (row,) = (f for f in doctor.machine() if f.what == "xpu:0")
        assert ("OVERRIDEABLE" in row.note) == closed


def test_doctor_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def note() -> str:
        return next(f.note for f in doctor.machine() if f.what == "XPU device")

    monkeypatch.setattr(torch.version, "xpu", None)
    assert "torch is not built for Intel's GPUs" in note()
    monkeypatch.setattr(torch.version, "xpu", "20250301")
    assert "torch sees none" in note()


def test_names_of_the_table() -> None:
    assert [s.name for s in facts.SHEETS] == list(registry.of_type("xpu").names)
    assert registry.by_name("arc b580").type == "xpu" and not registry.by_name("ArcB580").is_here

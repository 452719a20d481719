"""The flex target for CUDA devices, by its rules: what it takes, and the reason where it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from flex_graphs import case_of, reason, rewritten
from flex_programs import (
    BIG,
    CASES,
    IDENTITIES,
    ON_CUDA,
    added,
    by_rows,
    by_temperature,
    capped,
    causal,
    dilated,
    documents,
    masked,
    padded,
    positions,
    softcap,
    window,
)

import attn_pass
from attn_pass.targets.flex import rules
from attn_pass.targets.flex.rules import Case, refusal

Tensor = torch.Tensor


def sink(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    scores = torch.cat([capped(q, k), s[None, :, None, None].expand(q.size(0), -1, q.size(2), 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    weights = (q @ k.mT).masked_fill((j > i) | (i - j > 3), NEG_INF).softmax(-1)
    return torch.dropout(weights, 0.1, True) @ v


def threshold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.where(s < 0, -1.0, s).softmax(-1) @ v


def test_each_rule_on_both_sides() -> None:
    take = (masked(dilated), *qkv())
    assert reason(*take) == ""
    assert reason(*take, device="A100") == reason(*take, device="L4") == reason(*take, device="B200") == ""
    assert "npu" in reason(softcap, *qkv(), device="Ascend 910B")
    assert "float64" in reason(take[0], *qkv(dtype=torch.float64))
    assert "sink" in reason(sink, *qkv(), randn(2))
    assert "dropout 0.1" in reason(with_dropout, *qkv(grad=True))
    assert "head dim is below 16" in reason(take[0], *qkv(dim=15))
    assert "head dim is below 16" in reason(take[0], *qkv(value_dim=8))
    assert "or over 256" in reason(take[0], *qkv(dim=257))
    assert reason(take[0], *qkv(dim=24, value_dim=256)) == ""
    assert "without a mask" in reason(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    assert "without a mask" in reason(masked(causal), *qkv())
    assert "jump" in reason(threshold, *qkv())


def test_a_batch_past_the_grid_is_left() -> None:
    assert "65535" in reason(masked(window), *qkv(batch=65536, heads=1, q_len=2, kv_len=2), poor_cases=())


@pytest.mark.parametrize("captured", ["bias", "temperature"])
def test_a_captured_tensor_that_wants_a_gradient_is_left(captured: str) -> None:
    fn, more = {"bias": (added, randn(2, 1, 8, 8)), "temperature": (by_temperature, randn(2, 2, 8, 1))}[captured]
    assert "needs a gradient" in reason(fn, *qkv(grad=True), more.clone().requires_grad_())
    assert reason(fn, *qkv(grad=True), more, assume_nonempty_rows=True) == ""
    with torch.no_grad():
        assert reason(fn, *qkv(grad=True), more.clone().requires_grad_()) == ""


def test_a_learned_factor_of_affine_scores_has_its_gradient() -> None:
    same(by_rows, *qkv(grad=True), randn(2, 2, 8, 1, grad=True), rewritten=1, grad=True, **ON_CUDA)


def test_unknown_heads_are_left_and_an_unknown_batch_is_not() -> None:
    for dim, text in ((1, "heads"), (0, "")):
        inputs = qkv(batch=4, heads=4)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, dim)
        torch._dynamo.reset()
        with attn_pass.record() as report:
            backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise", **ON_CUDA)
            torch.compile(masked(window, cap=True), backend=backend)(*inputs)
        site = report.sites[0]
        assert (site.target == "flex") == (not text) and text in site.reason


def test_a_captured_tensor_of_unknown_size_is_taken() -> None:
    inputs = (*qkv(batch=3), randn(3, 2, 8, 8))
    same(added, *inputs, rewritten=1, dynamic=False, **ON_CUDA)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise", **ON_CUDA)
        torch.testing.assert_close(torch.compile(added, backend=backend)(*inputs), added(*inputs), atol=1e-5, rtol=1e-5)
    assert report.sites[0].target == "flex"


def test_rules_about_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(masked(dilated), *qkv(), monkeypatch=monkeypatch)
    assert refusal(case) is None

    def refused(**changes: Any) -> str:
        return refusal(replace(case, setting=replace(case.setting, **changes))) or ""

    assert refused(autocast=torch.float32) == "" and "would narrow" in refused(autocast=torch.bfloat16)
    for program, runner in itertools.product(("compile", "aoti", "export"), ("inductor", "hook", "other")):
        assert refused(program=program, runner=runner) == ""
    assert "no measured rule" in refused(device=replace(case.setting.device, kernels=()))
    assert "8.0" in refused(device=replace(case.setting.device, capability=(7, 5)))
    assert "cpu" not in refused(device=replace(case.setting.device, type="cpu"))
    assert "no measured rule for xpu" in (
        refusal(replace(case_of(softcap, *qkv(), monkeypatch=monkeypatch), setting=_on(case, "xpu"))) or ""
    )
    monkeypatch.setattr(rules, "TORCH_VERSION", (2, 10))
    assert "needs torch 2.11 or newer" in refused()


def _on(case: Case, kind: str) -> Any:
    return replace(case.setting, device=replace(case.setting.device, type=kind))


def test_sdpa_kernel_is_kept() -> None:
    assert "sdpa_kernel" in reason(_only_math, *qkv())


def _only_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return masked(window, cap=True)(q, k, v)


def test_rows_that_may_be_empty() -> None:
    strict = reason(documents, *qkv(**BIG), IDENTITIES, numerics="strict")
    assert "strict" in strict
    _, report = rewritten(documents, *qkv(**BIG), IDENTITIES)
    assert "gives 0" in report.sites[0].assumptions[0]
    _, report = rewritten(padded, *CASES["padding and causal"][1], assume_nonempty_rows=True)
    assert report.sites[0].assumptions == ("no row is fully masked",)


def test_a_mask_decided_by_rounded_numbers_stays_the_tensor_it_is() -> None:
    """Buckets by a logarithm: another library's could round to another bucket."""

    def buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i, j = positions(q, k)
        bucket = (torch.log((i - j).abs() + 1.0) * 2).to(torch.int64)
        return (capped(q, k) + table[bucket].permute(2, 0, 1)).softmax(-1) @ v

    same(buckets, *qkv(), randn(32, 2), rewritten=1, **ON_CUDA)
    _, report = rewritten(buckets, *qkv(), randn(32, 2))
    assert "log" not in report.sites[0].score_mod


def test_a_mask_written_to_between_is_not_computed_from_what_it_was_made_of() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        i, j = positions(q, k)
        keep = (j <= i) & (ids[:, None, :, None] == ids[:, None, None, :])
        ids.add_(torch.arange(ids.size(1)))
        return (q @ k.mT * 0.25).masked_fill(~keep, NEG_INF).softmax(-1) @ v + ids.sum()

    same(fn, *qkv(**BIG), IDENTITIES, rewritten=1, reference=False, **ON_CUDA)


def test_inside_the_hook_and_on_the_device_itself() -> None:
    """The CPU's rules are for the CPU: what is emitted for CUDA may be fused with what follows."""
    fn, inputs = CASES["soft cap"]
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, attn_pass.enabled(choose="fused", **ON_CUDA):
        torch.compile(fn, backend="inductor")(*inputs)
    assert [s.target for s in report.sites] == ["flex"]

"""FLOPs and bytes of a site, checked against manual counts."""

from __future__ import annotations

import torch

import attn_pass
from attn_pass.report.site import SiteReport

Tensor = torch.Tensor
B, H, KV, L, S, D = 2, 8, 2, 96, 160, 64


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1)
    return (q @ k.mT * 0.1).softmax(-1) @ v


def explained(program: object, *shapes: tuple[int, ...], **options: object) -> SiteReport:
    inputs = [torch.randn(shape) for shape in shapes]
    (site,) = attn_pass.explain(program, *inputs, attn_pass_options=options).sites
    return site


def test_the_scores_and_the_repeated_keys_are_what_stock_moves_more() -> None:
    site = explained(eager, (B, H, L, D), (B, KV, S, D), (B, KV, S, D), choose="fused", targets=("sdpa",))
    operands = 4 * (2 * B * H * L * D + 2 * B * KV * S * D)
    before, after = site.roofline["leave"], site.roofline["sdpa"]
    assert before["flops"] == after["flops"] == 4 * B * H * L * S * D
    repeated = 2 * 4 * B * H * S * 2 * D  # written and read
    scores = 4 * 4 * B * H * L * S  # written and read twice
    assert before["bytes"] == operands + scores + repeated and after["bytes"] == operands
    assert site.bytes_saved == before["bytes"] - after["bytes"] > 0
    assert before["us"] == site.predicted_us["leave"]


def test_the_device_decided_for_is_named() -> None:
    shapes = ((B, H, L, D), (B, H, S, D), (B, H, S, D))
    program = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    assert "H200" in str(explained(program, *shapes, device="H200").rates["device"])
    here = explained(program, *shapes).rates
    assert str(here["device"]).startswith("cpu") and float(here["gflops"]) > 0 and float(here["gbytes"]) > 0


def test_forms_of_several_kernels_have_a_time_alone() -> None:
    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(512)[:, None], torch.arange(512)
        return (q @ k.mT).masked_fill((j > i) | (i - j > 30), float("-inf")).softmax(-1) @ v

    site = explained(window, *[(1, 4, 512, 32)] * 3, choose="fused", targets=("local",))
    assert site.target == "local" and set(site.roofline["local"]) == {"us"} and site.bytes_saved == 0


def test_a_site_that_is_left_after_all_keeps_what_stock_does() -> None:
    site = explained(eager, (B, H, L, D), (B, KV, S, D), (B, KV, S, D), choose="fused")
    site.mark_left("the compiler could not lower it")
    assert set(site.roofline) == {"leave"} and site.bytes_saved == 0


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return (q @ k.mT * 0.1).masked_fill(j > i, float("-inf")).softmax(-1) @ v


def additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.1 + mask).softmax(-1) @ v


def test_a_mask_that_the_kernel_is_not_given_is_not_moved() -> None:
    operands = 4 * 4 * B * H * S * D
    site = explained(causal, *[(B, H, S, D)] * 3, choose="fused", targets=("sdpa",))
    scores = 4 * 4 * B * H * S * S
    assert site.mask == "causal" and site.roofline["sdpa"]["bytes"] == operands
    assert site.roofline["leave"]["bytes"] == operands + scores  # positions are compared where the scores are
    site = explained(additive, *[(B, H, S, D)] * 3, (S, S), choose="fused", targets=("sdpa",))
    assert site.roofline["sdpa"]["bytes"] == operands + 4 * S * S
    assert site.roofline["leave"]["bytes"] == operands + scores + 4 * S * S


def test_a_window_argument_of_a_gpu_kernel_moves_no_mask_either() -> None:
    half = [torch.randn(B, H, S, D).half()] * 3
    options = {"choose": "fused", "targets": ("flash",), "device": "H200"}
    (site,) = attn_pass.explain(causal, *half, attn_pass_options=options).sites
    assert site.target == "flash" and site.roofline["flash"]["bytes"] == 2 * 4 * B * H * S * D

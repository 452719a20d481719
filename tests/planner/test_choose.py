"""The choice at real sizes: what must not be touched, and what must."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_pass


def decided(fn: Any, *args: torch.Tensor, **options: Any) -> attn_pass.SiteReport:
    with torch.no_grad():
        return attn_pass.explain(fn, *args, attn_pass_options=options).sites[0]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **kwargs)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def test_a_call_that_is_fine_is_left() -> None:
    site = decided(sdpa, r(2, 8, 256, 64), r(2, 8, 256, 64), r(2, 8, 256, 64))
    assert site.outcome == "left" and "cheapest" in site.reason
    assert site.predicted_us["leave"] <= site.predicted_us["sdpa"]


def test_shared_keys_are_folded() -> None:
    site = decided(sdpa, r(1000, 4, 1, 32), r(1, 4, 2048, 32), r(1, 4, 2048, 32))
    assert site.poor_cases == ("shared K/V over the batch",)
    assert site.predicted_us["leave"] > 2 * min(site.predicted_us.values())


def test_grouped_decode_is_packed() -> None:
    site = decided(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), r(2, 32, 1, 64), r(2, 4, 2048, 64), r(2, 4, 2048, 64)
    )
    assert site.poor_cases == ("grouped heads",)


def test_poor_cases_can_be_switched_off() -> None:
    site = decided(sdpa, r(1000, 4, 1, 32), r(1, 4, 2048, 32), r(1, 4, 2048, 32), poor_cases=())
    assert site.poor_cases == ()


def test_a_causal_mask_becomes_the_flag() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i = torch.arange(q.size(-2))
        return sdpa(q, k, v, attn_mask=i[None, :] <= i[:, None])

    site = decided(fn, r(2, 8, 512, 64), r(2, 8, 512, 64), r(2, 8, 512, 64))
    assert (site.outcome, site.mask) == ("rewritten", "causal")


@pytest.mark.parametrize("shift", [-1, 1])
def test_nearly_causal_masks_are_not_called_causal(shift: int) -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i = torch.arange(q.size(-2))
        return sdpa(q, k, v, attn_mask=i[None, :] <= i[:, None] + shift)

    assert (
        decided(fn, r(2, 8, 64, 64), r(2, 8, 64, 64), r(2, 8, 64, 64), choose="fused").mask
        == f"causal with offset {shift}"
    )


def test_unmeasured_devices_are_left_with_the_reason() -> None:
    site = decided(sdpa, r(8, 5, 16), r(8, 7, 16), r(8, 7, 16), device="xpu", choose="fused")
    assert site.outcome == "left" and "xpu" in site.reason

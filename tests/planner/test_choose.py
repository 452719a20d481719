"""The choice at real sizes: sites that must be left, and sites that must be rewritten."""

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
    site = decided(sdpa, r(2, 8, 256, 64), r(2, 8, 256, 64), r(2, 8, 256, 64), targets=("sdpa",))
    assert site.outcome == "left" and "cheapest" in site.reason
    assert site.predicted_us["leave"] <= site.predicted_us["sdpa"]


def test_shared_keys_are_folded() -> None:
    site = decided(sdpa, r(1000, 4, 1, 32), r(1, 4, 2048, 32), r(1, 4, 2048, 32))
    assert site.poor_cases == ("shared_kv",)
    assert site.predicted_us["leave"] > 2 * min(site.predicted_us.values())


def test_grouped_decode_is_packed() -> None:
    site = decided(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        *(r(2, 32, 1, 64), r(2, 4, 2048, 64), r(2, 4, 2048, 64)),
        targets=("sdpa", "decomposed"),
    )
    assert site.poor_cases == ("grouped_heads",)


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
    site = decided(sdpa, r(8, 5, 16), r(8, 7, 16), r(8, 7, 16), device="hpu", choose="fused")
    assert site.outcome == "left" and "hpu" in site.reason


class _Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(q.size(-2))[:, None] - torch.arange(k.size(-2))
        return (q @ k.mT).masked_fill((distance < 0) | (distance > 3), float("-inf")).softmax(-1) @ v


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = _Layer(), _Layer()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.near(q, k, v) + self.far(k, q, v)


def test_rules_choose_by_module_or_line() -> None:
    inputs = (r(2, 4, 64, 16), r(2, 4, 64, 16), r(2, 4, 64, 16))

    def decided_by(rules: Any) -> dict[str, attn_pass.SiteReport]:
        torch._dynamo.reset()
        backend = attn_pass.wrap("aot_eager", rules=rules, on_error="raise")
        with torch.no_grad(), attn_pass.record() as report:
            torch.compile(_Layers(), backend=backend)(*inputs)
        return {site.module: site for site in report.sites}

    sites = decided_by({"far": ("decomposed", "local", "sdpa"), "ne*": "leave"})
    assert sites["far"].target == "local" and "the rule for 'far'" in sites["far"].reason
    assert sites["near"].outcome == "left" and sites["near"].reason.startswith("left as requested")
    line = sites["near"].where.split(" in ")[0]
    assert [s.outcome for s in decided_by([(line, ["leave"]), ("far", "sdpa")]).values()] == ["left", "left"]
    assert [s.outcome for s in decided_by({"other": "leave"}).values()] == ["rewritten", "rewritten"]
    with pytest.raises(Exception, match="unknown target in a rule 'sdp'"):
        decided_by({"far": "sdp"})


def test_first_takes_targets_in_their_order_whatever_the_cost() -> None:
    inputs = (r(1, 2, 64, 16), r(1, 2, 64, 16), r(1, 2, 64, 16))
    for order in (("local", "sdpa"), ("sdpa", "local")):
        torch._dynamo.reset()
        backend = attn_pass.wrap("aot_eager", choose="first", targets=order)
        with torch.no_grad(), attn_pass.record() as report:
            torch.compile(_Layer(), backend=backend)(*inputs)
        assert [s.target for s in report.sites] == [order[0]]


def test_where_the_best_form_does_not_hold_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.targets.sdpa import Sdpa

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        return (q @ k.mT * 0.125).softmax(-1) @ v

    inputs = (r(2, 8, 4, 64), r(2, 2, 300, 64), r(2, 2, 300, 64))
    best = decided(grouped, *inputs, targets=("sdpa",))
    assert best.poor_cases == ("grouped_heads",)
    emit = Sdpa.emit

    def refusing(self: Any, plan: Any, nodes: Any, offer: Any, setting: Any) -> Any:
        if offer.variant:
            raise attn_pass.RewriteError("holds for some sizes only")
        return emit(self, plan, nodes, offer, setting)

    monkeypatch.setattr(Sdpa, "emit", refusing)
    site = decided(grouped, *inputs, targets=("sdpa",))
    assert (site.target, site.poor_cases) == ("sdpa", ()) and "with sdpa" in site.reason
    assert "some sizes" in site.refusals["sdpa"]

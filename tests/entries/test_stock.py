"""What stock makes of a site is what Inductor makes of it: the prediction beside Inductor's own count of matches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stock_forms import FORMS, B, D, H, S, by_hand, heads, no_code
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F

import attn_pass
from attn_pass.compat import ADDS_A_BATCH, TORCH_VERSION

Tensor = torch.Tensor


def matches(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int:
    """How many attention patterns Inductor counts, up to where it would generate code."""

    def backend(gm: Any, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=no_code)

    torch._dynamo.reset()
    counters.clear()
    torch.compile(function, backend=backend)(*inputs)
    return int(counters["inductor"]["fuse_attention"])


@pytest.mark.parametrize("form", FORMS)
def test_what_stock_is_said_to_run_is_what_its_patterns_make_of_it(form: str) -> None:
    function, inputs = FORMS[form]
    matched = matches(function, inputs)
    counters.clear()
    (site,) = attn_pass.explain(function, *inputs).sites
    assert not counters["inductor"]  # asking leaves no trace
    fused = matched or (form == "rank 3" and ADDS_A_BATCH)  # a call that reaches the kernel as it is written
    assert site.stock == ("cpu flash" if fused else "unfused")
    assert site.stock_by_pattern == bool(matched)
    if matched:
        assert "unfused, " in site.reason and "with stock (cpu flash)" in site.reason


def test_gains_are_those_over_stock() -> None:
    (site,) = attn_pass.explain(by_hand, *heads(requires_grad=True), attn_pass_options={"targets": ["sdpa"]}).sites
    taken = site.predicted_us["sdpa"]
    assert site.stock_us is not None and site.predicted_us["leave"] > site.stock_us
    assert f"({site.stock_us / taken:.3g}x)" in site.reason and "(1x)" in site.reason  # the very call that stock makes


def test_a_call_that_reaches_a_kernel_is_stock_itself() -> None:
    (site,) = attn_pass.explain(F.scaled_dot_product_attention, *heads()).sites
    assert (site.stock, site.stock_us) == ("cpu flash", site.predicted_us["leave"])
    assert " with stock, " in site.reason and "unfused" not in site.reason


@pytest.mark.parametrize("options", [{"attn_pass_dynamic": True}, {"attn_pass_options": {"device": "H200"}}])
def test_what_was_not_asked_is_not_said(options: dict[str, Any]) -> None:
    (site,) = attn_pass.explain(by_hand, *heads(), **options).sites
    assert (site.stock, site.stock_us) == ("", None) and "stock" not in site.reason


def test_no_gain_is_told_where_stock_was_not_asked() -> None:
    """Stock's own patterns match there: 1x with the very call that they make, whoever asks."""
    with attn_pass.record() as report, torch.no_grad():
        torch.compile(by_hand, backend=attn_pass.wrap("eager", targets=["sdpa"]))(*heads())
    (site,) = report.sites
    assert (
        site.reason.startswith("predicted ") and " as written, " in site.reason and site.reason.endswith(" with sdpa")
    )

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    q, k, v = heads()
    with attn_pass.record() as report, torch.no_grad():  # a call that reaches a kernel is what stock runs
        torch.compile(copied, backend=attn_pass.wrap("eager"))(q.repeat(1, 2, 1, 1), k, v)
    assert "x)" in report.sites[0].reason


def test_layers_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.entries import stock

    asked = []
    ask = stock.ask_inductor
    monkeypatch.setattr(stock, "ask_inductor", lambda part, region: asked.append(part) or ask(part, region))

    def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = by_hand(q, k, v)
        return q

    explained = attn_pass.explain(three, *heads(), attn_pass_options={"targets": ["sdpa"]})
    assert [site.stock for site in explained.sites] == ["cpu flash"] * 3
    assert len(asked) == 1


@pytest.mark.skipif(
    TORCH_VERSION != (2, 13), reason="the pattern matches there, and not since pytorch #191203 is mended"
)
def test_where_stock_s_own_pattern_raises_nothing_is_said_of_it() -> None:
    """A scale that is a tensor (pytorch #191203): the replacement calls torch with it as a number."""

    def scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return (q @ k.mT / scale + mask).softmax(-1) @ v

    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    options = {"on_error": "raise"}
    mask, scale = torch.zeros(S, S), torch.tensor(0.5)
    (site,) = attn_pass.explain(scaled, q, k, v, mask, scale, attn_pass_options=options).sites
    assert site.kind == "attention" and site.stock == "" and site.stock_us is None

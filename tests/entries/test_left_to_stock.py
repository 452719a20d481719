"""A site that is left takes nothing away: stock's own pattern has it, where it makes of it what was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stock_forms import FORMS, B, D, H, S, added, by_hand, heads, no_code, without_code
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

import attn_pass
from attn_pass.devices.registry import families
from attn_pass.report.site import SiteReport

Tensor = torch.Tensor
Program = Callable[..., Tensor]
LEFT: dict[str, dict[str, Any]] = {
    "by a rule": {"rules": {"*": ()}},
    "by no target": {"targets": ()},
    "by another target": {"targets": ("single_key",)},
}
THEIRS = "; Inductor's own pattern makes a call of it, which computes the same (cpu flash)"
KEPT_AWAY = "; Inductor's own pattern is kept away from it: "


def matches(function: Program, inputs: tuple[Tensor, ...], **options: Any) -> tuple[int, SiteReport]:
    """How many attention patterns Inductor counts under the pass, up to where it would generate code; and the site."""
    torch._dynamo.reset()
    counters.clear()
    with without_code(), attn_pass.record() as report:
        got = torch.compile(function, backend=attn_pass.backend, options=options)(*inputs)
    (site,) = report.sites
    assert site.outcome == "left"
    if options.get("shield", True):
        right, eps = function(*(x.double() for x in inputs)), torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), right, rtol=0, atol=8 * eps)
    return int(counters["inductor"]["fuse_attention"]), site


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_by_choice_is_stock_s(form: str, left: str) -> None:
    function, inputs = FORMS[form]
    stock, _ = matches(function, inputs, shield=False, **LEFT[left])
    matched, site = matches(function, inputs, **LEFT[left])
    slower = site.reason.endswith(KEPT_AWAY + "the call is predicted to be slower")
    assert not slower or form == "bfloat16"  # by one or two percent, as the number of cores is
    assert matched == (0 if slower else stock) and site.reason.endswith(THEIRS) == bool(matched)
    explained = attn_pass.explain(function, *inputs, attn_pass_options=LEFT[left]).sites[0]
    assert explained.reason == site.reason


def test_by_an_annotation() -> None:
    def annotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attn_pass.leave():
            return by_hand(q, k, v)

    matched, site = matches(annotated, heads())
    assert matched == 1 and site.reason.endswith(THEIRS)


def test_layer_by_layer() -> None:
    """One site is left to stock, the next is rewritten, and a look-alike beside them is kept away."""

    def three(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        with attn_pass.leave():
            left = by_hand(q, k, v)
        taken = by_hand(left + 1.0, k, v)
        return taken, torch.softmax(x @ x.mT / 16.0, dim=0) @ x

    inputs = (*heads(), torch.randn(4, 4, 4, 8))
    with attn_pass.record() as report, without_code():
        counters.clear()
        torch._dynamo.reset()
        torch.compile(three, backend=attn_pass.backend, options={"targets": ("cpu_kernel",), "choose": "fused"})(
            *inputs
        )
    assert [site.outcome for site in report.sites if site.kind == "attention"][:2] == ["left", "rewritten"]
    assert counters["inductor"]["fuse_attention"] == 1


def test_by_the_hook() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=no_code)

    torch._dynamo.reset()
    counters.clear()
    with attn_pass.enabled(rules={"*": ()}), attn_pass.record() as report, torch.no_grad():
        torch.compile(by_hand, backend=backend)(*heads())
    assert counters["inductor"]["fuse_attention"] == 1
    assert report.sites[0].reason.endswith(THEIRS)


def test_in_a_package() -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_hand(q, k, v)

    counters.clear()
    inputs = tuple(torch.randn(B, H, 256, D) for _ in range(3))
    with attn_pass.record() as report:
        package = attn_pass.aot_compile(Net(), inputs, options={"rules": {"*": ()}})
    assert counters["inductor"]["fuse_attention"] == 1
    assert report.sites[0].reason.endswith(THEIRS)
    torch.testing.assert_close(torch._inductor.aoti_load_package(str(package))(*inputs), by_hand(*inputs))


# ---- kept away ----


def permuted_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """K goes from (B, T, H, D) straight to (B, H, D, T), and T equals H (pytorch/pytorch#195320)."""
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return (torch.matmul(q, k) * 0.25).softmax(-1) @ v


def test_a_pattern_that_makes_something_else_is_kept_away() -> None:
    inputs = tuple(torch.randn(2, 8, 8, 16) for _ in range(3))
    if matches(permuted_key, inputs, shield=False, rules={"*": ()})[0] == 0:
        pytest.skip("this torch no longer fuses the look-alike")
    matched, site = matches(permuted_key, inputs, rules={"*": ()})
    assert matched == 0 and site.reason.endswith(KEPT_AWAY + "the call is not proved to compute the same")


def test_a_row_that_may_be_fully_masked_is_kept_as_strict_has_it() -> None:
    inputs = (*heads(), torch.randn(B, 1, S, S))
    matched, site = matches(added, inputs, numerics="strict", targets=("single_key",))
    assert matched == 0 and KEPT_AWAY + "numerics='strict'" in site.reason


@pytest.mark.parametrize("targets", [("sdpa",), ("single_key",)])
def test_what_costs_least_as_it_is_stays_so(targets: tuple[str, ...]) -> None:
    """Whether torch's call was compared with the products, or is what stock would make of them."""
    inputs = tuple(torch.randn(1, 16, length, 64, dtype=torch.bfloat16) for length in (1, 512, 512))
    matched, site = matches(by_hand, inputs, targets=targets)
    assert matched == 0 and ("already the cheapest form" in site.reason) != (KEPT_AWAY in site.reason)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_family_keeps_patterns_off_only_where_it_says_what_stock_runs(family: Any) -> None:
    assert not family.keeps_inductors_patterns_off or family.fused_operators

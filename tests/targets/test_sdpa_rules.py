"""The sdpa target's rules, both sides of each, compared with torch's own choice on this CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_pass

FLASH = 1  # SDPBackend.FLASH_ATTENTION, the fused CPU kernel


def seen_backends(fn: Any, *args: torch.Tensor, **options: Any) -> tuple[list[int], attn_pass.Report, torch.Tensor]:
    """The backend torch picks for every SDPA call the pass emits, by running the rewritten graph."""
    picked: list[int] = []

    def execute(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        class Recorder(torch.fx.Interpreter):
            def call_function(self, target: Any, a: Any, k: Any) -> Any:
                if target is torch.nn.functional.scaled_dot_product_attention:
                    picked.append(torch._fused_sdp_choice(*a, **k))
                return super().call_function(target, a, k)

        return lambda *values: Recorder(gm).run(*values)

    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        out = torch.compile(fn, backend=attn_pass.wrap(execute, choose="fused", on_error="raise", **options))(*args)
    return picked, report, out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


CASES: dict[str, tuple[torch.Tensor, ...]] = {
    "plain": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 16)),
    "rank 3": (r(6, 5, 16), r(6, 7, 16), r(6, 7, 16)),
    "rank 5": (r(2, 3, 2, 5, 16), r(2, 3, 2, 7, 16), r(2, 3, 2, 7, 16)),
    "rank 2": (r(5, 16), r(7, 16), r(7, 16)),
    "keys of batch 1": (r(2, 3, 5, 16), r(1, 3, 7, 16), r(1, 3, 7, 16)),
    "keys of one head": (r(2, 3, 5, 16), r(2, 1, 7, 16), r(2, 1, 7, 16)),
    "values of batch 1": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(1, 3, 7, 16)),
    "query of batch 1": (r(1, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 16)),
    "narrow values": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 8)),
    "wide values": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 24)),
    "strided head dim": (r(2, 3, 16, 5).mT, r(2, 3, 16, 7).mT, r(2, 3, 16, 7).mT),
    "mask of rank 3": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 16), r(3, 5, 7)),
    "boolean mask": (r(2, 3, 5, 16), r(2, 3, 7, 16), r(2, 3, 7, 16), r(2, 1, 1, 7) > -1.5),
    "bfloat16": tuple(r(2, 3, n, 16, dtype=torch.bfloat16) for n in (5, 7, 7)),
    "float64": tuple(r(2, 3, n, 16, dtype=torch.float64) for n in (5, 7, 7)),
    "query length 1": (r(2, 3, 1, 16), r(2, 3, 7, 16), r(2, 3, 7, 16)),
    "key length 1": (r(2, 3, 5, 16), r(2, 3, 1, 16), r(2, 3, 1, 16)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_call_it_emits_reaches_the_fused_kernel(name: str) -> None:
    args = CASES[name]
    picked, report, out = seen_backends(sdpa, *args)
    assert [s.outcome for s in report.sites] == ["rewritten"], str(report)
    assert picked == ([] if name == "key length 1" else [FLASH])  # one key is its value, and no call at all
    want = sdpa(*(a.double() if a.is_floating_point() else a for a in args))
    tolerance = 2e-2 if args[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    assert out.dtype == args[0].dtype


def test_dropout_is_left_with_the_reason() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    _, report, _ = seen_backends(fn, *CASES["plain"])
    assert report.sites[0].outcome == "left"
    assert "dropout 0.5" in report.sites[0].reason


def test_empty_keys_are_left() -> None:
    args = (r(2, 3, 5, 16), r(2, 3, 0, 16), r(2, 3, 0, 16))
    _, report, out = seen_backends(sdpa, *args)
    assert [s.outcome for s in report.sites] == ["left"]
    assert out.eq(0).all()


def test_a_kernel_restriction_is_honoured() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    picked, report, out = seen_backends(fn, *CASES["plain"])
    assert picked == [] and "MATH" in report.sites[0].refusals["sdpa"]
    torch.testing.assert_close(out, sdpa(*CASES["plain"]))


@pytest.mark.parametrize("switches", [("enable_flash_sdp",), ("enable_flash_sdp", "enable_math_sdp")])
def test_a_switch_is_a_restriction_of_its_name(switches: tuple[str, ...]) -> None:
    """Torch's switches are those of sdpa_kernel, and so is what they mean; the reason says which one was set."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * 0.25).softmax(-1) @ v

    try:
        for switch in switches:
            getattr(torch.backends.cuda, switch)(False)
        _, report, out = seen_backends(fn, *CASES["plain"])
    finally:
        for switch in switches:
            getattr(torch.backends.cuda, switch)(True)
    (site,) = report.sites
    assert site.outcome == "left" and "allows only" not in site.reason
    assert all(f"torch.backends.cuda.{switch}(False)" in site.reason for switch in switches), site.reason
    assert ("MATH" in site.reason) == (len(switches) == 2)
    torch.testing.assert_close(out, fn(*CASES["plain"]))


def test_a_negative_scale_under_a_causal_mask_gives_numbers() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        return torch.softmax((q * -0.5 @ k.mT).masked_fill(~keep, float("-inf")), -1) @ v

    args = (r(2, 3, 6, 16), r(2, 3, 6, 16), r(2, 3, 6, 16))
    _, report, out = seen_backends(fn, *args)
    assert (report.sites[0].outcome, report.sites[0].mask) == ("rewritten", "causal")
    torch.testing.assert_close(out, fn(*args))

"""Wrong results of the common targets that were found by reading them: masks under autocast, of integers, and wide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn
from torch import Tensor, nn

import attn_pass

LOWEST_FLOAT64 = torch.finfo(torch.float64).min


def rewritten(fn: Callable[..., Tensor], *inputs: Tensor, target: str, choose: str = "fused") -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        backend = attn_pass.wrap("aot_eager", choose=choose, targets=(target,), on_error="raise")
        out = torch.compile(fn, backend=backend)(*inputs)
    assert [s.target for s in report.sites] == [target]
    return out


def holes() -> Tensor:
    """Row 3 has no key."""
    mask = torch.zeros(8, 8)
    mask[3] = mask[5, 2] = NEG_INF
    return mask


def guarded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (q @ k.mT * 0.25 + mask).softmax(-1).nan_to_num() @ v


def of_three_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Torch does not fuse this call; its own math gives 0."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 8, 8))


@pytest.mark.parametrize("target", ["sdpa", "cpu_kernel"])
@pytest.mark.parametrize("fn", [guarded, of_three_dimensions])
def test_minus_infinity_stays_so_under_autocast(fn: Callable[..., Tensor], target: str) -> None:
    inputs = (*qkv(2, 2, 8, 8, dim=16), holes())
    got, expected = rewritten(fn, *inputs, target=target), fn(*inputs)
    assert got[:, :, 3].eq(0).all()
    assert (got.float() - expected.float()).abs().max() < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_default_dtype_of_half_precision(dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 2, 8, 8, dim=16, dtype=dtype)
    keep = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    keep[0, 0, 3] = False

    def run(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v

    torch.set_default_dtype(dtype)
    try:
        got, expected = rewritten(run, q, k, v, keep, target="sdpa"), run(q, k, v, keep)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (got.float() - expected.float()).abs().max() < 3e-2


def test_integers_added_to_scores_in_float16() -> None:
    q, k, v = qkv(2, 2, 8, 8, dim=16, dtype=torch.float16)
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.int32)
    mask[0] = mask[1, ..., 5:] = -65504

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.5 + mask).softmax(-1) @ v

    mean = v[0].double().mean(-2, keepdim=True)
    got = rewritten(run, q, k, v, mask, target="sdpa")
    assert (got[0].double() - mean).abs().max() < 2e-3
    assert (got.double() - run(q, k, v, mask).double()).abs().max() < 4e-3


def test_integers_added_to_scores_in_float64() -> None:
    q, k, v = (5 * x for x in qkv(2, 2, 8, 8, dim=16))
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.int64)
    mask[0] = -(10**9)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT).double() + mask).softmax(-1).float() @ v

    assert (rewritten(run, q, k, v, mask, target="sdpa") - run(q, k, v, mask)).abs().max() < 1e-3


def test_a_fill_that_float32_has_no_number_for_beside_a_soft_cap() -> None:
    q, k, v = qkv(2, 2, 8, 8, dim=16)
    keep = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    keep[0, 0, 3] = keep[1, 0, :, 5:] = False

    def run(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        capped = torch.tanh((q @ k.mT).double() / 5) * 5
        return capped.masked_fill(~keep, LOWEST_FLOAT64).softmax(-1).float() @ v

    assert (rewritten(run, q, k, v, keep, target="flex") - run(q, k, v, keep)).abs().max() < 1e-4


def test_a_key_whose_head_dim_is_broadcast() -> None:
    q, k, v = qkv(2, 2, 8, 8, dim=16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[..., :1].expand_as(q), v)

    assert (rewritten(run, q, k, v, target="decomposed", choose="first") - run(q, k, v)).abs().max() < 1e-5


def test_a_fill_that_leaves_something_of_scores_is_not_recomputed() -> None:
    """-1e9 in float32 beside a learned bias: where a row is fully masked, sdpa repairs it, in inference alone."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 16, 16, dim=64))
    bias = randn(1, 2, 16, 16).requires_grad_()
    keep = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    keep[0, 0, 3] = False

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, fill: float) -> Tensor:
        return torch.where(keep, q @ k.mT + bias, fill).softmax(-1) @ v

    for fill, refused in ((-1e9, True), (-1e30, False)):
        torch._dynamo.reset()
        with attn_pass.record() as report:
            backend = attn_pass.wrap("aot_eager", choose="fused", targets=("recompute",))
            torch.compile(run, backend=backend)(q, k, v, bias, fill)
        assert ("-1e9 beside a bias" in report.sites[0].refusals.get("recompute", "")) == refused


class WithSink(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.cat([q @ k.mT * 0.3, self.sink.view(1, 4, 1, 1).expand(2, 4, 8, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v


def test_an_exported_sink_is_left_where_it_may_be_trained() -> None:
    inputs = [randn(2, 4, 8, 16) for _ in range(3)]
    program = torch.export.export(WithSink(), tuple(inputs))
    report = attn_pass.rewrite(program, choose="fused", targets=("sdpa",))
    assert "has no gradient" in report.sites[0].refusals["sdpa"]
    program = torch.export.export(WithSink().requires_grad_(False), tuple(inputs))
    assert attn_pass.rewrite(program, choose="fused", targets=("sdpa",)).sites[0].target == "sdpa"


@pytest.mark.parametrize("target", ["sdpa", "cpu_kernel"])
def test_a_mask_of_minus_1e9_absorbs_scores_in_bfloat16(target: str) -> None:
    """Float32, in which kernels add it, has numbers 64 apart there; a program in bfloat16 loses any score."""
    q, k, v = qkv(1, 2, 64, 64, dim=64, dtype=torch.bfloat16)
    slopes = torch.tensor([-0.5, -4.0]).view(2, 1, 1)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 3 + mask).softmax(-1) @ v

    def sloped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        distance = (torch.arange(64)[:, None] - torch.arange(64)).abs()
        return (q @ k.mT * 3 + (mask.float() + slopes * distance).bfloat16()).softmax(-1) @ v

    mask = torch.full((1, 1, 1, 64), -1e9, dtype=torch.bfloat16)
    mean = v.double().mean(-2, keepdim=True)
    for fn in (run, sloped):
        assert (rewritten(fn, q, k, v, mask, target=target).double() - mean).abs().max() < 1e-2
        some = mask.masked_fill(torch.arange(64) < 40, 0.0)
        expected = fn(q.double(), k.double(), v.double(), some)
        assert (rewritten(fn, q, k, v, some, target=target).double() - expected).abs().max() < 5e-2

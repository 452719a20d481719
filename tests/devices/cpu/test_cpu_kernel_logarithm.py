"""The CPU kernel where the log-sum-exp of the scores is needed too, as its second result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import also_used_programs as also_used
import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from torch import Tensor

import attn_pass

Program = Callable[..., Any]
ON_KERNEL: dict[str, Any] = {"choose": "fused", "targets": ("cpu_kernel",)}
BIAS = randn(2, 1, 7, 11)
GIVEN, STAYS = "and the kernel gives it", "and stay"


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    s = (q @ k.mT * 0.3).masked_fill(j > i + 3, NEG_INF)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def kept_dimension(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT * 0.3
    return s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True), torch.logsumexp(s, (3,)).exp()


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two query heads on each KV head, as a dimension of the scores."""
    q = q.unflatten(1, (k.shape[1] // 2, 2))
    s = q @ k[:, ::2, None].mT
    return s.softmax(-1) @ v[:, ::2, None], s.logsumexp(-1)


def merged_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.bmm(q, k.mT)
    return torch.bmm(s.softmax(-1), v), s.logsumexp(-1) * 2


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = 5 * torch.tanh(q @ k.mT / 5)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def biased(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT + BIAS.to(q.dtype)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def beside_a_sink(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The sum has one more in it, and the log-sum-exp has not."""
    s = q @ k.mT * 0.3
    e = s.exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v, s.logsumexp(-1)


def combined(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As ring attention joins parts: each result with the log-sum-exp of its scores."""
    a, b = (q @ x.mT * 0.3 for x in k.chunk(2, -2))
    one, two = (s.softmax(-1) @ x for s, x in zip((a, b), v.chunk(2, -2)))
    la, lb = a.logsumexp(-1, keepdim=True), b.logsumexp(-1, keepdim=True)
    both = torch.logaddexp(la, lb)
    return (one * (la - both).exp() + two * (lb - both).exp(),)


def for_several_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Values of more batches than the scores have: a row of its is one of several results."""
    s = q[:1] @ k[:1].mT
    return s.softmax(-1) @ v, s.logsumexp(-1)


GIVES: dict[str, tuple[Program, int]] = {
    "log-sum-exp": (also_used.logarithm, 1),
    "z-loss": (also_used.z_loss, 1),
    "the softmax is made of it": (also_used.its_own_logarithm, 1),
    "causal": (causal, 1),
    "with the dimension": (kept_dimension, 1),
    "grouped": (grouped, 1),
    "merged heads": (merged_heads, 1),
    "soft cap": (soft_cap, 1),
    "biased": (biased, 1),
    "a sink in the sum": (beside_a_sink, 1),
    "two parts": (combined, 2),
    "values of more batches": (for_several_values, 1),
}


def products(program: Program, *inputs: Tensor, **options: Any) -> int:
    """How many products are left in the graph."""
    counts: list[int] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        counts.append(sum("matmul" in str(n.target) or "bmm" in str(n.target) for n in gm.graph.nodes))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=attn_pass.wrap(seen, **ON_KERNEL, **options))(*inputs)
    return counts[-1]


@pytest.mark.parametrize("name", GIVES)
def test_the_kernel_gives_it_and_the_scores_go(name: str) -> None:
    program, count = GIVES[name]
    report = same(program, *qkv(2, 4, 7, 11), rewritten=count, **ON_KERNEL)
    assert all(site.reason.endswith(GIVEN) for site in report.sites), report
    assert products(program, *qkv(2, 4, 7, 11)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GIVES)
def test_in_half_precision(name: str, dtype: torch.dtype) -> None:
    program, count = GIVES[name]
    report = same(program, *qkv(2, 4, 7, 11, dtype=dtype), rewritten=count, **ON_KERNEL)
    assert all(site.reason.endswith(GIVEN) for site in report.sites), report


@pytest.mark.parametrize("program", [causal, kept_dimension, merged_heads])
def test_lengths_that_are_not_known(program: Program) -> None:
    report = same(program, *qkv(2, 4, 7, 11), rewritten=1, dynamic=True, **ON_KERNEL)
    assert report.sites[0].reason.endswith(GIVEN)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A softmax does not feel what is the same for all keys, and its logarithm does."""
    s = q @ k.mT
    s = s - s.amax(-1, keepdim=True)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def with_row_bias(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT + BIAS[..., :1].to(q.dtype)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def sink(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    s = torch.cat((s, torch.ones_like(s[..., :1])), -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


def filled_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A fully masked row has the fill's logarithm, not that of nothing."""
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    keep[2] = False
    s = (q @ k.mT).masked_fill(~keep, -1e9)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def zeroed_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The first row is fully masked: its result is zero, and its logarithm that of the fills."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    s = (q @ k.mT).masked_fill(j >= i, -1e9)
    return s.softmax(-1).masked_fill(j >= i, 0.0) @ v, s.logsumexp(-1)


def some_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1)[:, :, 1:3] @ v, s.logsumexp(-1)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k[:, :, : q.shape[-2]].mT
    return s.softmax(-1) @ v[:, :, : q.shape[-2]], s.logsumexp(-2)


def written_in_between(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    lse = s.logsumexp(-1)
    s.mul_(0.25)
    return torch.softmax(s, -1) @ v, lse


def before_the_result(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What is made of it goes into the values."""
    s = q @ k.mT
    lse = s.logsumexp(-1)
    return s.softmax(-1) @ (v + lse.mean()), lse


STAY: dict[str, Program] = {
    "scores shifted by their maximum": shifted,
    "a bias of rows": with_row_bias,
    "a sink": sink,
    "rows of a number": filled_rows,
    "weights set to zero": zeroed_weights,
    "some rows": some_rows,
    "over the queries": over_queries,
    "needed before the result": before_the_result,
    "of other scores": also_used.logarithm_of_unmasked,
    "written in between": written_in_between,
    "written, and once more": also_used.logarithm_then_written,
    "weights, too": also_used.weights_and_logarithm,
}


@pytest.mark.parametrize("name", STAY)
def test_neighbours_keep_what_they_wrote(name: str) -> None:
    report = same(STAY[name], *qkv(2, 4, 7, 11), rewritten=1, **ON_KERNEL)
    assert not any(site.reason.endswith(GIVEN) for site in report.sites), report


def test_other_kernels_leave_it_as_it_was_written() -> None:
    report = same(causal, *qkv(2, 4, 7, 11), rewritten=1, choose="fused", targets=("sdpa",))
    assert report.sites[0].reason.endswith(STAYS)


def test_what_stays_is_part_of_the_price_of_other_kernels() -> None:
    """Beside a kernel that gives it, all others are to pay for the scores."""
    inputs = qkv(1, 4, 512, 512, dim=64)
    reported = []
    for targets in (("sdpa",), ("sdpa", "cpu_kernel")):
        torch._dynamo.reset()
        with torch.no_grad(), attn_pass.record() as report:
            torch.compile(causal, backend=attn_pass.wrap("eager", targets=targets))(*inputs)
        reported.append(report.sites[0])
    alone, both = reported
    assert both.target == "cpu_kernel" and both.reason.endswith(GIVEN)
    stays = both.predicted_us["leave"] - alone.predicted_us["leave"]
    assert stays > 0 and both.predicted_us["sdpa"] == pytest.approx(alone.predicted_us["sdpa"] + stays, abs=1)

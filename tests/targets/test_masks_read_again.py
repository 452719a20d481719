"""Masks that a reader of the code thought up, which a target computed wrongly or lost: each keeps eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu.kernel import build

BF16 = torch.bfloat16
LOWEST = torch.finfo(torch.float32).min
NO_KERNEL = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
TARGETS = ["sdpa", pytest.param("cpu_kernel", marks=NO_KERNEL)]
Program = Callable[..., Any]


def large(times: float, q_len: int = 8, kv_len: int = 64) -> tuple[Tensor, ...]:
    """Operands in bfloat16 whose scores are beyond what -1e9 absorbs in float32."""
    q, k, v = qkv(2, 2, q_len, kv_len, 64)
    return (times * q).to(BF16), k.to(BF16), v.to(BF16)


FULLY_MASKED = torch.zeros(2, 1, 1, 64, dtype=BF16).index_fill(0, torch.tensor(1), -1e9)
ONE_ROW = torch.zeros(1, 1, 8, 64, dtype=BF16).index_fill(2, torch.tensor(3), -1e9)
IN_BFLOAT16: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "the softmax is in float32": (
        lambda q, k, v, m: ((q @ k.mT + m).float().softmax(-1).to(v.dtype) @ v)[1],
        (*large(12), FULLY_MASKED),
    ),
    "scaled after the mask was added": (
        lambda q, k, v, m: (((q @ k.mT + m) * 0.125).softmax(-1) @ v)[:, :, 3],
        (*large(50), ONE_ROW),
    ),
    "torch does not fuse the call": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v[..., :32], attn_mask=m)[:, :, 3],
        (*large(100), ONE_ROW),
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(IN_BFLOAT16))
def test_a_mask_of_a_finite_number_in_bfloat16(name: str, target: str) -> None:
    """Where it absorbs a score in eager, it does so in the kernel; and where it does not, it does not."""
    fn, inputs = IN_BFLOAT16[name]
    with torch.no_grad():
        same(fn, *inputs, targets=(target,), reference=False)


def test_a_mask_by_distance_in_bfloat16() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        age = torch.arange(256)[:, None] - torch.arange(128)[None]
        mask = torch.zeros(256, 128, dtype=BF16).masked_fill(~((age >= 0) & (age < 8)), -1e9)
        return ((q @ k.mT + mask).softmax(-1) @ v)[:, :, 140:]  # which keep no key

    with torch.no_grad():
        same(run, *large(30, 256, 128), targets=("sdpa",), reference=False, rewritten=1)


def causal_and_rows(q: Tensor, row: float) -> Tensor:
    i = torch.arange(q.shape[-2])
    return torch.where(i <= i[:, None], 0.0, NEG_INF) + row * i[:, None]


def beside_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + causal_and_rows(q, 0.5)
    return torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, 2, 8, 1)], -1).softmax(-1)[..., :-1] @ v


def with_its_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.25 + causal_and_rows(q, 0.5)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("target", TARGETS)
def test_a_term_of_rows_inside_an_added_mask(target: str) -> None:
    """The softmax does not feel it, and a sink and the log-sum-exp do."""
    same(beside_a_sink, *qkv(), torch.tensor([1.0, 3.0]), rewritten=0, targets=(target,))
    same(with_its_logarithm, *qkv(), rewritten=1, targets=(target,))


def rows_of(q: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(q.shape[-2])[None] < lengths[:, None]).float().log()[:, None, :, None]


LOGARITHMS: dict[str, Program] = {
    "a call": lambda q, k, v, n: F.scaled_dot_product_attention(
        q, k, v, attn_mask=causal_and_rows(q, 0.0) + rows_of(q, n)
    ),
    "a call, of rows alone": lambda q, k, v, n: F.scaled_dot_product_attention(
        q, k, v, attn_mask=rows_of(q, n).expand(-1, -1, -1, 8)
    ),
    "no number is made 0": lambda q, k, v, n: (q @ k.mT * 0.25 + rows_of(q, n)).softmax(-1).nan_to_num(0.0) @ v,
}


@pytest.mark.parametrize("name", list(LOGARITHMS))
def test_the_logarithm_of_a_mask_of_rows(name: str) -> None:
    same(LOGARITHMS[name], *qkv(), torch.tensor([8, 5]), targets=("sdpa",))


PADDED = torch.rand(2, 18, generator=torch.Generator().manual_seed(0)).index_fill(1, torch.tensor(0), 0.0) < 0.8


def every_second(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + torch.where(keep[:, None, None, ::2], 0.0, LOWEST)).softmax(-1) @ v


def causal_and_every_second(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    keeps = torch.ones(9, 9, dtype=torch.bool).tril() & keep[:, None, None, ::2]
    return (q @ k.mT * 0.25).masked_fill(~keeps, NEG_INF).softmax(-1) @ v


def blocks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(9) // 4
    keeps = keep[:, :9].view(-1, 3, 3)[:, i][:, :, i][:, None] & torch.ones(9, 9, dtype=torch.bool).tril()
    return (q @ k.mT * 0.25).masked_fill(~keeps, -1e9).softmax(-1) @ v


@NO_KERNEL
@pytest.mark.parametrize("fn", [every_second, causal_and_every_second, blocks])
def test_a_mask_that_is_no_view_of_what_it_is_made_of_goes_to_the_next_offer(fn: Program) -> None:
    same(fn, *qkv(q_len=9, kv_len=9), PADDED, targets=("cpu_kernel", "sdpa"), rewritten=1)


def test_a_bias_of_a_part_of_the_rows_goes_to_the_form_that_takes_it() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        scores[:, :, 1:] = scores[:, :, 1:] + bias
        return scores.softmax(-1) @ v

    k, v = randn(1, 2, 512, 16, seed=2), randn(1, 2, 512, 16, seed=3)
    same(run, randn(8, 2, 4, 16, seed=1), k, v, randn(3, 512, seed=4), targets=("sdpa",), rewritten=1)


class Table(torch.nn.Module):
    """T5's bias and a mask, added in float32 and cast together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bucket: Tensor, keep: Tensor) -> Tensor:
        bias = self.table(bucket).permute(2, 0, 1)[None] + torch.where(keep[:, None, None, :], 0.0, LOWEST)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


@pytest.mark.parametrize("target", TARGETS)
def test_a_table_and_a_mask_that_are_cast_together(target: str) -> None:
    """float32's lowest number is -inf in bfloat16, and a row of it is 0 in torch's call."""
    keep = torch.ones(2, 8, dtype=torch.bool).index_fill(0, torch.tensor(1), False)
    bucket = torch.arange(64).view(8, 8) % 32
    with torch.no_grad():
        same(Table(), *qkv(dtype=BF16), bucket, keep, targets=(target,), reference=False)


@pytest.mark.parametrize("target", TARGETS)
def test_a_comparison_of_two_types_in_the_shape_of_the_scores(target: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, m: Tensor, threshold: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        return scores.masked_fill(m.expand_as(scores) == threshold, NEG_INF).softmax(-1) @ v

    m, threshold = torch.tensor([0.1, 0.7] * 4).view(1, 1, 1, 8), torch.tensor(0.1, dtype=torch.float64)
    same(run, *qkv(), m, threshold, targets=(target,), reference=False, rewritten=1)


def test_flex_reads_no_tensor_beyond_its_end() -> None:
    """What is added to the first keys alone has no elements for the others."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT * 0.25) * 5
        scores[..., :4] = scores[..., :4] + bias
        return scores.softmax(-1) @ v

    inputs = (*qkv(), randn(8, 4))
    (site,) = attn_pass.explain(run, *inputs, attn_pass_options={"targets": ("flex",), "device": "H100"}).sites
    assert "beyond its end" in site.refusals["flex"]

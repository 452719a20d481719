"""Keys that all queries ignore are sliced off, and a single key gives its value: exact cases, and look-alikes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, same
from torch import Tensor

import attn_pass

NAME = "key_range"


def masked(keep: Callable[[Tensor, Tensor], Tensor], offset: int = 0) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None] + offset, torch.arange(k.shape[-2])[None]
        return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~keep(i, j), NEG_INF), -1) @ v

    return run


CUT: dict[str, tuple[Callable[..., Tensor], int, int, int]] = {  # program, queries, keys, keys left
    "one query, causal from the first key": (masked(lambda i, j: j <= i), 1, 9, 1),
    "a call, one query, is_causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 9, 1),
    "one query in a window": (masked(lambda i, j: (j <= i) & (i - j < 4), 8), 1, 9, 4),
    "a prefix": (masked(lambda i, j: j < 5), 3, 9, 5),
    "a suffix": (masked(lambda i, j: j >= 5), 3, 9, 4),
    "a run": (masked(lambda i, j: (j >= 2) & (j < 5)), 3, 9, 3),
}
WHOLE: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "one query, causal to the last key": (masked(lambda i, j: j <= i, 8), 1, 9),
    "two queries": (masked(lambda i, j: j <= i), 2, 9),
    "two runs": (masked(lambda i, j: (j < 2) | (j > 5)), 3, 9),
    "every other key": (masked(lambda i, j: j % 2 == 0), 3, 9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUT)
def test_cut(name: str, dtype: torch.dtype) -> None:
    program, queries, keys, left = CUT[name]
    report = same(program, *qkv(2, 2, queries, keys, dtype=dtype), rewritten=1, choose="fused", reference=False)
    (site,) = report.sites
    assert NAME in site.poor_cases
    assert (site.target == "single_key") == (left == 1)


@pytest.mark.parametrize("name", CUT)
def test_cut_with_gradients(name: str) -> None:
    program, queries, keys, _ = CUT[name]
    report = same(
        program, *qkv(2, 2, queries, keys, grad=True), rewritten=1, grad=True, choose="fused", reference=False
    )
    assert report.sites[0].target == "sdpa"


@pytest.mark.parametrize("name", WHOLE)
def test_not_cut(name: str) -> None:
    program, queries, keys = WHOLE[name]
    report = same(program, *qkv(2, 2, queries, keys), choose="fused", reference=False)
    assert NAME not in report.sites[0].poor_cases


def test_a_mask_known_at_run_time_only_is_not_cut() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        keep = torch.arange(9)[None] < n
        return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~keep, -1e9), -1) @ v

    report = same(run, *qkv(2, 2, 3, 9), torch.tensor(5), rewritten=1, choose="fused", reference=False)
    assert report.sites[0].poor_cases == ()


@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1}, {"value_dim": 8}])
def test_one_key_is_its_value(shape: dict[str, int]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.expand(-1, 2, -1, -1) for t in (k, v))
        out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return out.add_(1.0)  # the values themselves must not change

    report = same(run, *qkv(2, 2, 7, 1, **shape), rewritten=1, choose="fused", reference=False)
    assert report.sites[0].target == "single_key"


def test_one_key_with_a_mask_a_gradient_or_strictness_is_not_the_value() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(m, NEG_INF), -1) @ v

    hidden = torch.tensor([[[[True]]], [[[False]]]])
    report = same(run, *qkv(2, 2, 7, 1), hidden, choose="fused", reference=False)
    assert report.sites[0].target != "single_key"
    plain = masked(lambda i, j: j >= 0)
    report = same(plain, *qkv(2, 2, 7, 1, grad=True), grad=True, choose="fused", reference=False)
    assert report.sites[0].target != "single_key"
    report = same(plain, *qkv(2, 2, 7, 1), choose="fused", numerics="strict", reference=False)
    assert report.sites[0].target != "single_key"


def test_a_prefix_of_a_length_that_is_not_known() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return masked(lambda i, j: (j <= i) & (i - j < 4), k.shape[-2] - 1)(q, k, v)

    length = torch.export.Dim("length", min=8, max=99)
    with torch.no_grad():
        inputs = qkv(2, 2, 1, 17)
        program = torch.export.export(Model(), inputs, dynamic_shapes=(None, {2: length}, {2: length}))
        report = attn_pass.rewrite(program, choose="fused", on_error="raise")
        assert report.sites[0].poor_cases == (NAME,)
        more = qkv(2, 2, 1, 60)
        torch.testing.assert_close(program.module()(*more), Model()(*more), atol=1e-5, rtol=1e-5)

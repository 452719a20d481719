"""The split-KV target: what it takes on devices that need not be here, and its numbers on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same

import attn_pass

pytest.importorskip("triton")

Tensor = torch.Tensor
HALF = torch.bfloat16


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    i = torch.arange(q.size(-2))[:, None] + k.size(-2) - q.size(-2)
    j = torch.arange(k.size(-2))
    keep = j <= i if window is None else (j <= i) & (j >= i - window)
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(torch.arange(k.size(-2)) > 5 * q.size(-2), torch.finfo(q.dtype).min).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + mask).softmax(-1) @ v


LOWEST = torch.where(torch.arange(40) > 30, torch.finfo(HALF).min, 0.0).to(HALF)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "one row": (by_hand, qkv(q_len=1, kv_len=40, dtype=HALF)),
    "grouped": (by_hand, qkv(2, 8, 3, 40, 32, kv_heads=2, dtype=HALF)),
    "float16": (by_hand, qkv(2, 4, 5, 41, 64, dtype=torch.float16)),
    "narrow values": (by_hand, qkv(2, 4, 5, 41, 64, value_dim=16, dtype=HALF)),
    "causal": (causal, qkv(2, 2, 4, 40, dtype=HALF)),
    "window": (lambda q, k, v: causal(q, k, v, 7), qkv(2, 2, 4, 40, dtype=HALF)),
    "filled": (filled, qkv(2, 2, 4, 40, dtype=HALF)),
    "added": (added, (*qkv(2, 2, 4, 40, dtype=HALF), randn(2, 1, 4, 40, dtype=HALF))),
    "padding": (added, (*qkv(2, 2, 4, 40, dtype=HALF), LOWEST)),
    "every key of a row filled": (added, (*qkv(2, 2, 4, 40, dtype=HALF), LOWEST.min().expand(4, 40))),
    "heads last": (
        by_hand,
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 4, 3, 40, dtype=HALF)),
    ),
    "rank 3": (
        lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v),
        tuple(randn(4, n, 16, dtype=HALF) for n in (2, 40, 40)),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_computes_what_was_written(name: str) -> None:
    fn, inputs = CASES[name]
    report = same(fn, *inputs, rewritten=1, device="H200", targets=("decode",))
    assert report.sites[0].target == "decode"


def _taken(device: str, *shape: int, kv_heads: int | None = None, dtype: torch.dtype = HALF, **kwargs: Any) -> Any:
    batch, heads, q_len, kv_len, dim = shape
    options = {"device": device}
    with torch.device("meta"):
        q = torch.empty(batch, heads, q_len, dim, dtype=dtype, requires_grad=kwargs.get("grad", False))
        k, v = (torch.empty(batch, kv_heads or heads, kv_len, dim, dtype=dtype) for _ in range(2))
    fn = causal if kwargs.get("causal") else by_hand
    with torch.set_grad_enabled(kwargs.get("grad", False)):
        return attn_pass.explain(fn, q, k, v, attn_pass_options=options).sites[0]


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 12), (8, 4), (3, 1)])
def test_a_band_that_holds_nothing_is_not_causal(q_len: int, kv_len: int) -> None:
    i, j, last = torch.arange(q_len)[:, None], torch.arange(kv_len), kv_len - q_len

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = (j - i <= last) & (j - i >= last + 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep)

    same(fn, *qkv(2, 2, q_len, kv_len, 16, dtype=torch.float16), device="H200", targets=("decode",))


@pytest.mark.parametrize("device", ["H200", "A100", "L4", "B200"])
@pytest.mark.parametrize("q_len", [2, 8, 64])
def test_few_rows_over_many_keys_are_split(device: str, q_len: int) -> None:
    assert _taken(device, 1, 32, q_len, 32768, 128, kv_heads=8).target == "decode"


@pytest.mark.parametrize(
    ("why", "shape", "settings"),
    [
        ("are not few", (1, 32, 65, 32768, 128), {}),
        ("takes half precision", (1, 32, 8, 32768, 128), {"dtype": torch.float32}),
        ("no backward", (1, 32, 8, 32768, 128), {"grad": True}),
        ("multiple of 8", (1, 32, 8, 32768, 20), {}),
        ("multiple of 8", (1, 32, 8, 32768, 264), {}),
    ],
)
def test_what_it_refuses(why: str, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    site = _taken("H200", *shape, **settings)
    assert why in site.refusals["decode"]


def test_prefill_is_not_split() -> None:
    assert _taken("H200", 1, 32, 2048, 2048, 128).target == "cudnn"


def test_no_other_device_takes_it() -> None:
    assert "not for cpu" in _taken("cpu", 1, 32, 8, 4096, 128).refusals["decode"]

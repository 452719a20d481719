"""Programs for the flex target on CUDA devices: soft caps, masks by positions, biases, grouped heads, odd layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from against_eager import NEG_INF, qkv, randn

Tensor = torch.Tensor
CAP = 5.0
ON_CUDA: dict[str, Any] = {"device": "H200", "targets": ("flex",)}
LOWEST = torch.finfo(torch.float32).min


def capped(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT * 0.25 / CAP) * CAP


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped(q, k).softmax(-1) @ v


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]


def masked(keep: Callable[[Tensor, Tensor], Tensor], fill: float = NEG_INF, cap: bool = False) -> Callable[..., Tensor]:
    """Attention where key j of query i is kept if ``keep(i, j)``."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = capped(q, k) if cap else q @ k.mT * 0.25
        return scores.masked_fill(~keep(*positions(q, k)), fill).softmax(-1) @ v

    return fn


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 40)


def prefix(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < 20)


def sinks_and_window(i: Tensor, j: Tensor) -> Tensor:
    return ((j <= i) & (i - j < 40)) | ((j < 4) & (j <= i))


def chunks(i: Tensor, j: Tensor) -> Tensor:
    return (i // 32 == j // 32) & (j <= i)


def dilated(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % 4 == 0)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    slopes = (2.0 ** -torch.arange(1.0, q.size(1) + 1)[:, None, None]).to(q.dtype)
    return (q @ k.mT * 0.25 - slopes * (i - j)).masked_fill(j > i, NEG_INF).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    i, j = positions(q, k)
    keep = (j <= i) & (ids[:, None, :, None] == ids[:, None, None, :])
    return (q @ k.mT * 0.25).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    i, j = positions(q, k)
    return (q @ k.mT * 0.25 + (1 - m[:, None, None]) * LOWEST).masked_fill(j > i, LOWEST).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (capped(q, k) + bias).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(causal, cap=True)(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def grouped_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(window)(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))


def by_temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.tanh((q * t) @ (k / 4).mT).softmax(-1) @ v


def by_rows(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    i, j = positions(q, k)
    return ((q * t) @ k.mT).masked_fill(((i - j) % 3 == 1), NEG_INF).softmax(-1) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(window, cap=True)(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def fused_projection(x: Tensor) -> Tensor:
    q, k, v = x.view(2, -1, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return masked(window)(q * 2, k, v)


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).clamp(-1.5, 1.5).softmax(-1) @ v


def weakly_filled(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(m, -2.0).softmax(-1) @ v


IDENTITIES = torch.arange(300)[None] * torch.tensor([[1], [3]]) // 70
BIG = {"q_len": 300, "kv_len": 300}
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "soft cap": (softcap, qkv(**BIG)),
    "causal and soft cap": (masked(causal, cap=True), qkv(**BIG)),
    "window and soft cap": (masked(window, cap=True), qkv(**BIG)),
    "window": (masked(window), qkv(**BIG)),
    "window, finite fill": (masked(window, LOWEST), qkv(**BIG)),
    "causal, more keys than rows": (masked(lambda i, j: j <= i + 50), qkv(q_len=250, kv_len=300)),
    "prefix": (masked(prefix), qkv(**BIG)),
    "sinks and window": (masked(sinks_and_window), qkv(**BIG)),
    "chunks": (masked(chunks), qkv(**BIG)),
    "chunks up to the own": (masked(lambda i, j: j // 100 <= i // 100), qkv(**BIG)),
    "dilated": (masked(dilated), qkv(**BIG)),
    "alibi": (alibi, qkv(**BIG)),
    "documents": (documents, (*qkv(**BIG), IDENTITIES)),
    "padding and causal": (padded, (*qkv(**BIG), (torch.arange(300)[None] < torch.tensor([[300], [200]])).float())),
    "dense bias": (added, (*qkv(**BIG), randn(2, 1, 300, 300))),
    "bias and affine scores": (biased, (*qkv(**BIG), randn(2, 300, 300))),
    "fully masked rows, finite fill": (added, (*qkv(), torch.eye(8).roll(1, 0)[None, None] * LOWEST)),
    "grouped heads": (grouped, qkv(heads=4, kv_heads=2, **BIG)),
    "grouped heads, a window": (grouped_window, qkv(heads=4, kv_heads=1, **BIG)),
    "a factor of the query's rows": (by_temperature, (*qkv(), randn(2, 2, 8, 1))),
    "affine, a factor of the query's rows": (by_rows, (*qkv(), randn(2, 2, 8, 1))),
    "odd sizes": (masked(window, cap=True), qkv(batch=3, heads=5, q_len=131, kv_len=257, dim=24)),
    "one query": (masked(lambda i, j: (j + i) % 3 == 1), qkv(q_len=1, kv_len=300)),
    "one query, soft cap": (softcap, qkv(q_len=1, kv_len=300)),
    "one key": (softcap, qkv(q_len=5, kv_len=1)),
    "other values": (masked(window), qkv(value_dim=32, **BIG)),
    "heads last": (heads_last, tuple(x.transpose(1, 2).contiguous() for x in qkv(**BIG))),
    "fused projection": (fused_projection, (randn(2, 300, 96),)),
    "clamp": (clamped, qkv(**BIG)),
    "weak fill": (weakly_filled, (*qkv(), randn(8, 8) > 0)),
}

FILLED = ("padding and causal", "dense bias", "bias and affine scores", "fully masked rows, finite fill")

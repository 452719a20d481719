"""Attention as users write it in float16, for the targets that call the flash-attn packages, and what both take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from against_eager import NEG_INF, qkv
from torch import Tensor

import attn_pass

HALF, BFLOAT = torch.float16, torch.bfloat16


def own(q: Tensor, k: Tensor) -> Tensor:
    """(L, 1): the key that stands where each row does, counted from the last."""
    return torch.arange(q.size(-2))[:, None] + k.size(-2) - q.size(-2)


def keys(k: Tensor) -> Tensor:
    return torch.arange(k.size(-2))


def weighted(q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return score(q @ k.mT * 0.3).softmax(-1).to(q.dtype) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s.masked_fill(keys(k) > own(q, k), NEG_INF))


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(-q, k, v, lambda s: s.masked_fill(keys(k) > own(q, k), NEG_INF))


def lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Filled with a number: a fully masked row is the mean of the values."""
    return weighted(q, k, v, lambda s: s.masked_fill(keys(k) > own(q, k), -6e4))


def window(left: int, right: int | None, fill: float = NEG_INF) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = keys(k) >= own(q, k) - left
        if right is not None:
            keep = keep & (keys(k) <= own(q, k) + right)
        return weighted(q, k, v, lambda s: s.masked_fill(~keep, fill))

    return fn


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, counted from the first key."""
    keep = keys(k) <= torch.arange(q.size(-2))[:, None]
    return weighted(q, k, v, lambda s: s.masked_fill(~keep, NEG_INF))


SQUARE, LONG = qkv(2, 4, 9, 9, 16, dtype=HALF), qkv(2, 4, 5, 12, 16, dtype=HALF)
TAKEN: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": (plain, LONG),
    "bfloat16": (plain, qkv(2, 4, 5, 12, 16, dtype=BFLOAT)),
    "grouped": (plain, qkv(2, 8, 5, 12, 16, kv_heads=2, dtype=HALF)),
    "one kv head": (causal, qkv(2, 4, 5, 12, 16, kv_heads=1, dtype=HALF)),
    "causal": (causal, SQUARE),
    "causal from the last key": (causal, LONG),
    "causal, more rows than keys": (causal, qkv(2, 4, 12, 5, 16, dtype=HALF)),
    "window": (window(3, 2), SQUARE),
    "window from the last key": (window(3, 0), LONG),
    "window without an end": (window(2, None), SQUARE),
    "window wider than the keys": (window(30, 40), LONG),
    "negative scale": (negative, LONG),
}


def site_of(fn: Callable[..., Tensor] = plain, inputs: tuple[Tensor, ...] = LONG, **options: Any) -> Any:
    """What is decided of the program's one attention, on an H100."""
    return attn_pass.explain(fn, *inputs, attn_pass_options={"device": "H100", **options}).sites[0]

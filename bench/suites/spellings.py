"""Attention as users write it, on (B, H, L, D) operands: the programs of several suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def by_hand(q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Tensor:
    """Product, softmax, product; masks and biases are added to the scores."""
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    for matrix in added:
        scores = scores + matrix
    return torch.softmax(scores, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, *, fill: float = float("-inf")) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    return torch.softmax(scores.masked_fill(~keep, fill), -1) @ v


def repeated_kv(q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Tensor:
    """By hand, keys and values repeated for the query heads they serve."""
    groups = q.size(1) // k.size(1)
    k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    return by_hand(q, k, v, *added)


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def copied_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands (B, L, H, D), every one copied into the call's layout, and the result back."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def grouped_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# ---------------------------------------------------------------- which keys a row sees, by their positions

Keep = Callable[[Any, Any], Any]
WINDOW, DOCUMENT = 256, 300


def below(i: Any, j: Any) -> Any:
    """Causal, aligned to the last key."""
    return j <= i


def near(i: Any, j: Any) -> Any:
    return (j <= i) & (i - j < WINDOW)


def same(i: Any, j: Any) -> Any:
    return (i // DOCUMENT == j // DOCUMENT) & (j <= i)

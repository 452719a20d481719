"""Attention as users write it, of (B, H, L, D) operands: what the tests of kernels compile, and masks to go with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from against_eager import NEG_INF
from torch import Tensor


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in groups share keys and values, where there are fewer of these."""
    groups = q.size(-3) // k.size(-3)
    if groups != 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.3).softmax(-1) @ v


def banded(
    left: int | None, right: int | None, fill: float = NEG_INF, aligned: str = "last"
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Keys from ``own - left`` to ``own + right``; ``own`` is the row, or the row aligned to the last key."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, keys = q.size(-2), k.size(-2)
        own = torch.arange(rows, device=q.device)[:, None] + (keys - rows if aligned == "last" else 0)
        distance = torch.arange(keys, device=q.device)[None] - own
        keep = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        if left is not None:
            keep = keep & (distance >= -left)
        if right is not None:
            keep = keep & (distance <= right)
        return (q @ k.mT * 0.3).masked_fill(~keep, fill).softmax(-1) @ v

    return program


def infinite(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~keep, NEG_INF).softmax(-1) @ v


SOME = torch.arange(9) < torch.tensor([3, 9])[:, None, None, None]  # (2, 1, 1, 9), each batch row keeps a key
NONE_IN_ONE = torch.arange(9) < torch.tensor([0, 7])[:, None, None, None]

"""Programs whose weights or log-sum-exp are needed too, and look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from against_eager import qkv, randn
from torch import Tensor

Program = Callable[..., Any]
KEEP = randn(2, 1, 7, 11, seed=5) > -0.3
KEEP[..., 0] = True


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT * 0.25).softmax(-1)
    return w @ v, w


def averaged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Over the heads, as nn.MultiheadAttention gives them."""
    w = (q @ k.mT * 0.25).masked_fill(~KEEP, float("-inf")).softmax(-1)
    return w @ v, w.mean(1)


def one_row(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As vision transformers pick tokens by what the class token attends to."""
    w = F.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype)
    return w @ v, w[:, :, 0, 1:].mean(1).topk(3, -1)[0]


def written_in_place(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    s.mul_(0.25)
    s += torch.where(KEEP, 0.0, -1e9).to(s.dtype)
    w = s.softmax(-1)
    return w @ v, w.sum(-2)


def weights_written_later(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT * 0.25).softmax(-1)
    x = w @ v
    w.mul_(2)
    return x, w


def several_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w @ v.flip(-1), w.amax(1)


def before_dropout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT).softmax(-1)
    return F.dropout(w, 0.5, training=False) @ v, w


def logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT * 0.25
    return s.softmax(-1) @ v, torch.logsumexp(s, -1)


def z_loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of masked scores, as a loss that holds them near 0."""
    s = (q @ k.mT * 0.25).masked_fill(~KEEP, float("-inf")).float()
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1).square().mean()


def its_own_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The softmax is made of what is returned."""
    s = q @ k.mT * 0.25
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.exp(s - lse) @ v, lse


def logarithm_of_unmasked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT * 0.25
    return s.masked_fill(~KEEP, float("-inf")).softmax(-1) @ v, s.logsumexp(-1), s.logsumexp(-2)


def logarithm_then_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The scores are others once their logarithm is taken."""
    s = q @ k.mT
    lse = s.logsumexp(-1)
    s *= 0.25
    return torch.softmax(s, -1) @ v, lse, s.logsumexp(-1)


def weights_and_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    w = s.softmax(-1)
    return w @ v, w.mean(1), s.logsumexp(-1)


KEPT: dict[str, tuple[Program, int]] = {
    "returned": (returned, 1),
    "averaged over the heads": (averaged, 1),
    "one row": (one_row, 1),
    "written in place": (written_in_place, 1),
    "weights written later": (weights_written_later, 1),
    "several values": (several_values, 2),
    "before a dropout that is off": (before_dropout, 1),
    "log-sum-exp": (logarithm, 1),
    "z-loss": (z_loss, 1),
    "log-sum-exp that the softmax is made of": (its_own_logarithm, 1),
    "log-sum-exp of scores without a mask": (logarithm_of_unmasked, 1),
    "log-sum-exp of scores written later": (logarithm_then_written, 1),
    "weights and log-sum-exp": (weights_and_logarithm, 1),
}


def scores_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    w = s.softmax(-1)
    return w @ v, w, s


def dropped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = F.dropout((q @ k.mT).softmax(-1), 0.5)
    return w @ v, w


def dropped_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return F.dropout(s.softmax(-1), 0.5) @ v, s.logsumexp(-1)


def logarithm_and_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.logsumexp(-1), s.square().mean()


def logarithm_by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.exp().sum(-1).log()


def query_written_after_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q = q + 1.0
    s = q @ k.mT
    w = s.softmax(-1)
    q.mul_(2)
    return w @ v, s.logsumexp(-1)


def query_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """It is another one by the time the result is computed."""
    q = q + 1.0
    w = (q @ k.mT).softmax(-1)
    q.mul_(2)
    return w @ v, w


LEFT: dict[str, tuple[Program, str]] = {
    "scores as well": (scores_too, "weights are returned|scores are returned"),
    "dropped out": (dropped, "weights are returned"),
    "query written": (query_written, "weights are returned"),
    "log-sum-exp, dropped out": (dropped_logarithm, "scores are also used by"),
    "log-sum-exp, and scores as well": (logarithm_and_scores, "scores are also used by"),
    "log-sum-exp by hand": (logarithm_by_hand, "scores are also used by"),
    "log-sum-exp, query written": (query_written_after_logarithm, "scores are also used by"),
}


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    return qkv(q_len=7, kv_len=11, dtype=dtype, grad=grad)

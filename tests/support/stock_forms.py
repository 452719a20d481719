"""Attention as people write it, much of which stock Inductor matches as well; and compiles that end before code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

Tensor = torch.Tensor
B, H, S, D = 2, 4, 24, 16


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / 4.0 + mask).softmax(-1) @ v


def commuted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (mask + q @ k.mT / 4.0).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    return (q @ k.mT / 4.0).masked_fill(later, float("-inf")).softmax(-1) @ v


def bert(x: Tensor, y: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (t.view(B, S, H, D).permute(0, 2, 1, 3) for t in (x, y, z))
    return (q @ k.mT / 4.0 + mask).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT / 4.0).tanh() * 5.0).softmax(-1) @ v


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0])  # until torch 2.14 written out


def heads(number: int = 3, **more: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(B, H, S, D, **more) for _ in range(number))


def flat() -> tuple[Tensor, ...]:
    return tuple(torch.randn(B, S, H * D) for _ in range(3))


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "divided": (by_hand, heads()),
    "multiplied": (multiplied, heads()),
    "half": (by_hand, heads(dtype=torch.float16)),
    "bfloat16": (by_hand, heads(dtype=torch.bfloat16)),
    "mask on the right": (added, (*heads(), torch.randn(B, 1, S, S))),
    "mask on the left": (commuted, (*heads(), torch.randn(B, 1, S, S))),
    "causal": (causal, heads()),
    "BERT": (bert, (*flat(), torch.randn(B, 1, 1, S))),
    "soft cap": (capped, heads()),
    "rank 3": (squared, heads()),
    "training": (by_hand, heads(requires_grad=True)),
}


def no_code(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Inductor's inner compile, for which a graph runs as it is."""
    return make_boxed_func(gm.forward)


@contextmanager
def without_code() -> Iterator[None]:
    """Around compiles with `attn_pass.backend` that run up to where Inductor would generate code."""
    from torch._inductor import compile_fx

    with patch.object(compile_fx, "compile_fx_inner", no_code):
        yield

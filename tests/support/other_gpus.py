"""GPUs that are not here: attention as users write it, and what is decided for a device by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attn_pass


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def holed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.arange(k.size(-2)) % 3 > 0
    return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return causal(q, k, v)


def dropped(p: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout((q @ k.mT * 0.125).softmax(-1), p, True) @ v

    return program


def operands(
    dim: int = 64,
    value_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 512,
    heads: int = 8,
    keys: int = 512,
    grad: bool = False,
) -> list[Tensor]:
    """Query of two batch rows and 8 heads, key and value of ``heads``."""
    shapes = ((2, 8, rows, dim), (2, heads, keys, dim), (2, heads, keys, value_dim))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def decided_for(
    program: Callable[..., Tensor], inputs: list[Tensor], *, device: str, dynamic: bool = False, **options: Any
) -> attn_pass.SiteReport:
    """What becomes of the one site on a device by its name, with gradients where the query wants one.

    ``dynamic``: for inputs of any size, and not of these.
    """
    torch._dynamo.reset()
    with torch.set_grad_enabled(inputs[0].requires_grad):
        given = {"device": device, **options}
        report = attn_pass.explain(program, *inputs, attn_pass_options=given, attn_pass_dynamic=dynamic)
    return report.sites[0]

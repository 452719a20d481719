"""Programs for the Pallas targets, and the decision for one on a TPU, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from against_eager import NEG_INF
from torch import Tensor

import attn_pass
from attn_pass.devices.tpu.pallas import PallasFlash
from attn_pass.report.site import SiteReport

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TPUS = ("v5e", "v5p", "v6e", "TPU7x")


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window(q: Tensor, k: Tensor, v: Tensor, before: int = 512) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    keep = (j <= i) & (j >= i - before)
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def to_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    keep = j <= i + (k.size(-2) - q.size(-2))
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def grouped_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.125).softmax(-1), 0.25) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (30 * torch.tanh(q @ k.mT / 30)).softmax(-1) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale + bias).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = q @ k.mT * 0.125
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def biased_and_filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + bias).masked_fill(~keep, -1e30).softmax(-1) @ v


def decided(
    program: Callable[..., Tensor],
    device: str,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = BF16,
    grad: bool = False,
    extra: tuple[Tensor, ...] = (),
    growing: bool = False,
    value_dim: int | None = None,
    **options: Any,
) -> SiteReport:
    """The report of the one site; ``shape`` is B, H, Hkv, L, S, D."""
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    with torch.device("meta"):
        q = torch.empty(batch, heads, q_len, dim, dtype=dtype, requires_grad=grad)
        k = torch.empty(batch, kv_heads, kv_len, dim, dtype=dtype, requires_grad=grad)
        v = torch.empty(batch, kv_heads, kv_len, value_dim or dim, dtype=dtype, requires_grad=grad)
    if growing:
        for tensor in (k, v):
            torch._dynamo.mark_dynamic(tensor, 2)
    with torch.set_grad_enabled(grad):
        report = attn_pass.explain(program, q, k, v, *extra, attn_pass_options={"device": device, **options})
    (site,) = report.sites
    return site


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


LONG = (4, 16, 16, 2048, 2048, 128)


def considered(program: Callable[..., Tensor], *extra: Tensor, shape: tuple[int, ...] = LONG) -> tuple[Any, Any]:
    """The attention and the setting that a target is asked about."""
    with mock.patch.object(PallasFlash, "consider", autospec=True, side_effect=PallasFlash.consider) as asked:
        decided(program, "v6e", shape, extra=extra)
    _, attention, _, setting = asked.call_args.args
    return attention, setting

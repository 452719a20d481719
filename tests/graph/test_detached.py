"""Tensors that are detached in place: until then a gradient flows, whatever their fake value says afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from against_eager import qkv, randn, same
from torch import Tensor

from attn_pass.devices.cpu.kernel import build


def called(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = F.scaled_dot_product_attention(q, k, v)
    y = (out * 3).sum(-1)
    return y, out.detach_() * 1.0


def of_an_operand(q: Tensor, k: Tensor, v: Tensor) -> Any:
    scaled = q * 2
    out = (scaled @ k.mT * 0.3).softmax(-1) @ v
    return out, scaled.detach_() + 1


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
@pytest.mark.parametrize("fn", [called, of_an_operand])
@pytest.mark.parametrize("aot", [False, True])
def test_gradients_flow_until_it_is_detached(fn: Callable[..., Any], aot: bool) -> None:
    given = qkv(q_len=64, kv_len=64, grad=True)
    rewritten = int(fn is of_an_operand)
    (site,) = same(fn, *given, grad=True, rewritten=rewritten, targets=("cpu_kernel",), aot=aot).sites
    assert "detached in place" in site.reason if fn is not of_an_operand else site.outcome == "rewritten"


def with_indices(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Any:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out, logits.argmax(-1).detach_(), (logits > 0).detach_()


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
def test_what_has_no_gradient_may_be_detached() -> None:
    inputs = qkv(q_len=64, kv_len=64, grad=True)
    same(with_indices, *inputs, randn(2, 8, grad=True), grad=True, targets=("cpu_kernel",), rewritten=1)

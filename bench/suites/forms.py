"""Common forms at common sizes, by hand and as calls: `python -m bench forms [--json FILE] [--quick]`.

Where the pass leaves a call, stock's code runs, and the ratio is noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.harness.programs import Program, Setting, Tensors, of_function
from bench.suites.spellings import by_hand, call, causal, copied_call, grouped_call, repeated_kv

TITLE = "Common forms"
QUICK = ("by hand, tiny (2, 4, 16, 16)", "by hand, padding mask (4, 8, 256, 64)", "call, decode (2, 8, 1 x 2048, 64)")


def _form(name: str, run: Callable[..., torch.Tensor], inputs: Callable[[], Tensors]) -> Program:
    """A program on inputs that are the same numbers on every call."""

    def drawn(device: str) -> Tensors:
        torch.manual_seed(0)
        return tuple(x.to(device) for x in inputs())

    return of_function(name, run, drawn, tolerance=2e-2 if "bfloat16" in name else 1e-5)


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _qkv(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int) -> Tensors:
    return _r(batch, heads, q_len, dim), _r(batch, kv_heads, kv_len, dim), _r(batch, kv_heads, kv_len, dim)


FORMS: tuple[Program, ...] = (
    _form("by hand (1, 8, 1024, 64)", by_hand, lambda: _qkv(1, 8, 8, 1024, 1024, 64)),
    _form("by hand, tiny (2, 4, 16, 16)", by_hand, lambda: _qkv(2, 4, 4, 16, 16, 16)),
    _form("by hand, ViT (8, 12, 197, 64)", by_hand, lambda: _qkv(8, 12, 12, 197, 197, 64)),
    _form("by hand, cross (2, 8, 1024 x 77, 40)", by_hand, lambda: _qkv(2, 8, 8, 1024, 77, 40)),
    _form("by hand, decode (4, 8, 1 x 2048, 64)", by_hand, lambda: _qkv(4, 8, 8, 1, 2048, 64)),
    _form("by hand, padding mask (4, 8, 256, 64)", by_hand, lambda: (*_qkv(4, 8, 8, 256, 256, 64), _r(4, 1, 1, 256))),
    _form("by hand, bias (4, 8, 256, 64)", by_hand, lambda: (*_qkv(4, 8, 8, 256, 256, 64), _r(1, 8, 256, 256))),
    _form("by hand, causal (1, 8, 1024, 64)", causal, lambda: _qkv(1, 8, 8, 1024, 1024, 64)),
    _form("by hand, repeated K/V (1, 32/8, 512, 64)", repeated_kv, lambda: _qkv(1, 32, 8, 512, 512, 64)),
    _form("by hand, repeated K/V, decode (4, 32/8, 1 x 4096, 64)", repeated_kv, lambda: _qkv(4, 32, 8, 1, 4096, 64)),
    _form(
        "by hand, repeated K/V, decode, bfloat16 (4, 32/8, 1 x 4096, 64)",
        repeated_kv,
        lambda: tuple(t.bfloat16() for t in _qkv(4, 32, 8, 1, 4096, 64)),
    ),
    _form("call (2, 8, 512, 64)", call, lambda: _qkv(2, 8, 8, 512, 512, 64)),
    _form("call, rank 3 (16, 256, 64)", call, lambda: (_r(16, 256, 64), _r(16, 256, 64), _r(16, 256, 64))),
    _form("call, value dim 128 (2, 8, 256, 64)", call, lambda: (*_qkv(2, 8, 8, 256, 256, 64)[:2], _r(2, 8, 256, 128))),
    _form("call, decode (2, 8, 1 x 2048, 64)", call, lambda: _qkv(2, 8, 8, 1, 2048, 64)),
    _form("call, grouped (2, 8/2, 256, 64)", grouped_call, lambda: _qkv(2, 8, 2, 256, 256, 64)),
    _form("call, grouped decode (2, 32/4, 1 x 2048, 64)", grouped_call, lambda: _qkv(2, 32, 4, 1, 2048, 64)),
    _form(
        "call, shared K/V (1000, 4, 1 x 2048, 32)",
        call,
        lambda: (_r(1000, 4, 1, 32), _r(1, 4, 2048, 32), _r(1, 4, 2048, 32)),
    ),
    _form(
        "call, heads last with copies (4, 256, 8, 64)", copied_call, lambda: tuple(_r(4, 256, 8, 64) for _ in range(3))
    ),
)


def programs(setting: Setting) -> list[Program]:
    """Every form; three small ones in quick runs."""
    return [form for form in FORMS if not setting.quick or form.name in QUICK]

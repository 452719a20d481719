"""Which of torch's fused attention kernels takes a call, device by device: one row a rule, with its reason.

CPU: ``use_flash_attention_cpp`` in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp. CUDA: sdp_utils.cpp, compute
capability 8.0 and newer. torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attn_pass.model.attention import Attention
from attn_pass.model.index import Index

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """An attention as a kernel gets it: the mask's kind is "none", "causal", "boolean" or "additive"."""

    attention: Attention
    mask: str
    mask_needs_grad: bool = False


@dataclass(frozen=True)
class Rule:
    """What a kernel asks for; ``reason`` says in words why a call that fails is refused."""

    reason: Callable[[Call], str]
    holds: Callable[[Call], bool]


def _known(size: Index) -> int | None:
    return size if isinstance(size, int) else None


def _multiple(size: Index, of: int) -> bool:
    known = _known(size)
    return known is not None and known % of == 0


def _dtype(*taken: torch.dtype) -> Rule:
    return Rule(lambda c: f"{_name(c)} has no fused kernel", lambda c: c.attention.compute_dtype in taken)


def _name(call: Call) -> str:
    return str(call.attention.compute_dtype).removeprefix("torch.")


_SIZES = Rule(
    lambda c: "a size is 0",
    lambda c: (
        0
        not in (
            *(c.attention.q_len, c.attention.kv_len, c.attention.head_dim),
            *(c.attention.value_head_dim, c.attention.batch_size, c.attention.query_heads),
        )
    ),
)
_PADDABLE = Rule(
    lambda c: "head dims of keys and values differ and are not known",
    lambda c: (
        c.attention.head_dim == c.attention.value_head_dim
        or None not in (_known(c.attention.head_dim), _known(c.attention.value_head_dim))
    ),
)
_NO_MASK_GRADIENT = Rule(
    lambda c: "the bias needs a gradient, which the fused kernel does not give", lambda c: not c.mask_needs_grad
)

_DROPOUT = Rule(lambda c: f"dropout {c.attention.dropout:g} keeps nothing", lambda c: 0 <= c.attention.dropout < 1)

# As `torch.nn.attention.SDPBackend` names them.
BACKENDS = {"cpu flash": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}

KERNELS: Mapping[str, tuple[Rule, ...]] = {
    "cpu flash": (
        _dtype(torch.float32, torch.float64, *_HALF),
        Rule(
            lambda c: f"dropout {c.attention.dropout:g}: no fused CPU kernel draws dropout",
            lambda c: not c.attention.dropout,
        ),
        _PADDABLE,
        _SIZES,
        _NO_MASK_GRADIENT,
    ),
    "flash": (
        _dtype(*_HALF),
        _DROPOUT,
        _PADDABLE,
        _SIZES,
        Rule(
            lambda c: "the head dim is over 256, or not known",
            lambda c: all((_known(d) or 1 << 30) <= 256 for d in (c.attention.head_dim, c.attention.value_head_dim)),
        ),
        Rule(lambda c: "the flash kernel takes no mask", lambda c: c.mask in ("none", "causal")),
        Rule(
            lambda c: "causal with unequal lengths",
            lambda c: c.mask == "none" or c.attention.q_len == c.attention.kv_len,
        ),
    ),
    "efficient": (
        _dtype(torch.float32, *_HALF),
        _DROPOUT,
        _PADDABLE,
        _SIZES,
        Rule(lambda c: "the efficient kernel has no grouped heads", lambda c: c.attention.groups == 1),
        Rule(
            lambda c: "the head dim is no multiple of 8 (4 in float32), or not known",
            lambda c: _multiple(_width(c.attention), 4 if c.attention.compute_dtype == torch.float32 else 8),
        ),
    ),
}


def _width(a: Attention) -> Index:
    """The head dim after the narrower of both is padded."""
    sizes = (_known(a.head_dim), _known(a.value_head_dim))
    return max(s for s in sizes if s is not None) if None not in sizes else a.head_dim


def refusal(kernel: str, call: Call) -> str | None:
    """The first reason why a kernel does not take a call; None if it does."""
    return next((rule.reason(call) for rule in KERNELS[kernel] if not rule.holds(call)), None)

"""Attention by hand and by torch's call in the forms that models export, for runtimes: `PROGRAMS`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from against_eager import randn
from torch import Tensor, nn

LOWEST = torch.finfo(torch.float32).min


class Program(nn.Module):
    """A function as a module, as torch.export asks for."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@dataclass(frozen=True)
class Exported:
    """A program with its inputs; ``grouped``: its heads share keys."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    grouped: bool = False

    def program(self, **settings: Any) -> torch.export.ExportedProgram:
        """As torch.export gives it; gradients are on, as they are for most who export."""
        return torch.export.export(Program(self.function).eval(), self.inputs, **settings)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.25).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.25).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + torch.where(kept[:, None, None], 0.0, LOWEST)).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~kept[:, None, None], -1e9).softmax(-1) @ v


def hidden(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """A fully masked row gives 0."""
    scores = (q @ k.mT * 0.25).masked_fill(~kept[:, None, None], float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return by_hand(q, k, v)


def _beside(scores: Tensor, sink: Tensor) -> Tensor:
    """The weights of the scores, of which a sink (H) has a share."""
    logits = sink.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
    return torch.cat([scores, logits], -1).softmax(-1)[..., :-1]


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return _beside(q @ k.mT * 0.25, sink) @ v


def with_sink_and_padding(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, kept: Tensor) -> Tensor:
    """As transformers' GPT-OSS: grouped heads, what hides keys is added."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    hidden = (1.0 - kept[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return _beside(q @ k.mT * 0.25 + hidden, sink) @ v


def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def called_with_padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, kept[:, None, None])


def called_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def called_in_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])


def _qkv(rows: int = 7, keys: int = 7, heads: int = 4, kv_heads: int = 4, value_dim: int = 16) -> tuple[Tensor, ...]:
    return randn(2, heads, rows, 16), randn(2, kv_heads, keys, 16, seed=2), randn(2, kv_heads, keys, value_dim, seed=3)


def kept(*lengths: int, keys: int = 7) -> Tensor:
    """(B, S), True for the first so many keys of each row of the batch; a row of 0 keeps none."""
    return torch.arange(keys) < torch.tensor(lengths)[:, None]


PROGRAMS = {
    "no mask": Exported(by_hand, _qkv()),
    "rows and keys differ": Exported(by_hand, _qkv(5, 11)),
    "value heads of another size": Exported(by_hand, _qkv(value_dim=5)),
    "causal": Exported(causal, _qkv()),
    "causal, more keys": Exported(causal, _qkv(3, 7)),
    "a negative scale": Exported(negative, _qkv()),
    "padding": Exported(padded, (*_qkv(), kept(7, 4))),
    "padding, a fully masked row": Exported(padded, (*_qkv(), kept(0, 4))),
    "padding by -1e9, a fully masked row": Exported(filled, (*_qkv(), kept(0, 4))),
    "padding by -inf, zeros for a fully masked row": Exported(hidden, (*_qkv(), kept(0, 4))),
    "a bias for every head": Exported(biased, (*_qkv(), randn(1, 4, 7, 7, seed=5))),
    "a bias for every key": Exported(biased, (*_qkv(), randn(2, 1, 1, 7, seed=5))),
    "grouped heads": Exported(grouped, _qkv(kv_heads=2), grouped=True),
    "one key head": Exported(grouped, _qkv(kv_heads=1), grouped=True),
    "one row, grouped heads": Exported(grouped, _qkv(1, 16, kv_heads=2), grouped=True),
    "a sink": Exported(with_sink, (*_qkv(5, 11), randn(4, seed=6))),
    "a sink, padding, grouped heads": Exported(
        with_sink_and_padding, (*_qkv(kv_heads=2), randn(4, seed=6), kept(7, 4)), grouped=True
    ),
    "a sink, a fully masked row": Exported(with_sink_and_padding, (*_qkv(), randn(4, seed=6), kept(0, 4))),
    "torch's call": Exported(called, _qkv()),
    "torch's call with padding": Exported(called_with_padding, (*_qkv(), kept(7, 4))),
    "torch's call with grouped heads": Exported(called_in_groups, _qkv(kv_heads=2), grouped=True),
    "torch's call of rank 3": Exported(called_in_three, _qkv()),
}

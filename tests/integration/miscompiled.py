"""Programs that Inductor's own attention patterns silently get wrong, or that they cannot compile, as one table.

All come of one cause: the patterns' literals (axes, permutations, fills, compared numbers, scales) match any others,
and what they are replaced by is not compared with what was written (pytorch/pytorch#196468, #195320, #195282, #191260,
#191203, #195589). Sizes are such that a wrong reading fits: where a permutation is not looked at, its sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from against_eager import NEG_INF, randn
from torch import Tensor

Make = Callable[[torch.dtype], tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    """A function, its inputs by dtype, and its meaning in float64 where that is not the function on float64 inputs."""

    function: Callable[..., Any]
    inputs: Make
    reference: Callable[..., Any] | bool = True


def numbers(*shape: int, also: Callable[[torch.dtype], tuple[Any, ...]] = lambda dtype: ()) -> Make:
    """Query, key and value of this shape, and what else there is."""
    return lambda dtype: (*(randn(*shape, dtype=dtype, seed=n) for n in range(1, 4)), *also(dtype))


def softmax_over(dim: int) -> Callable[..., Tensor]:
    """pytorch/pytorch#196468."""
    return lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 16.0, dim=dim) @ v


def permuted_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """K goes from (B, T, H, D) straight to (B, H, D, T) (pytorch/pytorch#195320; #195282 where T is not H)."""
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return (torch.matmul(q, k) * 0.25).softmax(-1) @ v


def key_turned_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """pytorch/pytorch#191260."""
    return torch.bmm(torch.bmm(q, k.transpose(0, 1)).softmax(-1), v)


def permuted_all(*order: int) -> Callable[..., Tensor]:
    """Another permutation than the one from (B, S, H, D) to (B, H, S, D)."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(order) for t in (q, k, v))
        return torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(dim=-1).matmul(v)

    return program


def distilbert(compared: float, fill: float) -> Callable[..., Tensor]:
    """``masked_fill(mask == compared, fill)``; the pattern takes it for ``mask == 0`` and -inf."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / 4.0
        out = (mask == compared).view(mask.shape[0], 1, 1, -1).expand_as(scores)
        return torch.matmul(F.softmax(scores.masked_fill(out, fill), dim=-1), v)

    return program


def gpt2(fill: float | None) -> Callable[..., Tensor]:
    """``where(mask, scores, fill)``, None for the dtype's least; the pattern takes any for a boolean mask."""

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        scores = torch.matmul(q, k.permute(0, 1, 3, 2))
        scores = scores.div(torch.full((), 4.0, dtype=q.dtype))
        least = torch.finfo(q.dtype).min if fill is None else fill
        scores = torch.where(keep, scores, torch.full((), least, dtype=q.dtype))
        return F.dropout(scores.softmax(dim=-1), 0.0).matmul(v)

    return program


def mean_in_empty_rows(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """What the GPT-2 form means with the dtype's least as its fill, in any dtype."""
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    weights = (q @ k.mT / 4.0).masked_fill(~keep, NEG_INF).softmax(-1)
    return torch.where(keep.any(-1, keepdim=True), weights, 1 / k.shape[2]) @ v


def added_with_alpha(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(torch.add(q @ k.transpose(-2, -1) / 4.0, bias, alpha=3.0), dim=-1) @ v


def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """pytorch/pytorch#191203."""
    return F.softmax(q @ k.transpose(-2, -1) / scale + bias, dim=-1) @ v


def five_dimensions(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """pytorch/pytorch#195589."""
    q, k, v = q.view(1, 1, 2, 1, 8), k.view(1, 1, 2, 2, 8), v.view(1, 1, 2, 2, 8)
    out = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v
    return F.linear(out.view(2, 1, 8), weight)


def _five(dtype: torch.dtype) -> tuple[Any, ...]:
    shapes = ((2, 1, 8), (2, 2, 8), (2, 2, 8), (8, 8))
    return tuple(randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes))


def _padding(values: int) -> Callable[[torch.dtype], tuple[Any, ...]]:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        mask = torch.arange(16).expand(2, 16).clone() % values if values > 2 else torch.ones(2, 16, dtype=torch.long)
        if values == 2:
            mask[0, 10:], mask[1, 13:] = 0, 0
        return (mask.to(dtype),)

    return made


def _causal(empty: bool) -> Callable[[torch.dtype], tuple[Any, ...]]:
    def made(dtype: torch.dtype) -> tuple[Any, ...]:
        keep = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
        keep[..., 5, :] &= not empty
        return (keep,)

    return made


def _bias(dtype: torch.dtype) -> tuple[Any, ...]:
    return (randn(2, 1, 16, 16, dtype=dtype, seed=5),)


def _bias_and_scale(dtype: torch.dtype) -> tuple[Any, ...]:
    return (*_bias(dtype), torch.tensor(0.5, dtype=dtype))


HEADS_FIRST, HEADS_INSIDE = (2, 4, 16, 32), (2, 16, 4, 32)

PROGRAMS: dict[str, Program] = {
    "softmax over dim 0": Program(softmax_over(0), numbers(*HEADS_FIRST)),
    "softmax over dim 1": Program(softmax_over(1), numbers(*HEADS_FIRST)),
    "softmax over dim 2": Program(softmax_over(2), numbers(*HEADS_FIRST)),
    "softmax over dim -2": Program(softmax_over(-2), numbers(*HEADS_FIRST)),
    "a key permuted at once": Program(permuted_key, numbers(2, 8, 8, 16)),
    "a key permuted at once, other lengths": Program(permuted_key, numbers(2, 12, 4, 16)),
    "a key turned over the batch": Program(key_turned_over_the_batch, numbers(8, 8, 8)),
    "attention over channels": Program(permuted_all(0, 2, 3, 1), numbers(2, 16, 4, 16)),
    "heads before the batch": Program(permuted_all(1, 0, 2, 3), numbers(4, 2, 16, 32)),
    "heads last": Program(permuted_all(0, 3, 1, 2), numbers(2, 16, 32, 4)),
    "padding is 1": Program(distilbert(1.0, NEG_INF), numbers(*HEADS_INSIDE, also=_padding(2))),
    "a fill of 0": Program(distilbert(0.0, 0.0), numbers(*HEADS_INSIDE, also=_padding(2))),
    "a mask of three values": Program(distilbert(0.0, NEG_INF), numbers(*HEADS_INSIDE, also=_padding(3))),
    "where, a fill of 0": Program(gpt2(0.0), numbers(*HEADS_INSIDE, also=_causal(False))),
    "where, a fill of -5": Program(gpt2(-5.0), numbers(*HEADS_INSIDE, also=_causal(False))),
    "where, a fully masked row": Program(gpt2(None), numbers(*HEADS_INSIDE, also=_causal(True)), mean_in_empty_rows),
    "a bias with alpha": Program(added_with_alpha, numbers(*HEADS_FIRST, also=_bias)),
    "a scale that is a tensor": Program(divided_by_a_tensor, numbers(*HEADS_FIRST, also=_bias_and_scale)),
    "five dimensions": Program(five_dimensions, _five),
}
TRAINED = ("softmax over dim 1", "attention over channels")
"""Some of those that stock gets wrong in training too; most of its patterns are not looked for there."""

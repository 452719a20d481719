"""The cases of the CPU kernel: masks and scores over many rows, and few rows over a long cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.harness.programs import normal
from bench.suites.spellings import DOCUMENT, WINDOW, Keep, below, near, same

HEADS, LENGTH, DIM = 4, 2048, 64
KV_HEADS, CACHE = 8, 4096
VALID, CAP = 1500, 30.0
# The largest difference to float64 that counts as right, relative to the largest value.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def padding(i: Any, j: Any) -> Any:
    return (i >= 0) & (j < VALID)


@dataclass(frozen=True)
class Case:
    """Many rows (1, 4, 2048, D): what a row keeps, and how the kernel is told: bounds, or tensors.

    Attributes:
        keep: what is kept; None for all, "random" for half of all keys.
        given: the kernel's arguments; a mask that is no bound goes in as a tensor.
        as_tensor: the mask is given as a tensor of this many dimensions: 4 of (1, 1, L, S), 1 of the keys alone.
        aims: the share of a product's rate that is aimed at, by dtype.
    """

    name: str
    keep: Keep | str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    as_tensor: int = 0
    dim: int = DIM
    kv_heads: int = HEADS
    capped: bool = False
    sloped: bool = False
    flex: bool = False
    aims: Mapping[torch.dtype, float] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Query, key and value."""
        shapes = [(1, heads, LENGTH, self.dim) for heads in (HEADS, self.kv_heads, self.kv_heads)]
        return tuple(x.to(dtype) for x in normal(0, *shapes))

    def kept(self) -> Tensor | None:
        """(L, S), true where a key is kept."""
        if self.keep is None:
            return None
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        if isinstance(self.keep, str):
            return (torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5) | (i == j)
        return torch.as_tensor(self.keep(i, j))

    def share_kept(self) -> float:
        share = self.kept()
        return 1.0 if share is None else float(share.double().mean())

    def bias(self) -> Tensor | None:
        """(1, H, L, S), what is added beside the mask."""
        if not self.sloped:
            return None
        distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
        return (2.0 ** -torch.arange(1.0, HEADS + 1))[:, None, None] * distance[None]

    def exact(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """In float64."""
        q, k, v = (x.double() for x in inputs)
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(self.dim)
        if self.capped:
            scores = CAP * torch.tanh(scores / CAP)
        if (bias := self.bias()) is not None:
            scores = scores + bias.double()
        if (kept := self.kept()) is not None:
            scores = scores.masked_fill(~kept, -math.inf)
        return scores.softmax(-1) @ v


_CAUSAL = {"after": 0}
_FULL_AIMS = {torch.bfloat16: 0.85, torch.float32: 1.0, torch.float16: 1.0}
_CAUSAL_AIMS = {torch.bfloat16: 0.80, torch.float32: 1.0, torch.float16: 1.0}
_SPARSE_AIMS = dict.fromkeys((torch.bfloat16, torch.float32, torch.float16), 0.6)

MANY: tuple[Case, ...] = (
    Case("full", aims=_FULL_AIMS),
    Case("causal", below, _CAUSAL, flex=True, aims=_CAUSAL_AIMS),
    Case("full, head dim 128", dim=128, aims=_FULL_AIMS),
    Case("causal, head dim 128", below, _CAUSAL, dim=128, aims=_CAUSAL_AIMS),
    Case(f"window of {WINDOW}", near, {"after": 0, "before": WINDOW - 1}, flex=True, aims=_SPARSE_AIMS),
    Case(f"padding, {VALID} of {LENGTH} keys", padding, as_tensor=1),
    Case(f"documents of {DOCUMENT}, causal, a tensor", same, as_tensor=4, flex=True, aims=_SPARSE_AIMS),
    Case("half of the keys at random, a tensor", "random", as_tensor=4),
    Case("soft cap, causal", below, _CAUSAL, capped=True, flex=True),
    Case("ALiBi as a bias, causal", below, _CAUSAL, sloped=True),
    Case("4 heads on 1, causal", below, _CAUSAL, kv_heads=1),
)


@dataclass(frozen=True)
class Few:
    """Few rows against a cache: (B, 8 x rows, 1, D) and (B, 8, 4096, D), 64 MiB of keys and values or more."""

    rows: int
    dim: int = DIM
    aim: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rows} {'row' if self.rows == 1 else 'grouped rows'}, head dim {self.dim}"

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Query, key and value; as many bytes in every dtype."""
        batch = 16 * DIM // (dtype.itemsize * self.dim)
        query, cache = (batch, KV_HEADS * self.rows, 1, self.dim), (batch, KV_HEADS, CACHE, self.dim)
        return tuple(x.to(dtype) for x in normal(0, query, cache, cache))

    def exact(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """In float64, one row of the batch at a time: it takes much memory."""
        parts = []
        for q, k, v in zip(*inputs):
            q = q.double().unflatten(0, (KV_HEADS, self.rows))[:, :, 0]
            weights = (q @ k.double().mT / math.sqrt(self.dim)).softmax(-1)
            parts.append((weights @ v.double()).flatten(0, 1)[:, None])
        return torch.stack(parts)


FEW: tuple[Few, ...] = (
    *(Few(rows, aim={1: 0.85, 2: 0.85, 4: 0.85, 16: 0.65}.get(rows)) for rows in (1, 2, 4, 8, 16)),
    *(Few(rows, 128, aim={1: 0.85, 4: 0.85, 16: 0.65}.get(rows)) for rows in (1, 4, 16)),
)


def flops(case: Case | Few, inputs: tuple[Tensor, ...]) -> float:
    """Of both products, over the pairs that are kept."""
    query, key, _ = inputs
    return 4.0 * query.numel() * key.size(2) * (case.share_kept() if isinstance(case, Case) else 1.0)

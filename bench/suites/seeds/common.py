"""What several of the field reports measure: attention by hand, and its operands."""

from __future__ import annotations

import torch

from bench.harness.programs import Tensors


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * q.size(-1) ** -0.5, -1) @ v


def operands(*shape: int, seed: int, device: str) -> Tensors:
    """Query, key and value of one shape, the same numbers on every call; in half precision but on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=generator).to(device) for _ in range(3))
    return (q, k, v) if device == "cpu" else (q.half(), k.half(), v.half())

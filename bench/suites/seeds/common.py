"""The operands of the field reports."""

from __future__ import annotations

import torch

from bench.harness.programs import Tensors


def operands(*shape: int, seed: int, device: str) -> Tensors:
    """Query, key and value of one shape, the same numbers on every call; in half precision but on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=generator).to(device) for _ in range(3))
    return (q, k, v) if device == "cpu" else (q.half(), k.half(), v.half())

"""Which whole numbers a floating type holds: positions as floats are, up to them, the indices they were made of."""

from __future__ import annotations

import torch

from attn_pass.model.index import Index, is_at_most

# All whole numbers up to these, by the digits of the type (IEEE 754, and bfloat16's 8).
LARGEST = {torch.float64: 1 << 53, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}


def holds(dtype: torch.dtype | None, index: Index) -> bool:
    """Proves that a type holds every value of an index exactly; False means not proven."""
    largest = None if dtype is None else LARGEST.get(dtype)
    return largest is not None and is_at_most(index, largest) and is_at_most(-largest, index)

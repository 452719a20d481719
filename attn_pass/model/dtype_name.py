"""`dtype_name`: a dtype as people write it, "bfloat16"."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name without torch's own in front of it."""
    return str(dtype).removeprefix("torch.")

"""What the CPU kernel's dropout leaves, from the generator's definition: Philox4x32-10 in numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: list[np.ndarray], key: int) -> list[np.ndarray]:
    """Four numbers of 32 bits for each counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c = [x.astype(np.uint64) for x in counter]
    half = np.uint64(32)
    for n in range(10):
        keys = [np.uint64((key & 0xFFFFFFFF) + n * 0x9E3779B9 & 0xFFFFFFFF)]
        keys.append(np.uint64((key >> 32) + n * 0xBB67AE85 & 0xFFFFFFFF))
        one, other = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(other >> half) ^ c[1] ^ keys[0], other & _LOW, (one >> half) ^ c[3] ^ keys[1], one & _LOW]
    return c


def left(seed: Tensor, dropout: float, shape: tuple[int, int, int, int]) -> Tensor:
    """Whether each weight (B, H, L, S) is left, as `dropout.hpp` numbers them."""
    batch, heads, q_len, kv_len = shape
    panels = -(-kv_len // 64)
    counts = np.arange(16 * panels)[None, None]
    rows, of_batch = np.arange(q_len)[None, :, None], np.arange(batch * heads)[:, None, None]
    drawn = philox(list(np.broadcast_arrays(counts, rows, of_batch, np.zeros(1, int))), int(seed))
    each = np.stack([x.reshape(batch, heads, q_len, panels, 16) for x in drawn], -2)  # panel, j, n: key 16 j + n
    numbers = each.reshape(batch, heads, q_len, 64 * panels)[..., :kv_len]
    return torch.from_numpy(numbers >= min(round(dropout * 2**32), 2**32 - 1))

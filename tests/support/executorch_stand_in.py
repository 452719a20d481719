"""A stand-in for ExecuTorch's fused operator, with its schema and its peculiarities as they were met in ExecuTorch 1.5.

`tests_on/runtimes/test_executorch.py` compares both with the library's own operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCHEMA = (
    "custom_sdpa(Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask=None, "
    "float drpout_p=0., bool is_causal=False, float? scale=None) -> Tensor"
)


def computed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_pos: int,
    attn_mask: Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(B, L, H, D); reads the first ``start_pos + L`` keys, and ends where the operator ends the process."""
    length, groups = query.size(1), query.size(2) // key.size(2)
    assert query.dtype == key.dtype == value.dtype and query.size(3) == key.size(3) == value.size(3)
    read = start_pos + length
    assert 0 < read <= key.size(1), "num_keys_for_causal_attention must be <= kvSize"
    q, k, v = query, key[:, :read].repeat_interleave(groups, 2), value[:, :read].repeat_interleave(groups, 2)
    scores = torch.einsum("blhd,bshd->bhls", q.double(), k.double())
    if is_causal:
        assert attn_mask is None, "attn_mask and is_causal cannot be set at the same time"
        kept = torch.arange(read) <= torch.arange(length)[:, None] + start_pos
        scores = scores.masked_fill(~kept, float("-inf"))
    scores = scores * (query.size(3) ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        assert attn_mask.dtype == torch.float32 and attn_mask.shape == (length, read), "attn_mask shape mismatch"
        scores = scores + attn_mask
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v.double()).to(query.dtype).contiguous()


def empty(query: Tensor, *_: object, **__: object) -> Tensor:
    """The result, without a computation."""
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def registered() -> torch.library.Library:
    """The stand-in under the operator's name, until the library that is returned is destroyed."""
    library = torch.library.Library("llama", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("custom_sdpa", computed, "CPU")
    library.impl("custom_sdpa", empty, "Meta")
    return library

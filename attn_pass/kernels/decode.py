"""Split-KV attention for few query rows over many keys: `attn_pass::decode`, a Triton kernel and a reduction.

One program takes one KV head's query rows, all heads of its group packed together, and one split of the keys, so keys
and values are read once whatever the group; the splits' partial results are then joined by their sums of exponentials
(Flash-Decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The number of splits follows from the length
and the number of multiprocessors at run time. Inference only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attn_pass.kernels.decode_triton import attend, join

_MOST_ROWS = 64  # packed query rows a program takes
_LEAST_KEYS = 256  # of a split: less work than this is not worth joining
_PROGRAMS_PER_CORE = 2


def splits_for(programs: int, kv_len: int, cores: int) -> int:
    """Into how many parts the keys are cut, so that every multiprocessor has work."""
    wanted = max(1, _PROGRAMS_PER_CORE * cores // max(1, programs))
    most = (kv_len + _LEAST_KEYS - 1) // _LEAST_KEYS
    return torch.sym_max(1, torch.sym_min(wanted, most))  # type: ignore[no-any-return]


@triton_op("attn_pass::decode", mutates_args={})
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int = -1,
) -> Tensor:
    """``softmax(scale * query @ key.T + mask) @ value`` for few query rows.

    Args:
        query: (B, H, L, D), float16 or bfloat16, any strides but a dense last dimension.
        key: (B, Hkv, S, D); ``H % Hkv == 0``, head ``h`` uses KV head ``h // (H // Hkv)``.
        value: (B, Hkv, S, Dv).
        mask: added to the scores, or where boolean what is kept; broadcastable to (B, H, L, S), or None.
        scale: of the scores.
        causal: keys are kept up to ``i + S - L``, aligned to the last key.
        window: with ``causal`` the number of keys kept before that one, itself not counted; -1 for all.

    Returns:
        (B, H, L, Dv), contiguous. A row that keeps no key is 0.
    """
    if query.device.type != "cuda":
        return reference(query, key, value, mask, scale, causal, window)
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len, value_dim = key.size(1), key.size(2), value.size(3)
    rows = heads // kv_heads * q_len
    block_rows = row_block(rows)
    row_blocks = (rows + block_rows - 1) // block_rows
    cores = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = splits_for(batch * kv_heads * row_blocks, kv_len, cores)
    partial = query.new_empty((splits, batch, heads, q_len, value_dim), dtype=torch.float32)
    tops = query.new_empty((splits, batch, heads, q_len), dtype=torch.float32)
    totals = torch.empty_like(tops)
    arguments = launch(query, key, value, mask, scale, causal, window, partial, tops, totals)
    stages = tile(key.size(3), value_dim, mask is not None)[1]
    wrap_triton(attend)[(batch * kv_heads, row_blocks, splits)](**arguments, num_warps=4, num_stages=stages)
    result = query.new_empty((batch, heads, q_len, value_dim))
    count, block = batch * heads * q_len, power(value_dim)
    wrap_triton(join)[(count,)](
        partial, tops, totals, result, splits, count, DIM=value_dim, BLOCK_DIM=block, num_warps=2
    )
    return result


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    partial: Tensor,
    tops: Tensor,
    totals: Tensor,
) -> dict[str, object]:
    """The arguments of `attend` by name."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, value_dim = key.size(1), key.size(2), value.size(3)
    seen = None if mask is None else mask.expand(batch, heads, q_len, kv_len)
    strides = (0, 0, 0, 0) if seen is None else seen.stride()
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": query if seen is None else seen,
        "partial": partial,
        "tops": tops,
        "totals": totals,
        "scale": scale,
        "q_len": q_len,
        "kv_len": kv_len,
        "splits": partial.size(0),
        "batches": batch,
        "window": window,
        **{f"q{n}": s for n, s in enumerate(query.stride()[:3])},
        **{f"k{n}": s for n, s in enumerate(key.stride()[:3])},
        **{f"v{n}": s for n, s in enumerate(value.stride()[:3])},
        **{f"m{n}": s for n, s in enumerate(strides)},
        "KV_HEADS": kv_heads,
        "GROUPS": heads // kv_heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": power(dim),
        "BLOCK_VALUE": power(value_dim),
        "BLOCK_ROWS": row_block(heads // kv_heads * q_len),
        "BLOCK_KEYS": tile(dim, value_dim, mask is not None)[0],
        "MASK": 0 if mask is None else 2 if mask.dtype == torch.bool else 1,
        "CAUSAL": causal,
        "WINDOWED": causal and window >= 0,
    }


def tile(dim: int, value_dim: int, masked: bool) -> tuple[int, int]:
    """Keys of a block, and stages of the pipeline that loads them: what fits the 99 KB of shared memory of an L4.

    By what Triton 3.6 says of the kernel compiled for compute capability 8.0, 8.9 and 9.0 with 64 rows. A launch that
    asks for more than the device has fails.
    """
    if max(power(dim), power(value_dim)) > 128:
        return 32, 2
    return 64, 2 if masked else 3


def power(size: int) -> int:
    """The power of two a block needs, which tensor cores want to be 16 or more."""
    return max(16, 1 << (int(size) - 1).bit_length())


def row_block(rows: int) -> int:
    """Packed query rows a program takes."""
    return min(_MOST_ROWS, power(rows))


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    """The same function in plain operators: what the operator is on devices without the kernel."""
    q_len, kv_len, groups = query.size(2), key.size(2), query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.float() * scale) @ key.float().transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    if causal:
        last = torch.arange(q_len, device=query.device)[:, None] + (kv_len - q_len)
        at = torch.arange(kv_len, device=query.device)
        scores = scores.masked_fill(at > last, float("-inf"))
        if window >= 0:
            scores = scores.masked_fill(at < last - window, float("-inf"))
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
    return (weights @ value.float()).to(query.dtype)

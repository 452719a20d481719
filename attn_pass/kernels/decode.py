"""Split-KV attention for few query rows over many keys: `attn_pass::decode`, a Triton kernel and a reduction.

One program takes one KV head's query rows, all heads of its group packed together, and one split of the keys, so keys
and values are read once whatever the group; the splits' partial results are then joined by their sums of exponentials
(Flash-Decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The number of splits follows from the length
and the number of multiprocessors at run time. Inference only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attn_pass.kernels.decode_triton import attend, join

_MOST_ROWS = 64  # packed query rows a program takes
_TILES = ((64, 3), (64, 2), (32, 2))  # keys and pipeline stages, the best first
_LEAST_KEYS = 256  # of a split: less work than this is not worth joining
_PROGRAMS_PER_CORE = 2


@dataclass(frozen=True)
class Room:
    """What a GPU gives a block; by default what Ada and consumer GPUs do, the least of all that are served."""

    shared_bytes: int = 99 << 10
    major: int = 8  # of the compute capability


@dataclass(frozen=True)
class Tiles:
    """What a program works on: packed query rows, keys at a time, pipeline stages; and its warps."""

    rows: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Parts:
    """What each split leaves for the join: (splits, B, H, L, Dv) results, and (splits, B, H, L) for the other two."""

    splits: int
    results: Tensor
    tops: Tensor  # the highest score of a row
    totals: Tensor  # the sum of exponentials over it


def tiles_for(rows: int, dim: int, value_dim: int, mask_bytes: int = 0, room: Room = Room()) -> Tiles:
    """The largest tiles that fit, counted with every stage's keys, values and mask in shared memory.

    ``mask_bytes`` is the size of one of its elements, 0 without one. Eight warps where four would spill registers: 64
    rows of 256, before compute capability 9 of 128 (seen in what ptxas makes of it).
    """
    wide, wide_values = power(dim), power(value_dim)
    most = min(_MOST_ROWS, power(rows))
    most_values = 64 * 128 if room.major >= 9 else 64 * 64
    for block in (most, most // 2):
        for keys, stages in _TILES:
            loaded = stages * keys * (2 * (wide + wide_values) + block * mask_bytes)
            if loaded + 2 * block * (wide + keys) <= room.shared_bytes:
                return Tiles(block, keys, stages, 8 if block * wide_values > most_values else 4)
    return Tiles(16, 32, 1, 4)


def room_of(device: torch.device) -> Room:
    """What a block may have on this GPU."""
    found = torch.cuda.get_device_properties(device)
    return Room(getattr(found, "shared_memory_per_block_optin", Room.shared_bytes), found.major)


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
    tiles = tiles_for(rows, query.size(3), value_dim, 0 if mask is None else mask.itemsize, room_of(query.device))
    row_blocks = (rows + tiles.rows - 1) // tiles.rows
    cores = torch.cuda.get_device_properties(query.device).multi_processor_count
    seen = torch.sym_min(kv_len, window + q_len) if causal and window >= 0 else kv_len
    splits = splits_for(batch * kv_heads * row_blocks, seen, cores)
    count = batch * heads * q_len
    # Flat: a dimension of ``splits`` would be asked whether it is 1, and the answer be a guard on the number of keys.
    partial = query.new_empty(splits * count * value_dim, dtype=torch.float32)
    tops = query.new_empty(splits * count, dtype=torch.float32)
    totals = torch.empty_like(tops)
    parts = Parts(splits, partial, tops, totals)
    arguments = launch(query, key, value, mask, scale, causal, window, parts, tiles)
    grid = (batch * kv_heads, row_blocks, splits)
    wrap_triton(attend)[grid](**arguments, num_warps=tiles.warps, num_stages=tiles.stages)
    result = query.new_empty((batch, heads, q_len, value_dim))
    block = power(value_dim)
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
    parts: Parts,
    tiles: Tiles,
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
        "partial": parts.results,
        "tops": parts.tops,
        "totals": parts.totals,
        "scale": scale,
        "q_len": q_len,
        "kv_len": kv_len,
        "splits": parts.splits,
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
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_KEYS": tiles.keys,
        "MASK": 0 if mask is None else 2 if mask.dtype == torch.bool else 1,
        "CAUSAL": causal,
        "WINDOWED": causal and window >= 0,
    }


def power(size: int) -> int:
    """The power of two a block needs, which tensor cores want to be 16 or more."""
    return max(16, 1 << (int(size) - 1).bit_length())


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

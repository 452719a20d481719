"""Split-KV attention for few query rows over many keys: `attn_pass::decode`, a Triton kernel and a reduction.

One program takes one KV head's query rows, all heads of its group packed together, and one split of the keys, so keys
and values are read once whatever the group; the splits' partial results are then joined by their sums of exponentials
(Flash-Decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The number of splits follows from the length
and the number of multiprocessors at run time. Inference only.

`attn_pass::decode_with_lse` gives the logarithm of the sum of exponentials too. On devices without the kernel both are
plain products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.library import triton_op, wrap_triton

from attn_pass.devices.cuda.decode_triton import attend, join

_MOST_ROWS = 64  # packed query rows a program takes
_TILES = ((64, 3), (64, 2), (32, 2))  # keys and pipeline stages, the best first
_OF_FOUR_WARPS = 64 * 128  # numbers of the result that four warps keep in registers
_LEAST_KEYS = 256  # of a split: less work than this is not worth joining
_PROGRAMS_PER_CORE = 2
_SPLITS_JOINED = 32  # at a time
_CORES = 132  # of a GPU that is not here


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
class Inputs:
    """What `decode` is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    causal: bool = False
    window: int = -1
    lengths: Tensor | None = None
    starts: Tensor | None = None
    mean: bool = False

    @property
    def has_one_mask_row(self) -> bool:
        """Whether all rows of a KV head share one row of the mask, as far as is known when this is traced."""
        if self.mask is None:
            return False
        batch, heads, q_len = self.query.shape[:3]
        _, over_heads, over_rows, _ = self.mask.expand(batch, heads, q_len, self.key.size(2)).stride()
        one_head = _is(heads // self.key.size(1), 1) or _is(over_heads, 0)
        return one_head and (_is(q_len, 1) or _is(over_rows, 0))


def _is(size: object, number: int) -> bool:
    """Whether a size is known to be a number; asking a symbolic one would be a guard."""
    return isinstance(size, int) and size == number


def tiles_for(
    rows: int, dim: int, value_dim: int, mask_bytes: int = 0, room: Room = Room(), *, one_mask_row: bool = False
) -> Tiles:
    """The largest tiles that fit, counted with every stage's keys, values and mask in shared memory.

    ``mask_bytes`` is the size of one of its elements, 0 without one; ``one_mask_row``: a row of them is read, and no
    block. What ptxas would put on the stack decides the rest: eight warps for 64 rows of 256, and for half as much
    beside a block of the mask or before compute capability 9; no more than 32 keys for 64 rows of 256 beside a block of
    the mask, and without one from 10 on.
    """
    wide, wide_values = power(dim), power(value_dim)
    most = min(_MOST_ROWS, power(rows))
    reads_block = mask_bytes > 0 and not one_mask_row
    of_four_warps = _OF_FOUR_WARPS if room.major >= 9 and not reads_block else _OF_FOUR_WARPS // 2
    for block in (most, most // 2):
        many = block * max(wide, wide_values) > _OF_FOUR_WARPS
        most_keys = 32 if many and (reads_block or room.major >= 10) else 64
        for keys, stages in _TILES:
            loaded = stages * keys * (2 * (wide + wide_values) + (block if reads_block else 1) * mask_bytes)
            if keys <= most_keys and loaded + 2 * block * (wide + keys) <= room.shared_bytes:
                return Tiles(block, keys, stages, 8 if block * wide_values > of_four_warps else 4)
    return Tiles(16, 32, 1, 4)


def gpu_of(device: torch.device) -> tuple[Room, int]:
    """What a block may have on this GPU, and the number of its multiprocessors.

    Fake tensors of a GPU that is not here are planned with the least of one and Hopper's of the other: what comes of
    it is read, and never run.
    """
    try:
        properties = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError):  # torch was built without CUDA, or there is no driver
        if torch.cuda.is_available():
            raise
        return Room(), _CORES
    shared = getattr(properties, "shared_memory_per_block_optin", Room.shared_bytes)
    return Room(shared, properties.major), properties.multi_processor_count


def splits_for(programs: int, kv_len: int, cores: int) -> int:
    """Into how many parts the keys are cut, so that every multiprocessor has work."""
    enough_splits = torch.sym_max(1, _PROGRAMS_PER_CORE * cores // torch.sym_max(1, programs))
    if _is(enough_splits, 1):
        return 1  # as a number, whatever the length: nothing is joined then
    most = (kv_len + _LEAST_KEYS - 1) // _LEAST_KEYS
    return torch.sym_max(1, torch.sym_min(enough_splits, most))  # type: ignore[no-any-return]


def numbers_for(inputs: Inputs, room: Room, cores: int) -> tuple[Tiles, int]:
    """The tiles, and the number of splits, on a GPU with so many multiprocessors."""
    batch, heads, q_len, dim = inputs.query.shape
    kv_heads, kv_len, value_dim = inputs.key.size(1), inputs.key.size(2), inputs.value.size(3)
    rows = heads // kv_heads * q_len
    mask_bytes = 0 if inputs.mask is None else inputs.mask.itemsize
    tiles = tiles_for(rows, dim, value_dim, mask_bytes, room, one_mask_row=inputs.has_one_mask_row)
    windowed = inputs.causal and inputs.window >= 0
    kept_keys = torch.sym_min(kv_len, inputs.window + q_len) if windowed else kv_len
    return tiles, splits_for(batch * kv_heads * _blocks(rows, tiles.rows), kept_keys, cores)


def _blocks(rows: int, block: int) -> int:
    return (rows + block - 1) // block


@triton_op("attn_pass::decode", mutates_args={})
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int = -1,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """``softmax(scale * query @ key.T + mask) @ value`` for few query rows.

    Args:
        query: (B, H, L, D), float16 or bfloat16, any strides but a dense last dimension.
        key: (B, Hkv, S, D); ``H % Hkv == 0``, head ``h`` uses KV head ``h // (H // Hkv)``.
        value: (B, Hkv, S, Dv).
        mask: added to the scores, or where boolean what is kept; broadcastable to (B, H, L, S), or None.
        scale: of the scores.
        causal: keys are kept up to ``i + S - L``, aligned to the last key; with ``lengths`` to the last valid one of
            the batch row, up to ``i + lengths[b] - L``.
        window: with ``causal`` the number of keys kept before that one, itself not counted; -1 for all.
        lengths: (B,), int32: how many keys of each batch row are valid; those at or beyond it are not read. May be
            negative, which is none, or larger than S, by which causal rows are aligned all the same; within 2**30.
            None for all.
        starts: (B,), int32: the first key of each batch row that is valid; those before it are not read. None for 0.
        mean: a row that lengths, starts, causal and window mask fully is the mean of all values, as if its scores
            had been replaced by one number, and then all keys are read; not beside a mask.

    Returns:
        (B, H, L, Dv), contiguous. A fully masked row is 0, but for ``mean``.
    """
    inputs = Inputs(query, key, value, mask, scale, causal, window, lengths, starts, mean)
    return _computed(inputs, with_lse=False)[0]


@triton_op("attn_pass::decode_with_lse", mutates_args={})
def decode_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int = -1,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    mean: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result of `decode`, and each row's logarithm of the sum of exponentials of its scores.

    A separate operator, since Inductor writes results even if they are not read. It serves to add sinks, or to join
    parts of the keys that were computed apart.

    Returns:
        The result (B, H, L, Dv), and (B, H, L) in float32 to base e; -inf for a fully masked row.
    """
    inputs = Inputs(query, key, value, mask, scale, causal, window, lengths, starts, mean)
    out, lse = _computed(inputs, with_lse=True)
    assert lse is not None
    return out, lse


def _computed(inputs: Inputs, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    device = inputs.query.device
    if device.type != "cuda":
        return reference_with_lse(inputs)
    # Triton launches on the current device. Inductor's code makes it the tensors' own; an eager call does not.
    with nullcontext() if is_fake(inputs.query) else torch.cuda.device(device):
        return launched(inputs, *numbers_for(inputs, *gpu_of(device)), with_lse=with_lse)


def launched(
    inputs: Inputs, tiles: Tiles, splits: int, *, with_lse: bool, wrap: Callable[[Any], Any] = wrap_triton
) -> tuple[Tensor, Tensor | None]:
    """The kernels' results with these tiles and so many splits; ``wrap`` is what a kernel is launched through."""
    query, value_dim = inputs.query, inputs.value.size(3)
    batch, heads, q_len, _ = query.shape
    kv_heads = inputs.key.size(1)
    count = batch * heads * q_len
    result = query.new_empty((batch, heads, q_len, value_dim))
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32) if with_lse else None
    alone = _is(splits, 1)
    if alone:
        partial, tops, totals = result, lse, None
    else:
        # Flat: a dimension of ``splits`` would be asked whether it is 1, and the answer guard the number of keys.
        partial = query.new_empty(splits * count * value_dim, dtype=torch.float32)
        tops = query.new_empty(splits * count, dtype=torch.float32)
        totals = torch.empty_like(tops)
    grid = (batch * kv_heads, _blocks(heads // kv_heads * q_len, tiles.rows), splits)
    wrap(attend)[grid](
        partial=partial,
        tops=tops,
        totals=totals,
        splits=splits,
        **_arguments(inputs, tiles),
        ALONE=alone,
        LSE=alone and with_lse,  # elsewhere it makes no other kernel
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if alone:
        return result, lse
    at_once = min(power(splits, 2), _SPLITS_JOINED) if isinstance(splits, int) else _SPLITS_JOINED
    rows = _SPLITS_JOINED // at_once
    wrap(join)[(_blocks(count, rows),)](
        partial=partial,
        tops=tops,
        totals=totals,
        result=result,
        lse=lse,
        splits=splits,
        rows=count,
        DIM=value_dim,
        BLOCK_DIM=power(value_dim),
        BLOCK_ROWS=rows,
        BLOCK_SPLITS=at_once,
        LSE=with_lse,
        num_warps=4,
    )
    return result, lse


def _arguments(inputs: Inputs, tiles: Tiles) -> dict[str, object]:
    """The arguments of `attend` that describe the call, by name."""
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.mask
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, value_dim = key.size(1), key.size(2), value.size(3)
    torch._check(mask is None or not inputs.mean, lambda: "mean=True is given beside a mask; give one of them")
    if mask is not None:
        mask = mask.expand(batch, heads, q_len, kv_len)
    lengths, starts = _of_batch(inputs.lengths, "lengths", batch), _of_batch(inputs.starts, "starts", batch)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": mask,
        "lengths": lengths,
        "starts": starts,
        "scale": inputs.scale,
        "q_len": q_len,
        "kv_len": kv_len,
        "batches": batch,
        "window": inputs.window,
        **{f"q{n}": s for n, s in enumerate(query.stride()[:3])},
        **{f"k{n}": s for n, s in enumerate(key.stride()[:3])},
        **{f"v{n}": s for n, s in enumerate(value.stride()[:3])},
        **{f"m{n}": s for n, s in enumerate((0, 0, 0, 0) if mask is None else mask.stride())},
        "l0": 0 if lengths is None else lengths.stride(0),
        "s0": 0 if starts is None else starts.stride(0),
        "KV_HEADS": kv_heads,
        "GROUPS": heads // kv_heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": power(dim),
        "BLOCK_VALUE": power(value_dim),
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_KEYS": tiles.keys,
        "MASK": 0 if mask is None else 2 if mask.dtype == torch.bool else 1,
        "ONE_MASK_ROW": inputs.has_one_mask_row,
        "LENGTHS": lengths is not None,
        "STARTS": starts is not None,
        "CAUSAL": inputs.causal,
        "WINDOWED": inputs.causal and inputs.window >= 0,
        "MEAN": inputs.mean,
    }


def _of_batch(numbers: Tensor | None, name: str, batch: int) -> Tensor | None:
    if numbers is None:
        return None
    torch._check_type(numbers.dtype == torch.int32, lambda: f"{name} are {numbers.dtype}; int32 is expected")
    return numbers.expand(batch)


def power(size: int, least: int = 16) -> int:
    """The power of two that a block needs, at least 16 for tensor cores."""
    return max(least, 1 << (int(size) - 1).bit_length())


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int = -1,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """`decode` in plain operators: what the operator is on devices without the kernel."""
    return reference_with_lse(Inputs(query, key, value, mask, scale, causal, window, lengths, starts, mean))[0]


def reference_with_lse(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`decode_with_lse` in plain operators."""
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.mask
    q_len, kv_len, groups = query.size(2), key.size(2), query.size(1) // key.size(1)
    rows, at = torch.arange(q_len, device=query.device)[:, None], torch.arange(kv_len, device=query.device)
    key, value = (x.repeat_interleave(groups, 1).float() for x in (key, value))
    scores = (query.float() * inputs.scale) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    if inputs.causal or inputs.lengths is not None or inputs.starts is not None:
        length = kv_len if inputs.lengths is None else inputs.lengths[:, None, None, None]
        start = 0 if inputs.starts is None else inputs.starts[:, None, None, None]
        valid = ((at >= start) & (at < length)).view(-1, 1, 1, kv_len)
        keeps, last = valid, rows + length - q_len
        if inputs.causal:
            keeps = keeps & (at <= last)
            if inputs.window >= 0:
                keeps = keeps & (at >= last - inputs.window)
        scores = torch.where(keeps, scores, float("-inf"))
        if inputs.mean:
            keeps_none = ~keeps.any(-1, keepdim=True)
            scores = torch.where(keeps_none, 0.0, scores)
            valid = valid | keeps_none.any(2, keepdim=True)
        value = torch.where(valid.transpose(-1, -2), value, 0.0)  # whatever lies elsewhere, NaN too, is not read
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
    return (weights @ value).to(query.dtype), scores.logsumexp(-1)

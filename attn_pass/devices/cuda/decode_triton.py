"""The Triton kernels of `attn_pass::decode`: one split of the keys, and the join of all splits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logarithm(top, total):
    """Of the sum of exponentials, to base e: ``total`` is the sum over the highest score, ``top``, to base 2."""
    return (top + tl.log2(total)) * 0.6931471805599453


@triton.jit(do_not_specialize=["kv_len", "splits", "window"])
def attend(
    query,
    key,
    value,
    mask,
    lengths,
    starts,
    partial,
    tops,
    totals,
    scale,
    q_len,
    kv_len,
    splits,
    batches,
    window,
    q0,
    q1,
    q2,
    k0,
    k1,
    k2,
    v0,
    v1,
    v2,
    m0,
    m1,
    m2,
    m3,
    l0,
    s0,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASK: tl.constexpr,
    ONE_MASK_ROW: tl.constexpr,
    LENGTHS: tl.constexpr,
    STARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MEAN: tl.constexpr,
    ALONE: tl.constexpr,
    LSE: tl.constexpr,
):
    """One KV head of one batch row, one block of packed query rows, one split of the keys.

    Rows are packed head by head: row ``r`` is query ``r % q_len`` of head ``r // q_len`` of the group. ``partial``
    (splits, B, H, L, Dv) gets the softmax over this split's keys times the values, ``tops`` the highest score (base 2),
    -inf where a row is fully masked, and ``totals`` the sum of exponentials over it: two numbers, since next to a fill
    of float32's lowest number a logarithm would be lost. ALONE: there is one split, so that nothing is left to join;
    ``partial`` (B, H, L, Dv) is the result in its own dtype, and with LSE ``tops`` gets the logarithms. MASK: 0 none, 1
    added, 2 boolean; ONE_MASK_ROW: it is the same for all rows of a KV head. LENGTHS: only so many keys of each batch
    row are there; STARTS: and none before. MEAN: a row that these, or CAUSAL, mask fully weighs all keys alike.
    """
    batch = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < GROUPS * q_len
    head = kv_head * GROUPS + row // q_len
    at = row % q_len
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE)
    batch64 = batch.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    head64 = head.to(tl.int64)

    q_at = query + batch64 * q0 + head64[:, None] * q1 + at[:, None] * q2 + dims[None, :]
    q = tl.load(q_at, mask=real[:, None] & (dims < DIM)[None, :], other=0.0)
    k_base = key + batch64 * k0 + kv_head64 * k1
    v_base = value + batch64 * v0 + kv_head64 * v1

    end = kv_len  # where the last row is aligned, which may lie outside of the cache
    if LENGTHS:
        end = tl.load(lengths + batch64 * l0)
    length = tl.minimum(tl.maximum(end, 0), kv_len)
    start = 0
    if STARTS:
        start = tl.maximum(tl.load(starts + batch64 * s0), 0)
    read_from, read_to = start, length
    if MEAN:
        newest, oldest = length - 1 + at * 0, start + at * 0
        if CAUSAL:
            newest = tl.minimum(newest, at + (end - q_len))
        if WINDOWED:
            oldest = tl.maximum(oldest, at + (end - q_len) - window)
        keeps_none = newest < oldest
        reads_all = tl.max((keeps_none & real).to(tl.int32), 0) > 0
        read_from = tl.where(reads_all, 0, read_from)
        read_to = tl.where(reads_all, kv_len, read_to)
    blocks = tl.cdiv(read_to, BLOCK_KEYS)
    # The last key any row sees is the last one; the first one of a window is the first row's.
    skipped = read_from
    if WINDOWED:
        of_window = tl.maximum(end - q_len - window, read_from)
        skipped = tl.where(reads_all, 0, of_window) if MEAN else of_window
    before = skipped // BLOCK_KEYS
    each = tl.cdiv(tl.maximum(blocks - before, 0), splits)
    first = before + split * each
    last = tl.minimum(first + each, blocks)

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    # Exponentials are of base 2. Inductor passes a Python float as float64, and a launch in eager mode as float32.
    scale2 = tl.cast(scale, tl.float32) * 1.4426950408889634
    for block in range(first, last):
        keys = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        inside = keys < read_to
        if STARTS:
            inside = inside & (keys >= read_from)
        keys64 = keys.to(tl.int64)
        # Ahead of the product, which hides how long it takes.
        if MASK:
            m_base = mask + batch64 * m0
            if ONE_MASK_ROW:
                given = tl.load(m_base + kv_head64 * GROUPS * m1 + keys64 * m3, mask=inside, other=0)[None, :]
            else:
                m_at = m_base + head64[:, None] * m1 + at[:, None] * m2 + keys64[None, :] * m3
                given = tl.load(m_at, mask=inside[None, :] & real[:, None], other=0)
        k = tl.load(
            k_base + keys64[None, :] * k2 + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k) * scale2
        kept = inside[None, :] & real[:, None]
        if MASK == 1:
            bias = given.to(tl.float32)
            # The lowest finite number stays finite, so that a row filled with it averages the values.
            scores += tl.where(bias == float("-inf"), bias, tl.maximum(bias * 1.4426950408889634, -3.0e38))
        if MASK == 2:
            kept = kept & (given != 0)
        if CAUSAL:
            distance = at[:, None] + (end - q_len) - keys[None, :]
            kept = kept & (distance >= 0)
            if WINDOWED:
                kept = kept & (distance <= window)
        if MEAN:
            valid = (keys >= start) & (keys < length)
            kept = (kept & valid[None, :]) | (keeps_none[:, None] & inside[None, :] & real[:, None])
            scores = tl.where(keeps_none[:, None], 0.0, scores)
        scores = tl.where(kept, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_base + keys64[:, None] * v2 + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = higher

    divisor = tl.where(total == 0.0, 1.0, total)
    result = result / divisor[:, None]
    heads = KV_HEADS * GROUPS
    place = ((split.to(tl.int64) * batches + batch) * heads + head) * q_len + at
    tl.store(
        partial + place[:, None] * VALUE_DIM + value_dims[None, :],
        result.to(partial.dtype.element_ty),
        mask=real[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if not ALONE:
        tl.store(tops + place, top, mask=real)
        tl.store(totals + place, total, mask=real)
    elif LSE:
        tl.store(tops + place, logarithm(top, divisor), mask=real)


@triton.jit(do_not_specialize=["splits", "rows"])
def join(
    partial,
    tops,
    totals,
    result,
    lse,
    splits,
    rows,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LSE: tl.constexpr,
):
    """The partial results of BLOCK_ROWS rows, weighted by their sums of exponentials; 0 where no split kept a key.

    Twice over the splits, the highest score first, BLOCK_SPLITS at a time: none of their loads waits for another. With
    LSE also the logarithm (base e) of the sum of exponentials, -inf where no split kept a key.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < rows
    dims = tl.arange(0, BLOCK_DIM)
    several = tl.arange(0, BLOCK_SPLITS)

    highest = tl.full([BLOCK_ROWS, BLOCK_SPLITS], float("-inf"), tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + several
        place = split.to(tl.int64)[None, :] * rows + row[:, None]
        there = (split < splits)[None, :] & real[:, None]
        highest = tl.maximum(highest, tl.load(tops + place, mask=there, other=float("-inf")))
    top = tl.max(highest, 1)
    base = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros([BLOCK_ROWS, BLOCK_SPLITS], tl.float32)
    joined = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + several
        place = split.to(tl.int64)[None, :] * rows + row[:, None]
        there = (split < splits)[None, :] & real[:, None]
        values = tl.load(
            partial + place[:, :, None] * DIM + dims[None, None, :],
            mask=there[:, :, None] & (dims < DIM)[None, None, :],
            other=0.0,
        )
        part = tl.load(tops + place, mask=there, other=float("-inf"))
        weight = tl.load(totals + place, mask=there, other=0.0) * tl.exp2(part - base[:, None])
        joined += tl.sum(weight[:, :, None] * values, 1)
        total += weight
    whole = tl.sum(total, 1)
    divisor = tl.where(whole == 0.0, 1.0, whole)
    tl.store(
        result + row[:, None] * DIM + dims[None, :],
        (joined / divisor[:, None]).to(result.dtype.element_ty),
        mask=real[:, None] & (dims < DIM)[None, :],
    )
    if LSE:
        tl.store(lse + row, logarithm(top, divisor), mask=real)

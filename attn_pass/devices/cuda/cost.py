"""The cost model of CUDA kernels: how each handles few rows, odd head dims and grouped heads.

A kernel's shape and its shares of the matrix rate are in its own file: measured on an H200, and for other GPUs set by
published figures, which are named where they are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from attn_pass.devices.device import FEW_ROWS, Device, Shares
from attn_pass.devices.roofline import Problem, traffic


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, and what its launch takes."""

    rows: int  # query rows of a thread block
    widths: tuple[int, ...]  # compiled head dims, of which the next wider one is taken
    splits_keys: bool = False  # few blocks share out the keys, and a second kernel joins the parts
    split_rows: int = 0  # query rows of a block that does so, if they are fewer
    splits_one_row: bool = False  # the same within one kernel, for one query row alone
    packs_one_row: bool = False  # the heads of a group share one pass over keys and values where there is one query row
    lookup_us: float = 0.0  # on the host, of what was compiled for a shape
    builds_plans: bool = False  # for each new shape, in `Device.plan_us`
    one_core: float = 1.4  # of its share of the device's bandwidth is what one multiprocessor alone draws


_EXP_OVERLAP = 0.5  # of the exponentials' time is not hidden behind products (FA2 and cuDNN on H100, D 64 and 128)
_CORE_BANDWIDTH = 1.4  # of its share of the device's bandwidth is what one multiprocessor alone can draw
_MASKED = 1.5  # the time of products and exponentials with a mask to add among them: a guess
PYTHON_US = 20.0  # checks and allocations of a library's call in Python; not measured
_PLAN_USES = 16  # a shape that a plan is built for is taken to come so many times


def fused(device: Device, shares: Shares, shape: Shape, problem: Problem, *, growing: bool = False) -> float:
    """Microseconds a fused kernel of this shape takes; ``growing``: a length is not known when compiled."""
    blocks = -(-problem.q_len // shape.rows)
    one_row = problem.q_len == 1
    heads = problem.kv_heads if one_row and shape.packs_one_row else problem.heads
    tasks = max(1, problem.batch * heads * blocks)
    balance = min(1.0, tasks / device.cores)
    split = shape.splits_keys or (shape.splits_one_row and one_row)
    spread = 1.0 if split and problem.kv_len >= 512 else balance
    rows = blocks * shape.rows
    if shape.split_rows and balance < spread:
        rows = -(-problem.q_len // shape.split_rows) * shape.split_rows
    causal = _causal_share(shape.rows, problem) if problem.causal else 1.0
    scores = causal * problem.batch * heads * rows * problem.kv_len
    dims = sum(_compiled(shape, d) for d in (problem.head_dim, problem.value_dim))
    rate = device.fused(problem.dtype) if problem.dtype.itemsize == 4 else _rate(device, shares, problem)
    products = 2.0 * scores * dims / rate / 1e3
    exponentials = scores / device.exp_gops / 1e3
    arithmetic = (products + _EXP_OVERLAP * exponentials) / spread
    few = (
        min(problem.q_len, FEW_ROWS) if balance < spread else problem.q_len
    )  # what splits the keys has few rows for it
    memory = traffic(device, problem.operand_bytes) / shares.memory(few)
    read = problem.expanded_kv_bytes * heads / max(1, problem.heads)  # keys and values, read by each head or group
    memory = max(memory, read / device.cache_gbytes / 1e3)
    memory /= min(1.0, spread * shape.one_core)
    if shape.splits_keys and balance < spread:
        memory /= _filled(tasks, device.cores)
    mask = 0.0
    if problem.mask_elements:
        written_us = traffic(device, 2 * problem.mask_elements * problem.mask_bytes)
        mask = written_us + problem.scores * problem.mask_bytes / device.cache_gbytes / 1e3
        arithmetic *= _MASKED
    copies = traffic(device, 2 * problem.copied_bytes)
    plan = device.plan_us / _PLAN_USES if growing and shape.builds_plans else 0.0
    start = device.fused_op_us + shape.lookup_us
    if shape.splits_keys and balance < spread:
        start += device.op_us + device.join_us
    return start + max(arithmetic, memory) + mask + copies + plan


@lru_cache(maxsize=256)
def _filled(tasks: int, cores: int) -> float:
    """What FlashAttention's splits fill of a GPU, two blocks a multiprocessor: flash_api.cpp, num_splits_heuristic.

    The least number of splits is taken whose last wave leaves no more than 15 % more idle than the best number does.
    """
    waves = [tasks * splits / (2 * cores) for splits in range(1, 129)]
    filled = [n / math.ceil(n) for n in waves]
    return next(share for share in filled if share >= 0.85 * max(filled))


def _causal_share(rows: int, problem: Problem) -> float:
    """Of the time without a mask: half the scores, and blocks of rows that end at different times.

    Measured on an H200 from 256 to 16384 rows: cuDNN 0.90 to 0.54, flash 1.0 to 0.55, efficient 0.79 to 0.52.
    """
    return 0.5 + 0.5 * math.sqrt(min(1.0, rows / max(1, problem.q_len)))


def split_keys(device: Device, shares: Shares, problem: Problem) -> float:
    """A split-KV kernel, and if it splits its reduction: keys and values once for a KV head, rows in blocks of 16."""
    packed = problem.heads // problem.kv_heads * problem.q_len if problem.kv_heads else problem.q_len
    scores = problem.batch * problem.kv_heads * -(-packed // 16) * 16 * problem.kv_len
    products = 2.0 * scores * (problem.head_dim + problem.value_dim) / _rate(device, shares, problem) / 1e3
    arithmetic = products + _EXP_OVERLAP * scores / device.exp_gops / 1e3
    memory = traffic(device, problem.operand_bytes + problem.mask_elements * problem.mask_bytes)
    memory /= shares.memory(problem.q_len)
    read = problem.expanded_kv_bytes * problem.kv_heads / max(1, problem.heads)  # the batch may share keys and values
    memory = max(memory, read / device.cache_gbytes / 1e3)
    splits = _splits(device, problem, packed)
    joined = device.op_us + _join(device, problem, splits) if splits > 1 else 0.0
    return max(arithmetic, memory) + device.op_us + joined


def _splits(device: Device, problem: Problem, packed: int) -> int:
    """Into how many parts the keys are cut."""
    programs = problem.batch * problem.kv_heads * -(-packed // _SPLIT_ROWS)
    enough_splits = max(1, _PROGRAMS_PER_CORE * device.cores // max(1, programs))
    return max(1, min(enough_splits, -(-problem.kv_len // _LEAST_KEYS)))


def _join(device: Device, problem: Problem, splits: int) -> float:
    """The second kernel of a split: it waits for the first, and reads the parts, 32 at a time, in float32."""
    parts = 4.0 * splits * problem.batch * problem.heads * problem.q_len * problem.value_dim
    waves = -(-splits // _JOINED_AT_ONCE)
    return device.join_us * (1 + waves) / 3 + 2 * parts / device.cache_gbytes / 1e3


# As `attn_pass.devices.cuda.decode_operator` has them.
_SPLIT_ROWS = 64  # of a program, at most
_PROGRAMS_PER_CORE = 2
_LEAST_KEYS = 256
_JOINED_AT_ONCE = 32  # parts whose loads do not wait for each other: 33 of them take ``join_us``, by the instructions


def flex(device: Device, problem: Problem, share: float, *, splits_keys: bool = False) -> float:
    """FlexAttention as Inductor's Triton templates; ``share`` of the blocks is computed.

    ``splits_keys``: the template for few rows, whose programs share a KV head's keys; otherwise there is one program
    for each head's tile of rows, and few of them leave most multiprocessors idle.
    """
    dims = sum(1 << max(0, n - 1).bit_length() for n in (problem.head_dim, problem.value_dim))  # tiles are padded
    if splits_keys:
        heads = problem.batch * problem.kv_heads
        rows = max(16, 1 << max(0, problem.q_len * (problem.heads // max(1, problem.kv_heads)) - 1).bit_length())
        programs = heads * max(1, device.cores // max(1, heads) * 2)
    else:
        heads = problem.batch * problem.heads
        rows = -(-problem.q_len // _FLEX_TILE) * _FLEX_TILE
        programs = heads * (rows // _FLEX_TILE)
    busy = min(1.0, max(1, programs) / device.cores)
    scores = share * heads * rows * problem.kv_len
    half = problem.dtype.itemsize < 4
    single = _FLEX_SINGLE[device.capability >= (9, 0)] * device.fused(problem.dtype)
    rate = _rate(device, device.shares["flex"], problem) if half else single
    arithmetic = (2.0 * scores * dims / rate + _EXP_OVERLAP * scores / device.exp_gops) / busy / 1e3
    reached = device.shares["flex"].memory(problem.q_len if splits_keys else rows)
    memory = traffic(device, problem.operand_bytes) / reached / min(1.0, busy * _CORE_BANDWIDTH)
    captured = traffic(device, problem.mask_elements * problem.mask_bytes)
    copies = traffic(device, 2 * problem.copied_bytes)
    start = (1 + splits_keys) * device.fused_op_us + _FLEX_BLOCK_KERNELS * device.kernel_us + _FLEX_COMPILE_US
    return max(arithmetic, memory) + captured + copies + start


_FLEX_SINGLE = (0.85, 1.2)  # of the fused rate in float32, before and from Hopper on: as in half precision
_FLEX_TILE = 128  # query rows of a program
_FLEX_BLOCK_KERNELS = 4  # generated kernels that make the lists of blocks
_FLEX_COMPILE_US = 20.0  # its compile takes some 2 s a layer, which a hundred thousand calls must earn


def unfused(device: Device, problem: Problem) -> float:
    """Two batched products and a softmax with the scores in memory, shared keys and values written out for each head.

    A product takes the longer of its arithmetic, in blocks of 64 rows, and its bytes.
    """
    size = problem.dtype.itemsize
    rows = -(-problem.q_len // 64) * 64
    rate = device.matmul(problem.dtype) * _PRODUCT_SHARE
    scores = traffic(device, 2 * size * problem.scores) / 2  # scores and weights lie in the cache together, or not
    products = 0.0
    for dim, columns in ((problem.head_dim, problem.kv_len), (problem.value_dim, problem.value_dim)):
        flops = 2.0 * problem.batch * problem.heads * rows * problem.kv_len * dim
        moved = size * problem.batch * problem.heads * dim * (problem.q_len + problem.kv_len)
        tasks = problem.batch * problem.heads * (rows // 64) * -(-columns // 128)
        spread = min(1.0, 2 * _CORE_BANDWIDTH * max(1, tasks) / device.cores)  # the inner dimension may be cut in two
        products += max(flops / rate / 1e3, (traffic(device, moved) + scores) / _PRODUCT_REACHED) / spread
    softmax = 2 * scores + problem.scores / device.exp_gops / 1e3
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    shared = problem.batch * problem.heads > problem.kv_batch * problem.kv_heads
    copies = traffic(device, problem.expanded_kv_bytes) if shared else 0.0
    return products + softmax + mask + copies + 2 * device.op_us + 2 * device.kernel_us


_PRODUCT_REACHED = 0.7  # of the rate of a copy
_PRODUCT_SHARE = 0.85  # of the rate of a large product, for one whose inner or outer dimension is a head


def _rate(device: Device, shares: Shares, problem: Problem) -> float:
    return device.matmul(problem.dtype) * shares.matrix(max(problem.head_dim, problem.value_dim))


def _compiled(shape: Shape, dim: int) -> int:
    """The head dim the kernel computes with."""
    return next((w for w in shape.widths if w >= dim), dim)

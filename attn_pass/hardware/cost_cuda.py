"""The cost model of CUDA kernels: torch's own three, by what each makes of few rows, odd head dims and grouped heads.

Shares of the matrix rate are in `attn_pass.hardware.catalog`. None of it was measured by this project; the published
figures it was set by are named where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_pass.hardware.cost import Problem, traffic
from attn_pass.hardware.device import Device


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    rows: int  # query rows of a thread block
    widths: tuple[int, ...]  # compiled head dims, of which the next wider one is taken
    splits_keys: bool  # few blocks share out the keys; not in training with dropout
    packs_one_row: bool  # the heads of a group share one pass over keys and values where there is one query row


SHAPES = {
    # flash_api.cpp: num_splits_heuristic, and seqlenq_ngroups_swapped
    "flash": Shape(128, (32, 64, 96, 128, 192, 256), True, True),
    # One row is near the memory roof, two take nine times as long (62208 keys of 9 heads, H200).
    "cudnn": Shape(128, (32, 64, 96, 128, 192, 256), False, True),
    "efficient": Shape(64, (64, 128), False, False),
}
_EXP_OVERLAP = 0.5  # of the exponentials' time is not hidden behind products (FA2 and cuDNN on H100, D 64 and 128)
_CORE_BANDWIDTH = 1.4  # of its share of the device's bandwidth is what one multiprocessor alone can draw
_REACHED = 0.85  # of the rate of a copy
_SPLIT_SHARE = 0.75  # the same, for a kernel that splits the keys and joins the parts
_FLASH_SPLIT_SHARE = 0.70  # flash splits them into blocks of 128 rows, most of which are padding
_LOOKUP_US = 0.5  # cuDNN finds the plan of a shape by its key, on the host
_JOIN_US = 2.0  # the second kernel of a split waits for the first
_PLAN_US = 30_000 / 16  # cuDNN builds a plan for each new shape, 23 to 37 ms; a shape is taken to come 16 times


def torch_kernel(device: Device, kernel: str, problem: Problem, *, growing: bool = False) -> float:
    """Microseconds one of torch's fused kernels takes; ``growing``: a length is not known when compiled."""
    shape = SHAPES[kernel]
    blocks = -(-problem.q_len // shape.rows)
    tasks = problem.batch * problem.heads * blocks
    balance = min(1.0, tasks / device.cores)
    one_row = problem.q_len == 1
    split = one_row if kernel == "cudnn" else shape.splits_keys
    spread = 1.0 if split and problem.kv_len >= 512 else balance
    rows = float(blocks * shape.rows)
    if one_row and shape.packs_one_row:
        rows *= problem.kv_batch * problem.kv_heads / max(1, problem.batch * problem.heads)
    scores = problem.batch * problem.heads * rows * problem.kv_len * (0.55 if problem.causal else 1.0)
    dims = sum(_compiled(shape, d) for d in (problem.head_dim, problem.value_dim))
    rate = device.fused(problem.dtype) if problem.dtype.itemsize == 4 else _rate(device, kernel, problem)
    products = 2.0 * scores * dims / rate / 1e3
    exponentials = scores / device.exp_gops / 1e3
    arithmetic = (products + _EXP_OVERLAP * exponentials) / spread
    reached = _FLASH_SPLIT_SHARE if balance < spread and not one_row else _REACHED
    memory = traffic(device, problem.operand_bytes) / reached
    if not (one_row and shape.packs_one_row):
        memory = max(memory, problem.expanded_kv_bytes / device.cache_gbytes / 1e3)
    memory /= min(1.0, spread * _CORE_BANDWIDTH)
    mask = 0.0
    if problem.mask_elements:
        made = traffic(device, 2 * problem.mask_elements * problem.mask_bytes)
        mask = made + problem.scores * problem.mask_bytes / device.cache_gbytes / 1e3
    copies = traffic(device, 2 * problem.copied_bytes)
    plan = _PLAN_US if growing and kernel == "cudnn" else 0.0
    start = device.fused_op_us + (_LOOKUP_US if kernel == "cudnn" else 0.0)
    return start + max(arithmetic, memory) + mask + copies + plan


def split_keys(device: Device, problem: Problem) -> float:
    """A split-KV kernel and its reduction: keys and values once, whatever the group, at what copies reach or less."""
    memory = traffic(device, problem.operand_bytes + problem.mask_elements * problem.mask_bytes)
    return memory / _SPLIT_SHARE + 2 * device.op_us + _JOIN_US


def unfused(device: Device, problem: Problem) -> float:
    """Two batched products and a softmax with the scores in memory, shared keys and values written out for each head.

    A product takes the longer of its arithmetic, in blocks of 64 rows, and its bytes.
    """
    size = problem.dtype.itemsize
    rows = -(-problem.q_len // 64) * 64
    rate = device.matmul(problem.dtype) * _PRODUCT_SHARE
    scores = traffic(device, size * problem.scores)
    products = 0.0
    for dim in (problem.head_dim, problem.value_dim):
        flops = 2.0 * problem.batch * problem.heads * rows * problem.kv_len * dim
        moved = size * problem.batch * problem.heads * dim * (problem.q_len + problem.kv_len)
        products += max(flops / rate / 1e3, (traffic(device, moved) + scores) / _REACHED)
    softmax = 2 * scores + problem.scores / device.exp_gops / 1e3
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    shared = problem.batch * problem.heads > problem.kv_batch * problem.kv_heads
    copies = traffic(device, problem.expanded_kv_bytes) if shared else 0.0
    return products + softmax + mask + copies + 2 * device.op_us + 2 * device.kernel_us


_PRODUCT_SHARE = 0.85  # of the rate of a large product, for one whose inner or outer dimension is a head


def _rate(device: Device, kernel: str, problem: Problem) -> float:
    return device.matmul(problem.dtype) * device.shares[kernel]


def _compiled(shape: Shape, dim: int) -> int:
    """The head dim the kernel computes with."""
    return next((w for w in shape.widths if w >= dim), dim)

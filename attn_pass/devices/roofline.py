"""A roofline for the forms attention takes: bytes, FLOPs, exponentials and calls, in microseconds.

Sizes that are not known statically are taken at their hint, which the caller supplies; nothing is guarded on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.devices.device import Device


@dataclass(frozen=True)
class Problem:
    """The sizes of one attention, as plain numbers."""

    batch: int
    heads: int
    kv_batch: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    mask_elements: int = 0  # elements of the mask as it lies in memory
    mask_bytes: int = 4
    copied_bytes: int = 0  # operands that have to be copied before the kernel takes them
    causal: bool = False

    @property
    def scores(self) -> int:
        """Elements of the score matrix."""
        return self.batch * self.heads * self.q_len * self.kv_len

    @property
    def flops(self) -> float:
        """FLOPs of the two products, masked part included."""
        return 2.0 * self.scores * (self.head_dim + self.value_dim)

    @property
    def operand_bytes(self) -> int:
        """Bytes of query, key, value and result, each once."""
        keys = self.kv_batch * self.kv_heads * self.kv_len * (self.head_dim + self.value_dim)
        return self.query_bytes + self.dtype.itemsize * keys

    @property
    def moved_bytes(self) -> int:
        """Bytes one fused kernel moves: its operands, a mask that lies in memory, and copies, written and read."""
        return self.operand_bytes + self.mask_elements * self.mask_bytes + 2 * self.copied_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of query and result."""
        return self.dtype.itemsize * self.batch * self.heads * self.q_len * (self.head_dim + self.value_dim)

    @property
    def expanded_kv_bytes(self) -> int:
        """Bytes of keys and values with every shared one repeated."""
        return self.dtype.itemsize * self.batch * self.heads * self.kv_len * (self.head_dim + self.value_dim)


def traffic(device: Device, size: float) -> float:
    """Microseconds to move ``size`` bytes, from the cache where they fit."""
    rate = device.cache_gbytes if size <= device.cache_bytes else device.memory_gbytes
    return size / rate / 1e3


def fused(device: Device, problem: Problem) -> float:
    """The fused kernel: operands once, no score matrix. It works on one (batch, head, row block) a thread."""
    work = 0.6 if problem.causal and problem.q_len > 1 else 1.0
    tasks = max(1, problem.batch * problem.heads * -(-problem.q_len // _row_block(problem.q_len)))
    balance = min(1.0, max(1, tasks) / device.cores)
    rate = device.fused(problem.dtype) * balance * _row_efficiency(problem.q_len)
    memory = traffic(device, problem.operand_bytes)
    if problem.q_len < 32:
        rate *= device.core_times.few_rows_rate.get(problem.dtype, 1.0)
        memory *= device.core_times.few_rows_traffic
    arithmetic = work * problem.flops / rate / 1e3
    if problem.batch * problem.heads > problem.kv_batch * problem.kv_heads and problem.q_len == 1:
        memory = max(memory, problem.expanded_kv_bytes / device.cache_gbytes / 1e3)
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    mask += (problem.scores if problem.mask_elements else 0) * _MASK_NANOSECONDS / device.cores / 1e3
    copies = traffic(device, 2 * problem.copied_bytes)
    is_half, working = problem.dtype.itemsize == 2, min(tasks, device.cores)
    each = device.core_times.task_us[is_half] + (device.core_times.contended_us[is_half] if working > 1 else 0.0)
    starting = tasks * each / working
    if problem.q_len >= 32:
        starting += problem.batch * problem.heads * problem.q_len * device.core_times.row_ns[is_half] / working / 1e3
    return device.fused_op_us + max(arithmetic, memory) + starting + mask + copies


_MASK_NANOSECONDS = 0.5  # a core's time to add one mask element inside the fused kernel


def _row_block(q_len: int) -> int:
    """The fused CPU kernel's block of query rows (aten/native/cpu/FlashAttentionKernel.cpp)."""
    return 256 if q_len >= 768 else 64 if q_len >= 192 else 32


_EFFICIENCY = ((1, 0.075), (2, 0.2), (4, 0.4), (8, 0.6), (32, 0.8), (192, 0.9), (768, 1.0))


def _row_efficiency(q_len: int) -> float:
    """The share of the peak that products with so few rows reach; one row is a matrix-vector product."""
    return max(share for rows, share in _EFFICIENCY if rows <= max(q_len, 1))


def flex(device: Device, problem: Problem, share: float, *, as_written: bool = False) -> float:
    """FlexAttention as Inductor's C++ template; ``share`` of the blocks is computed.

    Where the program does not call it itself (``as_written``) its operands are copied, and its compile counts.
    """
    slower = 1.0 if problem.dtype.itemsize == 4 else 1.5  # half precision is widened element by element
    first = 2.0 * problem.head_dim / _FLEX_GFLOPS
    second = 2.0 * problem.value_dim / (device.fused(torch.float32) / device.cores)
    each = _FLEX_NANOSECONDS + slower * (first + second) / _row_efficiency(problem.q_len)
    each += _FLEX_MASK_NANOSECONDS if problem.mask_elements else 0.0
    each *= _FLEX_AS_WRITTEN if as_written else 1.0
    balance = max(1, min(device.cores, problem.batch * problem.heads * -(-problem.q_len // 64)))
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    moved = problem.operand_bytes if as_written else 2 * problem.operand_bytes + 2 * problem.copied_bytes
    once = 0.0 if as_written else _FLEX_COMPILE_US
    return device.fused_op_us + share * problem.scores * each / balance / 1e3 + mask + traffic(device, moved) + once


# A core's, measured with 8 heads of 64 and 256 to 2048 queries and keys: 6.6 ns a score in float32, 9.5 in bfloat16.
_FLEX_NANOSECONDS = 1.5  # the score function, a soft cap, and the softmax
_FLEX_MASK_NANOSECONDS = 1.0  # reading one more tensor in the score function
_FLEX_GFLOPS = 35.0  # the template's own product of queries and keys
_FLEX_AS_WRITTEN = 0.75  # no score function: 5.2 to 6.7 ns a score in float32 at head dim 64, 8.6 to 10.1 at 128
_FLEX_COMPILE_US = 400.0  # its compile takes 4 s a layer, which ten thousand calls must earn


def safe_softmax(device: Device, problem: Problem) -> float:
    """What a softmax that gives 0 for a fully masked row adds to a plain one."""
    return problem.scores * _SAFE_NANOSECONDS / device.cores / 1e3


_SAFE_NANOSECONDS = 4.0


def transcendental(device: Device, problem: Problem, calls: int) -> float:
    """What so many tanh, exp or sigmoid of every score add to the unfused form (2 ns of a core each)."""
    return calls * problem.scores * 2.0 / device.cores / 1e3


def unfused(device: Device, problem: Problem, *, materialised_kv: bool = True) -> float:
    """Products and softmax as separate kernels, the score matrix in memory between them (Inductor's code)."""
    size = problem.dtype.itemsize
    exponentials = problem.scores / device.exp_gops / 1e3
    if problem.q_len == 1:
        # Inductor turns a product with one row into a multiply-and-sum that reads broadcast operands in place.
        rate = device.vector(problem.dtype) * (1.0 if problem.head_dim % 16 == 0 else 0.5)  # a vector's worth of lanes
        products = max(problem.flops / rate / 1e3, traffic(device, problem.operand_bytes))
        scores = traffic(device, 3 * size * problem.scores)
        return products + exponentials + scores + 3 * device.kernel_us
    rate = device.matmul(problem.dtype) * _row_efficiency(problem.q_len)
    rate *= device.core_times.few_rows_products if problem.q_len < 32 else 1.0
    products = problem.flops / rate / 1e3
    scores = traffic(device, 4 * size * problem.scores)
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    shared = problem.expanded_kv_bytes > size * problem.kv_batch * problem.kv_heads * problem.kv_len * (
        problem.head_dim + problem.value_dim
    )
    copies = traffic(device, 2 * problem.expanded_kv_bytes) if shared and materialised_kv else 0.0
    each = device.core_times.score_ns[size == 2]
    each += device.core_times.half_mask_ns if size == 2 and problem.mask_elements else 0.0
    scores += problem.scores * each / device.cores / 1e3
    return products + exponentials + scores + mask + copies + 2 * device.op_us + 2 * device.kernel_us

"""The cost model of TPUs: a Pallas kernel, and two products and a softmax as XLA compiles them.

Nothing of it was measured by this project. It is set by one published figure, 2.5 ms for (1, 5, 16384, 128) in
bfloat16 with large tiles (pytorch/xla#9250), taken to be of a v6e.
"""

from __future__ import annotations

from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem, traffic

_SHARE = 0.45  # of the rate of a large product that the kernel's products reach
_STEP_US = 0.35  # a step of the grid (the figure of JAX's Pallas guide)
_LANES = 128
_SUBLANES = 8
_PRODUCT_SHARE = 0.7  # of the rate of a large product, for one whose inner or outer dimension is a head
_PASSES = 4  # the scores are written and read, by the first product, the softmax and the second
_KERNEL_US = 1.5  # one kernel of a compiled program: a guess, and so is the next
_CALL_US = 5.0  # a Pallas kernel, which nothing around it is fused into
_MASKED = 1.25  # of the arithmetic with a mask to add: a guess


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _products(problem: Problem) -> float:
    """FLOPs as the matrix unit does them: whole tiles of 8 by 128."""
    rows, keys = _up(problem.q_len, _SUBLANES), _up(problem.kv_len, _LANES)
    dims = sum(_up(d, _LANES) for d in (problem.head_dim, problem.value_dim))
    return 2.0 * problem.batch * problem.heads * rows * keys * dims


def pallas(device: Device, problem: Problem, steps: int) -> float:
    """Microseconds of a Pallas kernel of so many steps; a mask is a float32 matrix, which is made and read."""
    work = 0.6 if problem.causal and problem.q_len > 1 else 1.0
    arithmetic = _products(problem) / (device.matmul(problem.dtype) * _SHARE) / 1e3
    arithmetic += problem.scores / device.exp_gops / 1e3
    if problem.mask_elements:
        arithmetic *= _MASKED
    moved = problem.operand_bytes + problem.expanded_kv_bytes - problem.expanded_kv_bytes * (problem.q_len == 1)
    memory = traffic(device, moved) + 2 * traffic(device, 4 * problem.mask_elements)
    copies = traffic(device, 2 * problem.copied_bytes)
    return _CALL_US + work * (max(arithmetic, memory) + steps * _STEP_US) + copies


def unfused(device: Device, problem: Problem) -> float:
    """Microseconds of the products and the softmax as XLA compiles them, the scores in memory between."""
    products = _products(problem) / (device.matmul(problem.dtype) * _PRODUCT_SHARE) / 1e3
    scores = traffic(device, _PASSES * problem.dtype.itemsize * problem.scores)
    mask = traffic(device, problem.mask_elements * problem.mask_bytes)
    exponentials = problem.scores / device.exp_gops / 1e3
    return products + scores + mask + exponentials + 3 * _KERNEL_US

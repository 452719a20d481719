"""The cost model of Ascend's attention operators: a roofline with the rates of data sheets. Nothing was measured.

One row block of one head is a core's task. The inference operator divides the keys of a single query row among the
cores, as documented for its decoding branch; the training operators are assumed to read them core by core.
"""

from __future__ import annotations

from attn_pass.devices.device import Device
from attn_pass.devices.npu.generations import INFERENCE
from attn_pass.devices.roofline import Problem, traffic

_ROWS = 128  # of a task
COMPRESSED = 2048  # side of the mask that stands for every causal mask and window


def operator(device: Device, name: str, problem: Problem) -> float:
    """Microseconds of one call, its mask included; what is expanded before it is among the copied bytes."""
    blocks = -(-problem.q_len // _ROWS)
    tasks = problem.batch * problem.heads * blocks
    balance = min(1.0, max(1, tasks) / device.cores)
    spread = 1.0 if name == INFERENCE and problem.q_len == 1 and problem.kv_len >= 512 else balance
    work = 0.55 if problem.causal and problem.q_len > 1 else 1.0
    scores = problem.batch * problem.heads * max(problem.q_len, 16) * problem.kv_len * work  # products of 16 rows
    products = 2.0 * scores * (problem.head_dim + problem.value_dim) / device.fused(problem.dtype) / 1e3
    exponentials = scores / device.exp_gops / 1e3
    memory = traffic(device, problem.operand_bytes)
    mask = traffic(device, problem.mask_elements)  # a byte each
    copies = traffic(device, 2 * problem.copied_bytes)
    return device.fused_op_us + max((products + 0.5 * exponentials) / spread, memory / spread) + mask + copies


def stock_mask(device: Device, problem: Problem, *, causal: bool, elements: int) -> float:
    """What torch_npu does to a mask before its own call: a compressed one made anew, or a boolean one inverted.

    One that is neither (L, S) nor has all of its rows is expanded to every head first.
    """
    if causal:
        return traffic(device, 3 * COMPRESSED * COMPRESSED) + 2 * device.kernel_us  # ones, and triu of them
    if not elements:
        return 0.0
    one = problem.q_len * problem.kv_len
    full = problem.batch * problem.heads * one
    elements_read = elements if elements in (one, problem.batch * one, full) else full
    return traffic(device, elements + elements_read) + device.kernel_us

"""The cost model of CUDA kernels compared with published times, and its constants with the kernels' sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attn_pass.devices import registry
from attn_pass.devices.cuda import cost as cost_cuda
from attn_pass.devices.cuda import cudnn, decode, decode_operator, efficient, flash
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem

BF16 = torch.bfloat16
H100 = registry.by_name("H100")
KERNELS: dict[str, Callable[[Problem], float]] = {
    "unfused": lambda p: cost_cuda.unfused(H100, p),
    "flash": lambda p: flash.KERNEL.microseconds(H100, p),
    "flex": lambda p: cost_cuda.flex(H100, p, 0.55 if p.causal else 1.0),
    "cudnn": lambda p: cudnn.KERNEL.microseconds(H100, p),
}
# TFLOP/s of FlashAttention-3's paper (arXiv 2407.08608): H100 SXM, 16384 tokens in all, hidden size 2048; its Triton
# kernel stands for FlexAttention's. By head dim, whether causal, and length.
PUBLISHED: dict[tuple[int, bool, int], dict[str, int]] = {
    (64, False, 2048): {"unfused": 67, "flash": 318, "flex": 396, "cudnn": 395},
    (64, False, 8192): {"unfused": 73, "flash": 322, "flex": 401, "cudnn": 412},
    (128, False, 1024): {"flash": 350, "flex": 372, "cudnn": 574},
    (128, False, 2048): {"flash": 362, "flex": 389, "cudnn": 617},
    (128, False, 8192): {"unfused": 139, "flash": 370, "flex": 392, "cudnn": 600},
    (128, True, 2048): {"flash": 298, "flex": 323, "cudnn": 484},
    (128, True, 8192): {"flash": 333, "flex": 369, "cudnn": 529},
    (256, True, 2048): {"flash": 278, "cudnn": 450},
    (256, True, 8192): {"flash": 297, "cudnn": 497},
}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_hopper_is_within_a_tenth_of_what_was_published(shape: tuple[int, bool, int]) -> None:
    dim, causal, length = shape
    batch, heads = 16384 // length, 2048 // dim
    problem = Problem(batch, heads, batch, heads, length, length, dim, dim, BF16, causal=causal)
    flops = 4.0 * batch * heads * length**2 * dim / (2 if causal else 1)
    for kernel, rate in PUBLISHED[shape].items():
        assert KERNELS[kernel](problem) == pytest.approx(flops / rate / 1e6, rel=0.1), kernel


def split(kv_len: int, device: Device = H100, batch: int = 1) -> float:
    return decode.KERNEL.microseconds(device, Problem(batch, 32, batch, 8, 1, kv_len, 128, 128, BF16))


def test_joining_takes_longer_with_more_parts() -> None:
    """33 of them some 2 us, 128 little more: 32 at a time are read without waiting for each other."""
    problem = Problem(1, 32, 1, 8, 1, 32768, 128, 128, BF16)
    assert [cost_cuda._splits(replace(H100, cores=cores), problem, 4) for cores in (4 * 33, 4 * 128)] == [33, 128]
    few, more = (cost_cuda._join(H100, problem, splits) for splits in (33, 128))
    assert few == pytest.approx(2.0, abs=0.5) and few < more < 3 * few
    assert cost_cuda._splits(H100, replace(problem, kv_len=256), 4) == 1 and cost_cuda._join(H100, problem, 2) < few
    assert cost_cuda._join(replace(H100, join_us=6.0), problem, 33) > 2 * few
    assert split(65536) > split(32768) > split(1024)


def test_one_split_is_not_joined() -> None:
    problem = Problem(64, 32, 64, 8, 1, 8192, 128, 128, BF16)
    assert cost_cuda._splits(H100, problem, 4) == 1
    slow = replace(H100, join_us=1e6)
    assert decode.KERNEL.microseconds(slow, problem) == decode.KERNEL.microseconds(H100, problem)


def test_the_model_splits_as_the_kernel_does() -> None:
    ours = (cost_cuda._SPLIT_ROWS, cost_cuda._PROGRAMS_PER_CORE, cost_cuda._LEAST_KEYS)
    assert ours == (decode_operator._MOST_ROWS, decode_operator._PROGRAMS_PER_CORE, decode_operator._LEAST_KEYS)


def test_one_row_leaves_half_of_the_memory_s_rate_to_the_efficient_kernel() -> None:
    problem = Problem(64, 32, 64, 32, 1, 8192, 128, 128, BF16)
    times = {k.name: k.microseconds(H100, problem) for k in (efficient.KERNEL, flash.KERNEL, cudnn.KERNEL)}
    assert times["efficient"] > 1.6 * max(times["flash"], times["cudnn"])

"""S2, flash-attn against SDPA (A100, CUDA 11.8): transposed copies around a kernel that takes any strides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.document import Table
from bench.harness.programs import Program, Setting, of_function
from bench.suites.seeds.common import Bench, operands
from bench.suites.spellings import copied_call

TITLE = "S2: transposed copies around the call"
# (B, H, L, D) in float16, and what was reported of it.
SIZES: tuple[tuple[tuple[int, int, int, int], str], ...] = (
    ((12, 64, 256, 64), "A100, float16: flash-attn 364.1 us, without the copies 120.6 us; SDPA 98.7 us"),
    ((16, 128, 784, 128), "A100, float16: flash-attn 7392.4 us, without the copies 3845.1 us; SDPA 4085.1 us"),
)
CPU_HEADS = 8  # of the second size, whose 644 GFLOP would take a CPU seconds a call


def without_copies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernel in the layout the data has."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def programs(setting: Setting) -> list[Program]:
    """Both sizes; on a CPU the second with fewer heads, and in quick runs both with smaller batches."""
    listed = []
    for (batch, heads, length, dim), reported in SIZES:
        if setting.on_cpu:
            heads = min(heads, CPU_HEADS) if length > 256 else heads
            batch = 2 if setting.quick else batch
        name = f"B{batch} H{heads} L{length} D{dim}, copies"
        hand = "scaled_dot_product_attention without the copies"
        told: dict[str, Any] = {"reported": reported, "tolerance": setting.tolerance}
        given = partial(operands, batch, length, heads, dim, seed=length)
        listed.append(of_function(name, copied_call, given, without_copies, hand=hand, **told))
    return listed


def tables(bench: Bench) -> Iterator[Table]:
    """Every way; in quick runs packages for the first size alone."""
    made = programs(bench.setting)
    notes = [f"reported, {program.name}: {program.reported}" for program in made]
    notes.append("with flash-attn's own function, where its kernels are installed: `python -m bench gpu --only seeds`")
    yield bench.table(__name__, TITLE, made, slice(1), notes)

"""S2, flash-attn against SDPA (A100, CUDA 11.8): transposed copies around a kernel that takes any strides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Built, Function, Program, Setting
from bench.suites.seeds.common import operands

TITLE = "S2: transposed copies around the call"
# (B, H, L, D) in float16, and what was reported of it.
SIZES: tuple[tuple[tuple[int, int, int, int], str], ...] = (
    ((12, 64, 256, 64), "A100, float16: flash-attn 364.1 us, without the copies 120.6 us; SDPA 98.7 us"),
    ((16, 128, 784, 128), "A100, float16: flash-attn 7392.4 us, without the copies 3845.1 us; SDPA 4085.1 us"),
)
CPU_HEADS = 8  # of the second size, whose 644 GFLOP would take a CPU seconds a call


def with_copies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Operands (B, L, H, D), every one copied, and the result."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def without_copies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernel in the layout the data has."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _make(size: tuple[int, int, int, int], device: str) -> Built:
    batch, heads, length, dim = size
    return Function(with_copies), operands(batch, length, heads, dim, seed=length, device=device)


def _hand(device: str) -> nn.Module:
    return Function(without_copies)


def programs(setting: Setting) -> list[Program]:
    """Both sizes; on a CPU the second with fewer heads, and in quick runs both with smaller batches."""
    found = []
    for (batch, heads, length, dim), reported in SIZES:
        if setting.on_cpu:
            heads = min(heads, CPU_HEADS) if length > 256 else heads
            batch = 2 if setting.quick else batch
        size = (batch, heads, length, dim)
        name = f"B{batch} H{heads} L{length} D{dim}, copies"
        hand = "scaled_dot_product_attention without the copies"
        told = {"reported": reported, "tolerance": setting.tolerance}
        found.append(Program(name, partial(_make, size), _hand, hand, **told))
    return found


def tables(setting: Setting, rates: Rates, tell: Tell) -> Iterator[Table]:
    """Every way; in quick runs packages for the first size alone."""
    first, *rest = programs(setting)
    everything = (*w.COMPILED, *w.PACKAGED)
    rows = run(__name__, [first], everything, setting, rates, tell)
    rows += run(__name__, rest, w.COMPILED if setting.quick else everything, setting, rates, tell)
    notes = [f"reported, {program.name}: {program.reported}" for program in (first, *rest)]
    notes.append("with flash-attn's own function, where its kernels are installed: `python -m bench gpu --only seeds`")
    yield Table(TITLE, STANDARD, rows, [*notes, LEGEND])

"""S1, PyTorch/XLA flash attention against JAX: q, k, v of (1, 5, 16384, 128).

Reported on a TPU: JAX 2.5 ms; PyTorch/XLA 3.0 ms, though it calls the same kernel, because the measurement waited twice
an iteration and so timed tracing as well; `call_jax` 2.6 ms. Here the same attention by torch on this device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.nn.functional as F

from bench.harness.document import Table, read
from bench.harness.programs import Program, Setting, of_function
from bench.suites.seeds import xla
from bench.suites.seeds.common import Bench, operands
from bench.suites.spellings import by_hand

TITLE = "S1: one long self-attention, (1, 5, 16384, 128)"
COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "results" / "s1-xla.json"
REPORTED = (
    "reported on a TPU: JAX's flash attention 2.5 ms, PyTorch/XLA 3.0 ms timed with tracing in every iteration, "
    "call_jax 2.6 ms"
)
HEADS, DIM = 5, 128


def programs(setting: Setting) -> list[Program]:
    """The report's length, cut on a CPU, where eager's scores of 16384 would take 5 GB a tensor."""
    length = 16384 if not setting.on_cpu else 1024 if setting.quick else 4096
    name, hand = f"(1, {HEADS}, {length}, {DIM}) by hand", "scaled_dot_product_attention"
    given = partial(operands, 1, HEADS, length, DIM, seed=length)
    call = F.scaled_dot_product_attention
    return [of_function(name, by_hand, given, call, hand=hand, tolerance=setting.tolerance)]


def tables(bench: Bench) -> Iterator[Table]:
    """The ways of torch, without packages in quick runs; then XLA's."""
    yield bench.table(__name__, TITLE, programs(bench.setting), slice(0), [REPORTED])
    for name in ("correctness", "overlap", "tiles"):
        bench.tell(f"S1, {name}")
        yield of_jax(name)


def of_jax(name: str) -> Table:
    """A part of `xla`: measured here, or where its packages are not here, as the committed run has it."""
    table = xla.measured(name)
    if not table.rows:
        missing = table.notes
        (table,) = (kept for kept in read(COMMITTED).tables if kept.name == name)
        table.notes = [f"of the committed run, because here: {' '.join(missing)}", *table.notes]
    return replace(table, title=f"S1, XLA: {table.title}")

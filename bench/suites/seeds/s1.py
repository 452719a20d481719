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
from torch import nn

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Table, read
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Built, Function, Program, Setting
from bench.suites.seeds import xla
from bench.suites.seeds.common import operands
from bench.suites.spellings import by_hand

TITLE = "S1: one long self-attention, (1, 5, 16384, 128)"
COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "results" / "s1-xla.json"
REPORTED = (
    "reported on a TPU: JAX's flash attention 2.5 ms, PyTorch/XLA 3.0 ms timed with tracing in every iteration, "
    "call_jax 2.6 ms"
)
HEADS, DIM = 5, 128


def _make(length: int, device: str) -> Built:
    return Function(by_hand), operands(1, HEADS, length, DIM, seed=length, device=device)


def _call(device: str) -> nn.Module:
    return Function(F.scaled_dot_product_attention)


def programs(setting: Setting) -> list[Program]:
    """The report's length, cut on a CPU, where eager's scores of 16384 would take 5 GB a tensor."""
    length = 16384 if not setting.on_cpu else 1024 if setting.quick else 4096
    name = f"(1, {HEADS}, {length}, {DIM}) by hand"
    hand = "scaled_dot_product_attention"
    return [Program(name, partial(_make, length), _call, hand, tolerance=setting.tolerance)]


def tables(setting: Setting, rates: Rates, tell: Tell) -> Iterator[Table]:
    """The ways of torch."""
    chosen = w.COMPILED if setting.quick else (*w.COMPILED, *w.PACKAGED)
    rows = run(__name__, programs(setting), chosen, setting, rates, tell)
    yield Table(TITLE, STANDARD, rows, [REPORTED, LEGEND])
    for name in ("correctness", "overlap", "tiles"):
        tell(f"S1, {name}")
        yield of_jax(name)


def of_jax(name: str) -> Table:
    """A part of `xla`: measured here, or where its packages are not here, as the committed run has it."""
    table = xla.measured(name)
    if not table.rows:
        missing = table.notes
        (table,) = (kept for kept in read(COMMITTED).tables if kept.name == name)
        table.notes = [f"of the committed run, because here: {' '.join(missing)}", *table.notes]
    return replace(table, title=f"S1, XLA: {table.title}")

"""S3, flash-attn 2.6.3 against 2.7.0: small work, where what a call costs the host is what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import nn

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Built, Function, Program, Setting
from bench.suites.seeds.common import operands
from bench.suites.spellings import by_hand

TITLE = "S3: small work, 16 heads of 16"
REPORTED = (
    "reported: flash-attn 2.7.0 up to 2x slower than 2.6.3 at batch 2 or 512, sequence 50, 150, 300, embedding 256: "
    "its checks moved from C++ to Python; kernels took the same time"
)
HEADS, DIM = 16, 16
SIZES = tuple((batch, length) for batch in (2, 512) for length in (50, 150, 300))
LEAST = (1, 1)  # nothing to compute: what is left is the call
QUICK = ((2, 50), (2, 300))


def _make(batch: int, length: int, device: str) -> Built:
    given = operands(batch, HEADS, length, DIM, seed=length, device=device)
    return Function(F.scaled_dot_product_attention), given


def _hand(device: str) -> nn.Module:
    return Function(by_hand)


def programs(setting: Setting) -> list[Program]:
    """The sizes of the report, and the least there is."""
    sizes = (LEAST, *(QUICK if setting.quick else SIZES))
    limit = setting.tolerance
    return [
        Program(f"B{b} L{n} H{HEADS} D{DIM}, call", partial(_make, b, n), _hand, "two products", tolerance=limit)
        for b, n in sizes
    ]


def tables(setting: Setting, rates: Rates, tell: Tell) -> Iterator[Table]:
    """Every way; in quick runs packages for one size."""
    made = programs(setting)
    packaged = made[1:2] if setting.quick else made
    rows = []
    for program in made:
        chosen = (*w.COMPILED, *w.PACKAGED) if program in packaged else w.COMPILED
        rows += run(__name__, [program], chosen, setting, rates, tell)
    note = "the first size computes next to nothing: its times are what a call costs"
    yield Table(TITLE, STANDARD, rows, [REPORTED, note, LEGEND])

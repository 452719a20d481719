"""S3, flash-attn 2.6.3 against 2.7.0: small problems, whose time is the host's time per call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from bench.harness.document import Table
from bench.harness.programs import Program, Setting, of_function
from bench.suites.seeds.common import Bench, operands
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


def programs(setting: Setting) -> list[Program]:
    """The sizes of the report, and the least there is."""
    sizes = (LEAST, *(QUICK if setting.quick else SIZES))
    return [
        of_function(
            f"B{b} L{n} H{HEADS} D{DIM}, call",
            F.scaled_dot_product_attention,
            partial(operands, b, HEADS, n, DIM, seed=n),
            by_hand,
            hand="two products",
            tolerance=setting.tolerance,
        )
        for b, n in sizes
    ]


def tables(bench: Bench) -> Iterator[Table]:
    """Every way; in quick runs packages for one size."""
    note = "the first size computes next to nothing: its times are what a call costs"
    yield bench.table(__name__, TITLE, programs(bench.setting), slice(1, 2), [REPORTED, note])

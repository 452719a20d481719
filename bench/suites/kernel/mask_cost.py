"""What a mask costs the CPU kernel that hides nothing: `python -m bench mask-cost [--json FILE]`.

The kernel finds out when it runs which keys a boolean mask keeps, and makes a map of blocks of 64 keys from it. A mask
that keeps every key saves nothing, so what the attention takes longer with it than without is the cost of reading it
and of the map. Processor time by one thread, in turns, the attention without a mask twice (A/A).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attn_pass.model.dtype_name import dtype_name
from bench.harness.command import Json, Rounds, started
from bench.harness.document import Column, Row
from bench.harness.measure import quiet
from bench.harness.programs import normal
from bench.suites.kernel.command import timed

AIM = 0.02
DTYPES = (torch.float32, torch.bfloat16)
WITHOUT, AGAIN, OF_KEYS, OF_PAIRS = "without", "again", "of_keys", "of_pairs"
COLUMNS = (
    Column("program", "program"),
    Column("attention", "case"),
    Column("ms without a mask", "ms", ".3f"),
    Column("mask of keys, (B, 1, 1, S)", OF_KEYS, "+.1%"),
    Column("mask of rows and keys, (B, 1, L, S)", OF_PAIRS, "+.1%"),
    Column("A/A", "noise", ".1%"),
    Column("error", "error", ".0e"),
    Column("verdict", "verdict"),
)
NOTES = (
    "What the attention takes longer with a mask that keeps every key, at the 10th percentiles. A/A: how far the "
    "attention without a mask is from itself in the same turns. Error: the largest difference between the results, "
    "which are to be equal.",
    f"A mask of keys, as padding is, is to cost less than {AIM:.0%}, and what is below A/A is none.",
)


@dataclass(frozen=True)
class Size:
    """An attention (B, H, L, D) over S keys."""

    batch: int
    heads: int
    rows: int
    keys: int
    dim: int = 64

    @property
    def name(self) -> str:
        return f"({self.batch}, {self.heads}, {self.rows}, {self.dim}) over {self.keys} keys"

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Query, key and value."""
        shapes = [(self.batch, self.heads, length, self.dim) for length in (self.rows, self.keys, self.keys)]
        return tuple(x.to(dtype) for x in normal(0, *shapes))

    def masks(self) -> dict[str, Tensor]:
        """Masks that keep every key."""
        return {
            name: torch.ones(self.batch, 1, n, self.keys).bool() for name, n in ((OF_KEYS, 1), (OF_PAIRS, self.rows))
        }


SIZES = (
    Size(16, 12, 64, 64),
    Size(16, 12, 128, 128),
    Size(4, 12, 512, 512),
    Size(1, 12, 2048, 2048),
    Size(8, 8, 1, 4096),
)


def measured(size: Size, dtype: torch.dtype, rounds: int) -> Row:
    """The row of one attention."""
    from attn_pass.devices.cpu.kernel.operator import OPERATOR

    inputs, scale = size.inputs(dtype), 1 / math.sqrt(size.dim)

    def run(keep: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: OPERATOR(*inputs, scale, keep=keep)

    runs = {WITHOUT: run(), AGAIN: run(), **{name: run(keep) for name, keep in size.masks().items()}}
    results = {name: one() for name, one in runs.items()}
    error = max(float((x.double() - results[WITHOUT].double()).abs().max()) for x in results.values())
    taken = timed(runs, rounds, threads=1)
    shares = {name: taken[name] / taken[WITHOUT] - 1 for name in (OF_KEYS, OF_PAIRS)}
    noise = abs(math.log(taken[AGAIN] / taken[WITHOUT]))
    costs = "WRONG" if error else "" if shares[OF_KEYS] <= max(AIM, noise) else "costs more"
    facts = {"program": dtype_name(dtype), "way": "attn_pass", "status": "ok", "case": size.name}
    return {**facts, "ms": taken[WITHOUT] * 1e3, **shares, "noise": noise, "error": error, "verdict": costs}


def _rows(rounds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    for dtype, size in product(DTYPES, SIZES):
        row = measured(size, dtype, rounds)
        tell(f"{row['program']}, {row['case']}: {row[OF_KEYS]:+.1%}, {row[OF_PAIRS]:+.1%}")
        yield row


def main(json_file: Json = None, rounds: Rounds = 25) -> None:
    """What a mask that hides nothing costs the CPU kernel."""
    quiet(1)
    recorder = started("What a mask costs the CPU kernel", json_file, threads=1, rounds=rounds)
    recorder.table("A mask that keeps every key", COLUMNS, NOTES).rows += _rows(rounds, recorder.tell)
    recorder.finish()

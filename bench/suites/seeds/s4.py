"""S4, pytorch/pytorch#151287: AOTInductor and a batch of one-token queries against one shared K and V."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Built, Program, Setting, Tensors
from bench.suites.seeds import shared_keys

TITLE = "S4: one shared K and V, query length 1, batch 1 to 2048"


def _make(half: bool, device: str) -> Built:
    return shared_keys.SharedKeys(device, half).eval(), shared_keys.make_inputs(device=device)


def _hand(half: bool, device: str) -> nn.Module:
    return shared_keys.Folded(device, half).eval()


def _other(batch: int, device: str) -> Tensors:
    return shared_keys.make_inputs(batch, device)


def programs(setting: Setting) -> list[Program]:
    """Float32 as users of a CPU run it; in half autocast, which the report has, on GPUs and in full runs."""
    found = []
    for half in (False, True):
        if half and setting.quick and setting.on_cpu:
            continue
        dtype = "bfloat16 autocast" if half else "float32"
        found.append(
            Program(
                f"q (1000, 4, 1, 32), k and v (1, 4, 2048, 32), {dtype}",
                partial(_make, half),
                partial(_hand, half),
                "folded to (1, 4, 1000, 32)",
                dynamic_shapes=({0: shared_keys.batch_dim()}, None, None),
                others=tuple(partial(_other, batch) for batch in shared_keys.CHECKED_BATCHES[1:]),
                reference=shared_keys.reference,
                tolerance=shared_keys.TOLERANCE[half],
                dtype=torch.bfloat16 if half else torch.float32,
                reported=shared_keys.REPORTED,
            )
        )
    return found


def tables(setting: Setting, rates: Rates, tell: Tell) -> Iterator[Table]:
    """Every way: packages with a dynamic batch, compiled code for this batch."""
    rows = run(__name__, programs(setting), (*w.COMPILED, *w.PACKAGED, w.PACKAGE_HAND), setting, rates, tell)
    yield Table(TITLE, STANDARD, rows, [shared_keys.REPORTED, LEGEND])

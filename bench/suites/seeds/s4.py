"""S4, pytorch/pytorch#151287: AOTInductor and a batch of one-token queries against one shared K and V.

q is (1000, 4, 1, 32), k and v are (1, 4, 2048, 32), the batch of q is dynamic from 1 to 2048. Because k and v have to
be broadcast over the batch, no fused kernel takes the call as it stands; folding the batch into the query length is
the same function, and one they do take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.programs import Built, Function, Program, Setting, Tensors, normal
from bench.suites.models import Autocast
from bench.suites.seeds.common import EVERYTHING, Bench
from bench.suites.spellings import call

TITLE = "S4: one shared K and V, query length 1, batch 1 to 2048"
BATCH, HEADS, KV_LEN, HEAD_DIM = 1000, 4, 2048, 32
BATCH_DIM = torch.export.Dim("batch", min=1, max=2048)
# Where the answer is checked: the batch of the report, an odd one, and the smallest, which export may specialise on.
CHECKED_BATCHES = (BATCH, 7, 1)
# Largest error against float64 that counts as right, relative to the largest output.
TOLERANCE = {False: 1e-5, True: 2e-2}  # in float32, in half
REPORTED = "reported with torch 2.5.1 for 1000 calls: FX graph 11.03 s, AOTInductor 11.29 s, decomposed 4.44 s"


def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The call as a specialist writes it: q (B, H, 1, D) folded to (1, H, B, D), attended once and unfolded."""
    return call(q.permute(2, 1, 0, 3), k, v).permute(2, 1, 0, 3)


def make_inputs(batch: int = BATCH, device: str = "cpu") -> Tensors:
    """Random float32 q (batch, 4, 1, 32), k and v (1, 4, 2048, 32); the same batch gives the same numbers."""
    keys = (1, HEADS, KV_LEN, HEAD_DIM)
    return tuple(x.to(device) for x in normal(batch, (batch, HEADS, 1, HEAD_DIM), keys, keys))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention in float64, spelled out, a few queries at a time because the broadcast copies of k are large."""
    k64, v64 = k.double(), v.double()
    chunks = [((chunk.double() @ k64.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ v64 for chunk in q.split(50)]
    return torch.cat(chunks)


def _module(run: Callable[..., torch.Tensor], half: bool) -> nn.Module:
    """A function as a module, in bfloat16 autocast if ``half``."""
    return Autocast(Function(run)).eval() if half else Function(run).eval()


def _make(half: bool, device: str) -> Built:
    return _module(call, half), make_inputs(device=device)


def _hand(half: bool, device: str) -> nn.Module:
    return _module(folded, half)


def programs(setting: Setting) -> list[Program]:
    """Float32 as users of a CPU run it; in half autocast, which the report has, on GPUs and in full runs."""
    listed = []
    for half in (False, True):
        if half and setting.quick and setting.on_cpu:
            continue
        dtype = "bfloat16 autocast" if half else "float32"
        listed.append(
            Program(
                f"q (1000, 4, 1, 32), k and v (1, 4, 2048, 32), {dtype}",
                partial(_make, half),
                partial(_hand, half),
                "folded to (1, 4, 1000, 32)",
                dynamic_shapes=(({0: BATCH_DIM}, None, None),),
                others=tuple(partial(make_inputs, batch) for batch in CHECKED_BATCHES[1:]),
                reference=reference,
                tolerance=TOLERANCE[half],
                dtype=torch.bfloat16 if half else torch.float32,
                reported=REPORTED,
            )
        )
    return listed


def tables(bench: Bench) -> Iterator[Table]:
    """Every way: packages with a dynamic batch, compiled code for this batch."""
    rows = bench.rows(__name__, programs(bench.setting), (*EVERYTHING, w.PACKAGE_HAND))
    yield Table(TITLE, STANDARD, rows, [REPORTED, LEGEND])

"""Part 3: the kernels called directly, without Inductor: prefill at every length and head dim, forward and backward.

The points are those of `attn_pass.devices.cuda.points` and the clock is `attn_pass.tuning.clock`, so that what this
says and what ``attn-pass calibrate`` fits are the same measurements; here there are more of them, and each has what the
host takes for the call.
"""

from __future__ import annotations

import torch

from attn_pass.devices.cuda.points import PREFILL_KERNELS, Point, prefill
from attn_pass.devices.registry import of_type
from attn_pass.measuring.timing import why
from attn_pass.tuning.clock import read
from bench.gpu.environment import Environment
from bench.gpu.parts import Column, Part, Row, one_each
from bench.gpu.timing import rates

LENGTHS = (4096, 1024, 16384, 2048, 512, 8192, 256)  # the most telling first
DIMS = (128, 64, 256)
SHAPES = {f"S{s} D{d} {m}": (s, d, m == "causal") for s in LENGTHS for d in DIMS for m in ("full", "causal")}
_BLOCK_S = 0.004


def measure(env: Environment, shape: tuple[int, int, bool]) -> Row:
    """One shape: every kernel, forward and backward."""
    length, dim, causal = shape
    row: Row = {"us": {}, "host_us": {}, "spread": {}, "predicted_us": {}, "failed": {}}
    at = torch.device(env.device)
    clock, block_s = of_type(at.type).clock, 0.0 if env.dry else _BLOCK_S
    wanted = [p for p in prefill(PREFILL_KERNELS, (length,), (dim,), (False, True)) if p.causal == causal]
    for point in wanted:
        name = f"{point.kernel}, {'backward' if point.backward else 'forward'}"
        try:
            reading = read((_tiny(point) if env.dry else point).run(at), clock, block_s)
        except Exception as error:
            row["failed"][name] = why(error)
            continue
        row["us"][name] = row[f"us, {name}"] = reading.us
        row["host_us"][name] = reading.host_us
        row["spread"][name] = round(reading.spread, 3)
        row[f"of matmul, {name}"] = point.flops / reading.us / 1e6 / rates(env).matmul_tflops
        if not point.backward:
            row["predicted_us"][name] = point.predicted_us(env.decided_for)
    forward = {name: us for name, us in row["us"].items() if name.endswith("forward")}
    row["best"] = min(forward, key=lambda name: forward[name], default=None)
    return row


def _tiny(point: Point) -> Point:
    """The same call, small enough for the stand-ins."""
    return Point(point.kernel, 1, 2, 2, 16, 16, point.dim, point.causal, point.backward)


_NAMES = [f"{kernel}, {way}" for way in ("forward", "backward") for kernel in PREFILL_KERNELS]
PART = Part(
    "kernels",
    "Bare kernels, bfloat16, 16384 tokens of width 2048: microseconds, and the share of a large product's rate",
    0.15,
    (
        Column("shape", "name"),
        *(Column(f"{name} us", f"us, {name}", ".1f") for name in _NAMES),
        *(Column(f"{name}, of matmul", f"of matmul, {name}", ".2f") for name in _NAMES),
        Column("best forward", "best"),
    ),
    one_each(SHAPES, measure, quick=8),
    usual=False,
)

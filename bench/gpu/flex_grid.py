"""Part 4: FlexAttention against flash for what both can do and for what flash cannot: windows, soft caps, ALiBi."""

from __future__ import annotations

from functools import partial

from bench.gpu import floors
from bench.gpu.environment import Environment
from bench.gpu.parts import Case, Part
from bench.gpu.shapes import Shape

CASES: dict[str, Shape] = {
    **{
        f"window {w} of {s} D128": Shape(1, 32, 8, s, s, 128, "window", w)
        for s, w in ((8192, 256), (8192, 1024), (8192, 4096), (32768, 1024), (32768, 4096))
    },
    "window 1024 of 8192 D64": Shape(4, 16, 16, 8192, 8192, 64, "window", 1024),
    "soft cap S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "softcap"),
    "soft cap S8192 D256, grouped": Shape(1, 16, 8, 8192, 8192, 256, "softcap"),
    "ALiBi S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "alibi"),
    "causal S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "causal"),
}


def cases(env: Environment) -> list[Case]:
    """One a shape; the spelling by hand, which both read."""
    chosen = list(CASES.items())[:: 5 if env.quick else 1]
    return [Case(name, partial(floors.measure, env, shape)) for name, shape in chosen]


PART = Part(
    "flex",
    "FlexAttention against flash: windows, soft caps, ALiBi",
    0.10,
    floors.PART.columns,
    cases,
    usual=False,
)

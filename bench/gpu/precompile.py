"""Compiles what the timed parts will run, in several processes and without a clock, into Inductor's disk cache.

Floors compile for 10 to 25 s a case one after the other; with the kernels in the cache they take a few. The cache is
where ``TORCHINDUCTOR_CACHE_DIR`` says, which has to be the same for the timed run.
"""

from __future__ import annotations

from functools import partial

import torch

import attn_pass
from bench.gpu import floors
from bench.gpu.environment import Environment, passed, said, stock
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.shapes import Shape
from bench.harness.timing import why


def compile_case(env: Environment, shape: Shape) -> Row:
    """Both spellings, stock and with the pass, each called once."""
    if env.dry:
        shape = shape.tiny()
    row: Row = {"failed": {}}
    inputs = shape.inputs(env)
    with torch.no_grad():
        for spelling, spelled in floors.SPELLINGS.items():
            program = spelled(shape)
            if program is None:
                continue
            for who in ("stock", "pass") if spelling == "call" or floors.fits(env, shape) else ("pass",):
                made = stock(env, program) if who == "stock" else passed(env, program)
                try:
                    with attn_pass.record() as report:
                        made(*inputs)
                except Exception as error:
                    row["failed"][f"{who}, {spelling}"] = why(error)
                    continue
                if who == "pass":
                    row[f"took, {spelling}"] = said(report)["took"]
    row["not compiled"] = "; ".join(f"{name}: {reason}" for name, reason in row["failed"].items())
    return row


def cases(env: Environment) -> list[Case]:
    """In the order in which the timed parts will want them."""
    shapes = {**floors.CASES, **floors.FLEX_CASES}
    names = floors.quick_names() if env.quick else list(shapes)
    return [Case(name, partial(compile_case, env, shapes[name])) for name in names]


PART = Part(
    "compile",
    "Compiled ahead",
    0.20,
    (
        Column("case", "name"),
        Column("seconds", "seconds", ".1f"),
        Column("by hand", "took, by hand"),
        Column("call", "took, call"),
        Column("not compiled", "not compiled"),
    ),
    cases,
    timed=False,
    usual=False,
)

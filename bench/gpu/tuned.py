"""Part 6: the choice of ``tune=True``, compared with the fastest kernel chosen by hand."""

from __future__ import annotations

import os
import tempfile
from unittest.mock import patch

import torch

import attn_pass
from attn_pass.tuning import disk_cache
from bench.gpu.environment import Environment, decision_row, passed
from bench.gpu.floors import SPELLINGS
from bench.gpu.kernels import chosen_by_hand
from bench.gpu.parts import Column, Part, Row, one_each
from bench.gpu.shapes import Shape
from bench.gpu.timing import Variant, compare, sets_of

SITES: dict[str, tuple[str, Shape]] = {
    "decode q4 B1 KV32768": ("call", Shape(1, 32, 8, 4, 32768, 128)),
    "prefill B4 H32 S2048 D128 causal": ("by hand", Shape(4, 32, 32, 2048, 2048, 128, "causal")),
    "decode q1 B8 KV8192": ("by hand", Shape(8, 32, 8, 1, 8192, 128)),
    "ViT B64 H12 S197 D64": ("by hand", Shape(64, 12, 12, 197, 197, 64)),
    "bias B8 H12 S512 D64": ("by hand", Shape(8, 12, 12, 512, 512, 64, "bias")),
    "cross B2 H8 4096 x 77 D40": ("call", Shape(2, 8, 8, 4096, 77, 40)),
    "small B2 H16 S50 D16": ("by hand", Shape(2, 16, 16, 50, 50, 16)),
}


def measure(env: Environment, site: tuple[str, Shape]) -> Row:
    """One site: the pass predicting, the pass measuring, every kernel by hand."""
    spelling, shape = site
    if env.dry:
        shape = shape.tiny()
    sets = sets_of(env, shape, cold=shape.memory_bound)
    program = SPELLINGS[spelling](shape)
    assert program is not None
    row: Row = {}
    # What the tuner remembers is forgotten: it has to measure.
    with torch.no_grad(), tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, {disk_cache.VARIABLE: cache}):
        runs = {"predicted": passed(env, program, tune=False), "tuned": passed(env, program, tune=True)}
        for name, run in runs.items():
            with attn_pass.record() as report:
                run(*sets[0])
            row |= {f"{field}, {name}": value for field, value in decision_row(report).items()}
            if name == "tuned" and report.sites:
                row["measured_us"] = report.sites[-1].measured_us
        chosen, refused = chosen_by_hand(shape, env)
        times = compare(env, {**{n: Variant(r) for n, r in runs.items()}, **chosen}, sets)
    us = times.us
    best = times.best(list(chosen))
    row |= {"us": us, "failed": {**refused, **times.failed}, "best": best, "best_us": us.get(best or "")}
    for name in runs:
        row[f"us, {name}"] = us.get(name)
    if best and "tuned" in us:
        row["of_best"] = us["tuned"] / us[best]
    return row


PART = Part(
    "tuned",
    "tune=True against the fastest kernel by hand",
    0.09,
    (
        Column("site", "name"),
        Column("predicted, took", "took, predicted"),
        Column("us", "us, predicted", ".1f"),
        Column("tuned, took", "took, tuned"),
        Column("us", "us, tuned", ".1f"),
        Column("best by hand", "best"),
        Column("us", "best_us", ".1f"),
        Column("tuned / best", "of_best", ".2f"),
        Column("why", "reason, tuned"),
    ),
    one_each(SITES, measure, quick=len(SITES)),
)

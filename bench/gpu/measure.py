"""The measuring process: the parts of a run, in the order of their importance."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu import bare, correctness, counters, decode_grid, floors, growing, probes, rules, seeds, smoke, tuned
from bench.gpu.environment import Environment, facts
from bench.gpu.journal import Journal
from bench.gpu.parts import Part, run_parts
from bench.gpu.timing import rates
from bench.harness.document import Row
from bench.harness.environment import no_notices

PARTS: tuple[Part, ...] = (
    smoke.PART,
    correctness.PART,
    probes.PART,
    decode_grid.PART,
    bare.PART,
    floors.AHEAD,
    floors.PART,
    floors.FLEX,
    rules.PART,
    decode_grid.TILES,
    seeds.PART,
    growing.PART,
    tuned.PART,
    counters.PART,
)


def tell(line: str) -> None:
    print(line, flush=True)


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts asked for, in the order of their importance."""
    return [p for p in PARTS if p.name in args.only.split(",")]


def run_name(args: argparse.Namespace) -> str:
    """What tells the lines of this run from those of others in a shared journal."""
    usual = ",".join(p.name for p in PARTS if p.usual)
    parts = "" if args.only == usual else args.only
    return f"{parts} {args.shard.number}/{args.shard.count}".strip() if args.shard.count > 1 else parts


def measure(args: argparse.Namespace, path: Path, end: float) -> Iterator[Row]:
    """What the process that measures does: lines for the journal; what that has is not measured again."""
    no_notices(UserWarning)
    env = Environment(args.device, args.quick, args.shard.count)
    if env.dry:
        from bench.gpu import stand_ins

        stand_ins.install()
        torch.set_num_threads(1)  # for shapes this small threads only wait for each other
    parts = chosen(args)
    journal = Journal(path, run_name(args))
    known = [line["head"] for line in journal.own() if "head" in line]
    if not any("device" in head for head in known):
        yield {"head": facts(env)}
    if any(part.timed for part in parts) and not any("copy_tbs" in head for head in known):
        rate = rates(env)
        yield {"head": {"matmul_tflops": round(rate.matmul_tflops, 1), "copy_tbs": round(rate.copy_tbs, 3)}}
        tell(f"{rate.matmul_tflops:.0f} TFLOP/s, {rate.copy_tbs:.2f} TB/s")
    yield from run_parts(env, parts, end, journal, tell, args.shard)

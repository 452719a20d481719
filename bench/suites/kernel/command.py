"""The CPU kernel, the machine's rates and its peers: `python -m bench kernel [--threads 1,2] [--json FILE]`.

Everything of a case runs in turns in one process, the kernel twice (A/A). With one thread processor time counts, so
that other work on the machine does not, but for what it takes of caches and memory; with more it is wall time. Peers
that are not installed are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any

import torch
import typer

from attn_pass.measuring.timing import in_turns, percentile_10, relative_error
from attn_pass.model.dtype_name import dtype_name
from bench.harness.command import Json, Only, Quick, Rounds, named, started
from bench.harness.document import Column, Row
from bench.harness.environment import installed
from bench.harness.measure import quiet
from bench.suites.kernel.cases import FEW, MANY, TOLERANCE, Case, Few, flops
from bench.suites.kernel.peers import AGAIN, OURS, PEERS, SDPA, Peers, Run, ours
from bench.suites.kernel.read import reader

TITLE = "The CPU kernel"
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
QUICK_CASES = (MANY[0], MANY[1], FEW[0], FEW[4])
SIDE = 1024  # of the product whose rate is the measure
SLOW = 8.0  # a product that takes this many times float32's is computed one number at a time, and measures nothing
PRODUCT, READ, WRONG = "product", "read", "WRONG"
BLOCK_S, REST_S = 0.02, 0.01

_FIRST = (Column("program", "program"), Column("case", "case"), Column("ms", "ours_us", ".2f", 1e-3))
_LAST = (
    Column("aim", "aim", ".2f"),
    Column("A/A", "noise", ".0%"),
    *(Column(f"over {name}", name, ".2f") for name in PEERS),
    Column("over one thread", "scaling", ".2f"),
    Column("error", "error", ".0e"),
    Column("SDPA's", "sdpa_error", ".0e"),
    Column("verdict", "verdict"),
)
MANY_COLUMNS = (*_FIRST, Column("GFLOP/s", "rate", ".0f"), Column("of torch.mm", "share", ".2f"), *_LAST)
_OF_ROOFLINE = Column("of roofline", "of_roofline", ".2f")
FEW_COLUMNS = (*_FIRST, Column("GB/s", "rate", ".1f"), Column("of a plain read", "share", ".2f"), _OF_ROOFLINE, *_LAST)
NOTES = (
    "Times and ratios are of 10th percentiles. Over a peer: the speedup of the kernel over it; masks of "
    "peers, block masks too, are made beforehand. A/A: how far the kernel is from itself in the same turns.",
    "Error: largest against float64, relative to the largest value.",
)
MANY_NOTES = (
    f"Queries (1, 4, 2048, D). Of torch.mm: FLOPs a second, over the pairs that the mask keeps, as a share of those of "
    f"a product of two matrices {SIDE} x {SIDE} in the same dtype; in float32 where torch's own takes over {SLOW:.0f} "
    f"times as long.",
    *NOTES,
)
FEW_NOTES = (
    "One query, 8 KV heads, 4096 keys: 64 MiB of keys and values in every dtype. Of a plain read: what a loop takes "
    "that reads the same keys and values and adds them up. Of roofline: the longer of that time and the one that "
    "the products take at the rate of torch.mm (see above), as a share of the time taken.",
    *NOTES,
)


def timed(runs: Mapping[str, Callable[[], Any]], rounds: int, threads: int) -> dict[str, float]:
    """Seconds a call of each: the 10th percentile of blocks in turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    # Threads of the library that ran before wait by working, for milliseconds.
    samples = in_turns(runs, (), rounds, seconds=BLOCK_S, clock=clock, rest_s=REST_S if threads > 1 else 0.0)
    return {name: percentile_10(taken) / 1e6 for name, taken in samples.items()}


def bounds_of(case: Case | Few, inputs: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """What bounds the kernel: a product of two matrices and, of few rows, a read of keys and values."""
    dtype = _multiplied_in(inputs[0].dtype)
    a, b = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    bounds: dict[str, Callable[[], Any]] = {PRODUCT: lambda: torch.mm(a, b)}
    if isinstance(case, Few):
        read, (_, key, value) = reader(), inputs
        bounds[READ] = lambda: (read(key), read(value))
    return bounds


@cache
def _multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The type of the product that is the measure: float32 where torch has no fast product of `dtype`."""
    side = SIDE // 8
    factors = {of: torch.randn(side, side).to(of) for of in (dtype, torch.float32)}
    taken = timed({str(of): partial(torch.mm, x, x) for of, x in factors.items()}, 5, threads=1)
    return torch.float32 if taken[str(dtype)] > SLOW * taken[str(torch.float32)] else dtype


def measured(case: Case | Few, dtype: torch.dtype, threads: Sequence[int], rounds: int) -> Iterator[Row]:
    """A row for each number of threads."""
    inputs = case.inputs(dtype)
    exact, bounds = case.exact(inputs), bounds_of(case, inputs)
    work = sum(x.nbytes for x in inputs[1:]) if isinstance(case, Few) else flops(case, inputs)
    others, run, alone = Peers(case, inputs), ours(case, inputs), math.nan
    for count in threads:
        torch.set_num_threads(count)
        runs: dict[str, Run] = {OURS: run, **others.runs()}
        taken = timed({**bounds, AGAIN: run, **runs}, rounds, count)
        errors = {name: relative_error(result(), exact) for name, result in runs.items()}
        mine = taken[OURS]
        products = flops(case, inputs) * taken[PRODUCT] / (2.0 * SIDE**3)
        bound = taken.get(READ, products)
        alone = mine if count == 1 else alone
        wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype] * (1 if name == OURS else 10)]
        yield {
            "program": f"{dtype_name(dtype)}, {count} thread{'s' if count > 1 else ''}",
            "way": OURS,
            "status": "ok",
            "case": case.name,
            "threads": count,
            "ours_us": mine * 1e6,
            "rate": work / mine / 1e9,
            "share": bound / mine,
            "of_roofline": max(products, bound) / mine,
            "aim": case.aims.get(dtype) if isinstance(case, Case) else case.aim,
            "noise": abs(math.log(mine / taken[AGAIN])),
            "scaling": alone / mine if count > 1 else None,
            "error": errors[OURS],
            "sdpa_error": errors.get(SDPA),
            "verdict": WRONG if OURS in wrong else ", ".join(f"{name} is wrong" for name in wrong),
            "failures": others.failures,
            **{name: taken[name] / mine for name in runs if name != OURS},
        }


def _threads(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,2", param_hint="--threads")
    return counts


def main(
    threads: Annotated[str, typer.Option(help="Numbers of threads, separated by commas.")] = "1,2",
    json_file: Json = None,
    quick: Quick = False,
    only: Only = "",
    rounds: Rounds = 5,
) -> None:
    """The CPU kernel as an operator: shares of a product's rate or of a plain read, and peers beside it."""
    counts = _threads(threads)
    quiet(max(counts))
    rounds, told = (min(rounds, 3), "a few cases, fewer rounds") if quick else (rounds, None)
    chosen = named(only, [c for c in (*MANY, *FEW) if not quick or c in QUICK_CASES], attrgetter("name"))
    recorder = started(TITLE, json_file, threads=max(counts), rounds=rounds, quick=told)
    recorder.document.run["threads"] = ", ".join(map(str, counts))
    recorder.document.run["versions"] |= installed("openvino", "onnxruntime", "zentorch")
    for title, cases, columns, notes in (
        ("Many rows", MANY, MANY_COLUMNS, MANY_NOTES),
        ("Few rows", FEW, FEW_COLUMNS, FEW_NOTES),
    ):
        table = recorder.table(title, columns, notes)
        for dtype in DTYPES:
            of_dtype: list[Row] = []
            for case in (case for case in cases if case in chosen):
                rows = list(measured(case, dtype, counts, rounds))
                of_dtype += rows
                recorder.tell(f"{rows[0]['program'].split(',')[0]}, {case.name}: {', '.join(map(_row_text, rows))}")
            table.rows += sorted(of_dtype, key=lambda row: row["threads"])
            recorder.keep()
        failed = {f"{name}: {why}" for row in table.rows for name, why in row["failures"].items()}
        table.notes += [f"Not measured: {text}." for text in sorted(failed)]
    recorder.finish()


def _row_text(row: Row) -> str:
    return f"{row['ours_us'] / 1e3:.2f} ms ({row['share']:.2f}) {row['verdict']}".rstrip()

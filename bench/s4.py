"""Seed S4 (pytorch/pytorch#151287): many one-token queries against one shared K and V, compiled in every way.

    python -m bench.s4 [--json FILE] [--half] [--rounds N] [--device cpu]

q is (1000, 4, 1, 32), k and v are (1, 4, 2048, 32), the batch of q is dynamic from 1 to 2048. Because k and v have to
be broadcast over the batch, no fused kernel takes the call as it stands; folding the batch into the query length is
the same function, and one they do take. The candidates are timed in turns, so that a busy machine slows all of them,
and the stock package runs twice under two names: the ratio of those two rows is the noise of the run.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.benchmark import Timer

from bench.machine import (
    Candidate,
    command,
    device_name,
    peak_bytes,
    percentile_10,
    private_caches,
    relative_error,
    versions,
)
from bench.shared_keys import (
    ALL,
    BATCH,
    CHECKED_BATCHES,
    EAGER,
    HEAD_DIM,
    HEADS,
    KV_LEN,
    MAX_BATCH,
    REPORTED,
    STOCK,
    TOLERANCE,
    Inputs,
    Runner,
    Setting,
    Way,
    make_inputs,
    package,
    reference,
)

# ---- measuring ----


@dataclass(frozen=True)
class Row:
    """What was measured of one candidate; `peak_bytes` is the memory one call adds, None where it cannot be read."""

    name: str
    median_us: float
    p10_us: float
    relative_error: float
    compile_s: float
    package_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Result:
    """All rows of one run, with the conditions they hold under."""

    rows: tuple[Row, ...]
    tolerance: float
    dtype: str
    rounds: int
    device: str
    threads: int
    versions: dict[str, str]
    command: str

    @property
    def wrong(self) -> tuple[Row, ...]:
        # `not <=` and so NaN counts as wrong.
        return tuple(row for row in self.rows if not row.relative_error <= self.tolerance)

    def row(self, way: Way) -> Row | None:
        return next((row for row in self.rows if row.name == way.name), None)

    def ratio(self, slower: Way, faster: Way) -> float | None:
        """Median time of `slower` over that of `faster`; None if one of them was not measured."""
        above, below = self.row(slower), self.row(faster)
        return above.median_us / below.median_us if above and below else None


def warm_compiler(folder: Path) -> None:
    """Compile something trivial: the first compile in a fresh cache also builds Inductor's precompiled headers."""

    class Increment(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    package(torch.export.export(Increment(), (torch.zeros(8),)), folder / "warm_up.pt2")


def prepare(ways: Sequence[Way], setting: Setting, tell: Callable[[str], None]) -> list[Candidate]:
    """Compile and load every way, warmed up by one call; `tell` hears what is being done."""
    inputs = make_inputs(device=setting.device)
    built: dict[Callable[[Setting], Path], tuple[Path, float]] = {}
    candidates = []
    for way in ways:
        start = time.perf_counter()
        size = None
        if way.package is not None:
            if way.package not in built:
                path = way.package(setting)
                built[way.package] = path, time.perf_counter() - start
            path, seconds = built[way.package]
            size = path.stat().st_size
            run: Runner = torch._inductor.aoti_load_package(str(path))
            run(*inputs)
        else:
            assert way.callable is not None
            run = way.callable(setting)
            # A compiled function compiles in its first call.
            run(*inputs)
            seconds = 0.0 if way is EAGER else time.perf_counter() - start
        tell(f"{way.name}: ready in {time.perf_counter() - start:.1f} s")
        candidates.append(Candidate(way.name, run, seconds, size))
    return candidates


def errors(candidates: Sequence[Candidate], setting: Setting) -> list[float]:
    """The worst error against float64 of every candidate over CHECKED_BATCHES."""
    worst = [0.0] * len(candidates)
    for batch in CHECKED_BATCHES:
        inputs = make_inputs(batch, setting.device)
        want = reference(*inputs)
        for index, candidate in enumerate(candidates):
            error = relative_error(candidate.run(*inputs), want)
            # max() would drop a NaN.
            worst[index] = error if math.isnan(error) or error > worst[index] else worst[index]
    return worst


def interleaved_us(candidates: Sequence[Candidate], inputs: Inputs, rounds: int) -> list[list[float]]:
    """Microseconds a call, one sample a candidate a round; every round starts with another candidate."""
    timers = [
        Timer("run(*inputs)", globals={"run": candidate.run, "inputs": inputs}, num_threads=torch.get_num_threads())
        for candidate in candidates
    ]
    # About 20 ms a sample: enough calls to drown the clock, few enough to change candidates often.
    calls = [max(1, round(0.02 / timer.timeit(1).mean)) for timer in timers]
    samples: list[list[float]] = [[] for _ in candidates]
    for first in range(rounds):
        for offset in range(len(candidates)):
            index = (first + offset) % len(candidates)
            samples[index].append(timers[index].timeit(calls[index]).mean * 1e6)
    return samples


def measure(ways: Sequence[Way], setting: Setting, rounds: int, tell: Callable[[str], None]) -> Result:
    """Prepare, check and time the ways under no_grad."""
    # Without the graph caches: two ways that end in the same graph must both pay for compiling it.
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with torch.no_grad(), private_caches(setting.folder), uncached:
        start = time.perf_counter()
        warm_compiler(setting.folder)
        tell(f"compiler warmed up in {time.perf_counter() - start:.1f} s")
        candidates = prepare(ways, setting, tell)
        inputs = make_inputs(device=setting.device)
        tell(f"timing {len(candidates)} candidates in turns, {rounds} rounds")
        samples = interleaved_us(candidates, inputs, rounds)
        peaks = [peak_bytes(candidate, inputs) for candidate in candidates]
        # Last: other batches make torch.compile compile again, for any batch, and that is not what was timed.
        tell("comparing with float64")
        found = errors(candidates, setting)
    rows = tuple(
        Row(
            candidate.name,
            statistics.median(taken),
            percentile_10(taken),
            error,
            candidate.compile_s,
            candidate.package_bytes,
            peak,
        )
        for candidate, taken, error, peak in zip(candidates, samples, found, peaks, strict=True)
    )
    return Result(
        rows=rows,
        tolerance=TOLERANCE[setting.dtype],
        dtype="autocast bfloat16" if setting.half else "float32",
        rounds=rounds,
        device=device_name(setting.device),
        threads=torch.get_num_threads(),
        versions=versions(),
        command=command(),
    )


# ---- telling ----


# A redirected output has no width of its own; the tables of this folder need this much.
WIDTH = 150
COLUMNS = ("how", "median ms", "p10 ms", "against stock", "error", "compile s", "package KiB", "peak MiB")


def cells(result: Result) -> list[tuple[str, ...]]:
    """The table's text, one tuple a row in the order of COLUMNS; `against stock` above 1 is faster than stock."""
    stock = result.row(STOCK)

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        (
            row.name,
            f"{row.median_us / 1e3:.3f}",
            f"{row.p10_us / 1e3:.3f}",
            number(stock.median_us / row.median_us if stock else None, ".2f") + ("x" if stock else ""),
            f"{row.relative_error:.1e}" + (" WRONG" if row in result.wrong else ""),
            f"{row.compile_s:.1f}",
            number(row.package_bytes / 1024 if row.package_bytes is not None else None, ".0f"),
            number(row.peak_bytes / 2**20 if row.peak_bytes is not None else None, ".1f"),
        )
        for row in result.rows
    ]


def conditions(result: Result) -> str:
    known = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"q ({BATCH}, {HEADS}, 1, {HEAD_DIM}), k and v (1, {HEADS}, {KV_LEN}, {HEAD_DIM}), "
        f"batch 1..{MAX_BATCH}, {result.dtype}; "
        f"{result.device}, {result.threads} threads; {known}; {result.rounds} rounds in turns; "
        f"error: largest against float64 over batches {', '.join(map(str, CHECKED_BATCHES))}, "
        f"tolerance {result.tolerance:.0e}; "
        "peak: memory one call adds"
    )


def plain_console() -> Console:
    """A console wide enough for the tables where the output is redirected, and free of the libraries' notices."""
    # They announce changes to come in torch; none is about what is measured.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def rich_table(result: Result) -> Table:
    table = Table(title="S4: one shared K and V", caption=conditions(result), caption_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in cells(result):
        table.add_row(*row)
    return table


def markdown(result: Result) -> str:
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---" + "|---:" * (len(COLUMNS) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in cells(result)),
    ]
    return "\n".join([*lines, "", f"{conditions(result)}; {REPORTED}.", "", f"Command: `{result.command}`", ""])


def write(result: Result, path: Path) -> Path:
    """Write the numbers to `path` as JSON and the table beside it as Markdown; returns the Markdown path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    table = path.with_suffix(".md")
    table.write_text(markdown(result))
    return table


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write here, and a Markdown table beside it.")
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Run the model in bfloat16 autocast.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of every candidate.")] = 15,
    device: Annotated[str, typer.Option(help="The device to measure on.")] = "cpu",
) -> None:
    """Measure seed S4; the exit status is 1 if an answer is further from float64 than the tolerance."""
    console = plain_console()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            ALL,
            Setting(Path(folder), device, half),
            rounds,
            lambda line: console.print(f"[{time.perf_counter() - start:6.1f} s] {line}", markup=False, highlight=False),
        )
    console.print(rich_table(result))
    if json_file is not None:
        console.print(f"written: {json_file} and {write(result, json_file)}", markup=False, highlight=False)
    if result.wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

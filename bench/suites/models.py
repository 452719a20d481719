"""Whole models at real sizes, the pass against stock Inductor: `python -m bench models [--json FILE] [--quick]`.

For each model four fresh processes, one at a time. Three compile it cold, one way each (eager not at all), and measure
what one warm call adds to the resident peak. The fourth loads what they compiled and times all ways in turns, stock
twice (the A/A column is the noise); it compares the outputs with eager and, where that is affordable, with float64.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

import attn_pass
from bench.harness.command import Rounds, Threads
from bench.harness.console import plain_console
from bench.harness.document import markdown_table
from bench.harness.environment import command, device_name, versions
from bench.harness.process import Task, in_child
from bench.harness.timing import Candidate, compiled, peak_bytes, percentile_10, private_caches, relative_error
from bench.suites.census.rows import Row, told_report
from bench.suites.census.tables import without_places
from bench.suites.whole_models import MODELS, QUICK, Model, Tensors

WAYS: Mapping[str, Mapping[str, Any] | None] = {"eager": None, "stock": {}, "pass": {"backend": attn_pass.backend}}
"""How each way calls torch.compile; None does not."""

BLOCK_S = 0.2
"""A sample is this long or one call."""

SLOWER = 0.95
"""stock / pass below this is worth a remark."""

LIMIT_S = 1800.0

Run = Callable[..., Any]


# ---- what the children do ----


def run_of(module: nn.Module, way: str) -> Run:
    """The module as it is, or compiled."""
    settings = WAYS[way]
    return module if settings is None else compiled(module, fullgraph=True, **settings)


def prepared(model: Model, threads: int) -> tuple[nn.Module, Tensors]:
    """The model in this process, which hereby uses that many threads."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return model.build()


def measure_alone(model: Model, way: str, folder: Path, threads: int) -> Iterator[Row]:
    """A cold compile and the memory of a warm call, one way; the compiled code stays in `folder`."""
    module, inputs = prepared(model, threads)
    run = run_of(module, way)
    row = {**facts_of(model, way), "status": "ok"}
    with private_caches(folder / way):
        if WAYS[way] is not None:
            # The first compile in a new folder also builds Inductor's precompiled headers.
            torch.compile(lambda x: x + 1)(torch.zeros(8))
        first_s, warm_s = _seconds(run, inputs), _seconds(run, inputs)
    if WAYS[way] is not None:
        row["compile_s"] = first_s - warm_s
    row["peak_bytes"] = peak_bytes(Candidate(way, run, 0.0, None), inputs)  # type: ignore[arg-type]
    yield row


def measure_together(model: Model, folder: Path, threads: int, rounds: int) -> Iterator[Row]:
    """Times of all ways in turns, what the pass did, and how far apart the outputs are."""
    module, inputs = prepared(model, threads)
    runs: dict[str, Run] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    with attn_pass.record() as recorded:
        for name, way in (("eager", "eager"), ("stock", "stock"), ("stock again", "stock"), ("pass", "pass")):
            runs[name] = run_of(module, way)
            with private_caches(folder / way):
                outputs[name] = tensors(runs[name](*inputs))
    samples = timed(runs, inputs, rounds)
    row = {
        **facts_of(model, "times"),
        "status": "ok",
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "median_ms": {name: statistics.median(taken) for name, taken in samples.items()},
        "p10_ms": {name: percentile_10(taken) for name, taken in samples.items()},
        "error": {name: error(got, outputs["eager"]) for name, got in outputs.items()},
        "targets": dict(Counter(site.target for site in recorded.rewritten)),
        "pass_s": recorded.seconds,
        **told_report(recorded),
    }
    if model.exact:
        exact = tensors(module.double()(*(t.double() if t.is_floating_point() else t for t in inputs)))
        row["error_float64"] = {name: error(got, exact) for name, got in outputs.items()}
    yield row


def timed(runs: Mapping[str, Run], inputs: Tensors, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call, one block of calls a way a round; every round starts with another way."""
    calls = {name: max(1, round(BLOCK_S / _seconds(run, inputs))) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_seconds(runs[name], inputs, calls[name]) / calls[name] * 1e3)
    return samples


def _seconds(run: Run, inputs: Tensors, calls: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run(*inputs)
    return time.perf_counter() - began


def tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor of an output, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest relative error of all tensors; NaN if one holds a NaN."""
    found = [relative_error(*pair) for pair in zip(got, want, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


# ---- running them ----


def facts_of(model: Model, stage: str) -> Row:
    """What a child's row is about."""
    return {"bench": "models", "name": model.name, "stage": stage}


def measure(model: Model, threads: int, rounds: int, progress: Progress) -> Row:
    """All that is known of one model; `failures` holds the rows of children that failed."""
    result: Row = {"name": model.name, "compile_s": {}, "peak_bytes": {}, "failures": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        tasks = [Task(facts_of(model, way), measure_alone, (model, way, folder, threads)) for way in WAYS]
        together = (model, folder, threads, rounds)
        for task in (*tasks, Task(facts_of(model, "times"), measure_together, together)):
            row = in_child(task, LIMIT_S)[-1]
            progress.console.print(told(row), markup=False, highlight=False)
            if row["status"] != "ok":
                result["failures"].append(row)
            elif row["stage"] == "times":
                result |= {name: value for name, value in row.items() if name not in ("bench", "stage", "status")}
            else:
                result["peak_bytes"][row["stage"]] = row["peak_bytes"]
                result["compile_s"] |= {row["stage"]: row["compile_s"]} if "compile_s" in row else {}
            progress.advance(progress.task_ids[0])
    return result


def told(row: Row) -> str:
    """One line about what a child measured, for the log."""
    words = [f"[{row['wall_s']:5.0f} s] {row['name']}, {row['stage']}:"]
    if row["status"] != "ok":
        words.append(f"{row['status']}: {row['error'].splitlines()[0][:200]}")
    elif "median_ms" in row:
        ms = row["median_ms"]
        words.append(f"stock / pass {ms['stock'] / ms['pass']:.2f} (A/A {ms['stock'] / ms['stock again']:.2f}),")
        words.append(f"{chose(row)}, error {row['error']['pass']:.0e}")
    else:
        words.append(f"compiled in {row['compile_s']:.1f} s," if "compile_s" in row else "")
        words.append(f"one call adds {mebibytes(row['peak_bytes'])} MiB")
    return " ".join(filter(None, words))


# ---- telling ----

COLUMNS = (
    *("model", "M parameters", "eager ms", "stock ms", "pass ms", "stock / pass", "of 10th percentiles", "A/A"),
    *("eager / pass", "sites", "error", "float64: eager", "float64: pass", "compile s, stock", "compile s, pass"),
    *("MiB, eager", "MiB, stock", "MiB, pass"),
)


def cells(row: Row) -> list[str]:
    """The table's text for one model, in the order of COLUMNS; "-" for what is not known."""
    exact = row.get("error_float64", {})
    memory = [mebibytes(row["peak_bytes"].get(way)) for way in WAYS]
    compile_s = [number(row["compile_s"].get(way), ".1f") for way in ("stock", "pass")]
    if "median_ms" not in row:
        return [row["name"], *"-" * 12, *compile_s, *memory]
    ms, p10 = row["median_ms"], row["p10_ms"]
    return [
        row["name"],
        f"{row['parameters'] / 1e6:.0f}",
        *(f"{ms[way]:.1f}" for way in WAYS),
        f"{ms['stock'] / ms['pass']:.2f}",
        f"{p10['stock'] / p10['pass']:.2f}",
        f"{ms['stock'] / ms['stock again']:.2f}",
        f"{ms['eager'] / ms['pass']:.2f}",
        chose(row),
        f"{row['error']['pass']:.0e}",
        *(number(exact.get(way), ".0e") for way in ("eager", "pass")),
        *compile_s,
        *memory,
    ]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def chose(row: Row) -> str:
    """What became of the sites: "12 sdpa, 1 left"."""
    parts = [f"{count} {target}" for target, count in row["targets"].items()]
    parts += [f"{len(row['left'])} left"] if row["left"] else []
    return ", ".join(parts) or "no site"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What failed, what was left and why, and what is slower than stock."""
    said = []
    for row in rows:
        said += [f"{row['name']}, {f['stage']}: {f['status']}: {f['error']}" for f in row["failures"]]
        for reason, count in Counter(without_places(site["reason"]) for site in row.get("left", ())).items():
            said.append(f"{row['name']}: {count} left: {reason}")
        ms = row.get("median_ms")
        if ms is not None and (ratio := ms["stock"] / ms["pass"]) < SLOWER:
            noise = ms["stock"] / ms["stock again"]
            said.append(f"{row['name']}: slower than stock, {ratio:.2f} (A/A {noise:.2f}; {chose(row)})")
    return said


def conditions(threads: int, rounds: int) -> dict[str, Any]:
    """What the numbers hold under."""
    libraries = {name: version(name) for name in ("transformers", "diffusers", "timm")}
    known = {**versions(), **libraries}
    return {"device": device_name("cpu"), "versions": known, "command": command(), "threads": threads, "rounds": rounds}


def markdown(rows: Sequence[Row], under: Mapping[str, Any]) -> str:
    """The table and the remarks as committed in docs/results."""
    lines = [
        f"Device: {under['device']}; {', '.join(f'{n} {v}' for n, v in under['versions'].items())}; float32, "
        f"{under['threads']} threads, {under['rounds']} interleaved rounds; `{under['command']}`. A/A: stock against "
        "itself. Error: largest difference of the pass's outputs from eager's, relative to the largest value; the next "
        "two against float64. Compile: cold. MiB: what one warm call adds to the resident peak.",
        "",
        *markdown_table(COLUMNS, [cells(row) for row in rows]),
    ]
    if said := remarks(rows):
        lines += ["", *(f"- {remark}" for remark in said)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> Table:
    """The same table for a terminal."""
    drawn = Table(*COLUMNS)
    drawn.columns[0].min_width = 30
    for row in rows:
        drawn.add_row(*cells(row))
    return drawn


def save(json_file: Path, rows: Sequence[Row], under: Mapping[str, Any]) -> None:
    """Writes the rows and their conditions to a file, and the table beside it."""
    json_file.write_text(json.dumps({**under, "rows": rows}, indent=1) + "\n")
    json_file.with_suffix(".md").write_text("# Whole models on the CPU\n\n" + markdown(rows, under))


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write FILE and FILE with .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two small models, three rounds.")] = False,
    only: Annotated[str, typer.Option(help="Only models whose name holds this.")] = "",
    rounds: Rounds = 9,
    threads: Threads = 2,
) -> None:
    """Measure whole models, the pass against stock; the exit status is 1 if one failed."""
    rounds = 3 if quick else rounds
    console = plain_console()
    models = [model for model in (QUICK if quick else MODELS) if only in model.name]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows, under = [], conditions(threads, rounds)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        progress.add_task("measured", total=len(models) * (len(WAYS) + 1))
        for model in models:
            rows.append(measure(model, threads, rounds, progress))
            # After every model: a run takes long, and what is measured stays when it is stopped.
            if json_file is not None:
                save(json_file, rows, under)
    wide = console if console.is_terminal else Console(width=240)
    wide.print(table(rows))
    for remark in remarks(rows):
        wide.print(f"- {remark}", markup=False, highlight=False)
    if any(row["failures"] for row in rows):
        raise typer.Exit(1)

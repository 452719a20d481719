"""Packages with a dynamic query length, at one query and at many: stock's, ours, and one compiled for each length.

    python -m bench dynamic-query [--json FILE] [--rounds N] [--case NAME] [--quick]

One thread and processor time, so that what else runs on the machine is not counted (but for what it takes of the caches
and the memory). All packages of a length run in turns; stock's is loaded twice, and the second row is the noise of the
run. "for this length" is the faster of stock's package and ours, exported without dynamic sizes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attn_pass
from bench.harness.document import markdown_table
from bench.harness.environment import command, device_name, versions
from bench.harness.timing import in_turns, percentile_10, private_caches, relative_error

LENGTHS = (1, 2, 8, 64, 512)
TRACED = (2, 64, 512)  # the example's length
OURS_AT = 64
STOCK, AGAIN, OURS, FIXED = "stock", "stock again", "attn_pass", "for this length"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aligned to the last key, as with a cache."""
    i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=j <= i + k.size(2) - q.size(2))


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(j > i + k.size(2) - q.size(2), float("-inf"))
    return scores.softmax(-1) @ v


@dataclass(frozen=True)
class Case:
    """A function, the shape of its query but for the length (index 2), the shape of keys and values."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    query: tuple[int, int, int]  # batch, heads, head dim
    keys: tuple[int, int, int, int]
    any_batch: bool = False

    def inputs(self, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        batch, heads, dim = self.query
        shapes = ((batch, heads, length, dim), self.keys, self.keys)
        return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


CASES = {
    "plain": Case(plain, (1, 16, 64), (1, 16, 1024, 64)),
    "GQA 32/8": Case(grouped, (1, 32, 128), (1, 8, 4096, 128)),
    "shared K/V": Case(plain, (16, 4, 32), (1, 4, 2048, 32), any_batch=True),
    "causal": Case(causal, (1, 16, 64), (1, 16, 1024, 64)),
    "causal, by hand": Case(causal_by_hand, (1, 16, 64), (1, 16, 1024, 64)),
}


@dataclass(frozen=True)
class Row:
    """One package at one length, in microseconds of one core."""

    case: str
    dtype: str
    length: int
    package: str
    form: str
    median_us: float
    p10_us: float
    relative_error: float


class Model(nn.Module):
    """A case's function as a module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function = case.function

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v)


def exported(case: Case, dtype: torch.dtype, traced: int, of_query: Mapping[int, Any] | None) -> ExportedProgram:
    """At an example's length; ``of_query`` are the sizes of the query that are not fixed."""
    shapes = None if of_query is None else (of_query, None, None)
    return torch.export.export(Model(case), case.inputs(traced, dtype), dynamic_shapes=shapes)


def any_length() -> dict[int, Any]:
    return {2: Dim("length", min=1, max=1024)}


def compiled(
    case: Case, dtype: torch.dtype, traced: int, path: Path, *, ours: bool, dynamic: bool
) -> tuple[Callable[..., Any], str]:
    """The package, loaded, and its form."""
    of_query = any_length()
    if case.any_batch:
        of_query[0] = Dim("batch", min=1, max=1024)
    program = exported(case, dtype, traced, of_query if dynamic else None)
    if ours:
        attn_pass.aot_compile(program, package_path=path)
        (site,) = attn_pass.package_report(path).sites
        form = ", ".join((site.target or "left", *site.poor_cases))
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        form = "as written"
    return torch._inductor.aoti_load_package(str(path)), form


def measured(name: str, dtype: torch.dtype, lengths: Sequence[int], rounds: int, folder: Path) -> list[Row]:
    """All packages of one case, at every length."""
    case = CASES[name]
    stem = f"{list(CASES).index(name)}_{str(dtype)[6:]}"
    paths = (folder / f"{stem}_{number}.pt2" for number in range(1000))
    stock_path = next(paths)
    stock = compiled(case, dtype, OURS_AT, stock_path, ours=False, dynamic=True)
    packages = {
        STOCK: stock,
        AGAIN: (torch._inductor.aoti_load_package(str(stock_path)), stock[1]),
        OURS: compiled(case, dtype, OURS_AT, next(paths), ours=True, dynamic=True),
    }
    rows = []
    for length in lengths:
        here = dict(packages)
        here["fixed, stock"] = compiled(case, dtype, length, next(paths), ours=False, dynamic=False)
        fixed = compiled(case, dtype, length, next(paths), ours=True, dynamic=False)
        if fixed[1] != "left":
            here["fixed, attn_pass"] = fixed
        inputs = case.inputs(length, dtype)
        exact = case.function(*(x.double() for x in inputs))
        runs = {way: run for way, (run, _) in here.items()}
        samples = in_turns(runs, inputs, rounds, seconds=0.01, clock=time.process_time)
        fastest = min((way for way in here if way.startswith("fixed")), key=lambda way: statistics.median(samples[way]))
        for way in (STOCK, AGAIN, OURS, fastest):
            run, form = here[way]
            taken = samples[way]
            error = relative_error(run(*inputs), exact)
            told = FIXED if way == fastest else way
            middle, low = statistics.median(taken), percentile_10(taken)
            rows.append(Row(name, str(dtype)[6:], length, told, form, middle, low, error))
    return rows


def choices(name: str, dtype: torch.dtype) -> dict[int, str]:
    """The form that is chosen, by the length of the example."""
    case, found = CASES[name], {}
    for traced in TRACED:
        (site,) = attn_pass.rewrite(exported(case, dtype, traced, any_length())).sites
        found[traced] = ", ".join((site.target or "left", *site.poor_cases))
    return found


def markdown(rows: Sequence[Row], chosen: dict[str, dict[int, str]], told: str) -> str:
    """One line a case and length: medians, in parentheses the 10th percentiles, and ours over the others."""
    titles = ("case", "queries", STOCK, AGAIN, OURS, FIXED, "ours / stock", "ours / that", "form")
    cells = []
    by: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        by.setdefault((row.case, row.dtype, row.length), {})[row.package] = row
    for (case, dtype, length), ways in by.items():
        times = [f"{ways[w].median_us:.0f} ({ways[w].p10_us:.0f})" for w in (STOCK, AGAIN, OURS, FIXED)]
        ratios = [f"{ways[OURS].p10_us / ways[w].p10_us:.2f}" for w in (STOCK, FIXED)]
        form = f"{ways[OURS].form}; {ways[FIXED].form}"
        cells.append([f"{case}, {dtype}", str(length), *times, *ratios, form])
    lines = markdown_table(titles, cells)
    lines += ["", f"Microseconds of one core, median (10th percentile); ratios of the 10th percentiles. {told}", ""]
    lines += ["Chosen, by the length of the example that was traced:", ""]
    lines += markdown_table(("case", *map(str, TRACED)), [[case, *of.values()] for case, of in chosen.items()])
    return "\n".join([*lines, "", f"Command: `{command()}`", ""])


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write here, and a Markdown table beside it.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of every package at every length.")] = 7,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="1 and 64 queries of two cases, three samples.")] = False,
) -> None:
    """Measure packages with a dynamic query length; the exit status is 1 if an answer is wrong."""
    names = case or (["GQA 32/8", "causal, by hand"] if quick else list(CASES))
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    lengths, rounds = ((1, 64), min(rounds, 3)) if quick else (LENGTHS, rounds)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[Row] = []
    chosen: dict[str, dict[int, str]] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, private_caches(Path(folder)):
        for dtype in TOLERANCE:
            for name in names:
                began = time.perf_counter()
                rows += measured(name, dtype, lengths, rounds, Path(folder))
                chosen[f"{name}, {str(dtype)[6:]}"] = choices(name, dtype)
                typer.echo(f"{name}, {str(dtype)[6:]}: {time.perf_counter() - began:.0f} s", err=True)
                if json_file is not None:
                    _write(json_file, rows, chosen, rounds)
    typer.echo(markdown(rows, chosen, _told(rounds)))
    if any(not row.relative_error <= TOLERANCE[getattr(torch, row.dtype)] for row in rows):
        raise typer.Exit(1)


def _told(rounds: int) -> str:
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{device_name('cpu')}, 1 thread; {known}; {rounds} rounds in turns, on a machine that does other work."


def _write(path: Path, rows: Sequence[Row], chosen: dict[str, dict[int, str]], rounds: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"rows": [asdict(r) for r in rows], "chosen": chosen, "rounds": rounds, "versions": versions()}
    path.write_text(json.dumps(held, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(rows, chosen, _told(rounds)))

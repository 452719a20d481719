"""Packages with a dynamic query length, at one query and at many: stock, the pass, and one compiled per length.

    python -m bench dynamic-query [--json FILE] [--rounds N] [--case NAME] [--quick]

One thread and processor time, so that what else runs on the machine is not counted (but for what it takes of the caches
and the memory). All packages of a length run in turns; stock's is loaded twice, and the second row is the noise of the
run. "for this length" is the faster of stock's package and ours, exported without dynamic sizes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.export import Dim

import attn_pass
from attn_pass.measuring.timing import in_turns, private_caches, relative_error
from attn_pass.model.dtype_name import dtype_name
from bench.harness import variants as w
from bench.harness.command import Json, Rounds, started
from bench.harness.document import LEGEND, STANDARD, Column, Row
from bench.harness.measure import child, judged, quiet, row_of
from bench.harness.programs import Function
from bench.suites.spellings import call, grouped_call

LENGTHS = (1, 2, 8, 64, 512)
TRACED = (2, 64, 512)  # the example's length
OURS_AT = 64
LENGTH_DIM, BATCH_DIM = (Dim(name, min=1, max=1024) for name in ("length", "batch"))
FIXED = "AOTInductor, for this length"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


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
    "plain": Case(call, (1, 16, 64), (1, 16, 1024, 64)),
    "GQA 32/8": Case(grouped_call, (1, 32, 128), (1, 8, 4096, 128)),
    "shared K/V": Case(call, (16, 4, 32), (1, 4, 2048, 32), any_batch=True),
    "causal": Case(causal, (1, 16, 64), (1, 16, 1024, 64)),
    "causal, by hand": Case(causal_by_hand, (1, 16, 64), (1, 16, 1024, 64)),
}


def chosen(case: Case, dtype: torch.dtype, traced: int) -> str:
    """The form of a program of any length that is exported at an example's."""
    shapes = (({2: LENGTH_DIM}, None, None),)
    program = torch.export.export(Function(case.function), case.inputs(traced, dtype), dynamic_shapes=shapes)
    return _form(attn_pass.rewrite(program))


def compiled(
    case: Case, dtype: torch.dtype, traced: int, path: Path, *, ours: bool, dynamic: bool
) -> tuple[Callable[..., Any], str]:
    """The package, loaded, and its form."""
    of_query = {2: LENGTH_DIM} | ({0: BATCH_DIM} if case.any_batch else {})
    shapes = ((of_query, None, None),) if dynamic else None
    way = w.PACKAGE_PASS if ours else w.PACKAGE
    w.package(way, Function(case.function), case.inputs(traced, dtype), shapes, path)
    form = _form(attn_pass.package_report(path)) if ours else "as written"
    return torch._inductor.aoti_load_package(str(path)), form


def _form(report: attn_pass.Report) -> str:
    (site,) = report.sites
    return ", ".join((site.target or "left", *site.poor_cases))


def measured(name: str, dtype: torch.dtype, lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    """All packages of one case, at every length; and the form that is chosen, by the length of the example."""
    quiet(1)
    torch.manual_seed(0)
    case, numbers = CASES[name], count()
    with tempfile.TemporaryDirectory() as place, private_caches(Path(place)):

        def package(length: int, *, ours: bool, dynamic: bool) -> tuple[Callable[..., Any], str]:
            path = Path(place) / f"{next(numbers)}.pt2"
            return compiled(case, dtype, length, path, ours=ours, dynamic=dynamic)

        stock = package(OURS_AT, ours=False, dynamic=True)
        packages = {w.PACKAGE: stock, w.PACKAGE_PASS: package(OURS_AT, ours=True, dynamic=True)}
        again = torch._inductor.aoti_load_package(str(Path(place) / "0.pt2"))
        packages[w.PACKAGE_AGAIN] = again, stock[1]
        for length in lengths:
            fixed = {f"{FIXED}, {'attn_pass' if ours else 'stock'}": package(length, ours=ours, dynamic=False)
                     for ours in (False, True)}  # fmt: skip
            inputs = case.inputs(length, dtype)
            exact = case.function(*(x.double() for x in inputs))
            here = packages | fixed
            runs = {way: run for way, (run, _) in here.items()}
            samples = in_turns(runs, inputs, rounds, seconds=0.01, clock=time.process_time)
            fastest = min(fixed, key=lambda way: statistics.median(samples[way]))
            for way, told in {**{way: way for way in packages}, fastest: FIXED}.items():
                program = f"{name}, {dtype_name(dtype)}, {length} {'query' if length == 1 else 'queries'}"
                error = relative_error(runs[way](*inputs), exact)
                yield {**row_of(program, told, samples[way], error, TOLERANCE[dtype]), "took": here[way][1]}
    choices = {f"traced at {traced}": chosen(case, dtype, traced) for traced in TRACED}
    yield {"case": f"{name}, {dtype_name(dtype)}", "stage": "choices", "status": "ok", **choices}


CHOICES = (Column("case", "case"), *(Column(f"traced at {n}", f"traced at {n}") for n in TRACED))


def main(
    json_file: Json = None,
    rounds: Rounds = 7,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="1 and 64 queries of two cases, three samples.")] = False,
) -> None:
    """Measure packages with a dynamic query length. Exit status 1: a result is wrong."""
    names = case or (["GQA 32/8", "causal, by hand"] if quick else list(CASES))
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    lengths, rounds = ((1, 64), min(rounds, 3)) if quick else (LENGTHS, rounds)
    told = f"{rounds} in turns, processor time"
    recorder = started("Packages with a dynamic query length", json_file, threads=1, rounds=told)
    times = recorder.table("At one query and at many", STANDARD, [LEGEND])
    choices = recorder.table("The form chosen", CHOICES)
    for dtype in TOLERANCE:
        for name in names:
            rows = child(f"{name}, {dtype_name(dtype)}", measured, (name, dtype, lengths, rounds), recorder.tell)
            choices.rows += [row for row in rows if "case" in row]
            times.rows += judged([row for row in rows if "program" in row])
            recorder.keep()
    recorder.finish()

"""The pass's decisions, recorded and compared: `python -m bench decisions FILE [--cases FOLDER] [--census FOLDER]`.

A change that moves code must not move decisions. With `--record` the decisions over a fixed list of programs are
written to FILE; without it they are made again and compared with it, and the exit status is 1 if one differs. Nothing
is compiled and nothing is timed. A decision is the outcome, the target, the poor cases taken and the targets that
refused; the wording of reasons may change and is told apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.progress import Progress

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cpu import facts
from attn_pass.report.site import SiteReport
from bench.harness.command import named
from bench.harness.environment import command, versions
from bench.suites import cases, never_slower

Site = dict[str, Any]
Decisions = dict[str, list[Site]]
_TABLE = Path(__file__).parents[2] / "docs" / "decisions.py"  # the programs of the devices' tables in docs/
_MODELS = Path(__file__).with_name("decision_models.txt")  # names of the census
_NUMBERS = re.compile(r"\d[\d.e+-]*")


@dataclass(frozen=True)
class Question:
    """A program to decide for: its name in the record, and what makes the decision."""

    name: str
    decide: Callable[[], list[SiteReport]]


def site_of(report: SiteReport) -> Site:
    """What is recorded of a site. A reason that is a prediction says only that: predictions have numbers in them."""
    predicted = "predicted " in report.reason and " as written, " in report.reason
    return {
        "outcome": report.outcome,
        "kind": report.kind,
        "form": report.form,
        "target": report.target,
        "poor_cases": list(report.poor_cases),
        "mask": report.mask,
        "refused": sorted(report.refusals),
        "reason": "by its prediction" if predicted else report.reason,
    }


def _grid(shape: never_slower.Shape, threads: int) -> list[SiteReport]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        return _sites(never_slower.program(shape), shape.inputs())
    finally:
        torch.set_num_threads(before)


def _sites(function: Any, args: tuple[Any, ...], grad: bool = False, **options: Any) -> list[SiteReport]:
    torch._dynamo.reset()
    kwargs = options.pop("kwargs", {})
    dynamic = options.pop("dynamic", False)
    with torch.set_grad_enabled(grad):
        report = attn_pass.explain(
            function, *args, attn_pass_options=options or None, attn_pass_dynamic=dynamic, **kwargs
        )
    return report.sites


def _documented(table: ModuleType, case: Any, device: str) -> list[SiteReport]:
    torch._dynamo.reset()
    return [table.decided(case, device)]


def _case(path: Path) -> list[SiteReport]:
    module = cases.load(path)
    torch.manual_seed(0)
    model, args, kwargs = module.make("cpu")
    training = bool(module.META.get("train"))
    model = model if training else model.eval()
    dynamic = bool(module.META.get("dynamic"))
    return _sites(model, tuple(args), training, kwargs=kwargs, dynamic=dynamic, choose="fused")


def _model(folder: Path, name: str) -> list[SiteReport]:
    from bench.suites.census.dataset import open_census, prepared

    subject = prepared(open_census(folder), name)
    return _sites(subject.model, subject.args, kwargs=subject.kwargs, choose="fused")


def questions(case_folder: Path | None, census_folder: Path | None) -> Iterator[Question]:
    """Every program of the record, in its order; cases and models where their folders are given."""
    for shape in never_slower.grid():
        for threads in (1, 2):
            yield Question(f"cpu, {threads} threads: {shape}", partial(_grid, shape, threads))
    documented = cases.load(_TABLE)
    for device in registry.names():
        for case in documented.CASES:
            yield Question(f"{device.lower()}: {case.name}", partial(_documented, documented, case, device))
    for path in cases.paths(case_folder) if case_folder is not None else ():
        yield Question(f"case {path.stem}", partial(_case, path))
    for name in _MODELS.read_text().split() if census_folder is not None else ():
        yield Question(f"model {name}", partial(_model, census_folder, name))  # type: ignore[arg-type]


def decided(asked: list[Question], console: Console) -> Decisions:
    """All answers. A program that cannot be asked is recorded with the error, so that it cannot drop out unseen."""
    decisions: Decisions = {}
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
        for question in progress.track(asked, description="decided"):
            try:
                decisions[question.name] = [site_of(site) for site in question.decide()]
            except Exception as error:
                decisions[question.name] = [{"outcome": "error", "reason": f"{type(error).__name__}: {error}"[:300]}]
    return decisions


_WORDING = ("reason",)


def _written(document: dict[str, Any]) -> str:
    """A line a program, so that a record can be read and its changes seen."""
    *head, last = (f'"{key}": {json.dumps(value)}' for key, value in document.items() if key != "decisions")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(sites)}" for name, sites in document["decisions"].items())
    return "{" + ",\n".join([*head, last, '"decisions": {\n' + rows + "\n}"]) + "}\n"


def differences(before: Decisions, now: Decisions) -> tuple[list[str], list[str]]:
    """What was decided otherwise, and what is only worded otherwise, a line each."""
    moved, reworded = [], []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None or len(old) != len(new):
            moved.append(f"{name}: {_count(old)} before, {_count(new)} now")
            continue
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            for field in one.keys() | other.keys():
                if _plain(one.get(field)) != _plain(other.get(field)):
                    line = f"{name}, site {number}, {field}: {one.get(field)!r} before, {other.get(field)!r} now"
                    (reworded if field in _WORDING else moved).append(line)
    return moved, reworded


def _plain(value: Any) -> Any:
    return _NUMBERS.sub("#", value) if isinstance(value, str) else value


def _count(sites: list[Site] | None) -> str:
    return "not asked" if sites is None else f"{len(sites)} sites"


def main(
    file: Annotated[Path, typer.Argument(help="The record.")],
    record: Annotated[bool, typer.Option("--record", help="Write the record instead of comparing with it.")] = False,
    case_folder: Annotated[Path | None, typer.Option("--cases", help="Folder of collected cases.")] = None,
    census_folder: Annotated[Path | None, typer.Option("--census", help="Census folder.")] = None,
    only: Annotated[str, typer.Option(help="Run only programs whose name contains this.")] = "",
    wording: Annotated[bool, typer.Option("--wording", help="Also show reasons that differ only in wording.")] = False,
) -> None:
    """Record the decisions of the pass, or compare them with a record. Exit status 1: a decision differs."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    asked = named(only, questions(case_folder, census_folder), attrgetter("name"))
    # The record is of the decisions for one processor, wherever it is compared.
    with patch.object(facts, "instruction_set", lambda: "avx512"):
        now = decided(asked, console)
    if record:
        document = {"versions": versions(), "command": command(), "decisions": now}
        file.write_text(_written(document))
        console.print(f"{len(now)} programs, {sum(map(len, now.values()))} sites recorded in {file}")
        return
    before = json.loads(file.read_text())["decisions"]
    names = {q.name for q in asked}
    moved, reworded = differences({name: sites for name, sites in before.items() if name in names}, now)
    for line in moved + (reworded if wording else []):
        console.print(line)
    console.print(f"{len(now)} programs: {len(moved)} decisions differ, {len(reworded)} reasons differ in wording")
    raise typer.Exit(1 if moved else 0)

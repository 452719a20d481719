"""The commands that measure a list of programs: variants, forms, models, training, steps, runtimes, peers, cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from bench.harness import variants as w
from bench.harness.command import Add, Against, Device, Json, Only, Quick, Rounds, Threads, measured_tables, named
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Program, Setting
from bench.suites import cases, forms, masks, models, peers, runtimes, steps, training


def tables_of(
    module: ModuleType, chosen: Sequence[str], only: str, setting: Setting, rates: Rates, tell: Tell
) -> Iterator[Table]:
    """One table, again and again as it grows, with the columns and notes of the module where it has its own."""
    try:
        programs: list[Program] = named(only, module.programs(setting), attrgetter("name"))
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    columns, notes = getattr(module, "COLUMNS", STANDARD), getattr(module, "NOTES", (LEGEND,))
    table = Table(module.TITLE, columns, notes=list(notes))
    for program in programs:
        packaged = (*w.PACKAGED, w.PACKAGE_HAND) if module is cases and cases.is_packaged(program) else ()
        ways = tuple(way for way in dict.fromkeys((*chosen, *packaged, *program.extra)) if way not in program.without)
        rows = run(module.__name__, [program], ways, setting, rates, tell)
        facts = {**program.facts, **({"without": list(program.without)} if program.without else {})}
        table.rows += [{**row, **facts} for row in rows]
        yield table


def _command(
    module: ModuleType, about: str, chosen: Sequence[str] = w.COMPILED, times: int = 15
) -> Callable[..., None]:
    """The command that measures a module's programs; ``about`` is its help."""

    def measure(
        json_file: Json = None,
        baseline: Against = None,
        quick: Quick = False,
        only: Only = "",
        add: Add = False,
        device: Device = "cpu",
        threads: Threads = 2,
        rounds: Rounds = times,
        folder: Annotated[Path, typer.Option("--cases", help="A folder of collected cases.")] = Path("cases"),
    ) -> None:
        rounds = min(rounds, 5) if quick else rounds
        setting = Setting(device, threads, rounds, quick=quick, folder=str(folder.resolve()))
        measured_tables(module.TITLE, partial(tables_of, module, chosen, only), setting, json_file, baseline, add)

    measure.__doc__ = about
    return measure


COMMANDS: Mapping[str, Callable[..., None]] = {
    "cases": _command(cases, "Collected cases that must be fast: eager, stock, the pass, and each case's better form."),
    "variants": _command(
        masks, "Masks and score functions by hand: eager, stock, the pass, and the form a specialist writes."
    ),
    "forms": _command(forms, "Common forms at common sizes, by hand and as calls: eager, stock, the pass."),
    "models": _command(models, "Whole models at real sizes: eager, stock, the pass, both frozen.", models.WAYS, 9),
    "training": _command(training, "Training steps, forward and backward: eager, stock, the pass."),
    "steps": _command(steps, "Whole training steps with the optimizer: eager, stock, the pass.", times=9),
    "runtimes": _command(
        runtimes,
        "Whole models in ONNX Runtime and OpenVINO, as exported and after the pass (make bench-peers installs them).",
        runtimes.WAYS,
        9,
    ),
    "peers": _command(peers, "The same beside other systems, which make bench-peers installs.", peers.WAYS, 9),
}

"""The commands that measure a list of programs: variants, forms, models, training, peers, cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from bench.harness import variants as w
from bench.harness.command import Against, Device, Json, Only, Quick, Rounds, Threads, begin, finish
from bench.harness.console import plain_console, teller
from bench.harness.document import LEGEND, STANDARD, Table
from bench.harness.measure import run
from bench.harness.programs import Program, Setting
from bench.suites import cases, forms, masks, models, peers, training


def _measure(
    module: ModuleType,
    chosen: Sequence[str],
    setting: Setting,
    only: str,
    json_file: Path | None,
    baseline: Path | None,
) -> None:
    console = plain_console()
    try:
        programs: list[Program] = [p for p in module.programs(setting) if only in p.name]
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    if not programs:
        raise typer.BadParameter(f"no program's name holds {only!r}", param_hint="--only")
    made, rates, before = begin(module.TITLE, setting, baseline)
    table = Table(module.TITLE, STANDARD, notes=[LEGEND])
    made.tables.append(table)
    tell = teller(console)
    for program in programs:
        packaged = (*w.PACKAGED, w.PACKAGE_HAND) if module is cases and cases.is_packaged(program) else ()
        ways = tuple(dict.fromkeys((*chosen, *packaged, *program.extra)))
        table.rows += run(module.__name__, [program], ways, setting, rates, tell)
        if json_file is not None:
            made.write(json_file)  # a run takes long, and what is measured stays when it is stopped
    finish(console, made, json_file, before)


def _setting(device: str, threads: int, rounds: int, quick: bool, folder: str = "") -> Setting:
    return Setting(device, threads, min(rounds, 5) if quick else rounds, quick=quick, folder=folder)


def _command(
    module: ModuleType, about: str, chosen: Sequence[str] = w.COMPILED, times: int = 15
) -> Callable[..., None]:
    """The command that measures a module's programs; ``about`` is its help."""

    def measure(
        json_file: Json = None,
        baseline: Against = None,
        quick: Quick = False,
        only: Only = "",
        device: Device = "cpu",
        threads: Threads = 2,
        rounds: Rounds = times,
    ) -> None:
        _measure(module, chosen, _setting(device, threads, rounds, quick), only, json_file, baseline)

    measure.__doc__ = about
    return measure


COMMANDS: Mapping[str, Callable[..., None]] = {
    "variants": _command(
        masks, "Masks and score functions by hand: eager, stock, the pass, and the form a specialist writes."
    ),
    "forms": _command(forms, "Common forms at common sizes, by hand and as calls: eager, stock, the pass."),
    "models": _command(models, "Whole models at real sizes: eager, stock, the pass.", times=9),
    "training": _command(training, "Training steps, forward and backward: eager, stock, the pass."),
    "peers": _command(
        peers,
        "Whole models beside other systems; needs onnx, onnxruntime, onnxscript and openvino (make bench-peers).",
        peers.WAYS,
        9,
    ),
}


def cases_command(
    folder: Annotated[Path, typer.Option("--cases", help="The folder of the collected cases.")] = Path("cases"),
    json_file: Json = None,
    baseline: Against = None,
    quick: Quick = False,
    only: Only = "",
    device: Device = "cpu",
    threads: Threads = 2,
    rounds: Rounds = 15,
) -> None:
    """Collected cases that must be fast: eager, stock, the pass, and each case's better form."""
    setting = _setting(device, threads, rounds, quick, str(folder.resolve()))
    _measure(cases, w.COMPILED, setting, only, json_file, baseline)

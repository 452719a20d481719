"""The field reports measured again: `python -m bench seeds [--only S4,S5] [--quick] [--json FILE] [--against FILE]`."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.harness.command import Against, Device, Json, Rounds, Threads, begin, finish
from bench.harness.console import plain_console, teller
from bench.harness.programs import Setting
from bench.suites.seeds import s1, s2, s3, s4, s5

SEEDS = {"S1": s1, "S2": s2, "S3": s3, "S4": s4, "S5": s5}


def chosen(only: str) -> list[str]:
    """The seeds of a list such as "S1,s4"; all for an empty one.

    Raises:
        typer.BadParameter: there is no such seed.
    """
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SEEDS]:
        raise typer.BadParameter(f"no seed is called {', '.join(unknown)}; there are {', '.join(SEEDS)}")
    return names or list(SEEDS)


def main(
    only: Annotated[str, typer.Option(help="Some of them: S1,S4.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Cut sizes, fewer rounds and packages: under 8 minutes.")
    ] = False,
    json_file: Json = None,
    baseline: Against = None,
    device: Device = "cpu",
    threads: Threads = 2,
    rounds: Rounds = 15,
) -> None:
    """Measure the five field reports; exit status 1: an answer is wrong, or a ratio worse than in --against."""
    console = plain_console()
    setting = Setting(device, threads, min(rounds, 7) if quick else rounds, quick=quick)
    made, rates, before = begin("The field reports, measured again", setting, baseline)
    tell = teller(console)
    for name in chosen(only):
        for table in SEEDS[name].tables(setting, rates, tell):
            made.tables.append(table)
            if json_file is not None:
                made.write(json_file)  # a run takes long, and what is measured stays when it is stopped
    finish(console, made, json_file, before)

"""The field reports measured again: `python -m bench seeds [--only S4,S5] [--quick] [--json FILE] [--against FILE]`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any

import typer

from bench.harness.command import Against, Device, Json, Rounds, Threads, measured_tables
from bench.harness.document import Table
from bench.harness.programs import Setting
from bench.suites.seeds import s1, s2, s3, s4, s5
from bench.suites.seeds.common import Bench

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
    only: Annotated[str, typer.Option(help="Run some of them: S1,S4.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes, fewer rounds and packages: under 8 minutes.")
    ] = False,
    json_file: Json = None,
    baseline: Against = None,
    device: Device = "cpu",
    threads: Threads = 2,
    rounds: Rounds = 15,
) -> None:
    """Measure the five field reports. Exit status 1: a result is wrong, or a ratio is worse than in --against."""
    setting = Setting(device, threads, min(rounds, 7) if quick else rounds, quick=quick)
    names = chosen(only)

    def tables(*given: Any) -> Iterator[Table]:
        return chain.from_iterable(SEEDS[name].tables(Bench(*given)) for name in names)

    measured_tables("The field reports, measured again", tables, setting, json_file, baseline)

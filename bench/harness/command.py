"""Code shared by the commands: their options, the head of a run, measuring its tables, and its end."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from attn_pass.report.units import counted
from bench.harness import baseline as baselines
from bench.harness import document
from bench.harness.console import plain_console, show, show_table, teller
from bench.harness.document import Column, Document, Table
from bench.harness.environment import command, commit, device_name, versions
from bench.harness.floors import Rates, rates
from bench.harness.programs import Setting

_T = TypeVar("_T")

Json = Annotated[Path | None, typer.Option("--json", help="Write to this file, and a table next to it.")]
Against = Annotated[Path | None, typer.Option("--against", help="Compare with an earlier run.")]
Quick = Annotated[bool, typer.Option("--quick", help="Run a few of them, with fewer rounds.")]
Only = Annotated[
    str, typer.Option(help="Run only programs whose name contains this, or one of several: A|B; =A is a whole name.")
]
Add = Annotated[bool, typer.Option("--add", help="Keep what the file of --json has of other programs.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int, typer.Option(min=1, help="Number of torch threads.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples per variant.")]


def is_asked(only: str, name: str) -> bool:
    """Whether ``--only`` asks for a program of this name."""
    return any(part[1:] == name if part.startswith("=") else part in name for part in only.split("|"))


def named(only: str, programs: Iterable[_T], name_of: Callable[[_T], str]) -> list[_T]:
    """The programs that ``--only`` asks for; an error where there are none."""
    chosen = [program for program in programs if is_asked(only, name_of(program))]
    if not chosen:
        raise typer.BadParameter(f"no program is asked for by {only!r}", param_hint="--only")
    return chosen


Tables = Callable[[Setting, Rates, Callable[[str], None]], Iterable[Table]]


@dataclass
class Recorder:
    """A run of a command: its document, the file that keeps it, and the terminal that shows it.

    Attributes:
        tell: prints a line with the seconds since the run began.
    """

    document: Document
    json_file: Path | None = None
    console: Console = field(default_factory=plain_console)

    def __post_init__(self) -> None:
        self.tell = teller(self.console)

    def table(self, title: str, columns: Sequence[Column], notes: Iterable[str] = ()) -> Table:
        """A table of the document, which is to be filled."""
        self.document.tables.append(Table(title, columns, notes=list(notes)))
        return self.document.tables[-1]

    def keep(self) -> None:
        """Writes the document as it is: a run takes long, and what is measured stays when it is stopped."""
        if self.json_file is not None:
            self.document.write(self.json_file)

    def finish(self, before: Document | None = None, bad: bool = False) -> None:
        """Shows and writes the document, compares it with another run.

        Raises:
            typer.Exit: 1, something is wrong (``bad``: by what the command says), nothing ran, or it got worse.
        """
        show(self.console, self.document)
        if self.json_file is not None:
            written = f"written: {self.json_file} and {self.document.write(self.json_file)}"
            self.console.print(written, markup=False, highlight=False)
        rows = [row for table in self.document.tables for row in table.rows]
        bad = bad or any(row.get("verdict") == "WRONG" for row in rows)
        bad = bad or all(row.get("status", "ok") != "ok" for row in rows)
        if before is not None:
            compared = baselines.compare(self.document, before)
            show_table(self.console, compared)
            bad = bad or baselines.regressed(compared)
        if bad:
            raise typer.Exit(1)


def started(
    title: str, json_file: Path | None = None, *, threads: int = 0, rounds: Any = None, device: str = "cpu", **more: Any
) -> Recorder:
    """A document without tables, under the conditions of a run that begins now; ``more`` of them.

    ``threads`` is 0 for as many as torch uses by itself.
    """
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    given = {"device": device_name(device), "threads": threads, "rounds": rounds, **more}
    run = {
        **{name: value for name, value in given.items() if value is not None},
        "busy": f"load {os.getloadavg()[0]:.1f} at the start",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": command(),
    }
    return Recorder(Document(title, run), json_file)


def measured_tables(
    title: str,
    tables: Tables,
    setting: Setting,
    json_file: Path | None,
    baseline: Path | None,
    add: bool = False,
) -> None:
    """Measures this device's rates and the tables, keeping what there is, and compares it with another run.

    With ``add``, what the file has of other programs stays in it; every row says which run it is of.

    Raises:
        typer.BadParameter: the run to compare with cannot be read.
        typer.Exit: as `Recorder.finish`.
    """
    try:  # before it may be written over
        before = None if baseline is None else document.read(baseline)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--against") from error
    try:
        kept = document.read(json_file).tables if add and json_file is not None and json_file.exists() else []
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--add") from error
    rounds = f"{setting.rounds} in turns, a fresh process a program"
    quick = "cut sizes and fewer rounds" if setting.quick else None
    recorder = started(title, json_file, threads=setting.threads, rounds=rounds, device=setting.device, quick=quick)
    made = recorder.document
    rate = rates(setting.device)
    made.run["rates"] = asdict(rate)
    run_of = f"{commit() or 'no commit'} of {made.run['date']}, {counted(setting.rounds, 'round')}"
    for table in tables(setting, rate, recorder.tell):
        for row in table.rows:
            row.setdefault("of", run_of)
        now = {table.title: document.joined(next((t for t in kept if t.title == table.title), None), table)}
        made.tables = list({**{t.title: t for t in made.tables}, **now}.values())
        recorder.keep()
    recorder.finish(before)

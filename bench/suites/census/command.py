"""The command line of the census: `python -m bench census COMMAND --help`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import timing
from bench.harness.console import plain_console
from bench.harness.process import Task, run_all
from bench.suites.census import compile_time, export, sdpa, tables
from bench.suites.census.dataset import Census, FolderError, open_census
from bench.suites.census.rows import Row, read_rows

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Option("--census", help="The census folder: zoo.py, census.py, models.txt.")]
Out = Annotated[Path, typer.Option(help="JSONL file; rows are appended, and what has a row is skipped.")]
Only = Annotated[str, typer.Option(help="Regular expression on names.")]
Listed = Annotated[Path | None, typer.Option("--list", help="File of names to use instead of models.txt.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time.")]
Limit = Annotated[float, typer.Option("--limit", help="Seconds one process may take.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all rows and their conditions here.")]


@app.command("export")
def export_command(
    folder: Folder, out: Out, only: Only = "", listed: Listed = None, jobs: Jobs = 1, limit_s: Limit = 300
) -> None:
    """Export each model, rewrite the program, decomposed and not, and compare with eager."""
    census = _opened(folder)
    names = census.names(only, listed)
    tasks = [Task(export.facts_of(census, name), export.measure, (folder, name)) for name in names]
    _run(tasks, out, jobs, limit_s)


@app.command("sdpa")
def sdpa_command(
    folder: Folder, out: Out, only: Only = "", listed: Listed = None, jobs: Jobs = 1, limit_s: Limit = 300
) -> None:
    """Compile transformers models that call SDPA, and count which calls the pass reads."""
    census = _opened(folder)
    names = [name for name in census.names(only, listed) if name.startswith("hf/")]
    tasks = [Task(sdpa.facts_of(census, name), sdpa.measure, (folder, name)) for name in names]
    _run(tasks, out, jobs, limit_s)


@app.command("compile-time")
def compile_time_command(
    out: Out,
    folder: Annotated[Path | None, typer.Option("--census", help="Needed for timm without torchvision.")] = None,
    only: Only = "",
    rounds: Annotated[int, typer.Option(min=1, help="Cold compiles of each model each way.")] = 3,
    choose: Annotated[str, typer.Option(help="attn_pass's option of that name.")] = "fused",
    limit_s: Limit = 900,
    json_file: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="One model, one compile each way.")] = False,
) -> None:
    """Time cold compiles with stock Inductor and with attn_pass, and the pass's share of them."""
    names = [name for name in compile_time.MODELS if only in name][: 1 if quick else None]
    rounds = 1 if quick else rounds
    runs = [
        (name, way, number)
        for number in range(rounds)
        for name in names
        # Every round starts with the other way.
        for way in (compile_time.WAYS if number % 2 == 0 else compile_time.WAYS[::-1])
    ]
    tasks = [Task(compile_time.facts_of(*run), compile_time.measure, (*run, choose, folder)) for run in runs]
    _run(tasks, out, 1, limit_s, json_file)


@app.command()
def summary(paths: Annotated[list[Path], typer.Argument(help="JSONL files.")], json_file: JsonFile = None) -> None:
    """Print the tables of results, as Markdown."""
    _tell(read_rows(paths), json_file)


def _run(tasks: list[Task], out: Path, jobs: int, limit_s: float, json_file: Path | None = None) -> None:
    run_all(tasks, out, jobs=jobs, limit_s=limit_s, console=plain_console())
    _tell(read_rows([out]), json_file)


def _tell(rows: list[Row], json_file: Path | None) -> None:
    plain_console().print(tables.markdown(rows), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        command = timing.command()
        conditions = {"device": timing.device_name("cpu"), "versions": timing.versions(), "command": command}
        json_file.write_text(json.dumps({**conditions, "rows": rows}, indent=1) + "\n")


def _opened(folder: Path) -> Census:
    try:
        return open_census(folder)
    except FolderError as error:
        raise typer.BadParameter(str(error), param_hint="--census") from error

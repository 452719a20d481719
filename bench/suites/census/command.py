"""The command line of the census: `python -m bench census COMMAND --help`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from bench.harness import environment
from bench.harness.console import plain_console
from bench.harness.process import Task
from bench.suites.census import export, padding, projections, rotary, runtimes, sdpa, speed, steps, tables
from bench.suites.census.dataset import Census, FolderError, NotMeasured, open_census
from bench.suites.census.rows import Row, read_rows
from bench.suites.census.workers import run_all

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Option("--census", help="The census folder: zoo.py, census.py, models.txt.")]
Out = Annotated[Path, typer.Option(help="JSONL file; rows are appended, and programs that have a row are skipped.")]
Only = Annotated[str, typer.Option(help="Regular expression for names.")]
Listed = Annotated[Path | None, typer.Option("--list", help="File of names to use instead of models.txt.")]
Jobs = Annotated[int, typer.Option(min=1, help="Parallel processes.")]
Limit = Annotated[float, typer.Option("--limit", help="Time limit per process in seconds.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all rows and their conditions to this file.")]


def _command(bench: ModuleType, names_start: str | tuple[str, ...]) -> Callable[..., None]:
    """Measures the models of the census whose names start so."""

    def measure(
        folder: Folder, out: Out, only: Only = "", listed: Listed = None, jobs: Jobs = 1, limit_s: Limit = 300
    ) -> None:
        try:
            census = open_census(folder)
        except FolderError as error:
            raise typer.BadParameter(str(error), param_hint="--census") from error
        names = [name for name in census.names(only, listed) if name.startswith(names_start)]
        tasks = [Task(_facts(bench, census, name), rows_of, (bench.__name__, folder, name)) for name in names]
        run_all(tasks, out, jobs=jobs, limit_s=limit_s, console=plain_console())
        summary([out])

    return measure


def _facts(bench: ModuleType, census: Census, name: str) -> Row:
    """What the first row of a model is about."""
    return {**bench.FACTS, **census.facts(name)}


def rows_of(bench: str, folder: Path, name: str) -> Iterator[Row]:
    """What a process does: the rows of a model, or one that says why there are none."""
    module, census = import_module(bench), open_census(folder)
    facts = _facts(module, census, name)
    try:
        for row in module.measure(census, name):
            yield {**facts, **row}
    except NotMeasured as error:
        row = {**facts, "status": error.status}
        yield {**row, "error": str(error)} if str(error) else row


_COMMANDS: tuple[tuple[ModuleType, str | tuple[str, ...], str], ...] = (
    (export, "", "Export each model, rewrite the program, decomposed and not, and compare with eager."),
    (runtimes, "", "Export each model to ONNX Runtime and OpenVINO, stock and rewritten, and count their operators."),
    (sdpa, "hf/", "Compile transformers models that call SDPA, and count which calls the pass reads."),
    (rotary, "hf/", "Trace transformers models, and count the rotary embeddings and norms that are read."),
    (padding, "", "Compile each model, and list which regions run without padding, and why others do not."),
    (projections, "hf/", "Compile transformers models frozen, and count which projections are read, and which joined."),
    (speed, ("hf/", "timm/"), "Time larger models, compiled by stock Inductor and by the pass."),
    (steps, ("hf/", "timm/"), "Time training steps of larger models, compiled by stock Inductor and by the pass."),
)
for _bench, _start, _about in _COMMANDS:
    app.command(_bench.__name__.rpartition(".")[2], help=_about)(_command(_bench, _start))


@app.command()
def summary(paths: Annotated[list[Path], typer.Argument(help="JSONL files.")], json_file: JsonFile = None) -> None:
    """Print the tables of results, as Markdown."""
    rows = read_rows(paths)
    plain_console().print(tables.markdown(rows), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        command = environment.command()
        conditions = {"device": environment.device_name("cpu"), "versions": environment.versions(), "command": command}
        json_file.write_text(json.dumps({**conditions, "rows": rows}, indent=1) + "\n")

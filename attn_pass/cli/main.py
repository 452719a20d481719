"""The command line: ``explain``, ``bench``, ``check``, ``compare``, ``calibrate``, ``doctor``, ``version``."""

from __future__ import annotations

import enum
import importlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_pass.cli.failing import FAILED, Traceback, fail, failing
from attn_pass.cli.given import Option, checked_options
from attn_pass.cli.measure import bench, check
from attn_pass.cli.programs import built, in_mode
from attn_pass.errors import AttnPassError, own_version
from attn_pass.report.progress import is_terminal, logged_to_stderr, progress
from attn_pass.report.text import WIDTH
from attn_pass.report.units import counted, duration

if TYPE_CHECKING:
    from attn_pass.report.pages.collect import Collection
    from attn_pass.report.record import Report


class FailOn(str, enum.Enum):
    """The sites on which `explain` fails."""

    left = "left"
    near_miss = "near-miss"
    none = "none"


class FailOnChange(str, enum.Enum):
    """The changes on which `compare` fails."""

    changed = "changed"
    worse = "worse"


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"attn_pass {own_version()}")
        raise typer.Exit


app = typer.Typer(
    help="Show how attn_pass reads the attention of a PyTorch model, and how it would rewrite it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show how attn_pass reads the attention of a PyTorch model, and how it would rewrite it."""


@app.command()
def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PATH:FUNCTION|MODEL.pt2",
            help="A function, as file.py:function or module:function, that takes nothing and returns (model, args) "
            "or (model, args, kwargs); or a package that attn_pass.aot_compile wrote.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="OUT", help="Also write an HTML page to this file: sites, masks, code before and after."
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            metavar="OUT.json",
            help="Also write the graphs before and after to this file, for Model Explorer: sites in colour.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show why each target refused, also those of other devices and of sites taken."),
    ] = False,
    choose: Annotated[
        str | None,
        typer.Option(help='"cheapest" (the default) or "fused". ATTN_PASS_CHOOSE sets the default.'),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help='Decide for this device, present or not: "cpu", "H200", "cuda" (this machine\'s GPU, or an H200 by '
            "its data sheet if it has none)."
        ),
    ] = None,
    option: Option = None,
    training: Annotated[
        bool | None,
        typer.Option(
            "--training/--inference",
            help="Use training mode with gradients, or evaluation mode without. Default: as the function leaves "
            "the model.",
        ),
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Let every size of the inputs vary.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Decide as aot_compile would.")] = False,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="Exit with status 1 if an attention site is left; near-miss: also if there is a near miss; none: if "
            "no attention was found."
        ),
    ] = None,
    expect: Annotated[
        int | None,
        typer.Option(min=0, help="Exit with status 1 unless one run of the model computes this many attentions."),
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Print what each attention of a model would become and why, or what each attention of a package became.

    Nothing is compiled.
    """
    from attn_pass.report.pages.collect import Collection, collect

    collection = Collection()
    for flag, path in (("--html", html), ("--graph", graph)):
        if path is not None and not path.resolve().parent.is_dir():
            fail(f"{flag} {path}: there is no folder {path.resolve().parent}; create it first")
    of_choice = {"--choose": choose, "--device": device, "--option": option or None}
    with failing(show_traceback):
        of_capture = {"--training/--inference": training, "--dynamic": dynamic or None, "--aot": aot or None}
        if target.endswith(".pt2"):
            of_graphs = {"--graph": graph}
            already = f"{target} is already compiled, so these options have no effect"
            _refuse({**of_choice, **of_capture, **of_graphs}, already)
            report = importlib.import_module("attn_pass").package_report(target)
        else:
            from torch.export import ExportedProgram

            options = checked_options(option, choose=choose, device=device)  # before a model is built
            model, args, kwargs = built(target)
            if isinstance(model, ExportedProgram):
                _refuse(of_capture, f"{target} gives a program that is already exported")
            settings = {"attn_pass_options": options, "attn_pass_dynamic": dynamic, "attn_pass_aot": aot}
            with in_mode(model, training), collect() if html or graph else nullcontext(collection) as collection:
                report = importlib.import_module("attn_pass").explain(model, *args, **settings, **kwargs)
    report.about["command"] = " ".join(["attn-pass", *map(shlex.quote, sys.argv[1:])])
    if html is not None:
        _write_page(html, report, collection)
    if graph is not None:
        _write_graphs(graph, collection)
    typer.echo(report.to_json() if as_json else report.table(verbose=verbose))
    if sentence := _why_failed(report, fail_on, expect):
        typer.echo(f"attn-pass: {sentence}", err=True)
        raise typer.Exit(FAILED)


app.command()(bench)
app.command()(check)


@app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A report as JSON, or a package.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="A report or package to compare with it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON instead of a table.")] = False,
    fail_on: Annotated[
        FailOnChange | None,
        typer.Option(
            help="Exit with status 1; changed: if a site appeared, disappeared, or has another outcome or target; "
            "worse: only if an attention site is left that was not left before."
        ),
    ] = None,
) -> None:
    """Print the sites that differ between two reports of a model (attn-pass explain --json, Report.to_json, a .pt2)."""
    comparison = _stored(before).compare(_stored(after))
    typer.echo(comparison.to_json() if as_json else str(comparison))
    failing = {None: (), FailOnChange.changed: comparison.changed, FailOnChange.worse: comparison.worse}[fail_on]
    if failing:
        raise typer.Exit(FAILED)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print which packages are installed, how to install the others, and which targets are available."""
    with failing(with_traceback=False):
        importlib.import_module("attn_pass.entries.environment").import_compiler()
        sections = importlib.import_module("attn_pass.cli.doctor").diagnosis()
    if as_json:
        typer.echo(json.dumps(sections, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if is_terminal(sys.stdout) else WIDTH)
    for title, findings in sections.items():
        table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = "[green]yes[/]" if finding["found"] else "[dim]no[/]"
            table.add_row(mark, finding["what"], escape(finding["found"]), escape(finding["note"]))
        console.print(table)


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(help='"cpu" or "cuda:0". Default: the first GPU, else the CPU.')] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate time to measure.")] = 60.0,
    forget: Annotated[bool, typer.Option("--forget", help="Discard the calibration, and measure nothing.")] = False,
    keep_if_busy: Annotated[
        bool, typer.Option("--keep-if-busy", help="Keep the result even if the readings are far apart.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Measure the rates of this device's kernels, without Inductor, and use them for all predictions from now on.

    Exits with status 1 if the machine was too busy to keep the result.
    """
    session = importlib.import_module("attn_pass.tuning.calibration_session")
    try:
        at = session.device_named(device)
        if forget:
            typer.echo(f"{at}: {'forgotten' if session.forget(at) else 'nothing was measured of it'}")
            return
        with logged_to_stderr(), progress(silent=as_json) as tell:
            tell("measuring")
            outcome = session.calibrate(
                at, seconds, lambda name, reading: tell(f"{name}: {duration(reading.us)}"), keep_if_busy=keep_if_busy
            )
    except AttnPassError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(session.as_json(outcome), indent=2))
    else:
        _print_calibration(session.changes(outcome), session.summary_lines(outcome), outcome.failed)
    if not outcome.kept:
        raise typer.Exit(FAILED)


def _print_calibration(
    rows: Iterator[tuple[str, float | None, float]], sentences: Sequence[str], failed: Mapping[str, str]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("constant", "built in", "measured", box=None, padding=(0, 2, 0, 0))
    for name, before, measured in rows:
        table.add_row(name, "-" if before is None else f"{before:.4g}", f"{measured:.4g}")
    Console().print(table)
    for sentence in (*sentences, *(f"Not measured: {name}: {reason}" for name, reason in failed.items())):
        typer.echo(sentence)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print the versions of attn_pass, torch and Python."""
    import torch

    versions = {"attn_pass": own_version(), "torch": str(torch.__version__), "python": sys.version.split()[0]}
    typer.echo(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))


def main() -> None:
    """Run the command line; on invalid input print a one-line error to stderr and exit with status 2."""
    app()


def _stored(path: str) -> Report:
    """The report in a JSON file or a package."""
    from attn_pass.entries.package import package_report
    from attn_pass.report.record import Report

    try:
        if path.endswith(".pt2"):
            return package_report(path)
        return Report.from_dict(json.loads(Path(path).read_bytes()))
    except AttnPassError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}")
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        fail(f"{path} is not a report that attn-pass explain --json wrote: {type(error).__name__}: {error}")


def _write_page(path: Path, report: Report, collection: Collection) -> None:
    from attn_pass.report.pages.html import page

    try:
        path.write_text(page(report, collection.graphs), encoding="utf-8")
    except OSError as error:
        fail(f"--html {path} cannot be written: {error.strerror or error}")


def _write_graphs(path: Path, collection: Collection) -> None:
    from attn_pass.report.pages.model_explorer import collections_of

    try:
        path.write_text(json.dumps(collections_of(collection.graphs)), encoding="utf-8")
    except OSError as error:
        fail(f"--graph {path} cannot be written: {error.strerror or error}")


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Ends with a sentence if any of these options was given."""
    if ignored := [name for name, value in options.items() if value is not None]:
        fail(f"{why}: leave out {', '.join(ignored)}")


def _why_failed(report: Report, fail_on: FailOn | None, expect: int | None) -> str:
    """Why the command fails because of what was found; "" where it does not."""
    attentions = [site for site in report.sites if site.kind == "attention"]
    broken = report.breaks_in_words()
    if expect is not None and report.attentions != expect:
        return f"--expect: expected {counted(expect, 'attention')}, found {report.attentions}{broken}"
    if fail_on is FailOn.none:
        return "" if attentions else f"--fail-on none: no attention was found{broken}"
    misses = report.sites if fail_on is FailOn.near_miss else attentions
    number = sum(site.outcome == "left" for site in misses) if fail_on is not None else 0
    return f"--fail-on {fail_on.value}: {number} left" if fail_on is not None and number else ""

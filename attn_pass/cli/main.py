"""The command line: ``explain`` a model or package, ``compare`` two reports, ``calibrate``, ``doctor``, ``version``."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from attn_pass.errors import AttnPassError

if TYPE_CHECKING:
    from attn_pass.report.pages.collect import Collection
    from attn_pass.report.record import Report
    from attn_pass.report.site import SiteReport

_FAILED, _BAD_INPUT = 1, 2


class FailOn(str, enum.Enum):
    """The sites on which `explain` fails."""

    left = "left"
    near_miss = "near-miss"


class FailOnChange(str, enum.Enum):
    """The changes on which `compare` fails."""

    changed = "changed"
    worse = "worse"


app = typer.Typer(
    help="Show how attn_pass reads the attention of a PyTorch model, and how it would rewrite it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show why each target refused a site, even if the site is rewritten.")
    ] = False,
    choose: Annotated[
        str | None,
        typer.Option(help='"cheapest" (the default) or "fused". ATTN_PASS_CHOOSE sets the default.'),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help='Decide for this device, present or not: "cpu", "cuda:0", "H200".')
    ] = None,
    training: Annotated[
        bool | None,
        typer.Option(
            "--training/--inference",
            help="Use training mode with gradients, or evaluation mode without. Default: as the function leaves it.",
        ),
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Let every size of the inputs vary.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Decide as aot_compile would.")] = False,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(help="Exit with status 1 if an attention site is left; near-miss: also if there is a near miss."),
    ] = None,
) -> None:
    """Print what each attention of a model would become and why, or what each attention of a package became.

    Nothing is compiled.
    """
    from attn_pass.report.pages.collect import Collection, collect

    collection = Collection()
    if html is not None and not html.resolve().parent.is_dir():
        _fail(f"--html {html}: there is no folder {html.resolve().parent}; create it first")
    try:
        of_capture = {"--training/--inference": training, "--dynamic": dynamic or None, "--aot": aot or None}
        if target.endswith(".pt2"):
            of_choice = {"--choose": choose, "--device": device}
            _refuse({**of_choice, **of_capture}, f"{target} is already compiled, so these options have no effect")
            report = importlib.import_module("attn_pass").package_report(target)
        else:
            from torch.export import ExportedProgram

            from attn_pass.options import make_options

            options = {name: value for name, value in (("choose", choose), ("device", device)) if value is not None}
            make_options(**options)  # checked before a model is built
            model, args, kwargs = _built(target)
            if isinstance(model, ExportedProgram):
                _refuse(of_capture, f"{target} gives a program that is already exported")
            settings = {"attn_pass_options": options, "attn_pass_dynamic": dynamic, "attn_pass_aot": aot}
            with _mode(model, training), collect() if html is not None else nullcontext(collection) as collection:
                report = importlib.import_module("attn_pass").explain(model, *args, **settings, **kwargs)
    except AttnPassError as error:
        _fail(str(error))
    if html is not None:
        _write_page(html, report, collection)
    typer.echo(report.to_json() if as_json else report.table(verbose=verbose))
    if fail_on is not None and any(_fails(site, fail_on) for site in report.sites):
        raise typer.Exit(_FAILED)


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
        raise typer.Exit(_FAILED)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print which packages are installed, how to install the others, and which targets are available."""
    sections = importlib.import_module("attn_pass.cli.doctor").diagnosis()
    if as_json:
        typer.echo(json.dumps(sections, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
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
        with _progress(as_json) as heard:
            outcome = session.calibrate(at, seconds, heard, keep_if_busy=keep_if_busy)
    except AttnPassError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(session.as_json(outcome), indent=2))
    else:
        _print_calibration(session.changes(outcome), session.summary_lines(outcome), outcome.failed)
    if not outcome.kept:
        raise typer.Exit(_FAILED)


@contextmanager
def _progress(silent: bool) -> Iterator[Callable[[str, Any], None]]:
    """Shows on stderr what is being measured, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, quiet=silent)
    with console.status("measuring") as status:
        yield lambda name, reading: status.update(f"{name}: {reading.us:.1f} us")


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

    try:
        own = importlib.metadata.version("attn-pass")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown (run from a source tree that is not installed)"
    versions = {"attn_pass": own, "torch": str(torch.__version__), "python": sys.version.split()[0]}
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
        _fail(str(error))
    except OSError as error:
        _fail(f"{path} cannot be read: {error.strerror or error}")
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        _fail(f"{path} is not a report that attn-pass explain --json wrote: {type(error).__name__}: {error}")


def _write_page(path: Path, report: Report, collection: Collection) -> None:
    from attn_pass.report.pages.html import page

    try:
        path.write_text(page(report, collection.graphs), encoding="utf-8")
    except OSError as error:
        _fail(f"--html {path} cannot be written: {error.strerror or error}")


def _built(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from the function that ``file.py:function`` or ``module:function`` names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        _fail(f"{target!r} does not name a function: give file.py:function or module:function")
    function = getattr(_loaded(where), name, None)
    if not callable(function):
        _fail(f"{where} has no function {name!r}: define one that returns (model, args) or (model, args, kwargs)")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        _fail(f"{target} raised {type(error).__name__}: {error}")
    return _unpacked(target, made)


def _unpacked(target: str, made: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Check what the function returned; a single tensor or a list may stand for the tuple of arguments."""
    import torch

    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        _fail(f"{target} returned {_kind(made)}; return (model, args) or (model, args, kwargs)")
    args = made[1]
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        _fail(f"{target} returned {_kind(args)} as args; return a tuple of the model's positional inputs")
    kwargs = made[2] if len(made) == 3 and made[2] is not None else {}
    if not isinstance(kwargs, Mapping):
        _fail(f"{target} returned {_kind(kwargs)} as kwargs; return a dict of the model's keyword inputs")
    for name in kwargs:
        if not isinstance(name, str) or name.startswith("attn_pass_"):
            _fail(f"{target} returned kwargs with the key {name!r}; return a dict of the model's keyword inputs")
    return made[0], tuple(args), dict(kwargs)


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Ends with a sentence if any of these options was given."""
    if ignored := [name for name, value in given.items() if value is not None]:
        _fail(f"{why}: leave out {', '.join(ignored)}")


def _loaded(where: str) -> ModuleType:
    """The module at a path ending in .py, or of a dotted name looked up from the current directory."""
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            _fail(f"there is no file {where} (looked from {Path.cwd()})")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            _fail(f"{where} cannot be imported as Python")
        module = importlib.util.module_from_spec(spec)
        folder = str(path.resolve().parent)
    else:
        spec, module, folder = None, None, str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if spec is None or spec.loader is None or module is None:
            return importlib.import_module(where)
        sys.modules.setdefault(path.stem, module)  # dataclasses and pickling look the module up by name
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        _fail(f"{where} cannot be imported: {type(error).__name__}: {error}")
    return module


@contextmanager
def _mode(model: Any, training: bool | None) -> Iterator[None]:
    """Gradients and the model's mode for training or inference; None changes nothing."""
    import torch

    if training is None:
        yield
        return
    if isinstance(model, torch.nn.Module):
        model.train(training)
    with torch.set_grad_enabled(training):
        yield


def _fails(site: SiteReport, what: FailOn) -> bool:
    """Whether the command fails because of this site."""
    return site.outcome == "left" and (what is FailOn.near_miss or site.kind == "attention")


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"attn-pass: {sentence}", err=True)
    raise typer.Exit(_BAD_INPUT)

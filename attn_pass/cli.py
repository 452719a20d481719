"""The command line: ``attn-pass explain`` of a model or a package, and ``attn-pass version``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from attn_pass.errors import AttnPassError

_BAD_INPUT = 2

app = typer.Typer(
    help="Shows how attn_pass reads and would rewrite the attention of a PyTorch model.",
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
    choose: Annotated[
        str | None,
        typer.Option(help='"cheapest" (the default) or "fused"; as the environment variable ATTN_PASS_CHOOSE.'),
    ] = None,
) -> None:
    """Print, for each attention of a model, what it would become and why; of a package, what it became.

    Compiles nothing.
    """
    try:
        if target.endswith(".pt2"):
            report = importlib.import_module("attn_pass").package_report(target)
            typer.echo(report.to_json() if as_json else str(report))
            return
        from attn_pass.options import make_options

        make_options(**({} if choose is None else {"choose": choose}))  # told before a model is built
        model, args, kwargs = _built(target)
        with _environment("ATTN_PASS_CHOOSE", choose):  # explain's own keywords are the model's
            report = importlib.import_module("attn_pass").explain(model, *args, **kwargs)
    except AttnPassError as error:
        _fail(str(error))
    typer.echo(report.to_json() if as_json else str(report))


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
    typer.echo(json.dumps(versions) if as_json else "\n".join(f"{name} {found}" for name, found in versions.items()))


def main() -> None:
    """Run the command line; exits with 2, after one sentence on stderr, when the input is no use."""
    app()


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
    except Exception as error:
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
    return made[0], tuple(args), dict(kwargs)


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
    except Exception as error:
        _fail(f"{where} cannot be imported: {type(error).__name__}: {error}")
    return module


@contextmanager
def _environment(variable: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for a while; None changes nothing."""
    before = os.environ.get(variable)
    try:
        if value is not None:
            os.environ[variable] = value
        yield
    finally:
        if value is not None:
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"attn-pass: {sentence}", err=True)
    raise typer.Exit(_BAD_INPUT)

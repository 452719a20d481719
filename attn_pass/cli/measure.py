"""`attn-pass bench` and `attn-pass check`: a model measured, and any backend's attention compared with its meaning."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from attn_pass.cli.failing import FAILED, NOTHING_RAN, Traceback, fail, failing
from attn_pass.cli.given import Option, checked_options
from attn_pass.cli.programs import built, in_mode

Target = Annotated[
    str,
    typer.Argument(
        metavar="PATH:FUNCTION",
        help="A function, as file.py:function or module:function, that takes nothing and returns (model, args) or "
        "(model, args, kwargs).",
    ),
]
Training = Annotated[
    bool | None,
    typer.Option(
        "--training/--inference",
        help="Run forward and backward, or inference without gradients. Default: as the function leaves the model.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON instead of a table.")]


def bench(
    target: Target,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Also draw the times: OUT.png, OUT.svg or OUT.pdf.")
    ] = None,
    training: Training = None,
    package: Annotated[bool, typer.Option("--package", help="Measure AOTInductor packages too.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate time to measure, after compiling.")] = 20.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads. Default: torch's own.")] = None,
    option: Option = None,
    show_traceback: Traceback = False,
) -> None:
    """Measure a model: eagerly, with stock torch.compile, and with the pass.

    Exits with status 1 if a result is wrong, or if the pass failed.
    """
    if plot is not None and not plot.resolve().parent.is_dir():
        fail(f"--plot {plot}: there is no folder {plot.resolve().parent}; create it first")
    with failing(show_traceback):
        import torch

        options = checked_options(option)
        if threads is not None:
            torch.set_num_threads(threads)
        model, args, kwargs = built(target)
        settings = {
            "attn_pass_options": options,
            "attn_pass_training": training,
            "attn_pass_package": package,
            "attn_pass_seconds": seconds,
        }
        with in_mode(model, training):
            result = importlib.import_module("attn_pass").benchmark(model, *args, **settings, **kwargs)
    typer.echo(result.to_json() if as_json else str(result))
    if plot is not None:
        try:
            result.plot(plot)
        except (ImportError, OSError, ValueError) as error:
            fail(f"--plot {plot}: {type(error).__name__}: {error}", error)
    if result.speedup is None or any(row.verdict == "WRONG" for row in result.rows):
        raise typer.Exit(FAILED)


def check(
    target: Target,
    backend: Annotated[str, typer.Option(help="A backend of torch.compile, by name.")] = "inductor",
    as_json: Json = False,
    training: Training = None,
    show_traceback: Traceback = False,
) -> None:
    """Compare what a backend compiles of each attention, and of the whole model, with what it means in float64.

    Exits with status 1 if anything is wrong or the backend fails, and with status 3 if nothing was checked: no
    attention site was run.
    """
    with failing(show_traceback):
        importlib.import_module("attn_pass.entries.backends").backend_named(backend)  # before a model is built
        model, args, kwargs = built(target)
        with in_mode(model, training):
            settings = {"backend": backend, "attn_pass_training": training}
            result = importlib.import_module("attn_pass").check(model, *args, **settings, **kwargs)
    typer.echo(result.to_json() if as_json else str(result))
    if result.at_fault:
        raise typer.Exit(FAILED)
    if result.nothing_ran:
        typer.echo(f"attn-pass: {result.nothing_ran}", err=True)
        raise typer.Exit(NOTHING_RAN)

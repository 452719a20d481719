"""`python -m bench NAME`: the benchmarks by name."""

from __future__ import annotations

import typer

from bench import (
    constants,
    decisions,
    dynamic_query,
    lists,
    models,
    never_slower,
    page,
    pass_time,
    peers_suite,
    training,
    verify_time,
)
from bench.census.__main__ import compile_time_command
from bench.gpu import __main__ as gpu
from bench.kernel import __main__ as kernel
from bench.seeds import __main__ as seeds

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
for name, function in {
    "seeds": seeds.main,
    "cases": lists.cases_command,
    "variants": lists.variants_command,
    "forms": lists.forms_command,
    "models": models.main,
    "peers": lists.peers_command,
    "peers-suite": peers_suite.main,
    "dynamic-query": dynamic_query.main,
    "decisions": decisions.main,
    "never-slower": never_slower.main,
    "kernel": kernel.main,
    "training": training.main,
    "compile-time": compile_time_command,
    "pass-time": pass_time.main,
    "verify-time": verify_time.main,
    "constants": constants.main,
    "page": page.main,
}.items():
    app.command(name)(function)


@app.command(
    "gpu",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _gpu(context: typer.Context) -> None:
    """Everything a GPU has to say, in one run (its own --help says more)."""
    raise typer.Exit(gpu.main(context.args))


if __name__ == "__main__":
    app()

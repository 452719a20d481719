"""`python -m bench NAME`: the benchmarks by name."""

from __future__ import annotations

import typer

from bench import constants, dynamic_query, forms, masks, models, never_slower, pass_time, s4, training
from bench.gpu import __main__ as gpu

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
for name, module in {
    "constants": constants,
    "dynamic-query": dynamic_query,
    "forms": forms,
    "masks": masks,
    "models": models,
    "never-slower": never_slower,
    "pass-time": pass_time,
    "s4": s4,
    "training": training,
}.items():
    app.command(name)(module.main)


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

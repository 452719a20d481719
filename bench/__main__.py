"""`python -m bench NAME`: the benchmarks by name."""

from __future__ import annotations

import typer

from bench import results_page
from bench.gpu import __main__ as gpu
from bench.suites import (
    breakdown,
    commands,
    compile_time,
    constants,
    decisions,
    decode,
    demo,
    dynamic_query,
    linear_layers,
    never_slower,
    others,
    padding,
    pass_time,
    peers_suite,
    rotary_cost,
    verify_time,
)
from bench.suites.census import command as census
from bench.suites.kernel import command as kernel
from bench.suites.kernel import mask_cost
from bench.suites.seeds import command as seeds
from bench.suites.seeds import xla

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
for name, function in {
    "seeds": seeds.main,
    **commands.COMMANDS,
    "breakdown": breakdown.main,
    "peers-suite": peers_suite.main,
    "dynamic-query": dynamic_query.main,
    "decisions": decisions.main,
    "never-slower": never_slower.main,
    "others": others.main,
    "kernel": kernel.main,
    "mask-cost": mask_cost.main,
    "decode": decode.main,
    "padding": padding.main,
    "compile-time": compile_time.main,
    "pass-time": pass_time.main,
    "verify-time": verify_time.main,
    "rotary-cost": rotary_cost.main,
    "linear-layers": linear_layers.main,
    "constants": constants.main,
    "page": results_page.main,
    "demo": demo.main,
    "xla": xla.main,
}.items():
    app.command(name)(function)
app.add_typer(census.app, name="census")


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

"""What compilers make of attention, checked: `python -m bench others [--json FILE]`.

Every program of `tests/integration/miscompiled.py` goes through `attn_pass.check` with stock Inductor, up to the code
that it would generate: its graphs are run as they are, so that a difference is one of its patterns', not of rounding.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import attn_pass
from bench.harness.command import Json, Only, finish, started
from bench.harness.console import plain_console, teller
from bench.harness.document import Column, Table

TESTS = Path(__file__).parents[2] / "tests"
COLUMNS = (
    Column("program", "name"),
    Column("sites right", "right"),
    Column("sites wrong", "wrong"),
    Column("not run", "not_run"),
    Column("whole program", "whole"),
    Column("relative error", "error", ".1e"),
    Column("what it is", "what"),
)


def stock(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stock Inductor as a backend, up to the code it would generate."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return make_boxed_func(graph.forward)

    made: Callable[..., Any] = compile_fx(gm, list(example_inputs), inner_compile=as_it_is)
    return made


def row(name: str, program: Any) -> dict[str, Any]:
    """One program, checked."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        inputs = program.inputs(torch.float32)
        result = attn_pass.check(program.function, *inputs, backend=stock, attn_pass_progress=False)
    verdicts = [site.verdict for site in result.sites]
    what = "; ".join(dict.fromkeys(f"{s.mask}, {'x'.join(s.shapes[:1])}" for s in result.sites if s.shapes))
    return {
        "name": name,
        "right": verdicts.count("right"),
        "wrong": verdicts.count("WRONG"),
        "not_run": verdicts.count("not run"),
        "whole": result.whole,
        "error": None if result.whole_error == math.inf else result.whole_error,
        "what": what or "a near miss",
        "status": "ok",
    }


def main(json_file: Json = None, only: Only = "") -> None:
    """Check what stock Inductor makes of programs that look like its attention patterns."""
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "integration")]
    from miscompiled import PROGRAMS

    console = plain_console()
    tell = teller(console)
    made = started("What is wrong elsewhere: stock Inductor", threads=torch.get_num_threads())
    rows: list[dict[str, Any]] = []
    for name, program in PROGRAMS.items():
        if only in name:
            rows.append(row(name, program))
            tell(f"{name}: {rows[-1]['whole']}")
    silent, failed = (sum(r["whole"] == verdict for r in rows) for verdict in ("WRONG", "not run"))
    notes = [
        f"in float32, {silent} of {len(rows)} programs give a wrong result without a word, {failed} do not compile",
        "no error: the result has another shape than the program's",
        "each program is a few lines, in `tests/integration/miscompiled.py`; with the pass all of them are right "
        "(`tests/integration/test_miscompiles.py`)",
        "a near miss is no attention: it only looks like one of the patterns, and only the whole program is compared",
    ]
    made.tables.append(Table("Programs that look like attention", COLUMNS, rows, notes))
    finish(console, made, json_file)

"""The demonstration: real architectures explained, rewritten and checked, then field report S4 measured.

    python -m bench demo [--only NAME ...] [--no-s4] [--rounds N]

Of each model it prints what `attn_pass.explain` finds, then runs the rewritten graphs (without code generation, and
with the best fused target that accepts at every site) and compares every output with eager in the same dtype. The
exit status is 1 if an answer is off by more than the tolerance, or a model fails.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.rule import Rule

import attn_pass
from attn_pass.measuring.timing import relative_error, why
from bench.harness import floors, variants
from bench.harness.command import started
from bench.harness.console import plain_console, show_table, teller
from bench.harness.document import STANDARD, Column, Row, Table
from bench.harness.measure import run
from bench.harness.programs import Setting
from bench.suites.seeds import s4
from bench.suites.zoo import ARCHITECTURES, Architecture

# Largest difference from eager that counts as equal, relative to the largest value of that output. Fused kernels sum in
# another order, and the difference grows through the layers above.
TOLERANCE = 2e-4
COLUMNS = (
    Column("model", "model"),
    Column("rewritten to", "took"),
    Column("left", "left"),
    Column("error", "error", ".1e"),
    Column("verdict", "verdict"),
    Column("seconds", "seconds", ".1f"),
)


class Progress:
    """Says what is being done: a spinner where there is a terminal, and a line with both clocks when it is done."""

    def __init__(self, console: Console) -> None:
        self.console, self.tell = console, teller(console)

    def show(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(doing):
            yield
        self.tell(f"{doing}: {time.perf_counter() - start:.1f} s")


def try_architecture(architecture: Architecture, progress: Progress) -> Row:
    """Build, explain, rewrite, run and compare one model."""
    name, start = architecture.name, time.perf_counter()
    row: Row = {"model": name, "way": "rewritten", "program": name, "status": "ok"}
    try:
        with progress.step(f"{name}: building"):
            module, inputs = architecture.build()
        parameters = sum(parameter.numel() for parameter in module.parameters())
        progress.tell(f"{name}: {architecture.note}; {parameters / 1e6:.1f} M parameters, random")
        with torch.no_grad():
            with progress.step(f"{name}: explaining"):
                progress.show(str(attn_pass.explain(module, **inputs)))
            want = module(**inputs)
            torch._dynamo.reset()
            with progress.step(f"{name}: rewriting and running"), attn_pass.record() as record:
                # choose="fused": the check is of the rewrites, also of those that a model this small would not pay for.
                got = torch.compile(module, backend=attn_pass.wrap("aot_eager", choose="fused"))(**inputs)
        targets = Counter(str(site.target) for site in record.rewritten)
        row["took"] = ", ".join(f"{count} x {target}" for target, count in targets.most_common())
        row |= {"left": len(record.left), "error": relative_error(got, want)}
        row["verdict"] = "equal to eager" if row["error"] <= TOLERANCE else "WRONG"
    except Exception as error:
        # One model that fails must not hide the others; it fails the demo in the end.
        row |= {"status": "failed", "error_text": why(error, 120)}
        progress.show(traceback.format_exc(limit=-4))
    finally:
        torch._dynamo.reset()
        gc.collect()
        row["seconds"] = time.perf_counter() - start
    progress.tell(f"{name}: {row.get('verdict', 'FAILED')}")
    return row


def seed_s4(progress: Progress, setting: Setting) -> list[Row]:
    """Compile S4 stock, decomposed and with the pass; print the sites, the times and the ratios."""
    progress.console.print(Rule("field report S4: AOTInductor, query length 1, one shared K and V"))
    rates = floors.rates(setting.device)
    rows = run(s4.__name__, s4.programs(setting)[:1], variants.PACKAGED, setting, rates, progress.tell)
    for row in rows:
        if row["way"] == variants.PACKAGE_PASS and row["status"] == "ok":
            progress.show(row["report"])
    show_table(progress.console, Table(s4.TITLE, STANDARD, rows))
    return rows


def chosen(names: Sequence[str]) -> list[Architecture]:
    known = {name.lower(): architecture for name, architecture in ARCHITECTURES.items()}
    if unknown := [name for name in names if name.lower() not in known]:
        raise typer.BadParameter(f"no model is called {', '.join(unknown)}; there are {', '.join(ARCHITECTURES)}")
    return [known[name.lower()] for name in names] or list(known.values())


def main(
    only: Annotated[list[str] | None, typer.Option(help="Run only this architecture; may be repeated.")] = None,
    with_s4: Annotated[bool, typer.Option("--s4/--no-s4", help="Measure field report S4 at the end.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per S4 candidate.")] = 9,
) -> None:
    """Explain, rewrite and check real architectures, then compile field report S4 with and without the pass."""
    console = plain_console()
    progress = Progress(console)
    setting = Setting(threads=torch.get_num_threads(), rounds=rounds, quick=True)
    progress.show(started("Demo", threads=setting.threads).document.conditions())
    rows = []
    for architecture in chosen(only or []):
        console.print(Rule(architecture.name))
        rows.append(try_architecture(architecture, progress))
    title = f"Run without Inductor (aot_eager, choose='fused'), compared with eager: tolerance {TOLERANCE:.0e}"
    show_table(console, Table(title, COLUMNS, rows))
    rows += seed_s4(progress, setting) if with_s4 else []
    wrong = [f"{r['program']}: {r['way']}" for r in rows if r["status"] != "ok" or r.get("verdict") == "WRONG"]
    progress.tell(f"NOT RIGHT: {', '.join(wrong)}" if wrong else "everything computed is right")
    if wrong:
        raise typer.Exit(1)

"""The main job on real input: explain, rewrite and check real architectures, then compile seed S4 both ways.

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
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from torch.utils import _pytree as pytree

import attn_pass
from bench.harness import floors, timing, variants
from bench.harness.console import drawn, plain_console
from bench.harness.document import STANDARD, Row
from bench.harness.document import Table as Rows
from bench.harness.measure import run
from bench.harness.programs import Setting
from bench.suites.architectures import ARCHITECTURES, Architecture
from bench.suites.seeds import s4

# Largest difference from eager that counts as equal, relative to the largest value of that output. Fused kernels sum in
# another order, and the difference grows through the layers above.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass
class Verdict:
    """What became of one model."""

    name: str
    rewritten: int = 0
    left: int = 0
    targets: Counter[str] = field(default_factory=Counter)
    error: float = float("nan")
    tolerance: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def holds(self) -> bool:
        # A NaN is not below the tolerance either.
        return not self.failure and self.error <= self.tolerance


class Progress:
    """Says what is being done: a spinner where there is a terminal, and a line with both clocks when it is done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start = time.perf_counter()

    def tell(self, line: str) -> None:
        self.console.print(f"[{time.perf_counter() - self.start:6.1f} s] {line}", markup=False, highlight=False)

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(doing):
            yield
        self.tell(f"{doing}: {time.perf_counter() - start:.1f} s")


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Every tensor of a nested output, in order; model outputs of both libraries are known to pytree."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def compare(got: Any, want: Any) -> tuple[float, float]:
    """The error that uses most of its tolerance, and that tolerance.

    Infinite if the outputs differ in number, shape or dtype, or if NaN and infinity are not where eager has them.
    """
    pairs = list(zip(tensors(got), tensors(want), strict=False))
    if not pairs or len(tensors(got)) != len(tensors(want)):
        return float("inf"), 0.0
    found = [(_difference(*pair), TOLERANCE.get(pair[1].dtype, 0.0)) for pair in pairs]
    return max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else float("inf") * (pair[0] > 0))


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    a, b = got.double(), want.double()
    known = b.isfinite()
    # Outside the finite values the two must agree exactly, NaN included.
    if not torch.equal(a[~known].nan_to_num(nan=0.5), b[~known].nan_to_num(nan=0.5)) or not a[known].isfinite().all():
        return float("inf")
    if not known.any():
        return 0.0
    return ((a - b)[known].abs().max() / b[known].abs().max().clamp_min(1e-12)).item()


def try_architecture(architecture: Architecture, progress: Progress) -> Verdict:
    """Build, explain, rewrite, run and compare one model."""
    verdict = Verdict(architecture.name)
    start = time.perf_counter()
    try:
        with progress.step(f"{architecture.name}: building"):
            module, args, kwargs = architecture.build()
        parameters = sum(parameter.numel() for parameter in module.parameters())
        progress.tell(f"{architecture.name}: {architecture.note}; {parameters / 1e6:.1f} M parameters, random")
        with torch.no_grad():
            with progress.step(f"{architecture.name}: explaining"):
                report = attn_pass.explain(module, *args, **kwargs)
            progress.console.print(str(report), markup=False, highlight=False, soft_wrap=True)
            want = module(*args, **kwargs)
            torch._dynamo.reset()
            with progress.step(f"{architecture.name}: rewriting and running"), attn_pass.record() as record:
                # choose="fused": the check is of the rewrites, also of those that a model this small would not pay for.
                got = torch.compile(module, backend=attn_pass.wrap("aot_eager", choose="fused"))(*args, **kwargs)
        verdict.rewritten, verdict.left = len(record.rewritten), len(record.left)
        verdict.targets.update(str(site.target) for site in record.rewritten)
        verdict.error, verdict.tolerance = compare(got, want)
    except Exception as error:
        # One model that fails must not hide the others; it fails the demo in the end.
        verdict.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        progress.console.print(traceback.format_exc(limit=-4), markup=False, highlight=False, soft_wrap=True)
    finally:
        torch._dynamo.reset()
        gc.collect()
        verdict.seconds = time.perf_counter() - start
    progress.tell(f"{architecture.name}: {outcome(verdict)}")
    return verdict


def outcome(verdict: Verdict) -> str:
    if verdict.failure:
        return f"FAILED: {verdict.failure}"
    word = "equal to eager" if verdict.holds else "WRONG"
    return f"{word}, largest relative error {verdict.error:.1e} (tolerance {verdict.tolerance:.0e})"


def summary(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Rewritten models against eager")
    for column in ("model", "rewritten to", "verdict"):
        table.add_column(column)
    for column in ("rewritten", "left", "seconds"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        targets = ", ".join(f"{count} x {target}" for target, count in verdict.targets.most_common())
        counts = (str(verdict.rewritten), str(verdict.left), f"{verdict.seconds:.1f}")
        table.add_row(verdict.name, targets or "-", outcome(verdict), *counts)
    return table


def seed_s4(progress: Progress, setting: Setting) -> list[Row]:
    """Compile S4 stock, decomposed and with the pass; print the sites, the times and the ratios."""
    progress.console.print(Rule("seed S4: AOTInductor, query length 1, one shared K and V"))
    rates = floors.rates(setting.device)
    rows = run(s4.__name__, s4.programs(setting)[:1], variants.PACKAGED, setting, rates, progress.tell)
    found = {row["way"]: row for row in rows if row["status"] == "ok"}
    if (passed := found.get(variants.PACKAGE_PASS)) is not None:
        progress.console.print(passed["report"], markup=False, highlight=False, soft_wrap=True)
    progress.console.print(drawn(Rows(s4.TITLE, STANDARD, rows)))
    for text, slower, faster in (
        ("stock / attn_pass", variants.PACKAGE, variants.PACKAGE_PASS),
        ("decomposed / attn_pass", variants.DECOMPOSED, variants.PACKAGE_PASS),
        ("A/A, stock / stock: the noise of this run", variants.PACKAGE, variants.PACKAGE_AGAIN),
    ):
        if slower in found and faster in found:
            ratio = found[slower]["median_us"] / found[faster]["median_us"]
            progress.console.print(f"  {ratio:5.2f}  {text}", markup=False, highlight=False)
    return rows


def chosen(names: Sequence[str]) -> list[Architecture]:
    known = {architecture.name.lower(): architecture for architecture in ARCHITECTURES}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        listed = ", ".join(architecture.name for architecture in ARCHITECTURES)
        raise typer.BadParameter(f"no architecture is called {', '.join(unknown)}; there are {listed}")
    return [known[name.lower()] for name in names] or list(ARCHITECTURES)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only this architecture; may be given again.")] = None,
    with_s4: Annotated[bool, typer.Option("--s4/--no-s4", help="Measure seed S4 at the end.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of every S4 candidate.")] = 9,
) -> None:
    """Explain, rewrite and check real architectures, then compile seed S4 with and without the pass."""
    console = plain_console()
    progress = Progress(console)
    versions = ", ".join(f"{name} {version}" for name, version in timing.versions().items())
    progress.tell(f"{timing.device_name('cpu')}; {versions}; {torch.get_num_threads()} threads")

    verdicts = []
    for architecture in chosen(only or []):
        console.print(Rule(architecture.name))
        verdicts.append(try_architecture(architecture, progress))
    console.print(summary(verdicts))
    setting = Setting(threads=torch.get_num_threads(), rounds=rounds, quick=True)
    rows = seed_s4(progress, setting) if with_s4 else []

    wrong = [verdict.name for verdict in verdicts if not verdict.holds]
    wrong += [f"S4: {row['way']}" for row in rows if row["status"] != "ok" or row.get("verdict") == "WRONG"]
    progress.tell(f"NOT RIGHT: {', '.join(wrong)}" if wrong else "everything computed is right")
    if wrong:
        raise typer.Exit(1)

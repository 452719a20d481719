"""Training steps, the pass against stock Inductor: `python -m bench training [--json FILE] [--rounds N]`.

A step is a forward and a backward with gradients of every input. One interleaved run a form: eager, stock twice (the
A/A column is the noise), and the pass with ``choose="fused"``, which takes the fused form even where the planner would
leave the site; the last column says what the planner does by itself. Memory is what one step adds to the process at
its peak.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console

import attn_pass
from bench.harness.document import markdown_table
from bench.harness.environment import command, device_name, versions
from bench.harness.timing import Candidate, compiled, peak_bytes, relative_error

Tensors = tuple[torch.Tensor, ...]
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Form:
    """A program, the shape (B, H, L, D) of its operands, and what else it takes."""

    name: str
    run: Callable[..., torch.Tensor]
    shape: tuple[int, int, int, int]
    rest: Callable[[tuple[int, int, int, int]], Tensors] = lambda shape: ()

    def inputs(self) -> Tensors:
        """Operands that want gradients, and the rest."""
        return (*(torch.randn(self.shape, requires_grad=True) for _ in range(3)), *self.rest(self.shape))


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    for matrix in added:
        scores = scores + matrix
    return torch.softmax(scores, -1) @ v


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).masked_fill(~keep, LOWEST), -1) @ v


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def padding(shape: tuple[int, int, int, int]) -> Tensors:
    """An additive mask that cuts a quarter of the last sequence, and all of none."""
    mask = torch.zeros(shape[0], 1, 1, shape[2])
    mask[-1, ..., -shape[2] // 4 :] = LOWEST
    return (mask,)


def learned(shape: tuple[int, int, int, int]) -> Tensors:
    """A bias of every head that wants a gradient."""
    return (torch.randn(1, shape[1], shape[2], shape[2], requires_grad=True),)


FORMS = (
    Form("by hand", by_hand, (4, 8, 512, 64)),
    Form("causal by hand", causal, (4, 8, 512, 64)),
    Form("call", call, (4, 8, 512, 64)),
    Form("padded (BERT)", by_hand, (4, 8, 512, 64), padding),
    Form("padded, long", by_hand, (1, 8, 2048, 64), padding),
    Form("learned bias (T5)", by_hand, (4, 8, 512, 64), learned),
    Form("learned bias, long", by_hand, (1, 8, 2048, 64), learned),
    Form("learned bias of windows (Swin)", by_hand, (64, 4, 49, 32), learned),
)


def step(run: Callable[..., torch.Tensor], inputs: Tensors, seed: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of everything that wants one."""
    wanting = [t for t in inputs if t.requires_grad]
    return list(torch.autograd.grad(run(*inputs), wanting, seed))


def cold(form: Form, **settings: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return compiled(form.run, dynamic=None, **settings)


def measure(form: Form, rounds: int) -> dict[str, Any]:
    """One interleaved run of one form."""
    torch.manual_seed(0)
    inputs, seed = form.inputs(), torch.randn(form.shape)
    runs: dict[str, Callable[..., torch.Tensor]] = {"eager": form.run}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name, settings in (("stock", {}), ("stock again", {})):
            runs[name] = cold(form, **settings)
            step(runs[name], inputs, seed)
        with attn_pass.record() as report:
            runs["attn_pass"] = cold(form, backend=attn_pass.backend, options={"choose": "fused"})
            step(runs["attn_pass"], inputs, seed)
        with attn_pass.record() as planned:
            step(cold(form, backend=attn_pass.wrap("aot_eager")), inputs, seed)
    wide = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in inputs)
    exact = step(form.run, wide, seed.double())
    error = {n: max(map(relative_error, step(r, inputs, seed), exact)) for n, r in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            step(run, inputs, seed)
            samples[name].append((time.perf_counter() - began) * 1e3)
    memory = {}
    for name, run in runs.items():
        candidate = Candidate(name, lambda *x, run=run: step(run, x, seed), 0.0, None)  # type: ignore[arg-type]
        memory[name] = peak_bytes(candidate, inputs)  # type: ignore[arg-type]
    (site,) = report.sites
    return {
        "form": form.name,
        "shape": form.shape,
        "median_ms": {n: statistics.median(v) for n, v in samples.items()},
        "peak_bytes": memory,
        "error": error,
        "chose": site.target or "left",
        "planner": planned.sites[0].target or "left",
    }


def markdown(rows: list[dict[str, Any]], rounds: int) -> str:
    """The table as committed in docs/results."""
    lines = [
        f"Device: {device_name('cpu')}; {', '.join(f'{n} {v}' for n, v in versions().items())}; {rounds} interleaved "
        f"rounds; `{command()}`. Error: largest of all gradients against float64, relative. A/A: stock against itself.",
        "",
        *markdown_table(COLUMNS, [_cells(row) for row in rows]),
    ]
    return "\n".join(lines) + "\n"


COLUMNS = (
    *("form", "shape", "eager ms", "stock ms", "pass ms", "stock / pass", "A/A", "stock MiB", "pass MiB"),
    *("error, stock", "error, pass", "fused form", "the planner takes"),
)


def _cells(row: dict[str, Any]) -> list[str]:
    ms, mib, error = row["median_ms"], row["peak_bytes"], row["error"]
    return [
        row["form"],
        "x".join(map(str, row["shape"])),
        *(f"{ms[n]:.1f}" for n in ("eager", "stock", "attn_pass")),
        f"{ms['stock'] / ms['attn_pass']:.2f}",
        f"{ms['stock'] / ms['stock again']:.2f}",
        *("-" if mib[n] is None else f"{mib[n] / 2**20:.0f}" for n in ("stock", "attn_pass")),
        *(f"{error[n]:.0e}" for n in ("stock", "attn_pass")),
        row["chose"],
        row["planner"],
    ]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write FILE and FILE with .md.")] = None,
    rounds: int = 15,
    only: str = "",
    quick: Annotated[bool, typer.Option("--quick", help="One form, three rounds.")] = False,
) -> None:
    """Measure training steps of every form, forward and backward."""
    torch.set_num_threads(2)
    console = Console(width=200)
    rows, rounds = [], min(rounds, 3) if quick else rounds
    for form in FORMS[:1] if quick else FORMS:
        if only in form.name:
            rows.append(measure(form, rounds))
            ms = rows[-1]["median_ms"]
            console.print(f"{form.name}: {ms['stock'] / ms['attn_pass']:.2f} ({rows[-1]['chose']})")
    text = markdown(rows, rounds)
    console.print(text)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
        json_file.with_suffix(".md").write_text("# Training steps on the CPU\n\n" + text)

"""`python -m bench never-slower`: a grid of attention shapes, each against stock Inductor and against every offer.

One thread unless asked for more, a fresh process a shape, blocks of calls in turns, with stock timed twice (A/A). A
shape is *slower* when the pass takes over 1.10 of stock's time, beyond what stock differs from itself, in the first run
and in three more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console

import attn_pass
from attn_pass.errors import RewriteError
from attn_pass.options import LEAVE
from attn_pass.planner.choose import label
from attn_pass.tuning.worker import backend_for
from bench.harness.document import markdown_table
from bench.harness.environment import command, device_name, versions
from bench.harness.timing import compiled, in_turns, percentile_10

ROUNDS = 15
_BLOCK = 0.01  # seconds a candidate runs before the next one's turn
_SLOWER = 1.10
_RUNS = 3  # more runs of a shape that looks slower
_NEAR = 1.15  # of the best offer's time


@dataclass(frozen=True)
class Shape:
    """One program of the grid: (batch, heads, kv heads, queries, keys, head dim), spelling, mask, dtype."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    by_hand: bool
    masked: bool
    dtype: str

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        how = f"{'by hand' if self.by_hand else 'call'}{', mask' if self.masked else ''}, {self.dtype}"
        return f"({self.batch}, {heads}, {self.q_len} x {self.kv_len}, {self.dim}) {how}"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Query, key, value (B, H, L, D), and the mask."""
        dtype = getattr(torch, self.dtype)
        q = torch.randn(self.batch, self.heads, self.q_len, self.dim, dtype=dtype)
        k, v = (torch.randn(self.batch, self.kv_heads, self.kv_len, self.dim, dtype=dtype) for _ in range(2))
        if not self.masked:
            return q, k, v
        if self.by_hand:
            return q, k, v, torch.randn(self.batch, 1, 1, self.kv_len, dtype=dtype)
        return q, k, v, torch.rand(1, 1, self.q_len, self.kv_len) < 0.9


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.size(1) != k.size(1))


def program(shape: Shape) -> Callable[..., torch.Tensor]:
    """The function whose attention has this shape."""
    return _by_hand if shape.by_hand else _call


# (batch, heads, kv heads, queries, keys, head dim). Each is run four times: by hand and as a call, with and without a
# mask, in three dtypes by turns.
SIZES: tuple[tuple[int, int, int, int, int, int], ...] = (
    (1, 1, 1, 1, 1, 16),
    (1, 1, 1, 8, 8, 16),
    (1, 1, 1, 2048, 2048, 64),
    (1, 2, 2, 7, 13, 40),
    (1, 4, 4, 64, 64, 32),
    (1, 4, 1, 128, 128, 64),
    (1, 8, 8, 1, 128, 64),
    (1, 8, 8, 1, 2048, 64),
    (1, 8, 8, 16, 2048, 64),
    (1, 8, 8, 512, 512, 64),
    (1, 8, 8, 1024, 1024, 64),
    (1, 8, 8, 2048, 64, 64),
    (1, 8, 2, 256, 1024, 128),
    (1, 12, 12, 197, 197, 64),
    (1, 16, 16, 128, 128, 256),
    (1, 16, 2, 1, 2048, 128),
    (1, 32, 32, 256, 256, 80),
    (1, 32, 8, 1, 512, 128),
    (1, 32, 8, 512, 512, 64),
    (1, 32, 4, 1, 2048, 64),
    (2, 1, 1, 1024, 1024, 256),
    (2, 8, 8, 50, 50, 32),
    (2, 8, 8, 300, 300, 16),
    (2, 8, 8, 1024, 77, 40),
    (2, 16, 16, 1, 1000, 72),
    (4, 4, 4, 33, 65, 96),
    (4, 8, 8, 256, 256, 64),
    (4, 12, 12, 128, 128, 64),
    (4, 32, 8, 1, 1024, 64),
    (8, 2, 2, 1, 16, 16),
    (8, 8, 8, 64, 64, 64),
    (8, 8, 1, 4, 512, 64),
    (8, 12, 12, 197, 197, 64),
    (8, 16, 16, 16, 16, 32),
    (16, 4, 4, 49, 49, 32),
    (16, 8, 8, 1, 256, 64),
    (16, 8, 4, 100, 100, 64),
    (32, 4, 4, 128, 32, 64),
    (64, 3, 3, 49, 49, 32),
    (64, 8, 8, 1, 64, 32),
    (64, 12, 12, 32, 32, 64),
)
_DTYPES = ("float32", "bfloat16", "float32", "float16")


def grid() -> list[Shape]:
    """Every size in every spelling."""
    return [
        Shape(*size, by_hand=form % 2 == 0, masked=form in (1, 2), dtype=_DTYPES[(number + form) % 4])
        for number, size in enumerate(SIZES)
        for form in range(4)
    ]


def _quick(shapes: list[Shape]) -> list[Shape]:
    """Eight small ones of every kind."""
    return [s for s in shapes if s.batch * s.heads * s.q_len * s.kv_len < 300_000][::8][:8]


def time_shape(shape: Shape, tune: bool, threads: int) -> dict[str, Any]:
    """Compiles and times one shape in this process, microseconds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = shape.inputs()
    function = program(shape)
    options = {"tune": True} if tune else {}
    with torch.no_grad(), attn_pass.record() as report:
        began = time.perf_counter()
        candidates = {"stock": compiled(function)}
        candidates["stock"](*inputs)
        candidates["stock again"] = compiled(function)
        candidates["pass"] = compiled(function, backend=attn_pass.backend, options=options)
        candidates["pass"](*inputs)
        site = report.sites[0]
        chosen = label_of(site)
        for label in site.predicted_us:
            # A call that is left is stock's; a site written by hand is not, since stock's own patterns are kept off.
            if label != chosen and (label != LEAVE or shape.by_hand):
                candidates[label] = compiled(function, backend=backend_for(label, attn_pass.Options()))
        for name, run in list(candidates.items()):
            try:
                run(*inputs)
            except (torch._dynamo.exc.BackendCompilerFailed, RewriteError):
                del candidates[name]
        samples = in_turns(candidates, inputs, ROUNDS, seconds=_BLOCK)
    return {
        "shape": asdict(shape),
        "name": str(shape),
        "chosen": chosen,
        "reason": site.reason,
        "predicted_us": site.predicted_us,
        "measured_us": site.measured_us,
        "median_us": {name: sorted(s)[len(s) // 2] for name, s in samples.items()},
        "p10_us": {name: percentile_10(s) for name, s in samples.items()},
        "seconds": time.perf_counter() - began,
    }


def predicted_choice(shape: Shape, threads: int) -> str:
    """The form the shape is given without measuring."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    with torch.no_grad():
        return label_of(attn_pass.explain(program(shape), *shape.inputs()).sites[0])


def label_of(site: attn_pass.SiteReport) -> str:
    """The form a site was given, as the planner calls it."""
    return LEAVE if site.target is None else label(site.target, " + ".join(site.poor_cases))


# ------------------------------------------------------------ the whole grid


def ratio(row: dict[str, Any]) -> float:
    """The pass's time over stock's."""
    return float(row["median_us"]["pass"] / row["median_us"]["stock"])


def a_a(row: dict[str, Any]) -> float:
    """How much stock differs from itself, as a factor above 1."""
    factor = float(row["median_us"]["stock again"] / row["median_us"]["stock"])
    return max(factor, 1 / factor)


def looks_slower(row: dict[str, Any]) -> bool:
    """Over 1.10 of stock's time, and more than stock differs from itself."""
    return ratio(row) > max(_SLOWER, a_a(row))


def of_best(row: dict[str, Any]) -> float:
    """The pass's time over that of the fastest form."""
    return float(row["median_us"]["pass"] / min(row["median_us"].values()))


def _in_fresh_process(number: int, tune: bool, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        line = [sys.executable, "-m", "bench", "never-slower", "--one", str(number), "--threads", str(threads)]
        line += ["--json", str(out), *(["--tune"] if tune else [])]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode != 0:
            return {"name": str(grid()[number]), "error": done.stderr.strip().splitlines()[-1][:300]}
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def measure(number: int, tune: bool, threads: int) -> dict[str, Any]:
    """One shape of the grid; one that looks slower is run three times more, and is slower if it is in all of them."""
    row = _in_fresh_process(number, tune, threads)
    row["number"] = number
    if "error" not in row and looks_slower(row):
        row["again"] = [_in_fresh_process(number, tune, threads)["median_us"] for _ in range(_RUNS)]
        row["slower"] = all(looks_slower({"median_us": again}) for again in row["again"])
    return row


def markdown(rows: list[dict[str, Any]], tune: bool, threads: int) -> str:
    """What is committed in docs/results: the counts, then every shape."""
    good = [r for r in rows if "error" not in r]
    slower = [r for r in good if r.get("slower")]
    near = sum(of_best(r) <= _NEAR for r in good)
    gain = sorted(1 / ratio(r) for r in good)
    many = "one thread" if threads == 1 else f"{threads} threads"
    lines = [
        f"# Never slower than stock{', with tune=True' if tune else ''}{f', on {many}' if threads > 1 else ''}",
        "",
        f"Device: {device_name('cpu')}, {many}; {', '.join(f'{n} {v}' for n, v in versions().items())}; {ROUNDS} "
        f"interleaved rounds in a fresh process a shape; `{command()}`.",
        "",
        f"- {len(good)} shapes; slower: {len(slower)} ({100 * len(slower) / max(1, len(good)):.1f} %). Over stock: "
        f"median {gain[len(gain) // 2]:.2f}, least {gain[0]:.2f}, most {gain[-1]:.1f}.",
        f"- Within 15 % of the fastest form: {near} ({100 * near / max(1, len(good)):.1f} %).",
        f"- Did not run: {', '.join(r['name'] for r in rows if 'error' in r) or 'none'}.",
        "",
        *markdown_table(COLUMNS, [_cells(row) for row in good]),
    ]
    return "\n".join(lines) + "\n"


COLUMNS = ("shape", "stock us", "pass us", "stock / pass", "of 10th percentiles", "A/A", "pass / best form", "chose")


def _cells(row: dict[str, Any]) -> list[str]:
    median, p10 = row["median_us"], row["p10_us"]
    return [
        row["name"],
        *(f"{median[name]:.0f}" for name in ("stock", "pass")),
        *(f"{x:.2f}" for x in (1 / ratio(row), p10["stock"] / p10["pass"], a_a(row), of_best(row))),
        f"{row['chosen']}{' **slower**' if row.get('slower') else ''}",
    ]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write FILE, and FILE with .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Eight small shapes.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="The pass with tune=True.")] = False,
    every: Annotated[int, typer.Option(help="Only every so many shapes.")] = 1,
    only: Annotated[str, typer.Option(help="Only shapes whose names hold this.")] = "",
    rows_at_most: Annotated[
        int | None, typer.Option("--rows", help="Only shapes of at most so many query rows.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    changed: Annotated[Path | None, typer.Option(help="Keep FILE's rows but where another form is chosen now.")] = None,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure a grid of shapes: stock, stock again, the pass, and every form the pass could have taken."""
    console = Console(width=160)
    shapes = grid()
    if one is not None:
        assert json_file is not None
        json_file.write_text(json.dumps(time_shape(shapes[one], tune, threads)))
        return
    chosen = [s for s in (_quick(shapes) if quick else shapes) if only in str(s)]
    chosen = [s for s in chosen if rows_at_most is None or s.q_len <= rows_at_most][::every]
    kept = {row["name"]: row for row in json.loads(changed.read_text())} if changed is not None else {}
    rows = []
    for count, shape in enumerate(chosen, 1):
        row = kept.get(str(shape), {})
        if row.get("chosen") != predicted_choice(shape, threads):
            row = measure(shapes.index(shape), tune, threads)
        rows.append(row)
        if "error" in row:
            console.print(f"{count}/{len(chosen)} {row['name']}: {row['error']}")
            continue
        console.print(
            f"{count}/{len(chosen)} {row['name']}: {1 / ratio(row):.2f} (A/A {a_a(row):.2f}), {row['chosen']}, "
            f"{of_best(row):.2f} of the best{', SLOWER' if row.get('slower') else ''}"
        )
        if json_file is not None:
            json_file.write_text(json.dumps(rows, indent=1) + "\n")
            json_file.with_suffix(".md").write_text(markdown(rows, tune, threads))
    if rows and all("error" in row for row in rows):
        raise typer.Exit(1)
    if json_file is None and rows:
        console.print(markdown(rows, tune, threads))

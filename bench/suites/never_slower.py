"""`python -m bench never-slower`: a grid of attention shapes: stock Inductor, the pass and every offer.

One thread unless asked for more, a fresh process a shape, blocks of calls in turns, with stock timed twice (A/A). A
shape is *slower* when the pass takes over 1.10 of stock's time, beyond what stock differs from itself, in the first run
and in three more.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

import attn_pass
from attn_pass.errors import RewriteError
from attn_pass.measuring.timing import compiled, in_turns, percentile_10
from attn_pass.options import LEAVE
from attn_pass.report.units import counted
from attn_pass.tuning.worker import backend_for
from bench.harness import document
from bench.harness.command import Json, Only, Threads, named, started
from bench.harness.document import Column, Row
from bench.harness.measure import Tell, child, quiet
from bench.suites.spellings import by_hand, repeated_kv

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


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
    return (by_hand if q.size(1) == k.size(1) else repeated_kv)(q, k, v, *mask)


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


def time_shape(shape: Shape, tune: bool, threads: int) -> Iterator[Row]:
    """Compiles and times one shape in this process, microseconds."""
    quiet(threads)
    torch.manual_seed(0)
    inputs = shape.inputs()
    function = program(shape)
    options = {"tune": True} if tune else {}
    with attn_pass.record() as report:
        candidates = {"stock": compiled(function)}
        candidates["stock"](*inputs)
        candidates["stock again"] = compiled(function)
        candidates["pass"] = compiled(function, backend=attn_pass.backend, options=options)
        candidates["pass"](*inputs)
        site = report.sites[0]
        chosen = site.taken or LEAVE
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
    yield {
        "shape": asdict(shape),
        "name": str(shape),
        "way": chosen,
        "stage": chosen,
        "status": "ok",
        "chosen": chosen,
        "reason": site.reason,
        "predicted_us": site.predicted_us,
        "measured_us": site.measured_us,
        "median_us": {name: statistics.median(taken) for name, taken in samples.items()},
        "p10_us": {name: percentile_10(taken) for name, taken in samples.items()},
    }


def predicted_choice(shape: Shape, threads: int) -> str:
    """The form the shape is given without measuring."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(program(shape), *shape.inputs()).sites[0].taken or LEAVE


# ------------------------------------------------------------ the whole grid


def ratios(row: Row) -> Row:
    """The row with what its table shows: stock's time over the pass's, the A/A factor, the pass over the best form."""
    median, p10 = row["median_us"], row["p10_us"]
    again = median["stock again"] / median["stock"]
    return {
        **row,
        **{f"{name}_us": median[name] for name in ("stock", "pass")},
        "over_stock": median["stock"] / median["pass"],
        "over_stock_p10": p10["stock"] / p10["pass"],
        "a_a": max(again, 1 / again),
        "of_best": median["pass"] / min(median.values()),
    }


def looks_slower(row: Row) -> bool:
    """Over 1.10 of stock's time, and more than stock differs from itself."""
    return bool(1 / row["over_stock"] > max(_SLOWER, row["a_a"]))


def measure(shape: Shape, tune: bool, threads: int, tell: Tell) -> Row:
    """One shape of the grid; one that looks slower is run three times more, and is slower if it is in all of them."""

    def once() -> Row:
        (row,) = child(str(shape), time_shape, (shape, tune, threads), tell)
        return ratios(row) if row["status"] == "ok" else row

    row = once()
    if row["status"] == "ok" and looks_slower(row):
        more = [once() for _ in range(_RUNS)]
        row["again"] = [other.get("median_us") for other in more]
        if all(other["status"] == "ok" and looks_slower(other) for other in more):
            row["verdict"] = "slower"
    return row


COLUMNS = (
    Column("shape", "name"),
    Column("stock us", "stock_us", ".0f"),
    Column("pass us", "pass_us", ".0f"),
    Column("stock / pass", "over_stock", ".2f"),
    Column("of 10th percentiles", "over_stock_p10", ".2f"),
    Column("A/A", "a_a", ".2f"),
    Column("pass / best form", "of_best", ".2f"),
    Column("chose", "chosen"),
    Column("verdict", "verdict"),
)


def summary(rows: Sequence[Row]) -> list[str]:
    """How many are slower, what is gained, and how near the pass is to the fastest form."""
    good = [row for row in rows if row["status"] == "ok"]
    if not good:
        return []
    slower = sum(row.get("verdict") == "slower" for row in good)
    near = sum(row["of_best"] <= _NEAR for row in good)
    gain = sorted(row["over_stock"] for row in good)
    return [
        f"{len(good)} shapes; slower: {slower} ({slower / len(good):.1%}). Over stock: "
        f"median {gain[len(gain) // 2]:.2f}, least {gain[0]:.2f}, most {gain[-1]:.1f}.",
        f"Within 15 % of the fastest form: {near} ({near / len(good):.1%}).",
    ]


def _of_run(path: Path) -> dict[str, Row]:
    """The rows of an earlier run by name, each with the run that it is of."""
    before = document.read(path)
    run = f"{before.run.get('date', 'no date')}, attn_pass {before.run.get('versions', {}).get('attn_pass', '')}"
    return {row["name"]: {"kept": run, **row} for row in before.tables[0].rows if "name" in row}


def _kept(rows: Sequence[Row]) -> list[str]:
    """Which rows are of an earlier run, in which the pass chose the same form."""
    counts = Counter(row["kept"] for row in rows if row.get("kept"))
    return [f"{counted(n, 'row')} of the run of {run}, in which the same form was chosen." for run, n in counts.items()]


def main(
    json_file: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="Eight small shapes.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Run the pass with tune=True.")] = False,
    every: Annotated[int, typer.Option(help="Run only every N-th shape.")] = 1,
    only: Only = "",
    rows_at_most: Annotated[
        int | None, typer.Option("--rows", help="Run only shapes with at most this many query rows.")
    ] = None,
    threads: Threads = 1,
    changed: Annotated[
        Path | None, typer.Option(help="Keep FILE's rows, except where another form is chosen now.")
    ] = None,
) -> None:
    """Measure a grid of shapes: stock twice, the pass, and every form that the pass could have taken."""
    chosen = named(only, _quick(grid()) if quick else grid(), str)
    chosen = [s for s in chosen if rows_at_most is None or s.q_len <= rows_at_most][::every]
    kept = {} if changed is None else _of_run(changed)
    title = f"Never slower than stock{', with tune=True' if tune else ''}"
    recorder = started(title, json_file, threads=threads, rounds=ROUNDS)
    table = recorder.table("A fresh process a shape", COLUMNS)
    for count, shape in enumerate(chosen, 1):
        row = kept.get(str(shape), {})
        if row.get("chosen") != predicted_choice(shape, threads):
            row = measure(shape, tune, threads, recorder.tell)
        table.rows.append(row)
        table.notes = [*summary(table.rows), *_kept(table.rows)]
        if row["status"] == "ok":
            recorder.tell(
                f"{count}/{len(chosen)} {shape}: {row['over_stock']:.2f} (A/A {row['a_a']:.2f}), {row['chosen']}, "
                f"{row['of_best']:.2f} of the best{', SLOWER' if row.get('verdict') == 'slower' else ''}"
            )
        recorder.keep()
    recorder.finish()

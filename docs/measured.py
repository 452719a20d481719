"""The numbers of the README, from the committed runs in `docs/results`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_pass.measuring.judging import apart, verdict
from attn_pass.report.units import counted

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """One row: a program of a run, compiled stock and with the pass (`kind` is "compile" or "AOTInductor")."""

    name: str
    run: str
    program: str
    kind: str = "compile"
    short: str = ""  # in the picture


ROWS = (
    Measured(
        "one query per row, keys and values shared by 1000 rows (pytorch#151287), AOTInductor",
        "seeds-cpu",
        "q (1000, 4, 1, 32), k and v (1, 4, 2048, 32), float32",
        "AOTInductor",
        "one query, shared keys (pytorch#151287)",
    ),
    Measured(
        "the same with bfloat16 autocast",
        "seeds-cpu",
        "q (1000, 4, 1, 32), k and v (1, 4, 2048, 32), bfloat16 autocast",
        "AOTInductor",
        "the same, bfloat16 autocast",
    ),
    Measured("causal attention by hand", "variants-cpu", "causal"),
    Measured("a sliding window of 256 by hand", "variants-cpu", "sliding window 256"),
    Measured("a soft cap, causal, by hand", "variants-cpu", "soft cap, causal"),
    Measured("documents of 300, causal, by hand", "variants-cpu", "documents of 300, causal"),
    Measured("no mask, by hand", "variants-cpu", "full"),
    Measured("causal by hand, forward and backward", "training-cpu", "causal by hand, long, 1x8x2048x64"),
    Measured("a learned bias, forward and backward", "training-cpu", "learned bias, 4x8x512x64"),
    Measured("T5's encoder, padded, forward and backward", "training-cpu", "T5 encoder, padded, 4x8x512x64"),
    *(
        Measured(f"{name}{dtype}", run, f"{program}{dtype}")
        for run, dtype in (("peers-cpu", ""), ("peers-cpu-bf16", ", bfloat16"))
        for name, program in {
            "GPT-2 small, 1 x 1024 tokens": "GPT-2 small, 1 x 1024",
            "Llama, 4 layers, 1 x 2048 tokens": "Llama, 4 layers, 32/8 heads, 1 x 2048",
            "Llama, 4 layers, one token, a cache of 4096": "Llama, 4 layers, 32/8 heads, decode, 1 x 4096",
            "BERT base, 8 x 512 tokens, padded": "BERT base, 8 x 512, padded",
            "ViT-B/16, 8 images": "ViT-B/16, 8 x 197",
            "a diffusion block, 2 x 4096": "diffusion block, 2 x 4096, 77 cross",
        }.items()
    ),
)
COMMANDS = {"seeds-cpu": "python -m bench seeds --only S4", "variants-cpu": "python -m bench variants",
            "training-cpu": "python -m bench training", "peers-cpu": "python -m bench peers",
            "peers-cpu-bf16": "python -m bench peers --only bfloat16"}  # fmt: skip


def numbers() -> Iterator[str]:
    """Rows of the README's table."""
    yield "| | stock ms | attn_pass ms | speedup | command |"
    yield "|---|---|---|---|---|"
    for row in ROWS:
        stock, passed = times(row)
        link = f"[`{COMMANDS[row.run]}`](docs/results/{row.run}.md)"
        yield f"| {row.name} | {stock:,.1f} | {passed:,.1f} | {stock / passed:.2f} | {link} |"


def speedups(folder: Path = RESULTS) -> list[tuple[str, float]]:
    """The speedup over stock of every row."""
    return [(row.short or row.name, stock / passed) for row in ROWS for stock, passed in [times(row, folder)]]


def times(row: Measured, folder: Path = RESULTS) -> tuple[float, float]:
    """Median milliseconds of a call: stock's and the pass's."""
    document = json.loads((folder / f"{row.run}.json").read_text())
    rows: list[dict[str, Any]] = [r for t in document["tables"] for r in t["rows"] if r.get("program") == row.program]
    ways = {r["way"]: r["median_us"] / 1e3 for r in rows if r["status"] == "ok"}
    return ways[f"{row.kind}, stock"], ways[f"{row.kind}, attn_pass"]


RULE = "not slower by more than 10 % in four runs of four"
BELOW = 0.97


def grids(folder: Path = RESULTS) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """The runs of the grid of shapes, without tuning: the file's name, the run's conditions, its rows."""
    for path in sorted(folder.glob("never-slower*.json"), key=lambda p: p.stem):
        if not path.stem.endswith("tuned"):
            document = json.loads(path.read_text())
            yield path.stem, document["run"], [r for r in document["tables"][0]["rows"] if r["status"] == "ok"]


def below(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those below `BELOW` at the median and the 10th percentile, and all that are slower by the rule; slowest first."""
    low = [
        r
        for r in rows
        if r.get("verdict") == "slower" or max(r.get("over_stock", 1.0), r.get("over_stock_p10", 1.0)) < BELOW
    ]
    return sorted(low, key=lambda r: float(r["over_stock"]))


def never_slower() -> Iterator[str]:
    """For every run of the grid: how many shapes are slower by the rule, and which are below `BELOW` in one run."""
    for name, run, rows in grids():
        slower = sum(r.get("verdict") == "slower" for r in rows)
        low = below(rows)
        link = f"[run](docs/results/{name}.md)"
        are = "is" if slower == 1 else "are"
        where = f"{run['device']}, {counted(run['threads'], 'thread')}"
        yield f"- {where}: {slower} of {len(rows)} shapes {are} slower by this rule ({link})."
        yield ""
        yield f"  <details><summary>Speedup below {BELOW} at median and 10th percentile: {len(low)}</summary>"
        yield ""
        told = "; ".join(f"{r['name']}: {r['over_stock']:.2f}" for r in low)
        yield f"  {told or 'none'}"
        yield ""
        yield "  </details>"
        yield ""


RATES = {
    "stock": "compile, stock",
    "attn_pass": "compile, attn_pass",
    "ONNX Runtime": "ONNX Runtime",
    "OpenVINO": "OpenVINO",
}


def breakdown() -> Iterator[str]:
    """The rates of attention and of products in whole models, in GFLOP/s; those of Inductor where nothing is frozen."""
    names = [f"{part}, {way}" for part in ("attention", "products") for way in RATES]
    yield f"| model | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    document = json.loads((RESULTS / "breakdown-cpu.json").read_text())
    rates: dict[str, dict[str, Any]] = {}
    for row in (r for t in document["tables"] for r in t["rows"] if r["status"] == "ok"):
        rates.setdefault(row["program"], {})[row["way"]] = row
    for program, ways in rates.items():
        cells = [
            ways[way][f"{part}_rate"] if way in ways else None
            for part in ("attention", "products")
            for way in RATES.values()
        ]
        yield f"| {program} | {' | '.join('-' if c is None else f'{c:.0f}' for c in cells)} |"


def variants() -> Iterator[str]:
    """Rows of the table of masks and score functions: the speedup over stock of the pass, and of an expert."""
    document = json.loads((RESULTS / "variants-cpu.json").read_text())
    by_program: dict[str, list[dict[str, Any]]] = {}
    for row in document["tables"][0]["rows"]:
        if row["status"] == "ok":
            by_program.setdefault(row["program"], []).append(row)
    yield "| | attn_pass | expert's version | which is |"
    yield "|---|---|---|---|"
    for program, rows in by_program.items():
        (passed,) = (r for r in rows if r["way"] == "compile, attn_pass")
        hand = max((r for r in rows if "by hand" in r["way"]), key=lambda r: float(r["over_stock"]))
        what = hand.get("took") or hand["way"].removeprefix("compile, by hand: ")
        yield f"| {program} | {passed['over_stock']:.2f} | {hand['over_stock']:.2f} | {what} |"


PEERS = (
    ("eager", "eager"),
    ("stock Inductor", "compile, stock"),
    ("stock, frozen", "compile, stock, frozen"),
    ("stock, frozen package", "AOTInductor, stock, frozen"),
    ("attn_pass", "compile, attn_pass"),
    ("attn_pass, frozen", "compile, attn_pass, frozen"),
    ("attn_pass, frozen package", "AOTInductor, attn_pass, frozen"),
    ("zentorch, frozen", "compile, zentorch, frozen"),
    ("ONNX Runtime", "ONNX Runtime"),
    ("its attention fusion", "ONNX Runtime, attention fusion"),
    ("OpenVINO", "OpenVINO"),
)


def peers(run: str) -> Iterator[str]:
    """Rows of the table of whole models beside other systems: one for each model; of the ways that were measured."""
    by_program: dict[str, dict[str, str]] = {}
    for row in json.loads((RESULTS / f"{run}.json").read_text())["tables"][0]["rows"]:
        text = f"{row['median_us'] / 1e3:.0f}" if row["status"] == "ok" else "failed"
        by_program.setdefault(row["program"], {})[row["way"]] = text
    measured = [(title, way) for title, way in PEERS if any(way in ways for ways in by_program.values())]
    yield f"| model | {' | '.join(title for title, _ in measured)} |"
    yield "|---|" + "---|" * len(measured)
    for program, ways in by_program.items():
        cells = [ways.get(way, "-") for _, way in measured]
        yield f"| {program} | {' | '.join(cells)} |"


WAYS = (
    ("compiled", "compile, attn_pass"),
    ("frozen", "compile, attn_pass, frozen"),
    ("as frozen packages", "AOTInductor, attn_pass, frozen"),
)


def whole_models(run: str, ending: str = "") -> Iterator[str]:
    """A sentence: how fast models are over stock, in each way of the pass; and another one: which are slower.

    Of the programs whose names end so.
    """
    by_program = {program: ways for program, ways in _by_program(run).items() if program.endswith(ending)}
    said, slower = [], []
    for title, way in WAYS:
        rows = {program: ways[way] for program, ways in by_program.items() if "over_stock" in ways.get(way, {})}
        if not rows:
            continue
        ratios = [row["over_stock"] for row in rows.values()]
        are, as_fast, of_mean = ("", "", "") if said else (" are", " as fast", "geometric mean ")
        times = f"{min(ratios):.2f} to {max(ratios):.2f} times{as_fast}"
        mean = f"{of_mean}{statistics.geometric_mean(ratios):.2f}"
        said.append(f"{title}, {counted(len(rows), 'model')}{are} {times} ({mean})")
        slower += [f"{program} {title}" for program, row in rows.items() if row["verdict"] == "slower"]
    yield (
        f"Compared with stock Inductor in the same way: {'; '.join(said)}. Slower by more than the noise: "
        f"{', '.join(slower) or 'none'}."
    )


CALLS = "models-cpu-calls"
"""The run of models whose attention is a call."""


def calls() -> Iterator[str]:
    """The sentences about models whose attention is a call, as points of a list."""
    for dtype, ending in (("float32", ", SDPA"), ("bfloat16", ", bfloat16"), ("autocast to bfloat16", ", autocast")):
        yield f"- **{dtype}**. {' '.join(whole_models(CALLS, ending))}"


OTHERS = {
    "OpenVINO": "OpenVINO",
    "ONNX Runtime": "ONNX Runtime",
    "ONNX Runtime with its attention fusion": "ONNX Runtime, attention fusion",
    "frozen zentorch": "compile, zentorch, frozen",
}


def beside(run: str) -> Iterator[str]:
    """Points of a list: how fast attn_pass is, compared with every other system."""
    for title, way in OTHERS.items():
        if said := compared(run, title, way):
            yield f"- {said}"


def compared(run: str, title: str = "OpenVINO", way: str = "OpenVINO") -> str:
    """On how many models attn_pass is faster than another system, or slower, as the benches judge; "" for none.

    By its frozen package, and frozen where that could not be made; against the faster of two measurements of the other.
    """
    counts = dict.fromkeys(("faster", "same", "slower"), 0)
    ratios: dict[str, float] = {}
    twice = False  # whether the other system was measured twice
    fields = ("median_us", "p10_us")
    for program, ways in _by_program(run).items():
        mine = next((ways[own] for _, own in reversed(WAYS[1:]) if own in ways), None)
        its = ways.get(way)
        if mine is None or its is None or its.get("verdict") == "WRONG":
            continue
        again = ways.get(f"{way} (A/A)", its)
        twice |= again is not its
        around = mine.get("noise") if again is its else apart([its[field] / again[field] for field in fields])
        if around is not None and around == around:
            least = {field: min(its[field], again[field]) for field in fields}
            counts[verdict(*(least[field] / mine[field] for field in fields), around)] += 1
            ratios[program.removesuffix(", bfloat16")] = least["median_us"] / mine["median_us"]
    if not ratios:
        return ""
    least_of, most_of = min(ratios, key=lambda p: ratios[p]), max(ratios, key=lambda p: ratios[p])
    return (
        f"Compared with {title}, attn_pass (its frozen package, or frozen where there is none) is "
        f"{ratios[least_of]:.2f} ({least_of}) to {ratios[most_of]:.2f} times ({most_of}) as fast: faster on "
        f"{counts['faster']} of {counted(len(ratios), 'model')}, slower on {counts['slower'] or 'none'}, by more than "
        f"two measurements of {title if twice else 'stock'} differ."
    )


def _by_program(run: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of a run that ran, by program and way."""
    by_program: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / f"{run}.json").read_text())["tables"][0]["rows"]:
        if row["status"] == "ok":
            by_program.setdefault(row["program"], {})[row["way"]] = row
    return by_program


def in_short() -> Iterator[str]:
    """The same of both dtypes, as points of a list."""
    for dtype, run in (("float32", "peers-cpu"), ("bfloat16", "peers-cpu-bf16")):
        said = " ".join((*whole_models(run), compared(run)))
        yield f"- **{dtype}** ([run](docs/results/{run}.md)). {said}"

"""The results page and its plots, from the committed runs: `python -m bench page [--results FOLDER]`."""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness import plots
from bench.harness import variants as w
from bench.harness.badges import GOOD, PLAIN, badge
from bench.harness.document import Document, Row, markdown_table, read

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results"
PICTURES = "pictures"
sys.path.append(str(DOCS))
readme = importlib.import_module("measured")  # what the README shows, which `make docs` writes from the same runs


@dataclass(frozen=True)
class Run:
    """A committed run with tables, by its file's name without the ending, and what it is about."""

    file: str
    about: str
    table: str = ""  # the one that counts; all where it is empty


RUNS = (
    Run("seeds-cpu", "the five field reports"),
    Run("variants-cpu", "masks and score functions by hand"),
    Run("forms-cpu", "common forms, by hand and as calls"),
    Run("cases-cpu", "collected cases that must be fast"),
    Run("peers-cpu", "whole models in float32, frozen or not, as packages too, and in other systems"),
    Run("peers-cpu-bf16", "the same in bfloat16"),
    Run(
        "models-cpu-calls",
        "whole models whose attention is a call, in float32, in bfloat16 and under autocast, frozen or not, and as "
        "packages",
    ),
    Run(
        "models-cpu-autocast",
        "nine whole models under autocast, frozen or not, and as packages; by an earlier bench, in which GPT-2's "
        "errors cannot be judged: eager's own is 57 %",
    ),
    Run("decode-cpu", "steps of decoding over a static cache", "Steps"),
    Run("padding-cpu", "batches with padding, one layer of twelve"),
    Run("padding-cpu-bf16", "the same in bfloat16"),
)
SCALING = "S5.2: speedup over the sequence length"
CURVE = "never-slower"
OTHERS = (
    ("never-slower.md", "a grid of 164 shapes: stock, the pass, and every form that the pass could have taken"),
    ("never-slower-intel.md", "the same on a processor without AMX, by the constants of an AMD EPYC"),
    ("never-slower-avx2.md", "the same on a processor with AVX2 alone (Zen 3), by constants fitted to it"),
    ("never-slower-avx2-two-threads.md", "the same with two threads, after a fit to it"),
    ("never-slower-zen4.md", "the same on an AMD EPYC with AVX-512 (Zen 4)"),
    ("never-slower-two-threads.md", "the same with two threads"),
    ("never-slower-tuned.md", "every fifth shape with `tune=True`, before the CPU kernel"),
    ("dynamic-query.md", "packages with a dynamic query length: one form for any number, before the CPU kernel"),
    ("kernel-cpu-zen4.md", "the CPU kernel, compared with the rate of a large product, a plain read and other kernels"),
    ("kernel-cpu-zen4-edges.md", "cases of that run that other work on the machine disturbed, measured again"),
    ("kernel-cpu.md", "the same on an Intel processor without AMX"),
    ("kernel-cpu-amx.md", "the same on a processor with AMX"),
    ("gpu-nvidia-h200.md", "the first stage of a run on an H200: correctness, rules, cuDNN's answers, bare kernels"),
    ("breakdown-cpu.md", "where the time of six whole models goes, in other systems as well"),
    ("mask-cost.md", "the CPU kernel with a mask that hides nothing: what reading it costs"),
    ("padding-cpu-whole.md", "BERT with padding, all twelve layers, in bfloat16"),
    ("padding-cpu-full.md", "BERT without any padding, four layers of twelve, on a processor with AMX"),
    ("training-cpu.md", "training steps"),
    ("steps-cpu.md", "whole training steps with the optimizer"),
    ("census.md", "how much of the attention of 418 models is found and rewritten"),
    ("census-padding.md", "models with padding: which have a region that is proved, and why others have none"),
    ("census-projections.md", "layers that make queries, keys and values: which are read, and which are one product"),
    ("census-speed.md", "times of every sixth of transformers' and timm's models, larger, of two layers"),
    ("census-speed-avx2.md", "the same of 19 models on a processor with AVX2 alone (Zen 3)"),
    ("census-steps.md", "training steps of such models, and their gradients"),
    ("census-rotary.md", "rotary embeddings and norms of decoders, which are read"),
    ("linear-layers-cpu.md", "linear layers by torch's call, by oneDNN and by the CPU kernel, by their sizes"),
    ("linear-layers-cpu-avx2.md", "the same on a processor with AVX2 alone (Zen 3)"),
    ("rotary-cost.md", "what rotating inside the CPU kernel could save at most, predicted"),
    ("s1-xla.md", "field report S1 on XLA"),
    ("census-runtimes.md", "how much of it ends as an attention operator in ONNX and OpenVINO"),
    ("runtimes-cpu.md", "six whole models in ONNX Runtime and OpenVINO, as exported and after the pass"),
    ("cases.md", "collected bugs and requests: which are solved"),
    ("peers-suite.md", "the forms of PyTorch's own test of its attention patterns, before the CPU kernel"),
    ("fuzz.md", "generated programs: runs, findings, injected faults"),
    ("others.md", "programs that look like attention, as stock Inductor compiles them: what is wrong elsewhere"),
    ("others-onnxruntime.md", "the same with ONNX Runtime, and collected cases"),
    ("others-openvino.md", "the same with OpenVINO"),
    ("third-party.md", "small models of published packages: rewritten sites, differences from eager"),
    ("versions.md", "the core tests with other versions of torch"),
    ("verify-time.md", 'the time of `verify="graph"`, before the CPU kernel'),
    ("compile-time.md", "the pass's share of a cold compile, before the CPU kernel"),
    ("pass-time.md", "the pass alone, over the depth of a model"),
    ("cpu-constants.md", "the rates of the cost model, measured"),
)


def documents(folder: Path) -> dict[str, Document]:
    """The runs that are there, by file; what another bench wrote under such a name is told and left out."""
    by_file = {}
    for run in RUNS:
        path = folder / f"{run.file}.json"
        if path.exists():
            try:
                by_file[run.file] = read(path)
            except ValueError as error:
                typer.echo(f"left out: {error}", err=True)
    return by_file


def draw(folder: Path, documents: dict[str, Document]) -> Iterator[tuple[str, str]]:
    """The pictures that the runs allow: (file without its ending, what it shows)."""
    seeds = documents["seeds-cpu"].tables if "seeds-cpu" in documents else []
    scaling = [row for table in seeds if table.title == SCALING for row in table.rows if "length" in row]
    if scaling:
        plots.save(plots.speed_up(scaling), folder / PICTURES / "speed-up")
        yield "speed-up", "Field report S5: speedup over the sequence length"
        plots.save(plots.memory(scaling), folder / PICTURES / "memory")
        yield "memory", "Field report S5: memory of one call"
    roofs = [documents[name] for name in ("variants-cpu", "seeds-cpu", "forms-cpu") if name in documents]
    measured = [each for each in roofs if each.run.get("device") == roofs[0].run.get("device")]  # under one roof
    if measured:
        plots.save(plots.roofline(measured), folder / PICTURES / "roofline")
        what = "Roofline: stock and the pass under the device's limits; a line joins the two points of a program"
        yield "roofline", what
    curve = folder / f"{CURVE}.json"
    if curve.exists():
        rows = read(curve).tables[0].rows
        plots.save(plots.never_slower(rows, readme.RULE), folder / PICTURES / CURVE)
        yield CURVE, f"{len(rows)} shapes: speedup over stock, sorted. The rule: {readme.RULE}"
    if all((folder / f"{row.run}.json").exists() for row in readme.ROWS):
        plots.save(plots.speedups(readme.speedups(folder)), folder / PICTURES / "speedups")
        yield "speedups", "The programs of the README's table: speedup over stock"


def badges(folder: Path, documents: dict[str, Document]) -> dict[str, str]:
    """The badges that the runs allow: SVG by the file's name."""
    made = {}
    for name, run, label in (
        ("badge-speedup", "variants-cpu", "masks by hand, median speedup over stock"),
        ("badge-decoding", "decode-cpu", "a step of decoding, median speedup over stock"),
    ):
        if run in documents:
            (table,) = (each.table for each in RUNS if each.file == run)
            made[name] = badge(label, f"{summary(documents[run], table)['middle']:.2f}x")
    rows = [row for _, _, rows in readme.grids(folder) for row in rows]
    if rows:
        slower = sum(row.get("verdict") == "slower" for row in rows)
        colour = GOOD if not slower else PLAIN
        made["badge-never-slower"] = badge("slower than stock", f"{slower} of {len(rows)} shapes", colour)
    return made


_OURS = (w.PASS, w.PASS_FROZEN, w.PACKAGE_PASS, w.PACKAGE_PASS_FROZEN)


def summary(document: Document, title: str = "") -> dict[str, Any]:
    """Over the rows of the pass: how many, speedup over stock (median, least, most), verdicts, and how many failed.

    With a ``title`` of that table alone.
    """
    tables = [table for table in document.tables if title in ("", table.title)]
    ours = [row for table in tables for row in table.rows if row.get("way") in _OURS]
    rows = [row for row in ours if "over_stock" in row]
    ratios = [row["over_stock"] for row in rows]
    verdicts = [row["verdict"] for row in rows]
    return {
        "rows": len(rows),
        "middle": statistics.median(ratios) if ratios else math.nan,
        "least": min(ratios, default=math.nan),
        "most": max(ratios, default=math.nan),
        **{name: verdicts.count(name) for name in ("faster", "same", "slower", "WRONG")},
        "failed": sum(row.get("status", "ok") != "ok" for row in ours),
    }


def page(folder: Path, documents: dict[str, Document], pictures: Iterable[tuple[str, str]]) -> str:
    """The text of README.md."""
    lines = [
        "# Results",
        "",
        "`python -m bench page` writes this page from the runs next to it. Each run names its device, versions and",
        "command; [benchmarks.md](../benchmarks.md) describes how they are measured. The performance of whole programs",
        "has been measured on CPUs only, and bare kernels on one GPU. The NPU and TPU paths have not yet run on real",
        "hardware.",
        "",
        "## The pass against stock Inductor",
        "",
    ]
    titles = ("run", "rows", "median speedup", "minimum", "maximum", "faster", "same", "slower", "wrong", "failed")
    rows = []
    for run in RUNS:
        if run.file not in documents:
            continue
        summarised = summary(documents[run.file], run.table)
        ratios = [f"{summarised[name]:.2f}" for name in ("middle", "least", "most")]
        counts = [str(summarised[name]) for name in ("faster", "same", "slower", "WRONG", "failed")]
        rows.append([f"[{run.about}]({run.file}.md)", str(summarised["rows"]), *ratios, *counts])
    lines += markdown_table(titles, rows)
    lines += [
        "",
        "*Same* means within the noise: the difference of two measurements of stock in that run, at least 3 %.",
        "",
    ]
    if slower := list(_slower(documents)):
        lines += ["Slower by more than the noise:", "", *slower, ""]
    for run in RUNS[:2]:
        if run.file in documents:
            lines += [
                f"## {run.about[0].upper()}{run.about[1:]}: speedup over stock",
                "",
                *by_program(documents[run.file]),
                "",
            ]
    lines += ["## Plots", ""]
    for name, what in pictures:
        lines += [f"![{what}]({PICTURES}/{name}.png)", "", f"{what} ([SVG]({PICTURES}/{name}.svg)).", ""]
    lines += _below(folder)
    lines += ["## Other runs", ""]
    lines += [f"- [{file}]({file}): {what}" for file, what in OTHERS if (folder / file).exists()]
    return "\n".join(lines) + "\n"


def _below(folder: Path) -> list[str]:
    """The shapes of the grid that are below 0.97 at the median and the 10th percentile."""
    curve = folder / f"{CURVE}.json"
    rows = readme.below(read(curve).tables[0].rows) if curve.exists() else []
    if not rows:
        return []
    lines = [[row["name"], f"{row['over_stock']:.2f}", f"{row['over_stock_p10']:.2f}", row["chosen"]] for row in rows]
    heading = f"Of these shapes, below {readme.BELOW} at the median and at the 10th percentile in one run:"
    return [heading, "", *markdown_table(("shape", "median", "10th percentile", "chose"), lines), ""]


_WAYS = (
    (w.PASS, "pass"),
    (w.HAND, "by hand"),
    (w.PACKAGE_PASS, "package, pass"),
    (w.DECOMPOSED, "package, decomposed"),
)


def by_program(document: Document) -> list[str]:
    """One line a program: the speedup over stock of each way, bold beyond the noise."""
    lines = []
    for table in document.tables:
        programs = dict.fromkeys(row["program"] for row in table.rows if "over_stock" in row)
        for name in programs:
            rows = {row["way"]: row for row in table.rows if row["program"] == name and "over_stock" in row}
            cells = [_ratio(rows.get(way)) for way, _ in _WAYS]
            took = str(rows[w.PASS].get("took", "-")).split(":")[0] if w.PASS in rows else "-"
            lines.append([f"{table.title.split(':')[0]}: {name}" if len(document.tables) > 1 else name, *cells, took])
    return markdown_table(("program", *(title for _, title in _WAYS), "the pass chose"), lines)


def _ratio(row: Row | None) -> str:
    if row is None:
        return "-"
    text = f"{row['over_stock']:.2f}"
    return f"**{text}**" if row["verdict"] in ("faster", "slower") else text


def _slower(documents: dict[str, Document]) -> Iterator[str]:
    for run in RUNS:
        for table in documents[run.file].tables if run.file in documents else []:
            for row in table.rows:
                if row.get("way") in _OURS and row.get("verdict") == "slower":
                    which = f"{run.about}: {row['program']}, {row['way']}"
                    yield f"- {which}: {row['over_stock']:.2f} (noise {row['noise']:.0%})"


def main(folder: Annotated[Path, typer.Option("--results", help="The folder of committed runs.")] = RESULTS) -> None:
    """Write the page of results and its pictures from the committed runs."""
    by_file = documents(folder)
    for name, text in badges(folder, by_file).items():
        (folder / PICTURES).mkdir(exist_ok=True)
        (folder / PICTURES / f"{name}.svg").write_text(text)
    (folder / "README.md").write_text(page(folder, by_file, draw(folder, by_file)))
    typer.echo(f"written: README.md from {', '.join(by_file) or 'no run'}")

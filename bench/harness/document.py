"""The result of a run: tables of rows with their conditions, as JSON, Markdown and on the terminal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """The field of a row it shows, and how; ``times`` is multiplied with it."""

    title: str
    field: str
    form: str = ""
    times: float = 1.0

    def cell(self, row: Row) -> str:
        """The text, a dash where the row has no such field."""
        value = row.get(self.field)
        if value is None or (isinstance(value, float) and math.isnan(value) and self.field != "error"):
            return "-"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return format(value * self.times if self.times != 1.0 else value, self.form)
        return str(value)


@dataclass
class Table:
    """Rows of one kind."""

    title: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    name: str = ""

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Titles and lines; columns that say nothing in any row are left out, a program is a line of its own."""
        good = [row for row in self.rows if row.get("status", "ok") == "ok"]
        shown = [c for c in self.columns if c.field != "program" and any(c.cell(row) != "-" for row in good)]
        headed = any(c.field == "program" for c in self.columns)
        lines, before = [], None
        for row in good:
            if headed and row.get("program") != before:
                before = row.get("program")
                lines.append([f"**{before}**", *[""] * (len(shown) - 1)])
            lines.append([c.cell(row) for c in shown])
        return [c.title for c in shown], lines

    def failures(self) -> list[str]:
        bad = [row for row in self.rows if row.get("status", "ok") != "ok"]
        who = [", ".join(filter(None, (row.get("program", row.get("name")), row.get("way")))) for row in bad]
        return [f"{name}: {row.get('error_text')}" for name, row in zip(who, bad)]


@dataclass
class Document:
    """A run: its name, its conditions (device, versions, threads, command ...) and its tables."""

    title: str
    run: dict[str, Any]
    tables: list[Table] = field(default_factory=list)

    def markdown(self) -> str:
        """As committed in docs/results."""
        lines = [f"# {self.title}", "", self.conditions(), ""]
        for table in self.tables:
            titles, rows = table.cells()
            lines += [f"## {table.title}", ""]
            if rows:
                lines += markdown_table(titles, rows)
            lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
            failed = table.failures()
            lines += ["", "Failed:", "", *(f"- {text}" for text in failed)] if failed else []
            lines.append("")
        return "\n".join(lines).rstrip("\n") + "\n"

    def conditions(self) -> str:
        """One line about where and how."""
        facts = {k: v for k, v in self.run.items() if k not in ("versions", "command", "rates")}
        known = ", ".join(f"{name} {version}" for name, version in self.run.get("versions", {}).items())
        rates = self.run.get("rates")
        words = [f"{name}: {value}" for name, value in facts.items()] + [known]
        if rates:
            products = [f"{rate:.0f} GFLOP/s ({dtype})" for dtype, rate in rates["gflops"].items()]
            words.append(f"measured rates: {', '.join(products)}, {rates['gbs']:.0f} GB/s")
        words.append(f"`{self.run['command']}`" if "command" in self.run else "")
        return f"{'; '.join(filter(None, words))}."

    def write(self, path: Path) -> Path:
        """FILE and FILE with .md, each in one step; returns the second."""
        path.parent.mkdir(parents=True, exist_ok=True)
        table = path.with_suffix(".md")
        for target, text in ((path, json.dumps(self.to_dict(), indent=1) + "\n"), (table, self.markdown())):
            partial = target.with_suffix(f"{target.suffix}.{os.getpid()}.part")  # several processes may write at once
            partial.write_text(text)
            partial.replace(target)
        return table

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def joined(before: Table | None, now: Table) -> Table:
    """What was measured now, in the place of the same programs of an earlier run of the table, with notes on each."""
    by_program: dict[str, list[Row]] = {}
    for rows in ([] if before is None else before.rows, now.rows):
        measured = {row.get("program", "") for row in rows}
        by_program |= {program: [row for row in rows if row.get("program", "") == program] for program in measured}
    order = dict.fromkeys(row.get("program", "") for row in [*(before.rows if before else []), *now.rows])
    rows = [row for program in order for row in by_program[program]]
    return Table(now.title, now.columns, rows, [*now.notes, *_runs(rows)], now.name)


def _runs(rows: Sequence[Row]) -> list[str]:
    """Which run each program is of, if there were several; beside what it was measured, and which ways were not."""
    runs: dict[str, dict[str, None]] = {}
    busy: dict[str, str] = {}
    without: dict[str, str] = {}
    for row in rows:
        runs.setdefault(row.get("of", "an earlier run"), {})[row.get("program", "")] = None
        if row.get("busy"):
            busy[row.get("program", "")] = row["busy"]
        if row.get("without"):
            without[row.get("program", "")] = "; ".join(row["without"])
    told = "; ".join(f"{run}: {', '.join(programs)}" for run, programs in runs.items())
    notes = [f"Of several runs, by commit. {told}."] if len(runs) > 1 else []
    notes += [f"{program}: {why} (before or after its rounds)." for program, why in busy.items()]
    return notes + [f"{program}: not measured, for their memory: {ways}." for program, ways in without.items()]


def read(path: Path) -> Document:
    """A document that was written.

    Raises:
        ValueError: the file is none.
    """
    try:
        document = json.loads(path.read_text())
        tables = [
            Table(t["title"], tuple(Column(**c) for c in t["columns"]), t["rows"], t["notes"], t.get("name", ""))
            for t in document["tables"]
        ]
        return Document(document["title"], document["run"], tables)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path.name} is no result of a bench with tables ({type(error).__name__}: {error})"
        ) from error


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines; a bar or a line break in a cell does not end it."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(c).replace("|", "/").replace("\n", " ") for c in cells) + " |"

    return [line(titles), "|" + "---|" * len(titles), *(line(row) for row in rows)]


STANDARD: tuple[Column, ...] = (
    Column("program", "program"),
    Column("variant", "way"),
    Column("median ms", "median_us", ".3f", 1e-3),
    Column("p10 ms", "p10_us", ".3f", 1e-3),
    Column("p90 ms", "p90_us", ".3f", 1e-3),
    Column("speedup", "over_stock", ".2f"),
    Column("noise", "noise", ".0%"),
    Column("verdict", "verdict"),
    Column("of roofline", "of_floor", ".0%"),
    Column("error", "error", ".0e"),
    Column("compile s", "compile_s", ".1f"),
    Column("package KiB", "package_bytes", ".0f", 1 / 1024),
    Column("peak MiB", "peak_bytes", ".1f", 1 / 2**20),
    Column("outcome", "took"),
)
"""What is known of a program run in one way."""

LEGEND = (
    "Speedup: stock's median time over the variant's; packages are compared with the stock package. Noise: how far "
    "stock is from itself in this run (A/A); a speedup within the noise counts as the same. Of roofline: the least "
    "time that the rates measured beside the program allow, for all of its products, those that a mask hides included, "
    "or for reading its inputs and weights, as a share of the time taken. Error: the largest difference from float64, "
    "relative to the largest value. Peak: the memory that one call adds, the least of two; ONNX Runtime and OpenVINO "
    "keep theirs, and have none."
)

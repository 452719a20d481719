"""The result of `benchmark`: one row for each way to run the model, as a table, JSON and a plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attn_pass.report.json_schema import finite
from attn_pass.report.record import Report
from attn_pass.report.text import plain_table, printable
from attn_pass.report.units import duration

STOCK, PASS = "stock", "attn_pass"
_COLUMNS = (
    ("way", 3),
    ("median", 2),
    ("10th to 90th percentile", 3),
    ("speedup over stock", 3),
    ("verdict", 3),
    ("error", 2),
    ("memory", 2),
    ("compile", 2),
)


@dataclass(frozen=True)
class Row:
    """One way to run the model; all numbers are measured.

    Attributes:
        way: "eager", "stock", "stock again", "attn_pass", "package, stock", "package, attn_pass".
        median_us, p10_us, p90_us: microseconds of one call.
        speedup: stock's median over this one; for packages that of the stock package. None if stock failed.
        verdict: "faster", "slower" or "same", beyond the noise; "cannot tell", "WRONG", or "" for the baseline.
        error: largest difference from the reference over its largest value, of outputs and gradients; None if the
            model draws random numbers.
        memory_bytes: what one call adds to the process at its highest; None where the system does not say.
        compile_s: seconds of the first call, or of making the package, without caches; None for eager.
        package_bytes: of a package; None for anything else.
    """

    way: str
    median_us: float
    p10_us: float
    p90_us: float
    speedup: float | None
    verdict: str
    error: float | None
    memory_bytes: int | None
    compile_s: float | None
    package_bytes: int | None = None


@dataclass(frozen=True)
class Benchmark:
    """What `attn_pass.benchmark` measured. ``str(result)`` is a table.

    Attributes:
        rows: one for each way that ran.
        failures: why a way did not run, by its name.
        noise: by how much two measurements of the same code, stock's, differ in this run, as a share.
        busy: why the machine was too busy to tell; "" if it was quiet.
        reference: what errors are against: "float64", or "eager" if the model does not run in float64.
        conditions: "model", "mode", "device", "threads", "versions", "date" and "rounds".
        report: what the pass did with the model's attention.
        remarks: sentences about this run.
    """

    rows: tuple[Row, ...]
    failures: Mapping[str, str]
    noise: float
    busy: str
    reference: str
    conditions: Mapping[str, str]
    report: Report
    remarks: tuple[str, ...] = ()

    def __getitem__(self, way: str) -> Row:
        """The row of a way; raises KeyError with the ways there are."""
        for row in self.rows:
            if row.way == way:
                return row
        raise KeyError(f"no row {way!r}; there are {', '.join(row.way for row in self.rows)}")

    @property
    def speedup(self) -> float | None:
        """Stock's median time over the pass's; None if either failed."""
        return next((row.speedup for row in self.rows if row.way == PASS), None)

    def summary(self) -> str:
        """One line: the speedup over stock, and whether that is more than the noise."""
        row = next((row for row in self.rows if row.way == PASS), None)
        if row is None or row.speedup is None:
            return f"attn_pass benchmark of {self.conditions['model']}: nothing to compare"
        says = f"measured speedup over stock {row.speedup:.3g}x ({row.verdict})"
        return f"attn_pass benchmark of {self.conditions['model']}, {self.conditions['mode']}: {says}"

    def table(self, width: int | None = None) -> str:
        """The table as plain text, with the conditions; ``width`` is in characters."""
        lines = [self.summary(), *plain_table(_COLUMNS, [_cells(row) for row in self.rows], width)]
        noise = "not known" if math.isnan(self.noise) else f"two measurements of stock differ by {self.noise:.0%}"
        lines.append(f"noise: {noise}; errors are relative to {self.reference}; all times are measured")
        if self.busy:
            lines.append(f"the machine is too busy to tell: {self.busy}")
        lines += [f"failed: {way}: {why}" for way, why in self.failures.items()]
        lines += self.remarks
        lines.append(self.report.summary())
        lines.append("; ".join(f"{name}: {value}" for name, value in self.conditions.items() if name != "model"))
        return printable("\n".join(lines))

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON; the report as `Report.to_dict`."""
        return {
            "summary": self.summary(),
            "speedup": self.speedup,
            "noise": self.noise,
            "busy": self.busy,
            "reference": self.reference,
            "conditions": dict(self.conditions),
            "rows": [finite(asdict(row)) for row in self.rows],
            "failures": dict(self.failures),
            "remarks": list(self.remarks),
            "report": json.loads(self.report.to_json()),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The dict of `to_dict` as JSON."""
        return json.dumps(finite(self.to_dict()), indent=indent, ensure_ascii=False, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draws the times as bars, with the 10th and 90th percentiles, to a file (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
        """
        return _drawn(self, Path(os.fsdecode(path)))


@dataclass
class Samples:
    """What was measured of one way, before it is judged."""

    microseconds: Sequence[float] = ()
    error: float | None = None
    memory_bytes: int | None = None
    compile_s: float | None = None
    package_bytes: int | None = None


def _cells(row: Row) -> tuple[str, ...]:
    memory = "" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.1f} MiB"
    built = "" if row.compile_s is None else f"{row.compile_s:.1f} s"
    if row.package_bytes is not None:
        built += f", {row.package_bytes / 2**20:.1f} MiB"
    return (
        row.way,
        duration(row.median_us),
        f"{duration(row.p10_us)} to {duration(row.p90_us)}",
        "" if row.speedup is None else f"{row.speedup:.3g}x",
        row.verdict,
        "" if row.error is None else f"{row.error:.1e}",
        memory,
        built,
    )


def _drawn(result: Benchmark, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result.rows if row.way != "stock again"][::-1]
    figure, axes = plt.subplots(figsize=(7.0, 1.2 + 0.45 * len(rows)), layout="constrained")
    milliseconds = [row.median_us / 1e3 for row in rows]
    spread = [[(r.median_us - r.p10_us) / 1e3 for r in rows], [(r.p90_us - r.median_us) / 1e3 for r in rows]]
    colours = ["#0072B2" if PASS in row.way else "#E69F00" if STOCK in row.way else "#999999" for row in rows]
    axes.barh([row.way for row in rows], milliseconds, xerr=spread, color=colours, ecolor="#444444")
    for at, row in enumerate(rows):
        speedup_text = "" if row.speedup is None else f"  {row.speedup:.2g}x"
        axes.text(row.p90_us / 1e3, at, f"  {duration(row.median_us)}{speedup_text}", va="center")
    axes.set_xlim(0, 1.35 * max(row.p90_us for row in rows) / 1e3)
    axes.set(xlabel="milliseconds, measured", title=f"{result.conditions['model']}, {result.conditions['mode']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path

"""Rows: the facts about one model in one measurement, as a line of JSON."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attn_pass
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from bench.harness.document import Row
from bench.suites.census.dataset import error_text


def key(row: Row) -> tuple[str, str, str]:
    """What a row is about; of two rows about the same thing the later one counts."""
    return row["bench"], row["name"], row.get("stage", "")


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of JSONL files."""
    lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    return list({key(row): row for row in lines}.values())


@contextmanager
def warned(row: Row) -> Iterator[None]:
    """Keeps in a row what the pass warns of inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", attn_pass.AttnPassWarning)
        yield
    row["warnings"] = [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]


@contextmanager
def tried(row: Row, status: str = "does not run") -> Iterator[None]:
    """Keeps in a row what fails inside, under this status."""
    try:
        yield
    except Exception as error:
        row.update(status=status, error=error_text(error))


def report_row(report: Report) -> Row:
    """The report's part of a row: hand-written sites rewritten, calls rewritten, and every site that is left."""
    return {
        "rewritten": sum(site.form != "sdpa" and site.outcome != "left" for site in report.sites),
        "calls_rewritten": sum(site.form == "sdpa" and site.outcome != "left" for site in report.sites),
        "masks": dict(Counter(f"{site.form}: {site.mask}" for site in report.sites if site.kind == "attention")),
        "left": [site_row(site) for site in report.left],
    }


def site_row(site: SiteReport) -> dict[str, Any]:
    """What is worth knowing of a site that is left."""
    names = ("kind", "form", "reason", "where", "module", "node", "mask", "refusals")
    return {name: getattr(site, name) for name in names}


def row_text(row: Row) -> str:
    """One line about a row, for the log."""
    return " ".join(_row_parts(row))


def _row_parts(row: Row) -> Iterator[str]:
    yield f"{row['name']:34s} {row.get('stage', ''):12s} {row['status']:8s}"
    if "sites" in row:
        yield f"hand {row['sites'].get('hand', 0)} sdpa {row['sites'].get('sdpa', 0)}"
    if "left" in row:
        yield f"rewritten {row['rewritten']} and {row['calls_rewritten']} calls, left {len(row['left'])}"
    if (numerics := row.get("numerics")) is not None:
        yield f"rel {numerics['rel_l2']:.1e}" + (" WRONG" if numerics["ok"] is False else "")
    if "error" in row:
        yield row["error"].splitlines()[0][:100]

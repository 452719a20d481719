"""Compares a run with a baseline: speedups over stock that got worse by more than the noise of both.

Ratios are compared, not times: another day the same machine is faster or slower as a whole, stock included.
"""

from __future__ import annotations

import math

from bench.harness.document import Column, Document, Row, Table

Key = tuple[str, str, str]  # table, program, way
FAILED = "FAILED"
SLACK = 0.10  # two runs of the same code, hours apart, differ by this much in their ratios
COLUMNS = (
    Column("table", "table"),
    Column("program", "name"),
    Column("variant", "way"),
    Column("speedup in the baseline", "then", ".2f"),
    Column("now", "now", ".2f"),
    Column("allowed", "allowed", ".0%"),
    Column("verdict", "verdict"),
)


def compare(now: Document, then: Document) -> Table:
    """One row a program and way that both runs have and that is no longer what it was; notes say what was compared."""
    old, new = _rows(then), _rows(now)
    common = [key for key in new if key in old]
    rows = []
    for key in common:
        before, after = old[key], new[key]
        allowed = SLACK + sum(_known(row.get("noise")) for row in (before, after))
        change = math.log(after["over_stock"] / before["over_stock"])
        verdict = "worse" if change < -allowed else "better" if change > allowed else "same"
        if after.get("verdict") == "WRONG":
            verdict = "WRONG"
        ratios = {"then": before["over_stock"], "now": after["over_stock"], "allowed": allowed}
        rows.append({**_named(key), **ratios, "verdict": verdict})
    tried = {(table.title, row.get("program"), row.get("way")) for table in now.tables for row in table.rows}
    failed = tried - set(new)
    for key in old:
        if key in failed:
            rows.append({**_named(key), "then": old[key]["over_stock"], "verdict": FAILED})
    changed = [row for row in rows if row["verdict"] != "same"]
    notes = [f"{len(common)} ratios compared, {len(changed)} changed beyond the noise of both runs"]
    if lost := sorted({f"{key[1]}, {key[2]}" for key in old if key not in new and key not in failed}):
        notes.append(f"not measured now: {'; '.join(lost)}")
    notes += [
        f"another {what}: {then.run.get(what)} then, {now.run.get(what)} now"
        for what in ("device", "threads", "versions")
        if then.run.get(what) != now.run.get(what)
    ]
    return Table(f"against the run of {then.run.get('date', 'another day')}", COLUMNS, changed, notes)


def regressed(table: Table) -> bool:
    """Whether anything got worse or wrong, or runs no more."""
    return any(row["verdict"] in ("worse", "WRONG", FAILED) for row in table.rows)


def _named(key: Key) -> Row:
    return dict(zip(("table", "name", "way"), key))


def _rows(document: Document) -> dict[Key, Row]:
    by_key: dict[Key, Row] = {}
    for table in document.tables:
        for row in table.rows:
            if "over_stock" in row:
                by_key.setdefault((table.title, row["program"], row["way"]), row)
    return by_key


def _known(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value

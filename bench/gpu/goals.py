"""The project's goals for an H200 compared with a run: met or not, without failing the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Rows = Mapping[str, list[dict[str, Any]]]
NOISE = 1.05  # two runs of the same code differ by so much
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """``measured`` gives the worst of what counts, with its case, and whether that is enough."""

    what: str
    measured: Callable[[Rows], tuple[bool, str] | None]


def _worst(ratios: Iterable[tuple[float, str]], least: float, form: str) -> tuple[bool, str] | None:
    values = sorted(ratios)
    if not values:
        return None
    value, name = values[0]
    low = sum(v < least for v, _ in values)
    return value >= least, f"{form.format(value)} at worst ({name}); {len(values) - low} of {len(values)} reach it"


def _seed(rows: Rows) -> tuple[bool, str] | None:
    ratios = [(r["stock_over_pass"], r["name"]) for r in rows.get("seeds", []) if r.get("stock_over_pass")]
    return _worst((f for f in ratios if f[1].startswith("S4 ") and "AOTInductor" in f[1]), 50.0, "{:.1f}x")


def _prefill(rows: Rows) -> Iterable[dict[str, Any]]:
    return (r for r in rows.get("floors", []) if re.match(r"prefill .* D128 ", r["name"]))


def _of_best(rows: Rows) -> tuple[bool, str] | None:
    ratios = ((1 / r["pass_of_best"], r["name"]) for r in _prefill(rows) if r.get("pass_of_best"))
    return _worst(ratios, 0.95, "{:.2f} of the best")


def _of_matmul(rows: Rows) -> tuple[bool, str] | None:
    long = (r for r in _prefill(rows) if int(r["name"].split(" S")[1].split()[0]) >= 4096)
    return _worst(((r["of_matmul"], r["name"]) for r in long if r.get("of_matmul")), 0.75, "{:.2f} of the rate")


def _decode(rows: Rows) -> tuple[bool, str] | None:
    ratios = []
    for row in rows.get("decode", []):
        cell = re.match(r"q(\d+) B\d+ KV(\d+)$", row["name"])
        if cell and int(cell[1]) <= 16 and int(cell[2]) >= 32768:
            shares = [row[f"copy, {n}"] for n in ("decode", "flash", "flash packed", "cudnn") if f"copy, {n}" in row]
            ratios += [(max(shares), row["name"])] if shares else []
    return _worst(ratios, 0.75, "{:.2f} of a copy's rate")


def _never_slower(rows: Rows) -> tuple[bool, str] | None:
    slowest = []
    for part in ("floors", "seeds"):
        for row in rows.get(part, []):
            ratios = dict(row.get("pass_of_stock") or {})
            if row.get("stock_over_pass"):
                ratios["call"] = 1 / row["stock_over_pass"]
            noise = max(NOISE, *(x for a in [row.get("a_a") or 1.0] for x in (a, 1 / a)))
            slowest += [(noise / r, f"{row['name']}, {spelling}") for spelling, r in ratios.items() if r]
    return _worst(slowest, 1.0, "{:.2f} of stock's speed, noise taken off,")


def _right(rows: Rows) -> tuple[bool, str] | None:
    checked = [r for r in rows.get("correctness", []) if "verdict" in r or "error_text" in r]
    if not checked:
        return None
    ran = [r for r in checked if not r.get("verdict", "").startswith("refused")]
    bad = [r["name"] for r in ran if r.get("verdict") != "right"]
    return not bad, f"{len(ran) - len(bad)} of {len(ran)} right" + (f"; not {', '.join(bad[:5])}" if bad else "")


GOALS = (
    Goal("every target right, forward and backward", _right),
    Goal("S4: 50x over stock AOTInductor", _seed),
    Goal("prefill D128: 95 % of the best kernel by hand", _of_best),
    Goal("prefill D128 from 4k on: 75 % of the matmul rate", _of_matmul),
    Goal("decode q1 to 16 from 32k keys on: 75 % of a copy's rate, by the best kernel there is", _decode),
    Goal("nothing slower than stock", _never_slower),
)


def measured(rows: Rows, dry: bool) -> list[dict[str, str]]:
    """One line a goal; of a dry run what is right counts, and no time does."""
    lines = []
    for goal in GOALS:
        answer = goal.measured(rows) if not dry or goal.measured is _right else None
        verdict, value = (NOT_MEASURED, "") if answer is None else ("met" if answer[0] else "not met", answer[1])
        lines.append({"goal": goal.what, "verdict": verdict, "measured": value})
    return lines

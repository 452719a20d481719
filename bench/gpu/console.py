"""The result of a run: one JSON, and a Markdown table a part."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import goals
from bench.gpu.environment import one_line
from bench.gpu.journal import Journal
from bench.gpu.parts import Part, Row
from bench.harness.document import markdown_table


def document(journal: Journal, parts: Sequence[Part], over: bool = False) -> dict[str, Any]:
    """Everything the journal holds: ``run``, ``goals``, and ``parts`` by name with ``rows`` and ``notes``.

    ``over``: nothing runs any more, and a case that was begun and did not end was lost.
    """
    rows, notes, head = journal.rows(), journal.notes(), journal.head()
    for part, name in journal.all_unfinished() if over else ():
        lost = {"name": name, "error": "the run ended before the case did", "lost": True}
        rows[part] = [*(row for row in rows.get(part, ()) if row.get("name") != name), lost]
    return {
        "run": head,
        "goals": goals.measured(rows, bool(head.get("dry"))),
        "parts": {p.name: {"rows": rows.get(p.name, []), "notes": notes.get(p.name, [])} for p in parts},
    }


def markdown(found: dict[str, Any], parts: Sequence[Part]) -> str:
    """The tables as committed in docs/results."""
    run = dict(found["run"])
    dry = " A dry run: kernels are stand-ins on the CPU, shapes tiny, and times mean nothing." if run.get("dry") else ""
    lines = ["# One run on a GPU", "", f"{one_line(run)}.{dry}", "", "## Goals", ""]
    lines += markdown_table(("goal", "verdict", "measured"), [tuple(a.values()) for a in found["goals"]])
    for part in parts:
        given = found["parts"][part.name]
        lines += ["", f"## {part.title}", ""]
        good = [row for row in given["rows"] if "error" not in row]
        if good:
            shown = [c for c in part.columns if any(c.cell(row) != "-" for row in good)]
            lines += markdown_table([c.title for c in shown], [[c.cell(row) for c in shown] for row in good])
        failed = [f"- {row['name']}: {row['error']}" for row in given["rows"] if "error" in row]
        lines += ["", "Failed:", "", *failed] if failed else []
        lines += ["", *(f"- {note}" for note in given["notes"])] if given["notes"] else []
    return "\n".join(lines) + "\n"


def write(path: Path, found: dict[str, Any], parts: Sequence[Part]) -> None:
    """Writes FILE and FILE with .md, each in one step: a run that is killed leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {path: json.dumps(found, indent=1) + "\n", path.with_suffix(".md"): markdown(found, parts)}
    for target, text in texts.items():
        partial = target.with_suffix(f"{target.suffix}.{os.getpid()}.part")  # several shards may write at once
        partial.write_text(text)
        partial.replace(target)


def summary(found: dict[str, Any]) -> str:
    """What a caller who sees the end of the output needs."""
    lines = []
    for name, part in found["parts"].items():
        rows: list[Row] = part["rows"]
        verdicts = [str(r.get("verdict", "")).split(":")[0] for r in rows]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts) if v)
        failed = [r for r in rows if "error" in r]
        lines.append(f"{name}: {len(rows)} rows{', ' + counts if counts else ''}, {len(failed)} failed")
        lines += [f"  {r['name']}: {r['error'][:160]}" for r in failed[:5]]
        lines += [f"  {r['name']}: {r['verdict']}" for r in rows if r.get("verdict") in ("WRONG", "DIFFERS")]
        lines += [f"  {r['name']}: wrong {r['wrong']}" for r in rows if r.get("wrong")]
    told = [a for a in found["goals"] if a["verdict"] != goals.NOT_MEASURED]
    lines += [f"{a['verdict']:>8}  {a['goal']}: {a['measured']}" for a in told]
    return "\n".join(lines)


NOTHING, BAD = 1, 2


def status(found: dict[str, Any]) -> int:
    """The exit status of a run: 2 if a result is wrong, or a case failed or was lost; 1 if there is no row at all."""
    rows = [row for part in found["parts"].values() for row in part["rows"]]
    if any("error" in row or row.get("wrong") or row.get("verdict") == "WRONG" for row in rows):
        return BAD
    return 0 if rows else NOTHING

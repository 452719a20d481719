"""The result of a run on a GPU: a document with the goals and one table per part, built from the journal."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu import goals
from bench.gpu.journal import Journal
from bench.gpu.parts import Part
from bench.harness.document import Column, Document, Table

TITLE, GOALS = "One run on a GPU", "Goals"
GOAL_COLUMNS = (Column("goal", "goal"), Column("verdict", "verdict"), Column("measured", "measured"))


def document(journal: Journal, parts: Sequence[Part], over: bool = False) -> Document:
    """Everything the journal holds of these parts.

    ``over``: nothing runs any more, and a case that was begun and did not end was lost.
    """
    rows, notes, head = journal.rows(), journal.notes(), journal.head()
    for part, name in journal.unfinished().values() if over else ():
        lost = {"name": name, "status": "failed", "error_text": "the run ended before the case did", "lost": True}
        rows[part] = [*(row for row in rows.get(part, ()) if row.get("name") != name), lost]
    measured = goals.measured(rows, bool(head.get("dry")))
    tables = [Table(p.title, p.columns, rows.get(p.name, []), notes.get(p.name, []), p.name) for p in parts]
    return Document(TITLE, head, [Table(GOALS, GOAL_COLUMNS, measured), *tables])


def parts_of(run: Document) -> list[Table]:
    """Its tables without that of the goals."""
    return [table for table in run.tables if table.name]


def summary(run: Document) -> str:
    """What a caller who sees the end of the output needs."""
    lines = []
    for table in parts_of(run):
        verdicts = [str(r.get("verdict", "")).split(":")[0] for r in table.rows]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts) if v)
        failed = table.failures()
        lines.append(f"{table.name}: {len(table.rows)} rows{', ' + counts if counts else ''}, {len(failed)} failed")
        lines += [f"  {text[:200]}" for text in failed[:5]]
        lines += [f"  {r['name']}: {r['verdict']}" for r in table.rows if r.get("verdict") in ("WRONG", "DIFFERS")]
        lines += [f"  {r['name']}: wrong {r['wrong']}" for r in table.rows if r.get("wrong")]
    told = [a for a in run.tables[0].rows if a["verdict"] != goals.NOT_MEASURED]
    lines += [f"{a['verdict']:>8}  {a['goal']}: {a['measured']}" for a in told]
    return "\n".join(lines)


NOTHING, BAD = 1, 2


def status(run: Document) -> int:
    """The exit status of a run: 2 if a result is wrong, or a case failed or was lost; 1 if there is no row at all."""
    tables = parts_of(run)
    wrong = any(row.get("wrong") or row.get("verdict") == "WRONG" for table in tables for row in table.rows)
    if wrong or any(table.failures() for table in tables):
        return BAD
    return 0 if any(table.rows for table in tables) else NOTHING

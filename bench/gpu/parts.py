"""A run as parts and cases: shares of the time, a journal that outlives the process, errors kept with their case."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.frame.document import Column, Row
from bench.gpu.place import Place
from bench.gpu.timing import why

Tell = Callable[[str], None]
_TRACE = 2500  # characters kept of a traceback


@dataclass(frozen=True)
class Case:
    """One row: ``run`` gives its fields, and may raise."""

    name: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Part:
    """What one part measures; ``share`` of the time is its own, and what others leave."""

    name: str
    title: str
    share: float
    columns: tuple[Column, ...]
    cases: Callable[[Place], Sequence[Case]]


class Journal:
    """Lines of JSON, one as a case begins and one as it ends, written at once: what a run that dies leaves."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **line: Any) -> None:
        """One line more."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def lines(self) -> list[Row]:
        """All lines so far; half a line at the end is left out."""
        if not self.path.exists():
            return []
        found = []
        for text in self.path.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        return found

    def rows(self) -> dict[str, list[Row]]:
        """The rows of every part, in the order they were measured."""
        found: dict[str, list[Row]] = {}
        for line in self.lines():
            if "row" in line:
                found.setdefault(line["part"], []).append(line["row"])
        return found

    def notes(self) -> dict[str, list[str]]:
        """What is to be said of every part."""
        found: dict[str, list[str]] = {}
        for line in self.lines():
            if "note" in line:
                found.setdefault(line["part"], []).append(line["note"])
        return found

    def head(self) -> Row:
        """The facts of the run."""
        return {k: v for line in self.lines() if "head" in line for k, v in line["head"].items()}

    def unfinished(self) -> tuple[str, str] | None:
        """The part and the case that began and did not end."""
        begun = None
        for line in self.lines():
            if line.get("begin"):
                begun = (line["part"], line["begin"])
            elif "row" in line and begun == (line["part"], line["row"].get("name")):
                begun = None
        return begun


class Lost(RuntimeError):
    """The device answers no more in this process."""


def run_parts(
    place: Place, parts: Iterable[Part], end: float, journal: Journal, tell: Tell, done: Callable[[], None]
) -> None:
    """Runs the parts until ``end`` (of `time.time`), each until its share of what is left is used up.

    Parts that are over and cases the journal has are not run again. ``done`` is called after each part.

    Raises:
        Lost: nothing runs in this process any more; another one goes on.
    """
    over = {line["part"] for line in journal.lines() if line.get("over")}
    todo = [part for part in parts if part.name not in over]
    while todo:
        part = todo.pop(0)
        left = end - time.time()
        deadline = time.time() + left * part.share / (part.share + sum(p.share for p in todo))
        _run_part(place, part, deadline, journal, tell)
        journal.add(part=part.name, over=True)
        done()


def _run_part(place: Place, part: Part, deadline: float, journal: Journal, tell: Tell) -> None:
    done = {row.get("name") for row in journal.rows().get(part.name, [])}
    try:
        cases = [case for case in part.cases(place) if case.name not in done]
    except Exception as error:
        journal.add(part=part.name, note=f"could not begin: {why(error)}")
        tell(f"{part.name}: could not begin: {why(error)}")
        return
    began = time.time()
    for number, case in enumerate(cases):
        if time.time() > deadline:
            names = ", ".join(c.name for c in cases[number:])
            note = f"out of time, {len(cases) - number} of {len(cases)} cases skipped: {names}"
            journal.add(part=part.name, note=note)
            tell(f"{part.name}: {note[:200]}")
            break
        journal.add(part=part.name, begin=case.name)
        row = _run_case(place, case)
        journal.add(part=part.name, row=row)
        shown = f"FAILED {row['error']}" if "error" in row else _shown(part, row)
        tell(f"{part.name}: {case.name}: {shown}"[:230])
        if row.get("lost"):
            raise Lost(case.name)
    journal.add(part=part.name, note=f"{time.time() - began:.0f} s")


def _run_case(place: Place, case: Case) -> Row:
    began = time.perf_counter()
    row: Row = {"name": case.name}
    try:
        place.forget()
        row |= case.run()
        place.wait()
    except Exception as error:
        row |= {"error": why(error), "trace": traceback.format_exc()[-_TRACE:]}
        if not place.dry and _is_lost(place):
            row |= {"error": f"{row['error']} (the device was lost)", "lost": True}
    row["seconds"] = round(time.perf_counter() - began, 2)
    return row


def _is_lost(place: Place) -> bool:
    try:
        place.wait()
        place.normal(8).sum().item()
    except Exception:
        return True
    return False


def _shown(part: Part, row: Row) -> str:
    cells = ((c.title, c.cell(row)) for c in part.columns if c.field != "name")
    return ", ".join(f"{title} {cell}" for title, cell in cells if cell != "-")

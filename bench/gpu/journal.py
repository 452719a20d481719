"""The journal: lines of JSON that survive a crash of the process, and from which the JSON of a run is rebuilt.

Several processes may append to one journal, such as the shards of a part: every line carries the name of its run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.harness.document import Row


class Journal:
    """A file that is only ever appended to, a line at a time; ``run`` names who writes."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.path, self.run = path, run

    def add(self, **line: Any) -> None:
        """One line more, in a single write, so that lines of several processes never mix."""
        text = json.dumps({"run": self.run, **line}, default=str) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def start_anew(self) -> None:
        """What this run wrote before counts no more."""
        self.add(start=True)

    def lines(self) -> list[Row]:
        """All lines that count, of every run; half a line, as a kill leaves it, is left out."""
        if not self.path.exists():
            return []
        kept: list[Row] = []
        for text in self.path.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line.get("start"):
                kept = [other for other in kept if other.get("run", "") != line.get("run", "")]
            else:
                kept.append(line)
        return kept

    def own(self) -> list[Row]:
        """Those of this run."""
        return [line for line in self.lines() if line.get("run", "") == self.run]

    def rows(self) -> dict[str, list[Row]]:
        """The rows of every part in the order they were measured; of two with a name the later one."""
        by_case: dict[str, dict[str, Row]] = {}
        for line in self.lines():
            if "row" in line:
                by_case.setdefault(line["part"], {})[line["row"].get("name", "")] = line["row"]
        return {part: list(rows.values()) for part, rows in by_case.items()}

    def notes(self) -> dict[str, list[str]]:
        """What is to be said of every part."""
        by_case: dict[str, list[str]] = {}
        for line in self.lines():
            if "note" in line:
                who = f"{line['run']}: " if line.get("run") else ""
                by_case.setdefault(line["part"], []).append(who + line["note"])
        return by_case

    def head(self) -> Row:
        """The facts of the run, with the commands of all who wrote."""
        heads = [line["head"] for line in self.lines() if "head" in line]
        commands = [head["command"] for head in heads if "command" in head]
        return {**{k: v for head in heads for k, v in head.items()}, "command": "; ".join(dict.fromkeys(commands))}

    def unfinished(self) -> dict[str, tuple[str, str]]:
        """The part and the case that each run began and did not end: once all are over, what was lost with them."""
        begun: dict[str, tuple[str, str]] = {}
        for line in self.lines():
            run = line.get("run", "")
            if line.get("begin"):
                begun[run] = (line["part"], line["begin"])
            elif "row" in line and begun.get(run) == (line["part"], line["row"].get("name")):
                del begun[run]
        return begun

    def progress(self) -> int:
        """How many lines of this run there are, those left out that only say that it still runs."""
        return sum("beat" not in line for line in self.own())

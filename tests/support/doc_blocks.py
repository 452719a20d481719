"""The fenced blocks of a page of the documentation, and the comments that control how they run.

``<!-- not run: REASON -->`` keeps a block from being run; ``<!-- file: NAME -->`` writes it to a file that later blocks
of the page use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "bash", "text", "toml", "cpp", "py")  # the last is a signature, which is not run
_MARK = re.compile(r"<!-- (not run|file|needs): (.+) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its first line of text."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    file: str = ""
    needs: str = ""  # a library without which it is left out

    @property
    def where(self) -> str:
        """The page and the line, for messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, without comments."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
        return [line for line in lines if line]


def pages() -> list[str]:
    """Every page whose blocks are run: the README, the pages of docs/, and the how-tos."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in files]


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order."""
    return list(_blocks(page, (ROOT / page).read_text()))


def _blocks(page: str, text: str) -> Iterator[Block]:
    mark: re.Match[str] | None = None
    opened: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if opened is not None:
            if line.strip() == "```":
                start, language, lines = opened
                kind, said = (mark[1], mark[2]) if mark else ("", "")
                marks = {"not_run": said if kind == "not run" else "", "file": said if kind == "file" else ""}
                marks["needs"] = said if kind == "needs" else ""
                yield Block(page, start, language, "".join(f"{x}\n" for x in lines), **marks)
                opened = mark = None
            else:
                opened[2].append(line)
        elif line.startswith("```"):
            opened = (number + 1, line[3:].strip(), [])
        elif line.strip():
            mark = _MARK.fullmatch(line.strip())

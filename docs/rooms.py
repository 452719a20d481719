"""The table of rooms in architecture.md: the first line of every module's docstring, room by room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "attn_pass"


def rooms() -> Iterator[str]:
    """Lines of Markdown: for each package what it is, then a row a module."""
    for room in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        modules = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
        yield from ("", f"### `{room.relative_to(PACKAGE.parent)}/`", "", _first_line(room / "__init__.py"), "")
        if modules:
            yield from ("| module | what it is |", "|---|---|")
            yield from (f"| `{path.name}` | {_first_line(path)} |" for path in modules)
    yield ""


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("``", "`").replace("|", "\\|")

"""Writes what `docs/rewrites.md` says of poor cases and targets from their docstrings: `python docs/build.py`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from attn_pass import poor_cases, targets

PAGE = Path(__file__).parent / "rewrites.md"
_LABEL = re.compile(r"^(Poor|Costs|Becomes|Exact because|Offers)\b:?", re.MULTILINE)


def section(name: str, module: ModuleType) -> str:
    """A poor case or target under its name: the docstring of its file, as Markdown."""
    text = ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = _LABEL.sub(lambda match: f"*{match[0].rstrip(':')}*" + (":" if match[0].endswith(":") else ""), text)
    return f"### `{name}`\n\n{text}\n"


def sections() -> Iterator[tuple[str, str]]:
    """What stands between the marks for each room."""
    cases = [(name, inspect.getmodule(case)) for name, case in poor_cases.CASES.items()]
    forms = [(target.name, inspect.getmodule(type(target))) for target in targets.built_in()]
    for room, entries in (("poor_cases", cases), ("targets", forms)):
        yield room, "\n".join(section(name, module) for name, module in entries if module is not None)


def built(page: str) -> str:
    """The page with every marked part written anew."""
    for room, text in sections():
        start = f"<!-- from attn_pass/{room}: make docs -->\n"
        head, found, rest = page.partition(start)
        assert found, f"{PAGE.name} has no mark for {room}"
        page = f"{head}{start}{text}{rest[rest.index('<!-- end -->') :]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(built(PAGE.read_text()))

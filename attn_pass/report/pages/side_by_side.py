"""Code before and after side by side: aligned lines, in runs that changed and runs that did not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

CONTEXT = 3  # unchanged lines shown around a change
_LONGEST = 400  # characters of a line
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]*)?=[^=]")


@dataclass(frozen=True)
class Line:
    """One line of one side: its number from 1, its text, and the number of the site it belongs to (0 for none)."""

    number: int
    text: str
    site: int = 0


@dataclass(frozen=True)
class Row:
    """Lines that stand beside each other; None where a side has none."""

    before: Line | None
    after: Line | None


@dataclass(frozen=True)
class Run:
    """Rows that all changed, or of which none did; ``folded`` ones are far from any change."""

    changed: bool
    folded: bool
    rows: tuple[Row, ...]


def side_by_side(
    before: str, after: str, removed: Mapping[str, int] | None = None, added: Mapping[str, int] | None = None
) -> tuple[Run, ...]:
    """The runs of two texts.

    Args:
        before, after: readable code.
        removed, added: names of nodes to the number of the site that removed or added them.
    """
    old, new = before.splitlines(), after.splitlines()
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) + len(new) > 4000)
    runs: list[Run] = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            rows = [Row(_line(old, i + n, {}), _line(new, j + n, {})) for n in range(i_end - i)]
            runs += _with_folds(rows, starts=not runs, ends=i_end == len(old) and j_end == len(new))
            continue
        left = [_line(old, n, removed or {}) for n in range(i, i_end)]
        right = [_line(new, n, added or {}) for n in range(j, j_end)]
        length = max(len(left), len(right))
        pairs = zip(left + [None] * (length - len(left)), right + [None] * (length - len(right)))
        runs.append(Run(True, False, tuple(Row(*pair) for pair in pairs)))
    return tuple(runs)


def _with_folds(rows: Sequence[Row], *, starts: bool, ends: bool) -> Iterator[Run]:
    """Unchanged rows with all but those next to a change folded, where that saves more than a few lines."""
    head, tail = 0 if starts else CONTEXT, 0 if ends else CONTEXT
    if len(rows) <= head + tail + 2:
        yield Run(False, False, tuple(rows))
        return
    for part, folded in (
        (rows[:head], False),
        (rows[head : len(rows) - tail], True),
        (rows[len(rows) - tail :], False),
    ):
        if part:
            yield Run(False, folded, tuple(part))


def _line(lines: Sequence[str], number: int, sites: Mapping[str, int]) -> Line:
    text = lines[number]
    assigned = _ASSIGNED.match(text)
    site = sites.get(assigned[1], 0) if assigned else 0
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... ({len(text) - _LONGEST} more characters)"
    return Line(number + 1, text, site)

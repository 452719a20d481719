"""Code before and after side by side: aligned lines, in runs that changed and runs that did not; masks are folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby, zip_longest

CONTEXT = 3  # unchanged lines shown around a change
LEAST_FOLDED = 3  # lines of a mask
_LONGEST = 400  # characters of a line
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]*)?=[^=]")


@dataclass(frozen=True)
class Line:
    """One line of one side: its number from 1, its text, the number of the site it belongs to (0 for none).

    ``mask`` is set where it makes a mask or a bias.
    """

    number: int
    text: str
    site: int = 0
    mask: bool = False


@dataclass(frozen=True)
class Row:
    """Lines that stand beside each other; None where a side has none."""

    before: Line | None
    after: Line | None


@dataclass(frozen=True)
class Run:
    """Rows that all changed, or of which none did; ``folded`` ones are far from any change, or make a mask."""

    changed: bool
    folded: bool
    rows: tuple[Row, ...]

    @property
    def what(self) -> str:
        """The folded rows in words: "12 unchanged lines"."""
        if not self.changed:
            return f"{len(self.rows)} unchanged lines"
        side = "before" if self.rows[0].after is None else "after"
        return f"{len(self.rows)} lines that make the mask, {side}"


def side_by_side(
    before: str,
    after: str,
    removed: Mapping[str, int] | None = None,
    added: Mapping[str, int] | None = None,
    masks: Set[str] = frozenset(),
) -> tuple[Run, ...]:
    """The runs of two texts.

    Args:
        before, after: readable code.
        removed, added: names of nodes to the number of the site that removed or added them.
        masks: names of those of these nodes that make a mask.
    """
    old, new = before.splitlines(), after.splitlines()
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) + len(new) > 4000)
    runs: list[Run] = []
    old_masks, new_masks = (_making_masks(lines, masks) for lines in (old, new))
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            rows = [Row(_line(old, i + n, {}), _line(new, j + n, {})) for n in range(i_end - i)]
            runs += _with_folds(rows, starts=not runs, ends=i_end == len(old) and j_end == len(new))
            continue
        left = [_line(old, n, removed or {}, old_masks) for n in range(i, i_end)]
        right = [_line(new, n, added or {}, new_masks) for n in range(j, j_end)]
        runs += _changed(left, right)
    return tuple(runs)


def _changed(left: Sequence[Line], right: Sequence[Line]) -> Iterator[Run]:
    """The lines of both sides beside each other, but those of masks, which are folded one side at a time."""
    olds, news = _pieces(left), _pieces(right)
    while olds or news:
        if olds and olds[0][0].mask:
            yield Run(True, True, tuple(Row(line, None) for line in olds.pop(0)))
        elif news and news[0][0].mask:
            yield Run(True, True, tuple(Row(None, line) for line in news.pop(0)))
        else:
            pairs = zip_longest(olds.pop(0) if olds else (), news.pop(0) if news else ())
            yield Run(True, False, tuple(Row(*pair) for pair in pairs))


def _pieces(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines in runs that make a mask and runs that do not; a mask of few lines is not worth folding."""
    runs = [list(run) for _, run in groupby(lines, key=lambda line: line.mask)]
    plain = [replace(line, mask=False) if len(run) < LEAST_FOLDED else line for run in runs for line in run]
    return [list(run) for _, run in groupby(plain, key=lambda line: line.mask)]


def _making_masks(lines: Sequence[str], masks: Set[str]) -> frozenset[int]:
    """Numbers of the lines that make masks, with the comments before them and what is blank between them."""
    making: set[int] = set()
    waiting: list[int] = []  # comments and blank lines, which belong to what follows
    last = False
    for number, line in enumerate(lines if masks else ()):
        assigned = _ASSIGNED.match(line)
        if assigned is None or line.lstrip().startswith("#"):
            waiting.append(number)
            continue
        makes = assigned[1] in masks
        making |= {n for n in (*waiting, number) if makes and (last or lines[n].strip())}
        waiting, last = [], makes
    return frozenset(making)


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


def _line(lines: Sequence[str], number: int, sites: Mapping[str, int], masks: Set[int] = frozenset()) -> Line:
    text = lines[number]
    assigned = _ASSIGNED.match(text)
    site = sites.get(assigned[1], 0) if assigned else 0
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... ({len(text) - _LONGEST} more characters)"
    return Line(number + 1, text, site, number in masks)

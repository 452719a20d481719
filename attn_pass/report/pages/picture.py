"""`Picture`: the keys that each query row attends to, as a small grid of cells, and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

ALL, SOME, NONE, UNKNOWN = "#+.?"
"""Of a cell's (row, key) pairs: all kept, some, none, or the program has to run to know."""

WORDS = {ALL: "kept", SOME: "kept in part", NONE: "masked", UNKNOWN: "not known beforehand"}


@dataclass(frozen=True)
class Picture:
    """A mask over query rows (down) and keys (across).

    Attributes:
        cells: one string a row of cells, of `ALL`, `SOME`, `NONE` and `UNKNOWN`.
        rows, keys: query length and key length; the cells share them out evenly.
        remark: what the picture leaves out ("sampled"), "" for nothing.
    """

    cells: tuple[str, ...]
    rows: int
    keys: int
    remark: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of cells there are, in the order of `WORDS`."""
        return tuple(kind for kind in WORDS if any(kind in row for row in self.cells))

    def runs(self) -> Iterator[tuple[int, int, int, str]]:
        """(x, y, width, kind) of each run of equal cells in a row, masked ones left out."""
        for y, row in enumerate(self.cells):
            x = 0
            for kind, cells in groupby(row):
                width = len(list(cells))
                if kind != NONE:
                    yield x, y, width, kind
                x += width

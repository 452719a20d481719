"""The record of one region without padding: what was proved, where its rows leave it, and why it is no larger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_pass.report.json_schema import Record
from attn_pass.report.units import counted

IN_RESULT = "rows of padding are in the result of the model"
"""The reason, or a stop, that the user can do away with by `Options.assume_padding_unused`."""
_HINT = "  hint: if the rows of padding in the result are not used, assume_padding_unused=True skips them"


@dataclass(eq=False, kw_only=True)
class RegionReport(Record):
    """The attentions of a graph that share a padding mask, and what runs without padding around them.

    Attributes:
        outcome: "packed" if rows of padding are not computed, "left" if they are.
        reason: the reason for the outcome, in plain words.
        where: source line of the first attention.
        sites: how many attentions with this mask there are, and of them
        packed: how many run on packed rows.
        rows: the sizes of batch and positions; a symbolic size is shown by its name.
        operations: how often each operation runs row by row, by its name.
        entries: what is packed where the region begins, by the node's name.
        exits: where rows leave the region, and why padding is not seen there.
        stops: what may see rows of padding, so that the region ends before it.
        assumptions: the user's word that it rests on.
    """

    outcome: Literal["packed", "left"]
    reason: str
    where: str = "unknown source line"
    sites: int = 0
    packed: int = 0
    rows: tuple[int | str, ...] = ()
    operations: dict[str, int] = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    exits: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def mark_left(self, reason: str) -> None:
        """Record that padding is computed after all."""
        self.outcome, self.reason, self.packed = "left", reason, 0
        self.entries, self.exits, self.assumptions, self.operations = (), (), (), {}

    def lines(self) -> list[str]:
        """The record as text: one line, and one for each step of the proof."""
        if self.outcome == "left":
            sites = counted(self.sites, "site")
            text = f"padding is not removed: {self.reason} ({sites} with a padding mask, {self.where})"
            stops = [f"  stopped: {stop}" for stop in self.stops if stop != self.reason]
            return [text, *stops, *([_HINT] if IN_RESULT in (self.reason, *self.stops) else [])]
        operations = ", ".join(f"{name} x{count}" for name, count in self.operations.items())
        sites = f"{counted(self.sites, 'attention')} {'runs' if self.sites == 1 else 'run'}"
        return [
            f"padding is removed: {self.packed} of {sites} on packed rows of"
            f" ({', '.join(map(str, self.rows))}), {self.where}",
            f"  row by row: {operations}",
            f"  packed: {', '.join(self.entries)}",
            *(f"  exit: {text}" for text in self.exits),
            *(f"  stopped: {stop}" for stop in self.stops),
            *(f"  assumed: {text}" for text in self.assumptions),
        ]

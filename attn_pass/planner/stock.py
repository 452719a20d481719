"""What stock Inductor is predicted to run for a site: what is written, or what its own patterns make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_pass.graph.cut import Cut
from attn_pass.graph.regions import Region
from attn_pass.report.units import duration

UNFUSED = "unfused"


@dataclass(frozen=True)
class Stock:
    """The kernel that stock ends in, `UNFUSED` for products around a softmax, with its predicted microseconds.

    ``by_pattern`` is set where one of Inductor's attention patterns matches products and a softmax. With the pass these
    patterns are kept away from most of what is left (`attn_pass.entries.shield`), so stock is then not the same as
    leaving. ``as_written``: what the pattern makes is proved to compute what was written.
    """

    kernel: str
    us: float
    by_pattern: bool = False
    as_written: bool = False

    def in_words(self, leaving: float) -> str:
        """The baseline as the start of a reason."""
        if self.by_pattern:
            return f"{duration(leaving)} unfused, {duration(self.us)} with stock ({self.kernel})"
        return f"{duration(self.us)} with stock"


@dataclass(frozen=True)
class FusedCall:
    """A call of a fused kernel in the graph that Inductor's patterns leave: its operator, and the mask it is given.

    ``as_written``: it is proved to compute what was written, but for rounding and fully masked rows.
    """

    operator: str
    mask: str = "none"
    mask_elements: int = 0
    as_written: bool = False


class StockFails(Exception):
    """Inductor's own patterns raise on a part of a program, as for a scale that is a tensor: nothing is known."""


AskStock = Callable[[Cut, Region], "FusedCall | None"]
"""The fused call that Inductor's own patterns make of a part of a program; None where they make none.

Raises `StockFails`.
"""

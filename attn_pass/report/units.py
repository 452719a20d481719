"""Numbers as reports show them: a time with its unit, a count with its noun."""

from __future__ import annotations


def duration(microseconds: float) -> str:
    """A time with its unit: "564 us", "51.7 ms", "1.2 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:  # what rounds to 1,000 of a unit is 1 of the next
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun: "1 site", "2 sites"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"

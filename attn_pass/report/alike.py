"""Records that say the same of several layers of a graph, as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from typing_extensions import Self


class Countable(Protocol):
    """A record that counts what it is about."""

    def is_alike(self, other: Self) -> bool:
        """Whether another record says the same of other layers."""

    def count(self, other: Self) -> None:
        """Counts what an alike record is about as well."""


_Record = TypeVar("_Record", bound=Countable)


def merged(records: Iterable[_Record]) -> list[_Record]:
    """The first of all records that are alike, which counts the others; in order."""
    distinct: list[_Record] = []
    for record in records:
        alike = next((one for one in distinct if one.is_alike(record)), None)
        if alike is None:
            distinct.append(record)
        else:
            alike.count(record)
    return distinct

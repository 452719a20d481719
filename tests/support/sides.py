"""`Table`: the rows of a target's table, what they all take, and for each row what is on both of its sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from described import case

from attn_pass.devices.registry import device_for
from attn_pass.targets.base import Target
from attn_pass.targets.constraints import Attended, Constraint

Given = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A target's table.

    Attributes:
        target: whose it is; it refuses with the reason of the first row that fails.
        rows: in order.
        taken: what `described.case` is given for a case that all rows take.
        sides: by the name of a row pairs of changes to that: the first is taken, the second refused by that row first.
            ``environment`` are names in modules that are something else for it, ``runtime`` one to export to.
        made: the case of the table's own kind.
        environment: names in modules that are something else for all of its cases.
    """

    target: Target
    rows: Sequence[Constraint[Any]]
    taken: Given
    sides: Mapping[str, Sequence[tuple[Given, Given]]]
    made: Callable[[Attended], Any] = lambda attended: attended
    environment: Given = field(default_factory=dict)

    def case(self, changes: Given) -> tuple[Attended, Given]:
        """The case of some changes, and its environment."""
        given = {**self.taken, **changes}
        environment = {**self.environment, **given.pop("environment", {})}
        if (runtime := given.pop("runtime", None)) is not None:
            given["device"] = device_for(torch.device("cpu"), runtime=runtime)
        return case(**given), environment

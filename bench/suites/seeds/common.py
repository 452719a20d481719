"""Code shared by the seeds: the operands of the field reports, and how their programs are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Row, Table
from bench.harness.floors import Rates
from bench.harness.measure import Tell, run
from bench.harness.programs import Program, Setting, Tensors, normal

EVERYTHING = (*w.COMPILED, *w.PACKAGED)


def operands(*shape: int, seed: int, device: str) -> Tensors:
    """Query, key and value of one shape, the same numbers on every call; in half precision but on a CPU."""
    q, k, v = (x.to(device) for x in normal(seed, shape, shape, shape))
    return (q, k, v) if device == "cpu" else (q.half(), k.half(), v.half())


@dataclass(frozen=True)
class Bench:
    """What a seed is measured under."""

    setting: Setting
    rates: Rates
    tell: Tell

    def rows(self, module: str, programs: Sequence[Program], ways: Sequence[str]) -> list[Row]:
        """Some of a module's programs, each in these ways."""
        return run(module, programs, tuple(ways), self.setting, self.rates, self.tell)

    def table(
        self, module: str, title: str, programs: Sequence[Program], packaged: slice, notes: Sequence[str]
    ) -> Table:
        """All of a module's programs in every way; in quick runs packages only of those that are ``packaged``."""
        chosen = programs[packaged] if self.setting.quick else programs
        table = Table(title, STANDARD, notes=[*notes, LEGEND])
        for program in programs:
            table.rows += self.rows(module, [program], EVERYTHING if program in chosen else w.COMPILED)
        return table

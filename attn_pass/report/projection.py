"""The record of linear layers that make queries, keys and values: whether those of one input are multiplied once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attn_pass.report.json_schema import Record
from attn_pass.report.units import duration

_LEFT = ("projection by itself", "projections not joined")


@dataclass(eq=False, kw_only=True)
class ProjectionReport(Record):
    """Linear layers of one input, or one that stays alone; those of layers that are alike are one record.

    Attributes:
        outcome: "joined" if they are one product now, "left" if each is a product of its own.
        reason: the reason for the outcome, in plain words.
        where: source line of the first layer.
        roles: what each makes: "query", "key", "value", or several of them.
        widths: how many features each makes, in the order of ``roles``.
        features: how many features their input has.
        groups: how often they are in the graph.
        operands: how many queries, keys and values of attentions they make, all groups together.
        predicted_us: the predicted time of one group in microseconds: "leave" and "join". Empty if it was not asked.
    """

    outcome: Literal["joined", "left"]
    reason: str
    where: str = "unknown source line"
    roles: tuple[str, ...] = ()
    widths: tuple[int | str, ...] = ()
    features: int | str = 0
    groups: int = 1
    operands: int = 0
    predicted_us: dict[str, float] = field(default_factory=dict)

    def mark_left(self, reason: str) -> None:
        """Record that they are products of their own after all."""
        self.outcome, self.reason = "left", reason

    def is_alike(self, other: ProjectionReport) -> bool:
        """Whether another record says the same of other layers."""
        return self._facts() == other._facts()

    def count(self, other: ProjectionReport) -> None:
        """Counts the groups and operands of an alike record as well."""
        self.groups += other.groups
        self.operands += other.operands

    def _facts(self) -> tuple[Any, ...]:
        return self.outcome, self.reason, self.where, self.roles, self.widths, self.features, self.predicted_us

    def line(self) -> str:
        """The record as a line of text."""
        roles = ", ".join(self.roles)
        layers = f"{roles} ({self.features} to {' + '.join(map(str, self.widths))} features)"
        times = "" if self.groups == 1 else f", {self.groups} times"
        gain = ""
        if {"leave", "join"} <= self.predicted_us.keys():
            joined, apart = (duration(self.predicted_us[name]) for name in ("join", "leave"))
            gain = f", predicted {joined} instead of {apart}"
        if self.outcome == "joined":
            return f"projections joined into one: {layers}{times}{gain}, {self.where}"
        return f"{_LEFT[len(self.roles) > 1]}: {layers}{times}: {self.reason}, {self.where}"

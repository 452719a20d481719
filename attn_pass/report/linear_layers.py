"""The record of linear layers that another kernel multiplies than the one torch's call would use."""

from __future__ import annotations

from dataclasses import dataclass

from attn_pass.report.json_schema import Record


@dataclass(eq=False, kw_only=True)
class LinearLayersReport(Record):
    """Linear layers that are alike.

    Attributes:
        library: whose code multiplies them now; "" where they are torch's calls after all.
        reason: why, in plain words.
        where: source line of the first.
        features: how many features their input has.
        width: how many their result has.
        dtype: of both, and of the weight.
        activation: what is applied to the result in the same call: "gelu", "gelu, tanh" or "silu"; "none" if nothing.
        layers: how many of them are in the graph.
    """

    library: str
    reason: str
    where: str = "unknown source line"
    features: int
    width: int
    dtype: str
    activation: str = "none"
    layers: int = 1

    def mark_left(self, reason: str) -> None:
        """Record that they are torch's calls after all."""
        self.library, self.reason = "", reason

    def is_alike(self, other: LinearLayersReport) -> bool:
        """Whether another record says the same of other layers."""
        return self._facts() == other._facts()

    def count(self, other: LinearLayersReport) -> None:
        """Counts the layers of an alike record as well."""
        self.layers += other.layers

    def _facts(self) -> tuple[object, ...]:
        return self.library, self.reason, self.features, self.width, self.dtype, self.activation

    def line(self) -> str:
        """The record as a line of text."""
        applied = "" if self.activation == "none" else f", with {self.activation}"
        which = f"{self.features} to {self.width} features, {self.dtype}{applied}"
        times = "" if self.layers == 1 else f", {self.layers} times"
        done = f"multiplied by {self.library}" if self.library else "as written"
        return f"linear layers {done}: {which}{times}: {self.reason}, {self.where}"

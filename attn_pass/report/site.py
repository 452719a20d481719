"""The record of one attention site: its outcome, the reason, the predicted times and the assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from attn_pass.report.json_schema import check_fields

Outcome = Literal["rewritten", "decomposed", "left"]
Kind = Literal["attention", "near miss"]


@dataclass(eq=False, kw_only=True)
class SiteReport:
    """What was decided for one site. Two identical layers are two records, so records compare by identity.

    Attributes:
        outcome: "rewritten" to one fused call, "decomposed" into plain operations, or "left" as it was.
        kind: "attention", or "near miss" for a softmax that looks like attention and could not be proven to be.
        target: the target that was taken; None when the site is left.
        reason: why, in words a user understands.
        form: how it was written: "sdpa", "eager", ...
        where: source line, "file.py:123 in forward".
        count: calls of the shared body the site is in (1 outside shared bodies).
        shapes: "query", "key", "value" to their sizes; a symbolic size is its name.
        dtype, device: of the result, "bfloat16", "cuda".
        mask: what the mask is, in words ("none", "causal", "sliding window (3, 0)", "causal and padding", "dense").
        poor_cases: names of the poor cases whose variant was taken.
        refusals: target to the reason it did not take the site.
        assumptions: what was assumed, or differs in a way the numerics contract allows.
        fixed: buffers and constants, by name, of which the values were relied on: they are part of what was compiled.
        score_mod: the score function that was emitted, as Python source; ``t0`` and so on are tensors of the program.
            Empty where none was.
        predicted_us: predicted time in microseconds of each offer, "leave" included.
        measured_us: measured time of each form that was, "leave" included; empty where none was (`Options.tune`).
        verified_error: greatest absolute difference from the original when verified; None when not verified.
        not_verified: why a site could not be verified where that was asked for; "" otherwise.
        formula: the attention over batch b, head h, query i and key j: "score", "keep" (the condition; absent where
            every key is kept, or the bias masks), "else" (the score of a key that is not), "result", and the tensors
            they read by name.
        rates: of the device, for the site's dtype: "device" (its name), "gflops" of matrix products, "gbytes" a second
            of its memory. Empty where nothing was decided.
        roofline: "leave" and the target that was taken to "flops", "bytes" moved and "us" as predicted; the first two
            are absent for forms that are several kernels, symbolic sizes are at their hint.
        module: path of the module ("model.layers.0.self_attn"), "" if unknown.
        node: name of the graph node the site ends in.
    """

    outcome: Outcome
    reason: str
    kind: Kind = "attention"
    target: str | None = None
    form: str = "eager"
    where: str = "unknown source line"
    count: int = 1
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    dtype: str = ""
    device: str = ""
    mask: str = "none"
    poor_cases: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    score_mod: str = ""
    predicted_us: dict[str, float] = field(default_factory=dict)
    measured_us: dict[str, float] = field(default_factory=dict)
    verified_error: float | None = None
    not_verified: str = ""
    formula: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float | str] = field(default_factory=dict)
    roofline: dict[str, dict[str, float]] = field(default_factory=dict)
    module: str = ""
    node: str = ""

    def mark_left(self, reason: str) -> None:
        """Record that the site stays as it was after all; what had been chosen becomes a refusal with this reason."""
        if self.target is not None:
            self.refusals = {**self.refusals, self.target: reason}
        self.outcome, self.target, self.reason = "left", None, reason
        self.poor_cases, self.assumptions, self.fixed = (), (), ()
        self.verified_error, self.not_verified, self.score_mod = None, "", ""
        self.roofline = {name: point for name, point in self.roofline.items() if name == "leave"}

    @property
    def became(self) -> str:
        """What became of it, in words: "rewritten to sdpa", "near miss, left"."""
        outcome = f"{self.outcome} to {self.target}" if self.target else self.outcome
        return f"near miss, {outcome}" if self.kind == "near miss" else outcome

    @property
    def bytes_saved(self) -> float:
        """Bytes of memory traffic that what was taken saves in one call, as predicted; 0 where that is not known."""
        taken = self.roofline.get(self.target or "", {})
        before = self.roofline.get("leave", {})
        return before["bytes"] - taken["bytes"] if "bytes" in before and "bytes" in taken else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, with lists for tuples and no object of torch: ready for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SiteReport:
        """The record that `to_dict` was taken of, without fields of another version and what JSON had no number for."""
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in stored.items() if name in known}
        for name in ("poor_cases", "assumptions", "fixed"):
            values[name] = tuple(values.get(name, ()))
        values["shapes"] = {name: tuple(sizes) for name, sizes in values.get("shapes", {}).items()}
        for name in ("predicted_us", "measured_us"):
            values[name] = _numbers(values.get(name, {}))
        values["roofline"] = {name: _numbers(point) for name, point in values.get("roofline", {}).items()}
        values["rates"] = {name: rate for name, rate in values.get("rates", {}).items() if rate is not None}
        check_fields(cls, values)
        return cls(**values)


class ReportView(Protocol):
    """What pages and comparisons read of a report (`attn_pass.report.record.Report`, which shows itself as one)."""

    sites: list[SiteReport]
    seconds: float
    graphs: int

    @property
    def rewritten(self) -> list[SiteReport]:
        """The sites that changed: rewritten or decomposed."""

    @property
    def fixed_constants(self) -> tuple[str, ...]:
        """Buffers and constants, by name, whose values were relied on."""

    def summary(self) -> str:
        """One line: how many sites, what became of them, how long it took."""

    def groups(self) -> Sequence[Sequence[SiteReport]]:
        """The sites, with those that differ in nothing but the layer they are in put together."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _numbers(stored: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in stored.items() if isinstance(value, int | float)}

"""The record of one attention site: its outcome, the reason, the predicted times and the assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from attn_pass.report.json_schema import check_fields
from attn_pass.report.linear_layers import LinearLayersReport
from attn_pass.report.projection import ProjectionReport
from attn_pass.report.region import RegionReport

Outcome = Literal["rewritten", "decomposed", "left"]
Kind = Literal["attention", "near miss"]


@dataclass(eq=False, kw_only=True)
class SiteReport:
    """The decision for one site. Two identical layers are two records, so records compare by identity.

    Attributes:
        id: its name in logs, traces and torch's profiler: the compile and the number in its graph, "0/0#1"; "#1" in a
            graph that is not Dynamo's.
        outcome: "rewritten" to one fused call, "decomposed" into plain operations, or "left" unchanged.
        kind: "attention", or "near miss" for a softmax that looks like attention but could not be proven to be.
        target: the target that was taken; None if the site is left.
        reason: the reason for the outcome, in plain words.
        form: how the attention was written: "sdpa", "eager", ...
        where: source line, "file.py:123 in forward".
        count: its calls in one run of the model: of the shared body it is in, and after `explain` of a graph that
            Dynamo runs for several layers, as it does beside a graph break. While compiling that is not known.
        shapes: sizes of "query", "key" and "value"; a symbolic size is shown by its name.
        dtype, device: those of the result, "bfloat16", "cuda".
        decided_for: the device that the options name in place of that one; "" where they name none.
        mask: the name of the mask ("none", "causal", "sliding window (3, 0)", "causal and padding", "dense").
        taken: what was taken as predictions and measurements name it, "sdpa (shared_kv)"; "" for a site that is left.
        poor_cases: names of the poor cases whose variant was taken, or that its kernel does away with.
        refusals: by target, the reason why it refused the site.
        other_devices: names of the targets that refused because they are for other devices.
        assumptions: assumptions, and differences from eager that the numerics contract allows.
        fixed: names of the buffers and constants whose values were relied on: they are part of the compiled code.
        score_mod: the emitted score function as Python source; ``t0`` and so on are tensors of the program. Empty if
            there is none.
        predicted_us: predicted time in microseconds of each offer, including "leave".
        stock: the kernel that stock Inductor ends in, by its own attention patterns if they match: "cpu flash",
            "unfused"; "" if that was not looked at, as while compiling.
        stock_us: its predicted microseconds; None where it is not known. Gains are those over stock.
        measured_us: measured time of each measured form, including "leave"; empty without `Options.tune`.
        measured_spread: half of what lies between the 10th and the 90th percentile of its samples, over their median.
        verified_error: largest absolute difference from the original; None if the site was not verified.
        not_verified: why verification was requested but not possible; "" otherwise.
        formula: the attention over batch b, head h, query i and key j: "score", "keep" (the condition; absent if
            every key is kept, or if the bias masks), "else" (the score of a masked key), "result", and the tensors
            they read by name.
        prologue: what makes the "query" and the "key" before the attention, as it was read: rotary embeddings and
            norms, or why something like them was not read. Without plain operands; empty if that was not looked at, as
            while compiling.
        rates: of the device, for the site's dtype: "device" (its name), "from" (where they come from, in words),
            "gflops" of matrix products, "gbytes" per second of its memory. Empty if nothing was decided.
        roofline: "flops", "bytes" moved and predicted "us" of "leave" and of the target that was taken; the first two
            are absent for forms that are several kernels. Symbolic sizes have their traced values.
        hint: an option that would make the site cheaper, and what it promises; "" for none.
        module: path of the module ("model.layers.0.self_attn"), "" if unknown.
        node: name of the graph node in which the site ends.
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
    decided_for: str = ""
    mask: str = "none"
    taken: str = ""
    poor_cases: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    other_devices: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    score_mod: str = ""
    predicted_us: dict[str, float] = field(default_factory=dict)
    stock: str = ""
    stock_us: float | None = None
    measured_us: dict[str, float] = field(default_factory=dict)
    measured_spread: dict[str, float] = field(default_factory=dict)
    verified_error: float | None = None
    not_verified: str = ""
    formula: dict[str, str] = field(default_factory=dict)
    prologue: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float | str] = field(default_factory=dict)
    roofline: dict[str, dict[str, float]] = field(default_factory=dict)
    hint: str = ""
    module: str = ""
    node: str = ""
    id: str = ""

    def mark_left(self, reason: str) -> None:
        """Record that the site is left after all; the target that was chosen becomes a refusal with this reason."""
        if self.target is not None:
            self.refusals = {**self.refusals, self.target: reason}
        self.outcome, self.target, self.reason = "left", None, reason
        self.taken, self.poor_cases, self.assumptions, self.fixed = "", (), (), ()
        self.verified_error, self.not_verified, self.score_mod = None, "", ""
        self.roofline = {name: point for name, point in self.roofline.items() if name == "leave"}

    @property
    def stock_by_pattern(self) -> bool:
        """Whether stock runs something else than what is written: one of Inductor's attention patterns matches."""
        leaving = self.predicted_us.get("leave")
        return self.stock_us is not None and leaving is not None and abs(self.stock_us - leaving) > 0.1

    @property
    def baseline(self) -> str:
        """What gains are relative to, in words: "stock" where that is known, else the site "as written"."""
        return "as written" if self.stock_us is None or self.measured_us else "with stock"

    def in_timeline(self, target: str) -> str:
        """What torch's profiler shows: "attn_pass 0/0#1 model.py:12 in forward, sdpa"."""
        return f"attn_pass {self.id} {self.where}, {target}"

    @property
    def became(self) -> str:
        """The outcome in words: "rewritten to sdpa", "near miss, left"."""
        outcome = f"{self.outcome} to {self.target}" if self.target else self.outcome
        return f"near miss, {outcome}" if self.kind == "near miss" else outcome

    @property
    def bytes_saved(self) -> float:
        """Predicted bytes of memory traffic that the rewrite saves in one call; 0 if they are not known."""
        chosen = self.roofline.get(self.target or "", {})
        before = self.roofline.get("leave", {})
        return before["bytes"] - chosen["bytes"] if "bytes" in before and "bytes" in chosen else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, with lists for tuples and no object of torch: ready for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SiteReport:
        """The inverse of `to_dict`, without fields of other versions and numbers that JSON cannot represent."""
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in stored.items() if name in known}
        for name in ("poor_cases", "assumptions", "fixed", "other_devices"):
            values[name] = tuple(values.get(name, ()))
        values["shapes"] = {name: tuple(sizes) for name, sizes in values.get("shapes", {}).items()}
        for name in ("predicted_us", "measured_us", "measured_spread"):
            values[name] = _numbers(values.get(name, {}))
        values["roofline"] = {name: _numbers(point) for name, point in values.get("roofline", {}).items()}
        values["rates"] = {name: rate for name, rate in values.get("rates", {}).items() if rate is not None}
        check_fields(cls, values)
        return cls(**values)


class ReportView(Protocol):
    """The part of a report that pages and comparisons read (`attn_pass.report.record.Report` implements it)."""

    sites: list[SiteReport]
    seconds: float
    graphs: int
    graph_breaks: tuple[str, ...]
    regions: list[RegionReport]
    projections: list[ProjectionReport]
    linear_layers: list[LinearLayersReport]
    about: dict[str, str]

    @property
    def rewritten(self) -> list[SiteReport]:
        """The sites that changed: rewritten or decomposed."""

    @property
    def fixed_constants(self) -> tuple[str, ...]:
        """Names of the buffers and constants whose values were relied on."""

    @property
    def rates_from(self) -> dict[str, str]:
        """By device, where the rates come from that its predictions use."""

    def summary(self) -> str:
        """One line: the number of sites, their outcomes, the time it took."""

    def groups(self) -> Sequence[Sequence[SiteReport]]:
        """The sites, grouped so that sites that differ only in their layer are together."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _numbers(stored: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in stored.items() if isinstance(value, int | float)}

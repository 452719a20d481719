"""One record for each attention site: what it became, why, what that costs and what was assumed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

import torch

from attn_pass.stored import check_fields

if TYPE_CHECKING:
    from attn_pass.artifacts.compare import Comparison

Outcome = Literal["rewritten", "decomposed", "left"]
Kind = Literal["attention", "near miss"]

LOCK = threading.RLock()  # one for all reports: a lock of its own would make a Report impossible to copy or pickle
_TABLE_WIDTH = 160

_BOX = "    \n    \n -- \n    \n    \n    \n    \n    \n"  # for rich: a rule under the header, nothing else


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


@dataclass(eq=False)
class Report:
    """The sites of one or more graphs, in graph order. ``str(report)`` is a table.

    Attributes:
        sites: one SiteReport a site; other threads may be adding, so add by `append` and `extend`.
        seconds: time attn_pass itself took, in seconds.
        graphs: root graphs looked at.
    """

    sites: list[SiteReport] = field(default_factory=list)
    seconds: float = 0.0
    graphs: int = 0

    @property
    def rewritten(self) -> list[SiteReport]:
        """The sites that changed: rewritten or decomposed."""
        return [site for site in tuple(self.sites) if site.outcome != "left"]

    @property
    def left(self) -> list[SiteReport]:
        """The sites that stay as they were, near misses included."""
        return [site for site in tuple(self.sites) if site.outcome == "left"]

    @property
    def fixed_constants(self) -> tuple[str, ...]:
        """Buffers and constants, by name, whose values were relied on: other values need another compile."""
        return tuple(sorted({name for site in tuple(self.sites) for name in site.fixed}))

    def append(self, site: SiteReport) -> None:
        """Add one site; safe from any thread."""
        with LOCK:
            self.sites.append(site)

    def extend(self, other: Report) -> None:
        """Add the sites (the same records, not copies), seconds and graphs of another report."""
        if other is self:
            return
        with LOCK:
            known = {id(site) for site in self.sites}
            self.sites.extend(site for site in other.sites if id(site) not in known)
            self.seconds += other.seconds
            self.graphs += other.graphs

    def mark_left(self, reason: str) -> None:
        """Record that the whole graph was left after all: every site that had changed is left for this reason."""
        for site in self.rewritten:
            site.mark_left(reason)

    def to_dict(self) -> dict[str, Any]:
        """{"graphs", "seconds", "rewritten", "left" (counts), "fixed_constants", "sites" (dicts)}, ready for JSON."""
        with LOCK:
            return {
                "graphs": self.graphs,
                "seconds": self.seconds,
                "rewritten": len(self.rewritten),
                "left": len(self.left),
                "fixed_constants": list(self.fixed_constants),
                "sites": [site.to_dict() for site in self.sites],
            }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Report:
        """The report that `to_dict` was taken of; else TypeError, ValueError, KeyError or AttributeError."""
        sites = [SiteReport.from_dict(site) for site in stored["sites"]]
        counts = {name: stored[name] for name in ("seconds", "graphs")}
        check_fields(cls, counts)
        return cls(sites=sites, **counts)

    def to_json(self, indent: int | None = 2) -> str:
        """The dict of `to_dict` as JSON; a number JSON cannot hold (nan, inf) is null."""
        return json.dumps(_finite(self.to_dict()), indent=indent, allow_nan=False, ensure_ascii=False)

    def summary(self) -> str:
        """One line: how many sites, what became of them, how long it took."""
        took = f"{_counted(self.graphs, 'graph')}, {self.seconds:.3f} s in attn_pass"
        sites = tuple(self.sites)
        if not sites:
            return f"attn_pass: no attention found ({took})"
        outcomes = [(sum(site.outcome == name for site in sites), name) for name in ("rewritten", "decomposed", "left")]
        told = ", ".join(f"{number} {name}" for number, name in outcomes if number)
        misses = sum(site.kind == "near miss" for site in sites)
        what = _counted(len(sites) - misses, "attention site")
        if misses:
            near = _counted(misses, "near miss", "near misses")
            what = near if misses == len(sites) else f"{what} and {near}"
        return f"attn_pass: {what}: {told} ({took})"

    def groups(self) -> list[list[SiteReport]]:
        """The sites, with those that differ in nothing but the layer they are in put together."""
        groups: dict[str, list[SiteReport]] = {}
        for site in tuple(self.sites):
            groups.setdefault(_row_key(site), []).append(site)
        return list(groups.values())

    def table(self, width: int | None = None, *, verbose: bool = False) -> str:
        """The table as plain text; equal rows are one row with how many they are.

        Args:
            width: in characters; None takes the terminal's, or 160 when the output is no terminal.
            verbose: what every target said against a site also where the site is rewritten.
        """
        groups = self.groups()
        if not groups:
            return self.summary()
        lines = plain_table(_COLUMNS, [_row(group, verbose) for group in groups], width)
        if fixed := self.fixed_constants:
            lines.append(f"fixed, as their values are compiled in: {', '.join(fixed)}")
        return "\n".join([self.summary(), *lines])

    def __str__(self) -> str:
        return self.table()

    def to_html(self) -> str:
        """The report as one page that loads nothing: summary, sites to filter and expand, formulas, a roofline."""
        from attn_pass.artifacts.html import page

        return page(self)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `to_html` to a file. `attn_pass.inspect` writes one that has the graphs as well."""
        text = self.to_html()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary and a small table."""
        from attn_pass.artifacts.html import fragment

        return fragment(self)

    def compare(self, after: Report) -> Comparison:
        """What is different in another report of the same model: of a later version, other options, another device."""
        from attn_pass.artifacts.compare import compared

        return compared(self, after)


# ---- where a node was written ----

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
# No code of the user's: torch's, and attn_pass's own, which calls what `explain` is given.
_NOT_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
# A program exported elsewhere carries the paths of that machine.
_TORCH_ELSEWHERE = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]|^<eval_with_key>")


def source_line(node_meta: Mapping[str, Any]) -> str:
    """Where the user wrote a node: "file.py:123 in forward", the innermost frame that is not torch's own.

    Without such a frame the module it ran in ("in MultiheadAttention (layers.0.self_attn)"), then the innermost
    frame of torch, then "unknown source line".

    Args:
        node_meta: ``node.meta``, with "stack_trace" and "nn_module_stack" as Dynamo and torch.export leave them.
    """
    frames = [match.groupdict() for match in _FRAME.finditer(str(node_meta.get("stack_trace") or ""))]
    users = [f for f in frames if not f["file"].startswith(_NOT_USERS) and not _TORCH_ELSEWHERE.search(f["file"])]
    if users:
        return _told(users[-1])
    path, module_class = _innermost_module(node_meta)
    if module_class:
        return f"in {module_class} ({path})" if path else f"in {module_class}"
    return _told(frames[-1]) if frames else "unknown source line"


def module_path(node_meta: Mapping[str, Any]) -> str:
    """Path of the innermost module a node ran in, "layers.0.self_attn"; "" for the root module or when unknown."""
    return _innermost_module(node_meta)[0]


def _told(frame: Mapping[str, str]) -> str:
    base = re.split(r"[/\\]", frame["file"])[-1]
    return f"{base}:{frame['line']} in {frame['function']}"


def _innermost_module(node_meta: Mapping[str, Any]) -> tuple[str, str]:
    """(path, class name) of the last entry of "nn_module_stack"; empty strings when there is none.

    Dynamo writes ("L['self'].layers.0", class), torch.export ("layers.0", "package.module.Class").
    """
    stack = node_meta.get("nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return "", ""
    entry = list(stack.values())[-1]
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return "", ""
    path = re.sub(r"^L\[[^\]]*\]|^L__\w*self_*", "", str(entry[0]))
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[['\"]?([^'\"\]]+)['\"]?\]", lambda m: f".{m[1] or m[2]}", path)
    # Modules that look up attributes by hand (diffusers' ModelMixin.__getattr__) are read through their dictionary.
    path = re.sub(r"(^|\.)__dict__\._modules\.", r"\1", path)
    module_class = entry[1]
    name = module_class.__name__ if isinstance(module_class, type) else str(module_class).rsplit(".", 1)[-1]
    return path.strip("."), name


# ---- the table's cells ----

_COLUMNS = (
    ("sites", None),
    ("outcome", 4),
    ("form", 2),
    ("where", 8),
    ("shapes", 7),
    ("mask", 4),
    ("why", 14),
)


def plain_table(
    columns: Sequence[tuple[str, int | None]], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """A table as lines of plain text.

    Args:
        columns: titles, and what share of the width each gets; None for what it needs.
        rows: of cells, which may have several lines.
        width: in characters; None takes the terminal's, or 160 when the output is no terminal.
    """
    # Here, so that compiling needs no rich: only showing does.
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=Box(_BOX, ascii=True), pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for title, ratio in columns:
        table.add_column(title, overflow="fold", ratio=ratio, no_wrap=title == "sites")
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    out = StringIO()
    console = Console(file=out, width=width or _width(), color_system=None, force_terminal=False, force_jupyter=False)
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return [line for line in lines if line]


def _row(group: Sequence[SiteReport], verbose: bool) -> tuple[str, ...]:
    site = group[0]
    number = f"x{len(group)}" if len(group) > 1 else "1"
    if site.count > 1:
        number += f" ({site.count} calls)"
    module = common_module([member.module for member in group])
    return (
        number,
        site.became,
        site.form,
        "\n".join(filter(None, (site.where, module))),
        "\n".join(filter(None, (*shape_lines(site), f"{site.dtype} {site.device}".strip()))),
        site.mask,
        "\n".join(_why(site, verbose)),
    )


def printable(text: str) -> str:
    """Without control characters but line ends: a stored report may come from anywhere, and a terminal obeys them."""
    return "".join(c for c in text if c == "\n" or c.isprintable())


def _why(site: SiteReport, verbose: bool) -> Iterator[str]:
    yield site.reason
    if site.poor_cases:
        yield f"poor cases: {', '.join(site.poor_cases)}"
    if site.score_mod:
        yield f"score function: {site.score_mod.partition('return ')[2]}"
    if site.assumptions:
        yield f"assumed: {'; '.join(site.assumptions)}"
    if site.predicted_us:
        cheapest_first = sorted(site.predicted_us.items(), key=lambda offer: offer[1])
        yield "predicted us: " + ", ".join(f"{name} {time:.4g}" for name, time in cheapest_first)
    if site.verified_error is not None:
        yield f"verified: error {site.verified_error:.2g}"
    if site.not_verified:
        yield f"not verified: {site.not_verified}"
    if verbose or site.outcome == "left":
        same: dict[str, list[str]] = {}
        for target, why in site.refusals.items():
            same.setdefault(why, []).append(target)
        yield from (f"{', '.join(targets)}: {why}" for why, targets in same.items() if why != site.reason)


def _row_key(site: SiteReport) -> str:
    """Equal for sites whose rows may be shown as one: all fields but the layer they are in."""
    told = site.to_dict()
    del told["node"], told["module"]
    told["predicted_us"] = {name: f"{time:.4g}" for name, time in site.predicted_us.items()}
    return json.dumps(told, sort_keys=True) + "/".join(_pattern(site.module))


def _pattern(module: str) -> list[str]:
    return ["*" if part.isdigit() else part for part in module.split(".")]


def common_module(modules: Sequence[str]) -> str:
    """One path for all, of sites in one group: "model.layers.*.self_attn" where only layer numbers differ."""
    parts = [module.split(".") for module in modules]
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*parts, strict=True))


def shape_lines(site: SiteReport) -> list[str]:
    """One line for each shape, with the operands that have it: "query (1, 8, 1, 64)", "key, value (1, 8, 77, 64)"."""
    names: dict[str, list[str]] = {}
    for name, shape in site.shapes.items():
        names.setdefault(f"({', '.join(map(str, shape))})", []).append(name)
    return [f"{', '.join(having)} {shape}" if len(names) > 1 else shape for shape, having in names.items()]


def _width() -> int:
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _TABLE_WIDTH


def _counted(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _numbers(stored: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in stored.items() if isinstance(value, int | float)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

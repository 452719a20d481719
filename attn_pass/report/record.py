"""The report of one or more graphs: its sites, as a table, as JSON, as a page."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from attn_pass.report.json_schema import check_fields, finite
from attn_pass.report.linear_layers import LinearLayersReport
from attn_pass.report.pages.compare import Comparison, compared
from attn_pass.report.pages.html import fragment, page
from attn_pass.report.projection import ProjectionReport
from attn_pass.report.region import RegionReport
from attn_pass.report.site import ReportView, SiteReport
from attn_pass.report.text import COLUMNS, plain_table, printable, row_key, row_of
from attn_pass.report.units import counted

_Recorded = TypeVar("_Recorded")
LOCK = threading.RLock()  # one for all reports: a lock of its own would make a Report impossible to copy or pickle


@dataclass(eq=False)
class Report:
    """The sites of one or more graphs, in graph order. ``str(report)`` is a table.

    Attributes:
        sites: one SiteReport per site; other threads may be adding, so add by `append` and `extend`.
        seconds: the time of attn_pass itself, in seconds.
        graphs: the number of root graphs.
        graph_breaks: where Dynamo stopped and why, "file.py:12 in forward: ...": what runs eagerly there is in no
            graph, and attention in it is not in `sites`.
        regions: one RegionReport per padding mask that attentions of a graph share.
        projections: one ProjectionReport per kind of linear layers that make queries, keys and values.
        linear_layers: one LinearLayersReport per kind of linear layers that another library multiplies than torch's
            call would take.
        about: of what it is, for the head of the page: "model", "decided as", "options", "versions", "date", "command";
            empty if it is not of one call of `explain`.
    """

    sites: list[SiteReport] = field(default_factory=list)
    seconds: float = 0.0
    graphs: int = 0
    graph_breaks: tuple[str, ...] = ()
    regions: list[RegionReport] = field(default_factory=list)
    projections: list[ProjectionReport] = field(default_factory=list)
    linear_layers: list[LinearLayersReport] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def rewritten(self) -> list[SiteReport]:
        """The sites that changed: rewritten or decomposed."""
        return [site for site in tuple(self.sites) if site.outcome != "left"]

    @property
    def left(self) -> list[SiteReport]:
        """The sites that are left unchanged, including near misses."""
        return [site for site in tuple(self.sites) if site.outcome == "left"]

    @property
    def attentions(self) -> int:
        """How many attentions one run of the model computes: calls of its sites, near misses left out."""
        return sum(max(1, site.count) for site in tuple(self.sites) if site.kind == "attention")

    @property
    def fixed_constants(self) -> tuple[str, ...]:
        """Names of the buffers and constants whose values were relied on: other values need another compile."""
        return tuple(sorted({name for site in tuple(self.sites) for name in site.fixed}))

    @property
    def rates_from(self) -> dict[str, str]:
        """By device, where the rates come from that its predictions use: "calibrated on this machine"."""
        of_sites = (site.rates for site in tuple(self.sites))
        return {str(rates["device"]): str(rates["from"]) for rates in of_sites if {"device", "from"} <= rates.keys()}

    def append(self, site: SiteReport) -> None:
        """Add one site; safe from any thread."""
        with LOCK:
            self.sites.append(site)

    def extend(self, other: ReportView) -> None:
        """Add the sites (the same records, not copies), seconds and graphs of another report."""
        if other is self:
            return
        with LOCK:
            self.sites += _unseen(other.sites, self.sites)
            self.regions += _unseen(other.regions, self.regions)
            self.projections += _unseen(other.projections, self.projections)
            self.linear_layers += _unseen(other.linear_layers, self.linear_layers)
            self.seconds += other.seconds
            self.graphs += other.graphs
            self.graph_breaks = tuple(dict.fromkeys((*self.graph_breaks, *other.graph_breaks)))

    def mark_left(self, reason: str) -> None:
        """Record that the whole graph was left after all: every site that had changed is left for this reason."""
        for site in self.rewritten:
            site.mark_left(reason)
        for region in self.regions:
            region.mark_left(reason)
        for projection in self.projections:
            if projection.outcome == "joined":
                projection.mark_left(reason)
        for layers in self.linear_layers:
            layers.mark_left(reason)

    def to_dict(self) -> dict[str, Any]:
        """Counts ("graphs", "rewritten", "left"), "seconds", "graph_breaks", "about", and records.

        And "fixed_constants" and "rates_from", which are in the sites' records as well. Records are lists of dicts:
        "sites", "regions", "projections", "linear_layers". Ready for JSON.
        """
        with LOCK:
            return {
                "graphs": self.graphs,
                "seconds": self.seconds,
                "rewritten": len(self.rewritten),
                "left": len(self.left),
                "graph_breaks": list(self.graph_breaks),
                "about": dict(self.about),
                "fixed_constants": list(self.fixed_constants),
                "rates_from": self.rates_from,
                "sites": [site.to_dict() for site in self.sites],
                "regions": [region.to_dict() for region in self.regions],
                "projections": [projection.to_dict() for projection in self.projections],
                "linear_layers": [layers.to_dict() for layers in self.linear_layers],
            }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`; raises TypeError, ValueError, KeyError or AttributeError for anything else."""
        sites = [SiteReport.from_dict(site) for site in stored["sites"]]
        values = {name: stored[name] for name in ("seconds", "graphs")}
        values["graph_breaks"] = tuple(stored.get("graph_breaks", ()))
        values["about"] = stored.get("about", {})
        check_fields(cls, values)
        regions = [RegionReport.from_dict(region) for region in stored.get("regions", ())]
        projections = [ProjectionReport.from_dict(each) for each in stored.get("projections", ())]
        layers = [LinearLayersReport.from_dict(each) for each in stored.get("linear_layers", ())]
        return cls(sites=sites, regions=regions, projections=projections, linear_layers=layers, **values)

    def to_json(self, indent: int | None = 2) -> str:
        """The dict of `to_dict` as JSON; a number JSON cannot hold (nan, inf) is null."""
        return json.dumps(finite(self.to_dict()), indent=indent, allow_nan=False, ensure_ascii=False)

    def summary(self) -> str:
        """One line: the number of sites, their outcomes, the time it took."""
        took = f"{counted(self.graphs, 'graph')}, {self.seconds:.3f} s in attn_pass"
        sites = tuple(self.sites)
        if not sites:
            return f"attn_pass: no attention found{self.breaks_in_words()} ({took})"
        outcomes = [(sum(site.outcome == name for site in sites), name) for name in ("rewritten", "decomposed", "left")]
        shown = ", ".join(f"{number} {name}" for number, name in outcomes if number)
        misses = sum(site.kind == "near miss" for site in sites)
        counts_text = counted(len(sites) - misses, "attention site")
        if self.attentions > len(sites) - misses:
            counts_text += f" ({self.attentions} calls)"
        if misses:
            near = counted(misses, "near miss", "near misses")
            counts_text = near if misses == len(sites) else f"{counts_text} and {near}"
        return f"attn_pass: {counts_text}: {shown}{self.breaks_in_words()} ({took})"

    def breaks_in_words(self) -> str:
        """The graph breaks as the end of a sentence; "" for none."""
        number = len(self.graph_breaks)
        across = "it" if number == 1 else "one"
        return f"; {counted(number, 'graph break')}: attention that spans {across} is not detected" if number else ""

    def groups(self) -> list[list[SiteReport]]:
        """The sites, grouped so that sites that differ only in their layer are together."""
        groups: dict[str, list[SiteReport]] = {}
        for site in tuple(self.sites):
            groups.setdefault(row_key(site), []).append(site)
        return list(groups.values())

    def table(self, width: int | None = None, *, verbose: bool = False) -> str:
        """The table as plain text; equal rows are one row with their number.

        Args:
            width: in characters; None takes the terminal's, or 160 if the output is not a terminal.
            verbose: show why each target refused a site, even if the site is rewritten, and why projections are
                products of their own.
        """
        groups = self.groups()
        broken = [f"graph break: {text}" for text in self.graph_breaks]
        if not groups:
            return printable("\n".join([self.summary(), *broken]))
        lines = plain_table(COLUMNS, [row_of(group, verbose) for group in groups], width)
        if fixed := self.fixed_constants:
            lines.append(f"constants whose values are compiled in: {', '.join(fixed)}")
        lines += [f"rates of {device}: {origin}" for device, origin in self.rates_from.items()]
        for region in tuple(self.regions):
            lines += region.lines()
        lines += [p.line() for p in tuple(self.projections) if verbose or p.outcome == "joined"]
        lines += [layers.line() for layers in tuple(self.linear_layers)]
        return printable("\n".join([self.summary(), *lines, *broken]))

    def __str__(self) -> str:
        return self.table()

    def to_html(self) -> str:
        """The report as one self-contained page: summary, sites to filter and expand, formulas, a roofline."""
        return page(self)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `to_html` to a file. `attn_pass.inspect` writes a page that also has the graphs."""
        text = self.to_html()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _repr_html_(self) -> str:
        """The report in a notebook: the summary and a small table."""
        return fragment(self)

    def compare(self, after: Report) -> Comparison:
        """The differences to another report of the same model: of a later version, other options, another device."""
        return compared(self, after)


def _unseen(records: Sequence[_Recorded], known: Sequence[_Recorded]) -> list[_Recorded]:
    """The records, without those that are known as the same objects."""
    seen = set(map(id, known))
    return [record for record in records if id(record) not in seen]

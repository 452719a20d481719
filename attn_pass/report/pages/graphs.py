"""The collected data of a graph: its code before and after, and the edits of every site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_pass.report.pages.picture import Picture
from attn_pass.report.site import ReportView, SiteReport

_PROGRAMS = {"compile": "torch.compile", "export": "torch.export", "aoti": "AOTInductor"}


@dataclass(frozen=True, eq=False)
class SiteChange:
    """What deciding one site did to its graph.

    Attributes:
        record: the site's report.
        removed, added: names of the nodes that went and came; the last of either has the site's own name.
        mask: names of those among them that make the mask or a bias: none of the operands enters them.
        picture: of the mask; None where there is nothing to show.
    """

    record: SiteReport
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    picture: Picture | None = None


@dataclass(eq=False)
class GraphRecord:
    """One root graph.

    Attributes:
        program: "compile", "export" or "aoti".
        compile_id: Dynamo's, "0/0"; "" if it is not a graph of Dynamo's.
        report: its sites.
        before, after: readable code, source lines as comments; "" where it could not be printed.
        nodes_before, nodes_after: the same as nodes for Model Explorer (`attn_pass.report.pages.model_explorer`).
        sites: a change for every site, in the order they were decided.
        drawing: the graph afterwards as torch.fx's drawer describes it to graphviz; "" if it was not requested.
        not_drawn: why there is none; "" otherwise.
        seconds: the time of collecting, which is not part of the time of the pass.
    """

    program: str
    report: ReportView
    before: str = ""
    after: str = ""
    sites: list[SiteChange] = field(default_factory=list)
    nodes_before: list[dict[str, Any]] = field(default_factory=list)
    nodes_after: list[dict[str, Any]] = field(default_factory=list)
    drawing: str = ""
    not_drawn: str = ""
    compile_id: str = ""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """Where the graph comes from: "torch.compile 0/0"."""
        return f"{_PROGRAMS.get(self.program, self.program)} {self.compile_id}".strip()

    @property
    def was_undone(self) -> bool:
        """Whether the original was compiled after all, and what had been changed was not used."""
        return self.before != self.after and not self.report.rewritten


def change_of(graphs: Sequence[GraphRecord], record: SiteReport) -> SiteChange | None:
    """What was collected of a site."""
    return next((c for g in graphs for c in g.sites if c.record is record), None)

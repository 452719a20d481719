"""Reports as HTML: one self-contained page, and a fragment for notebooks. jinja2 escapes all text."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_pass.report.pages.graphs import GraphRecord, change_of
from attn_pass.report.pages.picture import WORDS, Picture
from attn_pass.report.pages.plot import plots, short
from attn_pass.report.pages.side_by_side import Run, side_by_side
from attn_pass.report.pages.times import baseline_us, shown_times, times_of
from attn_pass.report.site import ReportView, SiteReport
from attn_pass.report.text import common_module, place_and_dtype, place_lines, printable, shape_lines
from attn_pass.report.units import duration

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).parent / "templates"
_MOST_LINES = 6000  # of code on one page; what is longer shows its changes only
_FRAGMENT_ROWS = 20
_FILE = re.compile(r"(# File: )\S*?((?:[^/\\\s]+[/\\])?[^/\\\s]+:\d+)")


@dataclass(frozen=True)
class Entry:
    """Sites that differ in their layer alone, as the page shows them.

    Attributes:
        number: what it is called on the page, from 1.
        sites: the records; the first stands for all.
        module: one path for all.
        us, us_after: of one call, by stock where that is known or else as written, and as it is; None if unknown.
        taken: the label of what was taken, "" where nothing was.
        how: "measured" or "predicted", whichever the two are.
        times: (label, microseconds, share of the slowest) of every form, fastest first.
        picture: of the mask, where there is one.
    """

    number: int
    sites: tuple[SiteReport, ...]
    module: str
    shapes: tuple[str, ...]
    us: float | None
    us_after: float | None
    taken: str
    how: str
    times: tuple[tuple[str, float, float], ...]
    picture: Picture | None = None

    @property
    def site(self) -> SiteReport:
        """The first of them."""
        return self.sites[0]

    @property
    def calls(self) -> int:
        """How often one run of the program computes it."""
        return sum(max(1, site.count) for site in self.sites)

    @property
    def place(self) -> tuple[str, str]:
        """Where it is, and its module; "" for a module that the first names already."""
        where, *module = place_lines(self.site, self.module)
        return where, module[0] if module else ""

    @property
    def outcome(self) -> str:
        """The outcome, or "near miss"."""
        return "near miss" if self.site.kind == "near miss" else self.site.outcome

    @property
    def searched(self) -> str:
        """What the text filter looks at."""
        site = self.site
        texts = [site.where, site.form, site.mask, site.reason, site.target or "", site.dtype, site.device]
        return " ".join([*texts, *self.shapes, *(s.module for s in self.sites), *site.poor_cases]).lower()


@dataclass(frozen=True)
class GraphView:
    """A graph as the page shows it."""

    number: int
    program: str
    summary: str
    runs: tuple[Run, ...]
    changed: bool
    undone: bool
    shortened: bool


def page(report: ReportView, collected: Sequence[GraphRecord] = ()) -> str:
    """The whole page; with what was collected also the code before and after, and pictures of the masks."""
    entries = entries_of(report, collected)
    graphs = [_graph(n, g, entries) for n, g in enumerate(collected, 1)]
    shown = [(entry.number, entry.site) for entry in entries]
    return rendered(
        "report.html",
        report=report,
        entries=entries,
        outcomes=_counts(report),
        targets=sorted({e.site.target for e in entries if e.site.target}),
        totals=_totals(entries),
        baseline=_baseline(entries),
        how=_how(entries),
        plots=plots(shown),
        graphs=graphs,
    )


def fragment(report: ReportView) -> str:
    """The summary and a small table, for a notebook's cell."""
    entries = entries_of(report, ())
    return rendered("fragment.html", report=report, entries=entries[:_FRAGMENT_ROWS], more=entries[_FRAGMENT_ROWS:])


def index_page(title: str, summary: str, sections: Any, remarks: Any) -> str:
    """The page that links the files of `attn_pass.inspect`."""
    return rendered("index.html", title=title, summary=summary, sections=sections, remarks=remarks)


def entries_of(report: ReportView, collected: Sequence[GraphRecord]) -> list[Entry]:
    """The entries of a page, numbered."""
    entries = []
    for number, group in enumerate(report.groups(), 1):
        site = group[0]
        changes = [change_of(collected, s) for s in group]
        picture = next((c.picture for c in changes if c is not None and c.picture is not None), None)
        times, shown = times_of(site), shown_times(site)
        slowest = max(shown.values(), default=1.0) or 1.0
        entries.append(
            Entry(
                number,
                tuple(group),
                common_module([member.module for member in group]),
                tuple(shape_lines(site)),
                baseline_us(site),
                times.get(site.taken),
                site.taken,
                "measured" if site.measured_us else "predicted",
                tuple((label, time, time / slowest) for label, time in shown.items()),
                picture,
            )
        )
    return entries


def _counts(report: ReportView) -> list[tuple[str, int]]:
    sites = tuple(report.sites)
    kinds = ["near miss" if s.kind == "near miss" else s.outcome for s in sites]
    return [(kind, kinds.count(kind)) for kind in ("rewritten", "decomposed", "left", "near miss") if kind in kinds]


def _totals(entries: list[Entry]) -> dict[str, float]:
    """Over all calls: microseconds before and now where both are known, and bytes saved."""
    timed = [e for e in entries if e.us is not None and e.site.kind != "near miss"]
    before = sum(e.calls * (e.us or 0.0) for e in timed)
    after = sum(e.calls * (e.us if e.us_after is None else e.us_after) for e in timed if e.us is not None)
    return {"before": before, "after": after, "bytes": sum(e.calls * e.site.bytes_saved for e in entries)}


def _baseline(entries: list[Entry]) -> str:
    """What the total is relative to: stock where that is known of every site."""
    baselines = {e.site.baseline for e in entries if e.us is not None and e.site.kind != "near miss"}
    return baselines.pop() if len(baselines) == 1 else "as written, or with stock where that is known"


def _how(entries: list[Entry]) -> str:
    """Whether the times of the total were measured or predicted."""
    return " and ".join(sorted({e.how for e in entries if e.us is not None and e.site.kind != "near miss"}))


def _graph(number: int, graph: GraphRecord, entries: list[Entry]) -> GraphView:
    numbers = {id(site): entry.number for entry in entries for site in entry.sites}
    removed = {name: numbers.get(id(c.record), 0) for c in graph.sites for name in c.removed}
    added = {name: numbers.get(id(c.record), 0) for c in graph.sites for name in c.added}
    masks = {name for c in graph.sites for name in c.mask}
    runs = side_by_side(short_paths(graph.before), short_paths(graph.after), removed, added, masks)
    shortened = sum(len(run.rows) for run in runs) > _MOST_LINES
    if shortened:
        runs = tuple(run for run in runs if not run.folded)
    changed = any(run.changed for run in runs)
    return GraphView(number, graph.title, graph.report.summary(), runs, changed, graph.was_undone, shortened)


def short_paths(code: str) -> str:
    """The code with paths of source files in its comments cut to the file and its folder."""
    return _FILE.sub(r"\1\2", code)


# ---- rendering ----


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2  # here, so that compiling needs no jinja2: only showing does
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "us": duration,
        "quantity": _quantity,
        "size": _size,
        "plain": printable,
        "place_and_dtype": place_and_dtype,
    }
    script, style = (_own(name) for name in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "mask_words": WORDS,
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",  # a browser runs no other script, whatever a report may hold
        "style": Markup(style),
    }
    return environment


def _own(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def rendered(template: str, **values: Any) -> str:
    return str(_environment().get_template(template).render(**values))


def _quantity(value: float) -> str:
    """ "81.9 M", to be followed by a unit."""
    return re.sub(r"(?<=\d)(?=[kMGTP]$)|(?<=\d)$", " ", short(abs(value)))


def _size(value: float) -> str:
    """Bytes, "12.6 MB"."""
    return f"{_quantity(value)}B"

"""Compares two reports of the same model: which sites changed, appeared or disappeared."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attn_pass.report.json_schema import finite
from attn_pass.report.pages.html import rendered
from attn_pass.report.pages.times import baseline_us, time_taken, times_of
from attn_pass.report.site import ReportView, SiteReport
from attn_pass.report.text import common_module, place_lines, plain_table, without_numbers
from attn_pass.report.units import duration

Aspect = Literal["outcome", "target", "reason", "time"]
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_NOISE = 0.01  # times that differ by less are the same


@dataclass(frozen=True, eq=False)
class Change:
    """One site of either report, or of both.

    Attributes:
        before, after: the records; None if a report has no such site.
        aspects: the differences of a site that both have: "outcome", "target", "reason" (apart from numbers), "time".
    """

    before: SiteReport | None
    after: SiteReport | None
    aspects: tuple[Aspect, ...] = ()

    @property
    def site(self) -> SiteReport:
        """The later record, or the earlier one if there is no later."""
        site = self.after or self.before
        assert site is not None
        return site

    @property
    def what(self) -> str:
        """In words: "appeared", "gone", or the differences."""
        return "appeared" if self.before is None else "gone" if self.after is None else ", ".join(self.aspects)

    @property
    def is_of_kernels(self) -> bool:
        """Whether other kernels run now: more than a reason or a time differs."""
        return self.before is None or self.after is None or bool({"outcome", "target"} & set(self.aspects))

    @property
    def is_worse(self) -> bool:
        """Whether an attention site is left now that was rewritten before, or that was not there."""
        if self.after is None or self.after.outcome != "left":
            return False
        return self.after.kind == "attention" if self.before is None else self.before.outcome != "left"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The differences between two reports. ``str(comparison)`` is a table.

    Attributes:
        before, after: the reports.
        changes: the sites that differ, in the order of the later report; sites that disappeared come last.
        same: the number of sites that do not differ.
    """

    before: ReportView
    after: ReportView
    changes: tuple[Change, ...]
    same: int

    @property
    def changed(self) -> tuple[Change, ...]:
        """The changes after which other kernels run."""
        return tuple(c for c in self.changes if c.is_of_kernels)

    @property
    def worse(self) -> tuple[Change, ...]:
        """The changes by which an attention site is left that was not left before."""
        return tuple(c for c in self.changes if c.is_worse)

    def summary(self) -> str:
        """One line: how many sites differ, and how."""
        if not self.changes:
            return f"attn_pass: nothing differs ({_sites(self.same)})"
        counts: dict[str, int] = defaultdict(int)
        for change in self.changes:
            counts["appeared" if change.before is None else "gone" if change.after is None else "different"] += 1
        shown = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        worse = f"; {len(self.worse)} left that was not before" if self.worse else ""
        return f"attn_pass: {shown}, {self.same} the same{worse}"

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table: sites, where, what, before, after; layers with the same change are one row."""
        groups: dict[Hashable, list[Change]] = defaultdict(list)
        for change in self.changes:
            layer = without_numbers(change.site.module)
            place = "\n".join(place_lines(change.site, layer))
            groups[(place, layer, change.what, _cell(change, 0), _cell(change, 1))].append(change)
        rows: list[tuple[str, ...]] = []
        for group in groups.values():
            first = group[0]
            module = common_module([change.site.module for change in group])
            number = f"x{len(group)}" if len(group) > 1 else "1"
            rows.append(
                (number, "\n".join(place_lines(first.site, module)), first.what, _cell(first, 0), _cell(first, 1))
            )
        return rows

    def table(self, width: int | None = None) -> str:
        """The table as plain text; ``width`` is in characters, None takes the terminal's."""
        if not self.changes:
            return self.summary()
        return "\n".join([self.summary(), *plain_table(_COLUMNS, self.rows(), width)])

    def to_dict(self) -> dict[str, Any]:
        """{"same", "changed", "worse" (counts), "changes": what, and both records}, ready for JSON."""
        return {
            "same": self.same,
            "changed": len(self.changed),
            "worse": len(self.worse),
            "changes": [
                {
                    "what": change.what,
                    "before": None if change.before is None else change.before.to_dict(),
                    "after": None if change.after is None else change.after.to_dict(),
                }
                for change in self.changes
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The dict of `to_dict` as JSON; a number JSON cannot hold (nan, inf) is null."""
        return json.dumps(finite(self.to_dict()), indent=indent, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return rendered("comparison.html", comparison=self)


_COLUMNS = (("sites", None), ("where", 8), ("what", 3), ("before", 12), ("after", 12))


def compared(before: ReportView, after: ReportView) -> Comparison:
    """The comparison: sites are matched by module path, source line and order, then by module path and function.

    Where a line has more sites in one report than in the other, those of equal form, shapes and mask are matched first.
    """
    earlier, later = list(before.sites), list(after.sites)
    partner: dict[int, SiteReport] = {}
    places = [Counter(_exact(site) for site in sites) for sites in (earlier, later)]

    def alike(site: SiteReport) -> Hashable:
        place = _exact(site)
        even = places[0][place] == places[1][place]
        return place if even else (*place, site.form, site.mask, site.dtype, tuple(site.shapes.items()))

    for key in (alike, _exact, _by_function):
        free, matched_before = defaultdict(list), {id(site) for site in partner.values()}
        for site in earlier:
            if id(site) not in matched_before:
                free[key(site)].append(site)
        for site in later:
            if id(site) not in partner and free[key(site)]:
                partner[id(site)] = free[key(site)].pop(0)
    changes, same = [], 0
    for site in later:
        match = partner.get(id(site))
        change = Change(match, site, () if match is None else _aspects(match, site))
        if match is None or change.aspects:
            changes.append(change)
        else:
            same += 1
    matched = {id(site) for site in partner.values()}
    changes += [Change(site, None) for site in earlier if id(site) not in matched]
    return Comparison(before, after, tuple(changes), same)


def _exact(site: SiteReport) -> tuple[str, str]:
    return site.module, site.where


def _by_function(site: SiteReport) -> Hashable:
    """Without the line's number: the file was edited above it."""
    return site.module, re.sub(r":\d+", "", site.where)


def _aspects(before: SiteReport, after: SiteReport) -> tuple[Aspect, ...]:
    tests: Sequence[tuple[Aspect, Callable[[SiteReport], object]]] = (
        ("outcome", lambda s: (s.outcome, s.kind)),
        ("target", lambda s: (s.target, s.poor_cases)),
        ("reason", lambda s: _NUMBER.sub("#", s.reason)),
    )
    aspects: list[Aspect] = [name for name, of in tests if of(before) != of(after)]
    pairs = [(time_taken(before), time_taken(after)), (times_of(before).get("leave"), times_of(after).get("leave"))]
    if any(_differ(a, b) for a, b in pairs):
        aspects.append("time")
    return tuple(aspects)


def _differ(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return False  # of another outcome, which is reported as such
    return abs(before - after) > _NOISE * max(abs(before), abs(after))


def _cell(change: Change, side: int) -> str:
    """What one side was: its outcome, time, and where it matters the reason."""
    site = (change.before, change.after)[side]
    if site is None:
        return ""
    outcome = site.became
    if site.poor_cases:
        outcome += f" ({', '.join(site.poor_cases)})"
    stock_time, chosen_time = baseline_us(site), time_taken(site)
    how = "measured" if site.measured_us else "predicted"
    times = "" if stock_time is None else f"{how} {duration(stock_time)} {site.baseline}"
    reason = "" if times and site.reason.startswith(times) else site.reason  # which has the same two times
    times += "" if chosen_time is None else f", {duration(chosen_time)} as taken"
    return "\n".join(filter(None, (outcome, times, reason)))


def _sites(number: int) -> str:
    return f"{number} site{'' if number == 1 else 's'}"

"""The times of a site's forms in its report: measured if available, else predicted."""

from __future__ import annotations

import math

from attn_pass.report.site import SiteReport


def times_of(site: SiteReport) -> dict[str, float]:
    """Label to microseconds, fastest first, including "leave"; values that are not numbers are omitted."""
    times = site.measured_us or site.predicted_us
    finite = {k: float(v) for k, v in times.items() if isinstance(v, int | float) and math.isfinite(v)}
    return dict(sorted(finite.items(), key=lambda item: item[1]))


def baseline_us(site: SiteReport) -> float | None:
    """Microseconds that gains are relative to: measured as written, else predicted of stock, else as written."""
    times = times_of(site)
    return times.get("leave") if site.measured_us or site.stock_us is None else site.stock_us


def shown_times(site: SiteReport) -> dict[str, float]:
    """The times of the page's table, fastest first: each form, the site as written, and stock where it differs."""
    names = {"leave": "unfused" if site.stock_by_pattern else site.baseline}
    times = {names.get(label, label): time for label, time in times_of(site).items()}
    if site.stock_by_pattern and not site.measured_us and site.stock_us is not None:
        times[f"with stock ({site.stock})"] = site.stock_us
    return dict(sorted(times.items(), key=lambda item: item[1]))


def time_taken(site: SiteReport) -> float | None:
    """Microseconds of what was taken; None for a site that is left, or without times."""
    return times_of(site).get(site.taken)


def time_now(site: SiteReport) -> float | None:
    """Microseconds of the site as it is now: of what was taken, or as it is written; None without times."""
    return times_of(site).get(site.taken or "leave")

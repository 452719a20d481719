"""The times of a site's forms as its report has them: measured where they were, else predicted."""

from __future__ import annotations

import math

from attn_pass.report import SiteReport


def times_of(site: SiteReport) -> dict[str, float]:
    """Label to microseconds, fastest first, "leave" included; what is no number is left out."""
    times = site.measured_us or site.predicted_us
    finite = {k: float(v) for k, v in times.items() if isinstance(v, int | float) and math.isfinite(v)}
    return dict(sorted(finite.items(), key=lambda item: item[1]))


def time_taken(site: SiteReport) -> float | None:
    """Microseconds of what was taken: the best form its target offered. None for a site that is left."""
    if site.target is None:
        return None
    forms = (t for label, t in times_of(site).items() if label == site.target or label.startswith(f"{site.target} ("))
    return next(forms, None)

"""The roofline plot as coordinates: sites as they are written and as rewritten, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from attn_pass.report.site import SiteReport

WIDTH, HEIGHT = 520, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 46


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A site: where it stood (x0, y0), and where it stands now; None where that is not known or it was left."""

    number: int
    x0: float
    y0: float
    x1: float | None
    y1: float | None
    title: str


@dataclass(frozen=True)
class Plot:
    """A plot of WIDTH by HEIGHT; ``roof`` is the points of a line under which everything lies, but for cached data."""

    device: str
    gflops: float
    gbytes: float
    roof: tuple[tuple[float, float], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def plots(sites: Iterable[tuple[int, SiteReport]]) -> list[Plot]:
    """One plot for each device and dtype rate; sites without numbers are left out.

    Args:
        sites: with the numbers they are called by.
    """
    by_rates: dict[tuple[str, float, float], list[tuple[int, SiteReport]]] = {}
    for number, site in sites:
        gflops, gbytes = _number(site.rates.get("gflops")), _number(site.rates.get("gbytes"))
        if gflops and gbytes and _point(site, "leave") is not None:
            by_rates.setdefault((str(site.rates.get("device", "")), gflops, gbytes), []).append((number, site))
    return [_plot(*rates, points) for rates, points in by_rates.items()]


def _plot(device: str, gflops: float, gbytes: float, sites: list[tuple[int, SiteReport]]) -> Plot:
    ridge = gflops / gbytes
    pairs = [(n, site, _point(site, "leave"), _point(site, site.target or "")) for n, site in sites]
    places = [p for *_, before, after in pairs for p in (before, after) if p is not None]
    x = _Axis([p[0] for p in places] + [ridge / 3, ridge * 3], _LEFT, WIDTH - _RIGHT)
    y = _Axis([p[1] for p in places] + [gflops], HEIGHT - _BOTTOM, _TOP)
    low_x, high_x = 10.0**x.low, 10.0**x.high
    start = max(low_x, 10.0**y.low / gbytes)
    roof = ((start, start * gbytes), (ridge, gflops), (max(high_x, ridge), gflops))
    dots = []
    for number, site, before, after in pairs:
        assert before is not None
        title = f"{number}: {site.where}, {before[1]:.4g} GFLOP/s as written"
        if after is not None:
            title += f", {after[1]:.4g} as {site.target}"
        x1, y1 = (None, None) if after is None else (x.at(after[0]), y.at(after[1]))
        dots.append(Dot(number, x.at(before[0]), y.at(before[1]), x1, y1, title))
    return Plot(
        device,
        gflops,
        gbytes,
        tuple((x.at(a), y.at(b)) for a, b in roof),
        x.ticks(),
        y.ticks(),
        tuple(dots),
    )


class _Axis:
    """A logarithmic axis over whole decades."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        logs = [math.log10(v) for v in values]
        self.low, self.high = math.floor(min(logs) - 0.05), math.ceil(max(logs) + 0.05)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> tuple[Tick, ...]:
        step = max(1, (self.high - self.low) // 6)
        return tuple(Tick(self.at(10.0**n), short(10.0**n)) for n in range(self.low, self.high + 1, step))


def short(value: float) -> str:
    """A number with three digits and a letter: "1.5k", "20M"."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _point(site: SiteReport, name: str) -> tuple[float, float] | None:
    """(FLOPs a byte, GFLOP/s) of a form; None where they are not known."""
    point = site.roofline.get(name, {})
    flops, moved, us = (_number(point.get(key)) for key in ("flops", "bytes", "us"))
    return (flops / moved, flops / us / 1e3) if flops and moved and us else None


def _number(value: object) -> float:
    """A finite number above 0, else 0: a stored report may hold anything."""
    good = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0  # type: ignore[arg-type]

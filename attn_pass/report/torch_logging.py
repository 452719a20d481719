"""Torch's own observability: logging, structured traces, provenance, the compiler's bisector.

``TORCH_LOGS="attn_pass"`` prints one line per site, ``"+attn_pass"`` the refusals and predictions as well: torch
accepts any module's name as the name of its logger. ``TORCH_TRACE=folder`` stores the report and the graphs, which
tlparse shows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch._logging import trace_structured
from torch.fx import GraphModule

from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.report.text import printable
from attn_pass.report.units import duration

NAME = "attn_pass"
"""Name of the logger and of the pass in provenance; artifacts are attn_pass_report, _before and _after."""

_LOG = logging.getLogger(NAME)


def log_report(report: Report) -> None:
    """Writes a graph's report to the log and to the structured trace, if they are enabled."""
    _trace("report", "json", report.to_json)
    if not _LOG.isEnabledFor(logging.INFO) or not report.sites:
        return
    _LOG.info("%s", report.summary())
    for site in tuple(report.sites):
        _LOG.info("%s", _line(site))
        for line in _details(site) if _LOG.isEnabledFor(logging.DEBUG) else ():
            _LOG.debug("%s", line)


def trace_graph(when: Literal["before", "after"], gm: GraphModule) -> None:
    """A graph as readable code, to the structured trace where one is kept."""
    _trace(when, "string", lambda: gm.print_readable(print_output=False))


@contextmanager
def observed(gm: GraphModule) -> Iterator[None]:
    """Inside, Inductor's provenance tracking attributes all changes of a graph to this pass.

    Tracking is turned on in Inductor's configuration, so it is off if Inductor was not imported.
    """
    if "torch._inductor.config" not in sys.modules:
        yield
        return
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    with GraphTransformObserver(gm, NAME):
        yield


def is_bisected_away(description: Callable[[], str]) -> bool:
    """Whether torch's compiler bisector disables a rewrite; it calls ``description`` once it found the culprit.

    It replaces custom backends, so it sees only the rewrites of `attn_pass.install` and `enabled`.
    """
    module = sys.modules.get("torch._inductor.compiler_bisector")
    if module is None:
        return False
    return bool(module.CompilerBisector.disable_subsystem("inductor", "pre_grad_passes", description))


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Adds an artifact to the structured trace; a failure to make it is logged and does not fail the compile."""

    def payload_or_null() -> str:
        try:
            return payload()
        except Exception as error:
            _LOG.warning("the artifact %s_%s could not be made: %s: %s", NAME, name, type(error).__name__, error)
            return "null"

    trace_structured(
        "artifact",
        lambda: {"name": f"{NAME}_{name}", "encoding": encoding},
        payload_fn=payload_or_null,
        expect_trace_id=False,
    )


def _line(site: SiteReport) -> str:
    module = f" ({site.module})" if site.module else ""
    number = f"{site.id} " if site.id else ""
    return printable(f"{number}{site.where}{module}: {site.became}: {site.reason}").replace("\n", " ")


def _details(site: SiteReport) -> Iterator[str]:
    for target, why in site.refusals.items():
        yield printable(f"{site.where}: {target}: {why}")
    for name, times in (("predicted", site.predicted_us), ("measured", site.measured_us)):
        if times:
            shown = ", ".join(f"{label} {duration(time)}" for label, time in times.items())
            yield printable(f"{site.where}: {name}: {shown}")

"""The second try without the target that the compiler failed on: which target that is, and what the report says."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_pass.devices.registry import families
from attn_pass.errors import AttnPassWarning
from attn_pass.graph.provenance import Emission, culprits
from attn_pass.padding.regions import PACKED_ROWS
from attn_pass.projections.library import LINEAR_LAYERS
from attn_pass.projections.rewrite import JOINED
from attn_pass.report.record import Report


@dataclass(frozen=True)
class Failure:
    """That a rewritten graph did not compile.

    Attributes:
        cause: the error in one line.
        without: targets to decide without the next time, and why; empty where nothing else is worth trying. Regions
            on packed rows (`PACKED_ROWS`), joined projections (`JOINED`) and other calls for linear layers
            (`LINEAR_LAYERS`) are done without first: they change more than a site does.
        where: source line of the first site that had changed, "unknown source line" if none has one.
        changed: how many sites had changed.
    """

    cause: str
    without: Mapping[str, str]
    where: str
    changed: int


def failure_of(error: BaseException, cause: str, report: Report, emissions: Sequence[Emission]) -> Failure:
    """What is to be known of an error of the compiler once its traceback, which holds on to graphs, is gone."""
    around = [PACKED_ROWS] if any(region.outcome == "packed" for region in report.regions) else []
    around += [JOINED] if any(projection.outcome == "joined" for projection in report.projections) else []
    around += [LINEAR_LAYERS] if any(layers.library for layers in report.linear_layers) else []
    if around:
        without = dict.fromkeys(around, f"the compiler could not lower a graph with them ({cause})")
        return Failure(cause, without, first_where(report), len(report.rewritten))
    taken = {site.target for site in report.rewritten if site.target is not None}
    targets = culprits(error, emissions) & taken
    if targets:
        without = dict.fromkeys(sorted(targets), f"the compiler could not lower it ({cause})")
    else:
        suspected = sorted(taken - _torchs_own())
        reason = f"the compiler could not lower a graph with it and does not say what it failed on ({cause})"
        without = dict.fromkeys(suspected, reason)
    return Failure(cause, without, first_where(report), len(report.rewritten))


def _torchs_own() -> set[str]:
    """Targets that are calls of torch's own: the last to be suspected."""
    return {"sdpa", *(kernel for family in families() for kernel in family.kernel_rules)}


def mark_retried(report: Report, before: Report, failure: Failure) -> None:
    """Let the sites and regions that became something else say what they were to become first."""
    report.seconds += before.seconds
    report.regions = report.regions or before.regions
    report.projections = report.projections or before.projections
    report.linear_layers = report.linear_layers or before.linear_layers
    for region in report.regions:
        if region.outcome == "packed" and PACKED_ROWS in failure.without:
            region.mark_left(failure.without[PACKED_ROWS])
    for projection in report.projections:
        if projection.outcome == "joined" and JOINED in failure.without:
            projection.mark_left(failure.without[JOINED])
    for layers in report.linear_layers if LINEAR_LAYERS in failure.without else ():
        layers.mark_left(failure.without[LINEAR_LAYERS])
    for site, first in zip(report.sites, before.sites):
        reason = failure.without.get(first.target or "")
        if reason is not None and first.node == site.node:
            site.reason += f"; before that {first.target}: {reason}"


def warn_failed(report: Report, failures: Sequence[Failure]) -> None:
    """One warning, once something did compile: what the graph was compiled without, or that it is as written."""
    first = failures[0]
    if not report.rewritten:
        _warn_left(first.where, first.changed, could_not_lower(failures))
        return
    without = without_all(failures)
    names, reason = " and ".join(without), next(reversed(without.values()))
    became = ", ".join(sorted({site.target or site.outcome for site in report.rewritten}))
    warnings.warn(
        f"attn_pass compiled the graph with the attention at {first.where} without {names}: {reason}; what is "
        f"rewritten became {became}",
        AttnPassWarning,
        stacklevel=4,
    )


def without_all(failures: Sequence[Failure]) -> dict[str, str]:
    """What every failure is to be done without, in their order."""
    return {name: reason for failure in failures for name, reason in failure.without.items()}


def is_last(failures: Sequence[Failure]) -> bool:
    """Whether nothing is left to try: what surrounds sites is done without once, and then targets once."""
    of_targets = [f for f in failures if {PACKED_ROWS, JOINED, LINEAR_LAYERS}.isdisjoint(f.without)]
    return len(of_targets) > 1 or not failures[-1].without


def could_not_lower(failures: Sequence[Failure]) -> str:
    """The reason why the sites of a graph were left after all."""
    first, *again = failures
    reason = f"the compiler could not lower the rewritten graph ({first.cause})"
    tried = zip(failures, again)
    return reason + "".join(f", nor the one without {' and '.join(f.without)} ({g.cause})" for f, g in tried)


def leave_all(report: Report, reason: str) -> None:
    """Mark every changed site left for this reason, with one warning that names the first of them."""
    where, changed = first_where(report), len(report.rewritten)
    report.mark_left(reason)
    _warn_left(where, changed, reason)


def _warn_left(where: str, changed: int, reason: str) -> None:
    scope = f"the attention at {where}" if changed else "a graph"
    others = f" (and {changed - 1} more)" if changed > 1 else ""
    warnings.warn(f"attn_pass left {scope}{others} as written: {reason}", AttnPassWarning, stacklevel=5)


def first_where(report: Report) -> str:
    """Source line of the first site that changed."""
    return next((site.where for site in report.rewritten), "unknown source line")

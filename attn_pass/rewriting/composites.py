"""Calls that stay and get other arguments: whether this is allowed here, and the edit itself."""

from __future__ import annotations

import torch

from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import replace_arguments
from attn_pass.options import LEAVE
from attn_pass.patterns.base import Composite, Site
from attn_pass.planner.choose import AS_ASKED
from attn_pass.planner.overrides import before_leave, rule_for
from attn_pass.report.site import SiteReport
from attn_pass.rewriting.context import GraphContext


def give_arguments(context: GraphContext, site: Site, composite: Composite, record: SiteReport) -> bool:
    """Gives a call that stays its other arguments, or says in the record why not."""
    record.kind = "attention"
    record.reason = _why_left(context, site, composite, record)
    if record.reason:
        return False
    replace_arguments(composite.node, *composite.arguments)
    record.outcome, record.target, record.reason = "rewritten", composite.target, composite.why
    return True


def _why_left(context: GraphContext, site: Site, composite: Composite, record: SiteReport) -> str:
    run = context.run
    if composite.target in run.without:
        record.refusals[composite.target] = run.without[composite.target]
    if composite.refusal:
        return composite.refusal
    rule = rule_for((site.node, *site.internal), record, run.options)
    allowed = run.options.targets if rule is None else before_leave(rule[1])
    if allowed is not None and composite.target not in allowed:
        why = AS_ASKED if rule and LEAVE in rule[1] else f"the target {composite.target} is not allowed"
        return why if rule is None else f"{why} ({rule[0]})"
    device = run.device(torch.device(record.device or "cpu"))
    if not (device.kernels and family_of(device).takes_composites):
        return f"no rule for {device.type} devices yet"
    return run.without.get(composite.target, "")

"""Lets Inductor's own attention patterns match a site that is left, if their call computes what was written.

A site that costs least as it is stays products and a softmax. One that is left by the user's choice, a rule or
``numerics`` or the targets that are allowed, was never compared with the call that stock makes of it: there stock's
call is to run, as without attn_pass, if it is proved to be right.
"""

from __future__ import annotations

import torch

from attn_pass.devices.registry import family_of
from attn_pass.graph.provenance import mark_left_to_stock
from attn_pass.model.attention import Attention
from attn_pass.patterns.base import Site
from attn_pass.planner.choose import leave_cost
from attn_pass.planner.margins import followed
from attn_pass.planner.stock import Stock
from attn_pass.reading.parts import Described
from attn_pass.report.site import SiteReport
from attn_pass.rewriting.context import GraphContext
from attn_pass.rewriting.decision import Decision
from attn_pass.rewriting.run import Run
from attn_pass.rewriting.stock import stock_of
from attn_pass.targets.base import Refusal, Setting
from attn_pass.targets.sdpa import Sdpa


def let_stock(context: GraphContext, site: Site, described: Described, decision: Decision, record: SiteReport) -> None:
    """Marks a site that is left for `attn_pass.entries.shield` where stock's call is right, and says so in its record.

    What a measurement or a prediction was for, with torch's call among the forms, stays as it was chosen.
    """
    run, setting = context.run, decision.setting
    if not _is_shielded(run, setting) or _was_compared(decision):
        return
    stock = decision.stock or stock_of(context, site, described, setting, decision.written)
    if stock is None or not stock.by_pattern:
        return
    if why := _kept_away(stock, described.attention, decision):
        record.reason += f"; Inductor's own pattern is kept away from it: {why}"
        return
    mark_left_to_stock((site.node, *site.internal))
    record.reason += f"; Inductor's own pattern makes a call of it, which computes the same ({stock.kernel})"


def _is_shielded(run: Run, setting: Setting) -> bool:
    return run.compiles and run.options.shield and family_of(setting.device).keeps_inductors_patterns_off


def _was_compared(decision: Decision) -> bool:
    """Whether torch's call was among the forms of which leaving is the best."""
    choice = decision.choice
    return any(label.partition(" ")[0] == Sdpa.name for label in (*choice.predicted_us, *choice.measured_us))


def _kept_away(stock: Stock, attention: Attention, decision: Decision) -> str:
    """Why stock's call is not to run; empty where it is."""
    setting = decision.setting
    if not stock.as_written:
        return "the call is not proved to compute the same"
    if reason := _differs(attention, setting):
        return reason
    if stock.us > followed(setting.device) * leave_cost(attention, setting, decision.written):
        return "the call is predicted to be slower"
    return ""


def _differs(attention: Attention, setting: Setting) -> str:
    """Why torch's call does not give the program's result with the mask as it is and nothing beside it."""
    offer = Sdpa().consider(attention, "", setting)
    if isinstance(offer, Refusal):
        return offer.reason
    has_bias_of_half = attention.compute_dtype == torch.float16 and attention.mask.bias is not None
    if not attention.mask.never_empty and (offer.plan.mask.repairs or has_bias_of_half):
        return "a fully masked row would become another"
    return ""

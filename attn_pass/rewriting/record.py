"""Fills the record of a site from the choice and from the code that replaced the site."""

from __future__ import annotations

from attn_pass.model.picture import picture_of
from attn_pass.options import LEAVE
from attn_pass.patterns.base import Site
from attn_pass.planner import roofline
from attn_pass.planner.choose import Selection, label
from attn_pass.poor_cases import CASES
from attn_pass.reading.describe import Described
from attn_pass.report.build import place_of
from attn_pass.report.pages.picture import Picture
from attn_pass.report.site import SiteReport
from attn_pass.report.text import digits
from attn_pass.rewriting.context import GraphContext
from attn_pass.rewriting.decision import Decision
from attn_pass.rewriting.run import Run
from attn_pass.targets.base import Offer
from attn_pass.verify import Verified


def record_choice(run: Run, site: Site, described: Described, decision: Decision, record: SiteReport) -> None:
    """What was offered, predicted and measured, and the reason for as long as nothing is taken."""
    choice = decision.choice
    record.refusals, record.other_devices = choice.refusals, choice.other_devices
    record.measured_us = {k: digits(v) for k, v in choice.measured_us.items()}
    record.measured_spread = {k: round(v, 3) for k, v in choice.measured_spread.items()}
    record.predicted_us = {k: digits(v) for k, v in choice.predicted_us.items()}
    if decision.stock is not None:
        record.stock, record.stock_us = decision.stock.kernel, digits(decision.stock.us)
    with run.details(record):
        attention, setting = described.attention, decision.setting
        record.rates = roofline.rates(setting.device, attention)
        if (as_it_is := choice.predicted_us.get(LEAVE)) is not None:
            record.roofline[LEAVE] = roofline.as_left(attention, decision.written, setting, as_it_is)
    record.decided_for = "" if run.options.device is None else decision.setting.device.name
    record.reason = choice.reason + decision.by_rule
    if site.needed_as_well:
        location = place_of(site.refused_at, site.node)
        record.reason = f"{site.needed_as_well}; without them: {record.reason}{location}"


def record_taken(
    run: Run,
    site: Site,
    described: Described,
    decision: Decision,
    selection: Selection,
    verified: Verified | None,
    record: SiteReport,
) -> None:
    """The replacement of the site, its reason, and its assumptions."""
    offer = selection.offer
    record.reason = selection.reason + decision.by_rule
    if site.needed_as_well:
        gives_logarithm = site.logarithms is not None and offer.gives_logarithm
        record.reason += f"; {site.needed_as_well}, and {'the kernel gives it' if gives_logarithm else 'stay'}"
    record.outcome = "decomposed" if offer.target == "decomposed" else "rewritten"
    record.target, record.score_mod = offer.target, offer.score_mod
    record.taken = label(offer.target, offer.variant)
    record.poor_cases = cases_of(offer)
    assumed, fixed = ((), ()) if site.opaque is None else (site.opaque.assumes, site.opaque.fixed)
    record.assumptions = tuple(dict.fromkeys((*offer.assumptions, *assumed, *described.assumptions)))
    record.fixed = tuple(dict.fromkeys((*fixed, *described.fixed)))
    with run.details(record):
        record.roofline[offer.target] = roofline.as_taken(offer, decision.setting)
    if verified is not None:
        record.verified_error, record.not_verified = verified.error, verified.reason


def cases_of(offer: Offer) -> tuple[str, ...]:
    """The poor cases whose variant an offer is for, and those that its kernel does away with."""
    return (*(n for n in offer.variant.split(" + ") if n in CASES), *offer.handles)


def picture_of_site(context: GraphContext, site: Site) -> Picture | None:
    """The mask of a site as a picture; None for a call that was not read."""
    if site.described is None:
        return None
    values = [context.values.get(node) for node in site.described.nodes]
    return picture_of(site.described.attention, values, context.sizes.hint)

"""Runs a site before and after the rewrite, if `verify` requests it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import GraphModule, Node

from attn_pass.devices.device import Device
from attn_pass.graph.edit import Value
from attn_pass.graph.values import tensor_value, value_key, wants_gradient
from attn_pass.patterns.base import Site
from attn_pass.planner.choose import Selection
from attn_pass.reading.describe import Described
from attn_pass.report.progress import tell
from attn_pass.report.site import SiteReport
from attn_pass.rewriting.context import GraphContext
from attn_pass.verify import Subject, Verified, verify


def verified(
    context: GraphContext,
    site: Site,
    described: Described,
    record: SiteReport,
    selection: Selection,
    nodes: tuple[Node, ...],
    value: Value,
    device: Device,
    verify_smaller: Callable[[GraphModule], float],
) -> Verified:
    """What running both showed, or why neither was run. Raises `Mismatch`."""
    old = tensor_value(site.node)
    if old is None or not device.is_here or old.device.type != device.type:
        return Verified(None, f"there is no {device.name} here to run it on")
    subject = Subject(
        site.node,
        replace(described, nodes=nodes),
        context.around_node(site.node),
        context.sizes,
        site.region,
        context.values,
        wants_gradient if described.attention.needs_grad else lambda _: False,
        value,
        selection.target.name,
        record.where,
        value_key(site.node),
        verify_smaller,
        context.run.compile_site,
    )
    return verify(subject)


def compare_compiled(
    context: GraphContext,
    site: Site,
    described: Described,
    record: SiteReport,
    check_smaller: Callable[[GraphModule], float],
) -> None:
    """Compares what a backend compiles of a site, as it is written, with what was read of it. Raises `Mismatch`."""
    subject = Subject(
        site.node,
        described,
        context.around_node(site.node),
        context.sizes,
        site.region,
        context.values,
        wants_gradient if described.attention.needs_grad else lambda _: False,
        None,
        context.run.checks,
        record.where,
        value_key(site.node),
        check_smaller,
        context.run.compile_site,
    )
    tell(f"checking {record.where}")
    outcome = verify(subject)
    record.verified_error, record.not_verified = outcome.error, outcome.reason
    record.reason = outcome.reason or f"compiled by {context.run.checks}, it agrees with its meaning in float64"

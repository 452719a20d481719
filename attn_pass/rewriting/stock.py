"""Asks Inductor what its own attention patterns make of a site, so that gains are those over stock."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from attn_pass.devices.registry import family_of
from attn_pass.graph.cut import CannotExtract, Cut, cut, numbers
from attn_pass.graph.values import fake_value, wants_gradient
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import Load, walk
from attn_pass.model.index import Symbol, atoms
from attn_pass.patterns.base import Site
from attn_pass.planner.choose import leave_cost
from attn_pass.planner.stock import UNFUSED, Stock, StockFails
from attn_pass.reading.describe import Described
from attn_pass.rewriting.context import GraphContext
from attn_pass.targets.base import Setting


def stock_of(
    context: GraphContext, site: Site, described: Described, setting: Setting, written: AsWritten
) -> Stock | None:
    """What stock would run for a site; None where that is not known, as for symbolic sizes, or is not asked.

    A part of a program that other parts read too, or that is a call of a module in pieces, is not asked about: the
    patterns look at the whole graph, and at what the call becomes later.
    """
    ask = context.run.ask_stock
    kernels = family_of(setting.device).fused_operators
    if ask is None or not kernels or not setting.device.is_here:
        return None
    leaving = leave_cost(described.attention, setting, written)
    if setting.kernel_as_written is not None:
        return Stock(setting.kernel_as_written, leaving)
    if site.needed_as_well or site.partners or site.opaque is not None or _is_symbolic(described.attention):
        return None
    try:
        part, has_mask = _part(context, site, described)
    except CannotExtract:
        return None
    try:
        call = ask(part, site.region)
    except StockFails:
        return None
    if call is None:
        return Stock(UNFUSED, leaving)
    if call.operator not in kernels:
        return None
    kernel = kernels[call.operator]
    as_called = replace(written, fused=True, plain=True, mask=call.mask, mask_elements=call.mask_elements, causal=False)
    us = leave_cost(described.attention, replace(setting, kernel_as_written=kernel), as_called)
    return Stock(kernel, us, by_pattern=True, as_written=call.as_written and has_mask)


def _is_symbolic(attention: Attention) -> bool:
    return any(isinstance(a, Symbol) for s in attention.sources for i in (*s.shape,) for a in atoms(i))


def _part(context: GraphContext, site: Site, described: Described) -> tuple[Cut, bool]:
    """The site from its operands on, and whether it has the mask as the program computes it, not as it is given."""
    a, nodes = described.attention, [context.now(n) for n in described.nodes]
    until = context.effects.position[site.node]
    tensors = {e.source for e in walk(a.score) if isinstance(e, Load)}
    operands = {a.query.source, a.key.source, a.value.source}
    take = functools.partial(
        cut,
        site.node,
        around=context.around_node(site.node),
        number=numbers(context.sizes),
        known={},
        needs_grad=wants_gradient if a.needs_grad else lambda _: False,
        repeatable=True,
    )
    for begin in (operands, operands | tensors):
        begin_at = [n for n in sorted(begin) if isinstance(fake_value(nodes[n]), torch.Tensor)]
        try:
            part = take(sources={nodes[n]: described.read_at.get(n, until) for n in begin_at})
            return part, begin == operands
        except CannotExtract as error:
            problem = error
    raise problem

"""The decision for a site: the cheapest form, or why it is left. Nothing is changed yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.devices.registry import family_of
from attn_pass.graph.ancestry import Ancestry
from attn_pass.graph.values import tensor_value, wants_gradient
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.index import Index
from attn_pass.options import LEAVE
from attn_pass.patterns import flex_calls
from attn_pass.patterns.base import Site
from attn_pass.planner.choose import Choice, choose, score_product_cost
from attn_pass.planner.lengths import lengths
from attn_pass.planner.overrides import rule_for
from attn_pass.planner.stock import Stock
from attn_pass.poor_cases import variants
from attn_pass.reading.describe import Described
from attn_pass.report.build import record_of
from attn_pass.report.site import SiteReport
from attn_pass.rewriting.context import GraphContext
from attn_pass.rewriting.setting import device_of, made_of, setting_of
from attn_pass.rewriting.stock import stock_of
from attn_pass.targets.base import Setting
from attn_pass.tuning.tuner import TuningSite

_OF_A_SHARD = "context parallelism is active: the mask is over a shard's positions, not over the sequence's"
_WITHIN_A_SHARD = (
    "context parallelism is active: this is attention within a shard, and a call here would become ring attention"
)
# AOTAutograd refuses the call there, stock's own as well: it counts the kernel as drawing random numbers.
_NO_GRADIENT_IN_A_CHECKPOINT = (
    "no input of its checkpoint needs a gradient, and torch refuses fused calls there while gradients are on: call the"
    " model under torch.no_grad()"
)


_DETACHED = "its result is detached in place afterwards, as a view of a kernel's result cannot be"


@dataclass(frozen=True)
class Decision:
    """What is chosen for a site, and under which circumstances."""

    choice: Choice
    setting: Setting
    made_of: Ancestry | None
    written: AsWritten
    rule: tuple[str, tuple[str, ...]] | None
    stock: Stock | None = None

    @property
    def by_rule(self) -> str:
        """Which of the user's rules it follows, as the end of a reason; empty where none is about it."""
        return "" if self.rule is None else f" ({self.rule[0]})"


def stays(context: GraphContext, site: Site, attention: Attention) -> str:
    """Why a site is left before anything is chosen; empty where it may be rewritten."""
    if site.node in context.detached:
        return _DETACHED
    return _not_here(context, attention) or _call_stays(context, site, attention)


def _not_here(context: GraphContext, attention: Attention) -> str:
    """Why nothing is rewritten in a program like this one; empty where something may be."""
    if context.around.is_checkpoint and not attention.needs_grad:
        return _NO_GRADIENT_IN_A_CHECKPOINT
    if context.context_parallel:
        return _OF_A_SHARD if not attention.mask.is_none or attention.not_affine else _WITHIN_A_SHARD
    return ""


def _call_stays(context: GraphContext, site: Site, attention: Attention) -> str:
    """Why a call of FlexAttention that was read stays the call it is; empty for anything else."""
    if site.opaque is None or site.opaque.form != flex_calls.FORM:
        return ""
    if flex_calls.ONCE_LISTED in site.opaque.assumes and context.run.options.numerics == "strict":
        return f"numerics='strict' does not assume that {flex_calls.ONCE_LISTED}"
    return family_of(device_of(context, attention)).keeps_flex(attention)


def decision_for(context: GraphContext, site: Site, described: Described, record: SiteReport) -> Decision:
    """What is chosen for a site, and what for."""
    run, attention = context.run, described.attention
    parts = made_of(context, described)
    setting = setting_of(context, site, described, parts)

    def copied(hint: Callable[[Index], int]) -> int:
        return sum(context.bytes_of(n, hint) for n in described.copies)

    written = _as_written(context, site, described, copied(context.sizes.hint))
    rule, measure = rule_for((site.node, *site.internal), record, run.options), None
    # What is measured as it is are the parts that were read, which a call that has a kernel of its own is not.
    is_parts = site.opaque is None or site.opaque.written is None
    if run.measure is not None and rule is None and not site.needed_as_well and is_parts:
        measure = functools.partial(run.measure, _tuning_site(context, site, described, setting))
    stock = None
    with run.details(record):
        stock = stock_of(context, site, described, setting, written) if run.explains else None
    choice = choose(
        attention,
        variants(attention, run.options.poor_cases),
        written,
        setting,
        prefer=run.options.choose if rule is None else "first",
        allowed=run.options.targets if rule is None else rule[1],
        measure=measure,
        elsewhere=lengths(attention, setting, written, copied),
        without=run.without,
        stock=stock,
    )
    return Decision(choice, setting, parts, written, rule, stock)


def _as_written(context: GraphContext, site: Site, described: Described, copied: int) -> AsWritten:
    """What would run if nothing were done, with the copies that it takes and what stays beside a kernel."""
    joined_nodes = {n for one in context.joined for n in one.operands} | {one.values for one in context.summed}
    joined = sum(context.bytes_of(n, context.sizes.hint) for n in described.nodes if n in joined_nodes)
    return replace(site.written, copied_bytes=copied, joined_bytes=joined, needed_as_well=bool(site.needed_as_well))


def _tuning_site(context: GraphContext, site: Site, described: Described, setting: Setting) -> TuningSite:
    attention = described.attention
    operands = {attention.query.source, attention.key.source, attention.value.source}
    others = [node for n, node in enumerate(described.nodes) if n not in operands]
    return TuningSite(
        site.node,
        described.nodes,
        [node for node in others if _is_made_of_known(node, context.tensors)],
        context.sizes,
        context.effects,
        context.tensors,
        lambda node: context.run.program == "compile" and wants_gradient(node),
        setting,
    )


def _is_made_of_known(node: Node, known: Mapping[Node, torch.Tensor]) -> bool:
    """Whether a tensor, such as a mask, is computed by the program from sizes and from values that are known alone."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each.op in ("placeholder", "get_attr") and tensor_value(each) is not None and each not in known:
            return False
        new = [n for n in each.all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return node not in known


class Partners:
    """Sites that share inner nodes: all of them are rewritten, or none.

    What they share would be computed once if they were left, and in each of their kernels if not.
    """

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        self._are_rewritten: dict[frozenset[str], bool] = {}

    def why_left(self, site: Site) -> str:
        """Why a site is left for the sake of its partners; empty where all are rewritten, or where it has none."""
        if not site.partners:
            return ""
        key = frozenset(p.node.name for p in site.partners)
        if key not in self._are_rewritten:
            self._are_rewritten[key] = self._decide(site.partners)
        return "" if self._are_rewritten[key] else f"{site.alone}, in an attention that is left or costs less as it is"

    def _decide(self, partners: tuple[Site, ...]) -> bool:
        context = self._context
        leaving = taking = 0.0
        for partner in partners:
            assert partner.described is not None
            attention = partner.described.attention
            decision = decision_for(context, partner, partner.described, record_of(partner, context.around.count))
            if _not_here(context, attention) or not decision.choice.selections:
                return False
            again = 0.0 if partner is partners[0] else score_product_cost(attention, decision.setting)
            leaving += decision.choice.predicted_us.get(LEAVE, 0.0) - again
            taking += decision.choice.selections[0].offer.microseconds
        return taking < leaving or context.run.options.choose != "cheapest"

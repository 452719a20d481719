"""The edit of one site: planned on fake values, checked, and applied in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attn_pass.errors import RewriteError
from attn_pass.graph.edit import LayoutError, Plan, Value, fake_of
from attn_pass.graph.provenance import Emission, mark, operator_name
from attn_pass.graph.stand_in import NoSize, ShapeUse, give_stand_ins
from attn_pass.graph.values import tensor_value
from attn_pass.patterns import also_used
from attn_pass.patterns.base import Site
from attn_pass.planner.choose import Selection
from attn_pass.reading.describe import Described
from attn_pass.report.progress import tell
from attn_pass.report.site import SiteReport
from attn_pass.rewriting.check import verified
from attn_pass.rewriting.context import GraphContext
from attn_pass.targets.base import Setting
from attn_pass.verify import Verified

VerifySmaller = Callable[[GraphModule], float]


class HoldsForSome(RewriteError):
    """What was planned rests on a fact about symbolic sizes or strides: a reason to leave the site, and no fault."""


def emit(
    context: GraphContext,
    site: Site,
    described: Described,
    record: SiteReport,
    selection: Selection,
    setting: Setting,
    verify_smaller: VerifySmaller,
) -> Verified | None:
    """Puts what was chosen in a site's place; returns what running both showed, where the options ask for that.

    Raises `HoldsForSome`, `RewriteError` or `Mismatch` before anything in the graph has changed.
    """
    nodes = tuple(context.now(n) for n in described.nodes)
    stands_for = None if site.opaque is None else site.opaque.stands_for(site.node)
    plan = Plan(
        context.gm, site.node, site.region, context.size_nodes, context.effects, context.around.is_body, stands_for
    )
    value, logarithms = _planned(context, plan, site, nodes, selection, setting)
    _check_result(context, site.node, value, selection)
    outcome = None
    if context.run.options.verify != "off":
        tell(f"verifying {record.where}")
        outcome = verified(context, site, described, record, selection, nodes, value, setting.device, verify_smaller)
    _apply(context, plan, site, value, logarithms, selection)
    if context.run.options.timeline:
        mark(plan.inserted, record.in_timeline(selection.target.name))
    return outcome


def _planned(
    context: GraphContext, plan: Plan, site: Site, nodes: tuple[Node, ...], selection: Selection, setting: Setting
) -> tuple[Value, list[tuple[Node, Value]]]:
    """What the target computes in the site's place, and the log-sum-exps that its kernel gives beside it."""
    name = selection.target.name
    with plan.running():
        before = plan.guards()
        try:
            value = selection.target.emit(plan, nodes, selection.offer, setting)
            if site.written_to is not None and _is_seen(context, site.written_to, site.node):
                value = plan.call(torch.ops.aten.copy_.default, context.now(site.written_to), value)
            logarithms = also_used.given_by_kernel(plan, site, selection.offer.gives_logarithm)
        except LayoutError as error:
            raise HoldsForSome(str(error)) from None
        except GuardOnDataDependentSymNode as error:
            raise HoldsForSome(f"{name} needs a size that is known at run time only ({error.cond})") from None
    if context.run.program != "compile" and (broken := plan.broken_guard(before)) is not None:
        raise HoldsForSome(f"{name} would hold for some sizes only: {broken}")  # which are not checked
    return value, logarithms


def _is_seen(context: GraphContext, buffer: Node, writer: Node) -> bool:
    """Whether the tensor that a result is written to has any other reader than the operation that writes it."""
    is_own = buffer.op not in ("placeholder", "get_attr") and context.effects.aliases(buffer)[0] is buffer
    return not is_own or set(buffer.users) != {writer}


def _check_result(context: GraphContext, node: Node, value: Value, selection: Selection) -> None:
    """Raises `RewriteError` where what was planned has another shape or type than the site's result."""
    old, new, sizes = tensor_value(node), fake_of(value), context.sizes
    if old is None or sizes.shape(old) != sizes.shape(new) or old.dtype != new.dtype:
        was = None if old is None else (old.dtype, tuple(old.shape))
        raise RewriteError(f"{selection.target.name} gives {new.dtype} {tuple(new.shape)} where {node.name} was {was}")


def _apply(
    context: GraphContext,
    plan: Plan,
    site: Site,
    value: Value,
    logarithms: list[tuple[Node, Value]],
    selection: Selection,
) -> None:
    stack_trace = str(site.node.meta.get("stack_trace") or "")
    internal, shape_uses = site.internal, site.shape_uses
    if logarithms:
        assert site.logarithms is not None
        internal, shape_uses = site.logarithms.internal, site.logarithms.shape_uses
    _give_stand_ins(context, site.node, internal, shape_uses)
    gone = {site.node, *internal}
    for old, logarithm in logarithms:
        context.put_in_place(plan.put_beside(logarithm, old, gone), old, site.region)
    node = plan.apply(value, _doomed(site, internal))
    operators = frozenset(operator_name(n.target) for n in plan.inserted if n.op == "call_function")
    context.run.emissions.append(Emission(selection.target.name, operators, stack_trace))
    context.put_in_place(node, site.node, site.region)


def _doomed(site: Site, internal: Sequence[Node]) -> list[Node]:
    """The inner nodes that go with a site: what partners have inside as well goes with the last of them."""
    others = [partner for partner in site.partners if partner is not site]
    needed = {n for partner in others if not partner.node._erased for n in partner.internal}
    inner = dict.fromkeys((*internal, *(n for partner in others if partner.node._erased for n in partner.internal)))
    return [n for n in inner if not n._erased and n not in needed]


def _give_stand_ins(
    context: GraphContext, result: Node, internal: Sequence[Node], shape_uses: Sequence[ShapeUse]
) -> None:
    """Gives what takes a shape from the site's inner nodes, and stays, other tensors of that shape."""
    try:
        gone = {result, *internal}
        for stand_in, user in give_stand_ins(context.gm.graph, shape_uses, gone, context.sizes):
            context.effects.add_beside(stand_in, user)
            context.regions.add(stand_in, context.regions.of(user))
    except NoSize as error:
        raise HoldsForSome(str(error)) from None

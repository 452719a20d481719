"""All that a target may consult besides the description, for one site: its `Setting`, and what it depends on."""

from __future__ import annotations

import torch

from attn_pass.compat import recomputes_everything
from attn_pass.devices.device import Device
from attn_pass.devices.registry import family_of
from attn_pass.graph.ancestry import Ancestry, ancestry
from attn_pass.graph.values import wants_gradient
from attn_pass.model.attention import Attention
from attn_pass.patterns.base import Site
from attn_pass.reading.describe import Described
from attn_pass.rewriting.context import GraphContext
from attn_pass.targets.base import Setting


def device_of(context: GraphContext, attention: Attention) -> Device:
    """The device a site runs on: that of its query, or the one that the options name."""
    return context.run.device(attention.sources[attention.query.source].device)


def made_of(context: GraphContext, described: Described) -> Ancestry | None:
    """What a site's operands and its mask are made of, where a target asks: for gradients of an exported program.

    And on NPUs for dropout.
    """
    a, run, around = described.attention, context.run, context.around
    merges = bool(a.dropout) and family_of(device_of(context, a)).merges_equal_calls
    if not merges and run.program != "export":
        return None
    nodes = (context.now(n) for n in described.nodes)
    effects = {context.gm.graph: context.effects, **{level.graph: level.effects for level in around.levels}}
    return ancestry(nodes, run.dropout_sites.root, around.bound, effects)


def setting_of(context: GraphContext, site: Site, described: Described, parts: Ancestry | None) -> Setting:
    """The setting of a site whose operands are made of ``parts``."""
    run, written, attention = context.run, site.written, described.attention
    device = device_of(context, attention)
    deterministic = torch.are_deterministic_algorithms_enabled()
    deterministic = deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
    stock = None
    if written.from_library:
        stock = written.library
    elif site.region.sdpa_backends is None:
        stock = family_of(device).stock_kernel(attention, written, device, deterministic=deterministic)
    merged = parts is not None and bool(attention.dropout) and run.dropout_sites.has_like(site.node, parts)
    return Setting(
        device=device,
        program=run.program,
        numerics=run.options.numerics,
        assume_nonempty_rows=run.options.assume_nonempty_rows,
        autocast=site.region.autocast_dtype(attention.sources[attention.query.source].device.type),
        allowed_backends=site.region.sdpa_backends,
        runner=run.runner,
        eager_form=not site.is_call,
        kernel_as_written=stock,
        blocks=written.blocks,
        deterministic=deterministic,
        may_need_grad=_may_need_grad(context, site, parts),
        is_recomputed=context.around.is_checkpoint or recomputes_everything(),
        wants_logarithm=site.logarithms is not None,
        may_be_merged_by_cse=merged,
        sharing_mask=_sharing_mask(context, described),
        over_cache=_is_over_cache(context, described),
        same_random_numbers=run.program == "compile" and bool(torch._inductor.config.fallback_random),
        hint=context.sizes.hint,
        can_be_zero=context.sizes.can_be_zero,
    )


def _sharing_mask(context: GraphContext, described: Described) -> int:
    """How many sites may share what is computed from the mask: those that have it, if nothing writes to it."""
    read = described.read_by_mask()
    return 1 if any(map(context.effects.mutations, read)) else max(1, context.masks[read])


def _is_over_cache(context: GraphContext, described: Described) -> bool:
    """Whether the keys are a part of what the program is given, and writes to: state that lives longer than a call."""
    keys = described.nodes[described.attention.key.source]
    if not context.effects.mutations(keys):
        return False
    return any(n.op in ("placeholder", "get_attr") for n in context.effects.aliases(keys))


def _may_need_grad(context: GraphContext, site: Site, parts: Ancestry | None) -> bool:
    """Whether a program whose values do not show it may need gradients: if something it depends on does."""
    if parts is None or context.run.program != "export" or site.region.grad_enabled is False:
        return False
    inputs = context.run.dropout_sites.root.find_nodes(op="placeholder")
    anything = any(map(wants_gradient, inputs))
    return parts.needs_grad or (anything and not parts.is_whole)

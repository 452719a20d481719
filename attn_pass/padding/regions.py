"""The regions of one graph: found after its attentions are rewritten, one for each padding mask, each on its own."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attn_pass.compat import PACKS_ANY_ROWS
from attn_pass.devices.device import Device
from attn_pass.devices.registry import family_of
from attn_pass.errors import first_line
from attn_pass.graph.effects import Effects
from attn_pass.graph.names import operation_name
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import FOLDS_CONSTANTS, Sizes
from attn_pass.options import Options
from attn_pass.padding.added import adds_learned, ancestors, between_sum_and_mask
from attn_pass.padding.cost import Cost, cost_of, is_product
from attn_pass.padding.exits import FINITE, Surroundings
from attn_pass.padding.folds import keep_positions_apart
from attn_pass.padding.masks import NO_PADDING, OTHER_ROWS, Group, groups
from attn_pass.padding.packed import CannotPackError
from attn_pass.padding.rewrite import Rewrite, leaves
from attn_pass.padding.rules import Rules
from attn_pass.padding.shared import (
    erase_unread_writes,
    fill_masks_apart,
    keep_heads_apart,
    move_masks_up,
    share_masks,
)
from attn_pass.padding.trace import Proof, Trace, prove
from attn_pass.report.places import source_line
from attn_pass.report.region import RegionReport
from attn_pass.report.site import SiteReport
from attn_pass.report.units import counted

PACKED_ROWS = "packed rows"
"""What a second try is without, beside names of targets: regions."""
ASSUMED = "assume_padding_unused: rows of padding in the model's result are not used; they become zeros"
FINITE_ROWS = "rows of padding that a mask multiplies with 0 hold finite numbers"
LEARNED = "a bias that is learned and added to scores beside a mask masks no key: its numbers are far above a mask's"
_NOT_FROZEN = "with `freezing`, linear layers of rows that are counted at run time need torch 2.13 or newer"
FINITE_GRADIENTS = "rows of padding hold finite numbers, so that their gradients are 0"
Complain = Callable[[str, Exception], None]


@dataclass(frozen=True)
class Graph:
    """A graph whose attentions are rewritten, and what is asked of its regions.

    Attributes:
        gm: the graph.
        operators: the attentions that take packed rows.
        sizes: those of the graph.
        region: the state around the graph.
        options: the user's.
        device: what the attentions run on.
        draws: whether dropout may draw other random numbers than eager.
    """

    gm: GraphModule
    operators: Collection[Any]
    sizes: Sizes
    region: Region
    options: Options
    device: Callable[[Node], Device]
    draws: bool = True


def take_padding_out(graph: Graph, complain: Complain) -> list[RegionReport]:
    """Rewrites every region of a graph that is proved, in place; returns a record of each padding mask.

    ``complain`` is told what failed, where something did; the region is left then.
    """
    if groups(graph.gm.graph, graph.operators, graph.sizes)[0]:
        _prepare(graph)
    reports = _refused(graph)
    done: set[Node] = set()
    while (group := next(_new(graph, done), None)) is not None:
        done.update(group.sites)
        record = RegionReport(
            outcome="left",
            reason="",
            where=source_line(group.sites[0].meta),
            sites=len(group.sites),
            rows=tuple(s if isinstance(s, int) else str(s) for s in group.rows),
        )
        reports.append(record)
        try:
            done.update(_take_out(graph, group, record))
        except CannotPackError as error:
            record.mark_left(str(error))
        except GuardOnDataDependentSymNode as error:
            record.mark_left(f"torch needs the number of rows at compile time ({first_line(error)})")
        except Exception as error:
            record.mark_left(f"internal error: {type(error).__name__}: {first_line(error)}")
            complain("a region is left with its padding", error)
    return reports


def _prepare(graph: Graph) -> None:
    """What makes regions larger, and changes no value."""
    erase_unread_writes(graph.gm.graph)
    fill_masks_apart(graph.gm.graph, graph.operators)
    share_masks(graph.gm.graph, graph.operators, Regions(graph.gm.graph, graph.region))
    keep_heads_apart(graph.gm.graph, graph.operators, graph.sizes)
    keep_positions_apart(graph.gm, graph.operators, graph.sizes, Regions(graph.gm.graph, graph.region))
    move_masks_up(graph.gm.graph, graph.operators, Regions(graph.gm.graph, graph.region))


def _refused(graph: Graph) -> list[RegionReport]:
    """The attentions that keep some keys and cannot run on packed rows, by the reason."""
    by_reason: dict[str, list[Node]] = {}
    for node, reason in groups(graph.gm.graph, graph.operators, graph.sizes)[1].items():
        if reason not in (OTHER_ROWS, NO_PADDING):
            by_reason.setdefault(reason, []).append(node)
    return [
        RegionReport(outcome="left", reason=reason, where=source_line(nodes[0].meta), sites=len(nodes))
        for reason, nodes in by_reason.items()
    ]


def of_other_targets(sites: Iterable[SiteReport], targets: Collection[str]) -> list[RegionReport]:
    """A record of the attentions over padded sequences that became none of ``targets``, which run on packed rows."""
    by_target: dict[str | None, list[SiteReport]] = {}
    for site in sites:
        query, key = (site.shapes.get(name, ()) for name in ("query", "key"))
        is_of_sequences = "padding" in site.mask.split(" and ") and query[2:3] == key[2:3]
        if site.kind == "attention" and is_of_sequences and site.target not in targets:
            by_target.setdefault(site.target, []).append(site)
    return [
        RegionReport(
            outcome="left",
            reason=f"its attentions {f'became {target}' if target else 'are left'}, and rows are packed for"
            f" {' and '.join(sorted(targets))} only",
            where=of_target[0].where,
            sites=sum(site.count for site in of_target),
        )
        for target, of_target in by_target.items()
    ]


def _new(graph: Graph, done: set[Node]) -> Iterator[Group]:
    possible, _ = groups(graph.gm.graph, graph.operators, graph.sizes)
    return (g for g in possible if done.isdisjoint(g.sites))


def _take_out(graph: Graph, group: Group, record: RegionReport) -> list[Node]:
    """Rewrites a region if it is one, and says so; returns its attentions that are called as they were."""
    gm, sizes, options = graph.gm, graph.sizes, graph.options
    strict = options.numerics == "strict"
    rules = Rules(sizes, graph.draws)
    around = Surroundings(rules, group.rows, group.mask, graph.operators, options.assume_padding_unused, strict)
    trace = Trace(group, around, Effects(gm.graph))
    masks = {*group.mask.nodes, *(n for site in group.sites for n in between_sum_and_mask(site))}
    if any(map(trace.is_written, masks)):  # rows are counted once, in front of all that reads them
        record.mark_left("its mask is written in place")
        return []
    proof = prove(trace)
    record.stops = tuple(dict.fromkeys(_stops(trace, proof)))
    record.operations = dict(Counter(_name(n, proof) for n in gm.graph.nodes if n in proof.layouts))
    if reason := _not_packed(graph, proof, record):
        record.mark_left(reason)
        return []
    exits, learned = leaves(proof), any(map(adds_learned, proof.sites))
    least = _cost(graph, proof).least_padding if options.choose == "cheapest" else 0.0
    rewrite = Rewrite(gm, sizes, Regions(gm.graph, graph.region), trace, proof, least)
    rewrite.apply()
    record.outcome, record.packed = "packed", len(proof.sites)
    record.reason = f"rows of padding reach no result; on packed rows: {counted(record.packed, 'attention')}"
    record.entries = tuple(dict.fromkeys(n.name for n in rewrite.entries))
    record.exits = tuple(dict.fromkeys(f"{leaving.words}{_location(user)}" for _, user, leaving in exits))
    by_word = any(user.op == "output" for _, user, _ in exits)
    finite = any(leaving.words == FINITE for *_, leaving in exits)
    assumed = {ASSUMED: by_word, FINITE_ROWS: finite, LEARNED: learned, FINITE_GRADIENTS: proof.is_trained}
    record.assumptions = tuple(words for words, is_assumed in assumed.items() if is_assumed)
    return [rewrite.new[site] for site in rewrite.whole]


def _not_packed(graph: Graph, proof: Proof, record: RegionReport) -> str:
    """Why a region that is proved is left as it is; empty where it is not."""
    if not proof.sites:
        return record.stops[0] if record.stops else "its attentions have no rows that could be followed"
    if graph.options.numerics == "strict" and proof.is_trained:
        return "gradients of rows of padding are not assumed to be finite"
    if not any(is_product(node) for node in proof.layouts):
        return "nothing but the attention itself would run on fewer rows"
    if graph.gm.meta.get(FOLDS_CONSTANTS) and not PACKS_ANY_ROWS:
        return _NOT_FROZEN
    if graph.options.choose != "cheapest":
        return ""
    return _cost(graph, proof).too_small


def _cost(graph: Graph, proof: Proof) -> Cost:
    device = graph.device(proof.sites[0])
    chooses = graph.options.linear_layers == "best" and not proof.is_trained
    family, frozen = family_of(device), bool(graph.gm.meta.get(FOLDS_CONSTANTS))
    new_rows_us = functools.partial(family.new_rows_us, device, chooses=chooses)
    linear_gflops = functools.partial(family.linear_gflops, device, chooses=chooses)
    return cost_of(proof, device, graph.sizes.hint, new_rows_us, linear_gflops, frozen)


def _stops(trace: Trace, proof: Proof) -> Iterator[str]:
    """What sees padding behind an attention; what does so before the first one ends no region."""
    sites = set(proof.group.sites)
    for node, reason in proof.stops.items():
        if not sites.isdisjoint(ancestors((node,))):
            yield reason


def _name(node: Node, proof: Proof) -> str:
    if node in proof.crosses:
        return "cross attention"
    return "attention" if node in proof.group.sites else operation_name(node)


def _location(user: Node) -> str:
    where = source_line(user.meta)
    return "" if where.startswith("unknown") else f" ({where})"

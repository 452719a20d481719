"""Sites that share inner nodes: one score matrix under two softmaxes, one softmax before two products.

The matrix goes away if every site that needs it is rewritten, and only then: such sites are partners, decided together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.patterns.base import Site, check_window
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable


def with_partners(reader: Reader, sites: Sequence[Site]) -> list[Site]:
    """The sites, where those that only others stand in the way of have these as ``partners`` and no refusal.

    Every use of an inner node outside the site must lie inside a partner that has the node inside as well. Weights that
    are dropped out are not shared: each kernel would draw numbers of its own.
    """
    among: dict[int, _Shared] = {}
    for number, site in enumerate(sites):
        uses = None if site.unshared is None else _outside_uses(reader, site.unshared)
        if site.unshared is not None and uses is not None:
            among[number] = _Shared(site.unshared, uses)
    while True:
        partners_of = {number: _partners(reader, number, among) for number in among}
        alone = [number for number, partners in partners_of.items() if not partners]
        if not alone:
            break
        for number in alone:
            del among[number]
    for number in among:
        group, waiting = {number}, [number]
        while waiting:
            more = partners_of[waiting.pop()] - group
            group |= more
            waiting += more
        shared = among[number].site
        shared.partners, shared.alone = tuple(among[n].site for n in sorted(group)), sites[number].refusal
    return [among[number].site if number in among else site for number, site in enumerate(sites)]


@dataclass(frozen=True)
class _Shared:
    """A site, and the uses of its inner nodes by others: the node and its user."""

    site: Site
    uses: frozenset[tuple[Node, Node]]

    def has(self, node: Node, user: Node) -> bool:
        return node in self.site.internal and (user is self.site.node or user in self.site.internal)


def _partners(reader: Reader, own: int, among: Mapping[int, _Shared]) -> set[int]:
    """The sites that the outside uses lie in; none if one lies in no site."""
    partners: set[int] = set()
    for node, user in among[own].uses:
        inside = {number for number, other in among.items() if number != own and other.has(node, user)}
        dropped = any(_drops(among[number].site) for number in (own, *inside))
        if not inside or (dropped and reader.softmaxes.get(node)):
            return set()
        partners |= inside
    return partners


def _drops(site: Site) -> bool:
    return site.described is not None and site.described.attention.dropout != 0


def _outside_uses(reader: Reader, site: Site) -> frozenset[tuple[Node, Node]] | None:
    """The uses of inner nodes outside the site; None if one is the graph's output, or if something else writes one."""
    if site.described is None:
        return None
    try:
        check_window(reader, site.described, site.node)
    except Unreadable:
        return None
    inside = {*site.internal, site.node}
    of_a_shape = {use.user for use in site.shape_uses}
    uses: set[tuple[Node, Node]] = set()
    for node in site.internal:
        if reader.effects.mutations(node) and not reader.effects.is_internal(node, inside):
            return None
        for user in node.users:
            if user in inside or user in of_a_shape or is_metadata_assertion(user):
                continue
            if user.op == "output":
                return None
            uses.add((node, user))
    return frozenset(uses)

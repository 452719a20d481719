"""What somebody else needs as well: the kernel gives the result, and weights or a log-sum-exp stay for who needs them.

What is computed as it was written is not touched, whatever is written in place there; only what nobody needs any more
goes. That is the product with the values, and the softmax where all that is needed is the scores' log-sum-exp. The
compiler may compute both in one pass over the scores, so a kernel has to be cheaper than the product with the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.patterns.base import Site, check_window, is_logarithm
from attn_pass.reading.lift import Reader, Unreadable


def with_what_else_is_needed(reader: Reader, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites, where one that is refused for such uses alone becomes one beside which what is needed stays."""
    for site in sites:
        inner = site.unshared
        if inner is None or site.partners or not _may_stay(reader, inner):
            yield site
            continue
        inner.needed_as_well, inner.internal, inner.shape_uses = site.refusal, (), ()
        yield inner


def _may_stay(reader: Reader, site: Site) -> bool:
    """Whether all that is needed of it elsewhere are weights and log-sum-exps, where a kernel draws no numbers."""
    if site.described is None or site.described.attention.dropout:
        return False
    try:
        check_window(reader, site.described, site.node)
    except Unreadable:
        return False
    inside = {*site.internal, site.node, *(use.user for use in site.shape_uses)}
    needed: dict[Node, list[Node]] = {}
    for node in site.internal:
        users = [user for user in node.users if user not in inside and not is_metadata_assertion(user)]
        if users:
            needed[node] = users
    return bool(needed) and all(
        reader.softmaxes.get(node) or is_logarithm(reader, node) or all(is_logarithm(reader, user) for user in users)
        for node, users in needed.items()
    )

"""Weights that somebody else needs as well: the kernel gives the result, and the weights stay for who needs them.

What is computed as it was written up to the weights is not touched, whatever is written in place there. So nothing goes
away but the product with the values, and that is all a kernel has to be cheaper than.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.patterns.base import Site, check_window
from attn_pass.reading.lift import Reader, Unreadable


def with_weights_kept(reader: Reader, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites, where one that is refused for uses of its weights alone becomes one beside which they stay."""
    for site in sites:
        inner = site.unshared
        if inner is None or site.partners or not _keeps_weights(reader, inner):
            yield site
            continue
        inner.weights_stay, inner.internal, inner.shape_uses = site.refusal, (), ()
        yield inner


def _keeps_weights(reader: Reader, site: Site) -> bool:
    """Whether all that is needed of it elsewhere are its weights, which a kernel draws no numbers for."""
    if site.described is None or site.described.attention.dropout:
        return False
    try:
        check_window(reader, site.described, site.node)
    except Unreadable:
        return False
    inside = {*site.internal, site.node, *(use.user for use in site.shape_uses)}
    used = {
        node for node in site.internal for user in node.users if user not in inside and not is_metadata_assertion(user)
    }
    return bool(used) and all(reader.softmaxes.get(node) for node in used)

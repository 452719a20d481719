"""Weights or a log-sum-exp that are used elsewhere too: they stay as written, and the kernel gives only the result.

The nodes that are computed as written are not changed, even if they write in place; only nodes without users are
removed. These are the product with the values, and the softmax if only the scores' log-sum-exp is needed. The
compiler may compute both in one pass over the scores, so a kernel has to be cheaper than the product with the values.

A kernel that gives the log-sum-exp with the result replaces the scores too (`Logarithms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from attn_pass.graph.edit import LayoutError, Plan, Value, fake_of
from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.graph.values import tensor_value
from attn_pass.model.index import Index, product
from attn_pass.patterns.base import Logarithms, Site, check_window, is_logarithm
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable


def with_what_else_is_needed(reader: Reader, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites, where one that is refused for such uses alone becomes one beside which what is needed stays."""
    for site in sites:
        inner = site.unshared
        if inner is None or site.partners or not _may_stay(reader, inner):
            yield site
            continue
        inner.logarithms = _logarithms(reader, inner)
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
    needed = _needed(site)
    return bool(needed) and all(
        reader.softmaxes.get(node) or is_logarithm(reader, node) or all(is_logarithm(reader, user) for user in users)
        for node, users in needed.items()
    )


def given_by_kernel(plan: Plan, site: Site, gives: bool) -> list[tuple[Node, Value]]:
    """Each log-sum-exp and what stands in its place, planned; nothing where these stay as they were written.

    Raises `LayoutError` where the program would see other strides.
    """
    if site.logarithms is None or not gives:
        return []
    assert plan.logarithm is not None and site.softmax_of is not None
    outputs: list[tuple[Node, Value]] = []
    for node in site.logarithms.nodes:
        value, old = plan.logarithm, tensor_value(node)
        assert old is not None
        if old.dim() > fake_of(value).dim():  # keepdim=True
            value = plan.call(torch.ops.aten.unsqueeze.default, value, site.softmax_of[1])
        if fake_of(value).dtype != old.dtype:
            value = plan.call(torch.ops.aten.to.dtype, value, old.dtype)
        if not plan.has_layout_of(value, node):
            raise LayoutError("the scores' log-sum-exp would have another memory layout")
        outputs.append((node, value))
    return outputs


def _needed(site: Site) -> dict[Node, list[Node]]:
    """The inner nodes that something else needs, and what that is."""
    inside = {*site.internal, site.node, *(use.user for use in site.shape_uses)}
    needed: dict[Node, list[Node]] = {}
    for node in site.internal:
        users = [user for user in node.users if user not in inside and not is_metadata_assertion(user)]
        if users:
            needed[node] = users
    return needed


def _logarithms(reader: Reader, site: Site) -> Logarithms | None:
    """The log-sum-exps that are all that is needed, each of every row of the softmax, and only once the result is."""
    if site.softmax_of is None or site.described is None:
        return None
    scores, dim = site.softmax_of
    logarithms: dict[Node, None] = {}
    for node, users in _needed(site).items():
        if is_logarithm(reader, node):
            logarithms[node] = None
        elif node is scores:
            logarithms |= dict.fromkeys(users)
        else:
            return None
    rows = tuple(product(a.size for a in dims) for dims in site.described.attention.score_rows)
    if not rows or not all(_is_of(reader, node, scores, dim, rows) for node in logarithms):
        return None
    inside, end = {*site.internal, *logarithms}, reader.order[site.node]
    if any(user not in inside and reader.order.get(user, end + 1) <= end for node in logarithms for user in node.users):
        return None
    times = [reader.order[n] for n in (*scores.users, site.node) if n in reader.order]
    if reader.effects.mutation_between(scores, reader.order[scores], max(times)) is not None:
        return None
    return Logarithms(
        tuple(logarithms), (*site.internal, *(n for n in logarithms if n not in site.internal)), site.shape_uses
    )


def _is_of(reader: Reader, node: Node, scores: Node, dim: int, rows: tuple[Index, ...]) -> bool:
    """Whether it is the log-sum-exp of these scores along that dimension, and nothing is selected of their rows."""
    call, value = reader.call(node), tensor_value(scores)
    if call is None or call.op != "logsumexp" or call.in_place or call["input"] is not scores or value is None:
        return False
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    if [d % value.dim() for d in dims if isinstance(d, int)] != [dim]:
        return False
    shape = reader.shape(scores)
    return rows == (*shape[:dim], *shape[dim + 1 :]) and reader.regions.of(node) == reader.regions.of(scores)

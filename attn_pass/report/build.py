"""The report of a site before anything is decided: where it is, and its shapes and mask."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import Index, product
from attn_pass.patterns.base import Site
from attn_pass.report.places import module_path, source_line
from attn_pass.report.site import SiteReport


def record_of(site: Site, count: int) -> SiteReport:
    """The record of a site that occurs ``count`` times, left for no reason so far."""
    result = site.node if site.opaque is None else site.opaque.result
    value = tensor_value(result)
    if value is None and site.node.args:
        value = tensor_value(site.node.args[0])  # a composite call gives a tuple
    record = SiteReport(
        outcome="left",
        reason="",
        kind=site.kind,
        form=site.form if site.opaque is None else site.opaque.form,
        where=source_line(site.node.meta),
        count=count,
        module=module_path(site.node.meta),
        node=result.name,
        dtype="" if value is None else dtype_name(value.dtype),
        device="" if value is None else str(value.device.type),
    )
    if site.described is not None:
        a = site.described.attention
        record.mask = str(a.mask)
        query, kv = _leading(a)
        record.shapes = {
            "query": _shape((*query, a.q_len, a.head_dim)),
            "key": _shape((*kv, a.kv_len, a.head_dim)),
            "value": _shape((*kv, a.kv_len, a.value_head_dim)),
        }
    return record


def _leading(a: Attention) -> tuple[tuple[Index, Index], tuple[Index, Index]]:
    """Batch and heads, of the query and of keys and values. A batch of 1 is no axis: its heads look like a batch."""
    kv_heads = product(x.size for x in a.kv_heads)
    one_sequence = not a.heads and len(a.output) == 4 and not a.output[0] and a.output[1] == a.batch
    if one_sequence:
        return (1, a.batch_size), (1, a.batch_size)
    return (a.batch_size, a.query_heads), (a.batch_size, kv_heads)


def place_of(node: Node | None, result: Node) -> str:
    """The source line of the node a site was refused at, in brackets; nothing where it is the site's own."""
    if node is None or node is result or node.op == "output":
        return ""
    where = source_line(node.meta)
    return f" ({where})" if not where.startswith("unknown") else ""


def _shape(sizes: tuple[Index, ...]) -> tuple[int | str, ...]:
    return tuple(s if isinstance(s, int) else str(s) for s in sizes)

"""Calls of torch's own attention: `scaled_dot_product_attention`, and the kernel that it decomposes to on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from attn_pass.compat import ADDS_A_BATCH
from attn_pass.graph.values import settled_number, tensor_value
from attn_pass.model.attention import AsWritten
from attn_pass.model.expression import Const, Dot, Expr, IndexValue, Load, apply
from attn_pass.model.index import Axis, axis_index, divide, divide_exactly, product
from attn_pass.patterns.base import (
    NOT_GROUPED,
    USED_LOGARITHM,
    Site,
    check_window,
    failed,
    first_result,
    refused,
    scale_of,
)
from attn_pass.reading.describe import Parts, describe
from attn_pass.reading.operands import operand
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import SideLoad
from attn_pass.reading.views import Position, broadcast_position

FORM = "sdpa"
NO_KERNELS: Mapping[Any, Any] = MappingProxyType({})
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
CALLS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.scaled_dot_product_attention: _SDPA,
    torch.ops.aten.scaled_dot_product_attention.default: _SDPA,
}
_RESULTS = {1: USED_LOGARITHM}

Kernels = Mapping[Any, tuple[str, ...]]
"""The decomposed call: kernels that give the logarithm of the sums as well, with the names of their arguments.

They take fewer heads of keys and values than of queries as they are, and count positions from the first key, as the
call does (`attn_pass.devices.base.Family.decomposed_calls`).
"""


def arguments(node: Node, kernels: Kernels) -> dict[str, Any] | None:
    """The arguments of an attention call by name; None for any other node."""
    if node.op != "call_function":
        return None
    names = CALLS.get(node.target) or kernels.get(node.target)
    if names is None:
        return None
    call_args = {**_DEFAULTS, **dict(zip(names, node.args)), **node.kwargs}
    call_args["dropout_p"] = settled_number(call_args["dropout_p"])
    return {**call_args, "enable_gqa": True} if node.target in kernels else call_args


def find(
    reader: Reader, kernels: Kernels = NO_KERNELS, settled_kernels: Mapping[Any, str] = NO_KERNELS
) -> Iterator[Site]:
    """Every attention call of the graph; ``settled_kernels`` are those that stay, by their operators."""
    for node in reader.graph.nodes:
        call_args, settled = arguments(node, kernels), settled_kernels.get(node.target)
        if call_args is None and settled is None:
            continue
        region = reader.regions.of(node)
        try:
            if call_args is None:
                raise Unreadable(
                    f"torch's {settled} kernel was chosen when the program was decomposed: rewrite the program before"
                    " run_decompositions()",
                    node,
                )
            if region.functorch:
                raise Unreadable(f"it runs under {region.describe()}", node)
            result, rest = first_result(node, _RESULTS) if node.target in kernels else (node, [])
            written = _as_written(reader, result, call_args)
            with reader.site() as used:
                parts = _lift(reader, node, result, call_args)
                described = describe(parts, used)
                is_half = parts.score_dtype in (torch.float16, torch.bfloat16)
                if is_half and not (written.fused or described.attention.mask.never_empty):
                    # Torch adds the mask in float32, where float16's lowest number does not absorb a row's scores,
                    # nor -1e9 all of those that it does in bfloat16.
                    described = describe(replace(parts, score_dtype=torch.float32), used)
            check_window(reader, described, result)
            internal = (*rest, *((node,) if result is not node else ()))
            yield Site(result, FORM, region, described, internal=internal, written=written, is_call=True)
        except Unreadable as error:
            yield refused(node, FORM, region, error, kind="attention")
        except Exception as error:
            yield failed(node, FORM, region, error)


def _as_written(reader: Reader, node: Node, call_args: dict[str, Any]) -> AsWritten:
    mask, out = tensor_value(call_args["attn_mask"]), tensor_value(node)
    elements = 0
    if mask is not None and out is not None:
        elements = reader.sizes.hint(product(reader.sizes.shape(mask)))
    plain = _is_plain(reader, call_args)
    kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    needs_grad = mask is not None and mask.requires_grad
    return AsWritten(
        fused=(plain or (ADDS_A_BATCH and _is_plain(reader, call_args, rank=3)))
        and not call_args["dropout_p"]
        and not needs_grad
        and _has_one_head_dim(reader, call_args),
        plain=plain,
        plain_but_for_mask=not plain and _is_plain(reader, call_args, any_mask=True),
        mask=kind,
        mask_needs_grad=needs_grad,
        mask_elements=elements,
        causal=call_args["is_causal"],
    )


def _is_plain(reader: Reader, call_args: dict[str, Any], rank: int = 4, *, any_mask: bool = False) -> bool:
    """Whether the call is one that fused kernels look at: of this rank, nothing to broadcast, dense last dimensions.

    The mask is of this rank too, or of rank 2; with ``any_mask`` of any.

    With `_has_one_head_dim`, no dropout and no gradient of the mask it is what ``use_flash_attention_cpp`` asks of rank
    4, and of rank 3 where torch adds a batch.
    """
    tensors = [tensor_value(call_args[n]) for n in ("query", "key", "value")]
    q, k, v = ((*(1,) * (4 - rank), *reader.sizes.shape(t)) if t is not None else () for t in tensors)
    if any(len(s) != 4 for s in (q, k, v)) or q[0] != k[0] or k[0] != v[0]:
        return False
    if k[1] != v[1] or (q[1] != k[1] and not call_args["enable_gqa"]):
        return False
    mask = tensor_value(call_args["attn_mask"])
    if mask is not None and not any_mask and mask.dim() not in (2, rank):
        return False
    return all(reader.sizes.index(t.stride(-1)) == 1 for t in tensors if t is not None)


def _has_one_head_dim(reader: Reader, call_args: dict[str, Any]) -> bool:
    sizes = {reader.sizes.shape(t)[-1] for t in map(tensor_value, (call_args[n] for n in _SDPA[:3])) if t is not None}
    return len(sizes) == 1


def _lift(reader: Reader, node: Node, result: Node, call_args: dict[str, Any]) -> Parts:
    query, key, value = (call_args[n] for n in ("query", "key", "value"))
    q, k, v, out = (tensor_value(n) for n in (query, key, value, result))
    if q is None or k is None or v is None or out is None or min(t.dim() for t in (q, k, v)) < 2:
        raise Unreadable("an operand is not a tensor of at least two dimensions", node)
    for name in ("is_causal", "enable_gqa"):
        if not isinstance(call_args[name], bool):
            raise Unreadable(f"{name} is not a constant", node)
    if not isinstance(call_args["dropout_p"], (int, float)):
        raise Unreadable("dropout_p is known at run time only", node)
    shape = reader.sizes.shape(out)
    output = tuple(Axis(f"o{n}", size) for n, size in enumerate(shape))
    at = tuple(axis_index(a) for a in output)
    q_shape, k_shape, v_shape = (reader.sizes.shape(t) for t in (q, k, v))
    keys, dim = Axis("j", k_shape[-2]), Axis("d", k_shape[-1])
    if q_shape[-1] != dim.size:
        raise Unreadable("the head dims of query and key are not provably equal", node)
    if v_shape[-2] != keys.size:
        raise Unreadable("the lengths of keys and values are not provably equal", node)
    outer, row = at[:-2], at[-2]
    positions = {
        "query": broadcast_position((*outer, row, axis_index(dim)), q_shape),
        "key": _kv_position(outer, shape, k_shape, (axis_index(keys), axis_index(dim)), call_args["enable_gqa"]),
        "value": _kv_position(outer, shape, v_shape, (axis_index(keys), at[-1]), call_args["enable_gqa"]),
    }
    time, region = reader.order[node], reader.regions.of(node)
    side: dict[Load, SideLoad] = {}
    score = _score(reader, node, call_args, (*outer, row, axis_index(keys)), dim, side)
    return Parts(
        reader=reader,
        result=result,
        output=output,
        rows_at=(outer, row),
        keys=keys,
        dim=dim,
        query=operand(reader, query, positions["query"], time, region, factors=True),
        key=operand(reader, key, positions["key"], time, region, factors=True),
        value=operand(reader, value, positions["value"], time, region, factors=False),
        score=score,
        side=side,
        score_dtype=q.dtype,
        product_dtypes=(out.dtype, out.dtype),
        dropout=float(call_args["dropout_p"]),
        empty_row_is_nan=False,
    )


def _kv_position(outer: Position, shape: Position, own: Position, tail: Position, gqa: bool) -> Position:
    """Where keys or values are read: broadcast over the batch, grouped over the heads with ``enable_gqa``."""
    heads = list(outer)
    if gqa and len(own) >= 3 and len(outer) >= 1 and own[-3] != shape[-3] and own[-3] != 1:
        groups = divide_exactly(shape[-3], own[-3])
        if groups is None:
            raise Unreadable(NOT_GROUPED)
        heads[-1] = divide(outer[-1], groups)[0]
    return broadcast_position((*heads, *tail), own)


def _score(
    reader: Reader, node: Node, call_args: dict[str, Any], position: Position, dim: Axis, side: dict[Load, SideLoad]
) -> Expr:
    time = reader.order[node]
    score: Expr = Dot()
    scale = call_args["scale"]
    if scale is None:
        if not isinstance(dim.size, int):
            raise Unreadable("the default scale of a symbolic head dim is not a constant", node)
        if dim.size == 0:
            raise Unreadable("the head dim is 0", node)
        scale = dim.size**-0.5
    score = apply("mul", score, scale_of(reader, scale, time, node))
    mask = call_args["attn_mask"]
    if mask is not None:
        value = tensor_value(mask)
        if value is None:
            raise Unreadable("the mask is not a tensor", node)
        load = element_of(reader, node, mask, broadcast_position(position, reader.sizes.shape(value)), side)
        if value.dtype == torch.bool:
            score = apply("where", load, score, Const(float("-inf")))
        else:
            score = apply("add", score, load)
    if call_args["is_causal"]:
        score = apply("where", apply("le", _index(position[-1]), _index(position[-2])), score, Const(float("-inf")))
    return score


def element_of(
    reader: Reader, node: Node, tensor: Node, position: Position, side: dict[Load, SideLoad]
) -> Load | Const:
    """An element of a tensor that the call ``node`` takes beside its operands: a number, or loaded and noted down."""
    time = reader.order[node]
    source, at_source, read_at = reader.through_views(tensor, position, time, reader.regions.of(node))
    known = reader.element(source, at_source, read_at)
    if isinstance(known, Const):
        return known
    load = reader.load(source, at_source, read_at)
    side[load] = SideLoad(source, read_at, tensor, position, time)
    return load


def _index(index: Any) -> Expr:
    return Const(index) if isinstance(index, int) else IndexValue(index)

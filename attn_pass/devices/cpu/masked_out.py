"""Keys that an added mask rules out, found at run time: the mask is an input of the graph, and has no known structure.

A mask that is made once for all layers and passed in adds 0 to some scores and the dtype's lowest number to all others.
A score with such a number added counts for nothing beside any other. So the keys that a row keeps are those whose
element does not absorb a score, or all keys where every element does. This is a boolean tensor, computed once for all
sites that have the same mask, and of 64 keys that no row keeps the kernel reads neither keys nor values.
"""

from __future__ import annotations

import torch

from attn_pass.devices.cpu.cost import FEW_ROWS
from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Expr, Load, expression_axes
from attn_pass.model.index import is_at_most, product
from attn_pass.model.mask import ABSORBING
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering

_WIDE = (torch.float32, torch.bfloat16)  # their lowest numbers absorb a score in float32
_SHARE = 8  # a few rows: the mask is read if it is at most such a part of keys and values
_ONCE = 8  # bytes of an element: it is read and compared once, and its truth value is read by every layer
_LEAST_PRODUCTS = 1024  # many rows: multiplications for an element of a mask that all heads share


def is_inspected(a: Attention, setting: Setting) -> bool:
    """Whether the kernel is told which keys the mask rules out: an added mask of the program's, cheap beside the rest.

    For a few rows what counts is reading keys and values; for many, the products, of which all heads' together belong
    to one element of the mask. With 1,024 of them the comparison took up to a seventh of a layer's time, and it serves
    all layers.
    """
    bias = a.mask.bias
    if bias is None or a.mask.keep is not None or a.not_affine or setting.numerics == "strict":
        return False
    load = _loaded(bias)
    if load is None or a.sources[load.source].dtype not in _WIDE or a.score_dtype not in _WIDE:
        return False
    axes = expression_axes(bias)
    if a.keys not in axes:
        return False
    mask_bytes = product(x.size for x in axes - {a.keys}) * _ONCE  # for each key
    key_bytes = product(x.size for x in (*a.batch, *a.kv_heads)) * (a.head_dim + a.value_head_dim)
    if is_at_most(a.q_len * a.groups, FEW_ROWS):
        return is_at_most(_SHARE * mask_bytes, key_bytes * a.compute_dtype.itemsize)
    is_shared = not axes & set(a.heads)
    return is_shared and is_at_most(_LEAST_PRODUCTS, a.query_heads * (a.head_dim + a.value_head_dim))


def _loaded(bias: Expr) -> Load | None:
    """The tensor that is added as it is, but for a cast that keeps its numbers."""
    if isinstance(bias, Apply) and bias.op == "cast" and bias.dtype in _WIDE:
        return _loaded(bias.args[0])
    return bias if isinstance(bias, Load) else None


def kept(lower: Lowering) -> Value:
    """The keys that may count, as a boolean tensor that broadcasts to (B, H, L, S)."""
    call, bias = lower.plan.call, lower.attention.mask.bias
    assert bias is not None
    with lower.plan.sharing():
        absorbs = call(aten.le.Scalar, lower.expression(bias, lower.mask_groups()), ABSORBING)
        nothing = call(aten.all.dim, absorbs, -1, True)
        keeps = call(aten.logical_or.default, call(aten.logical_not.default, absorbs), nothing)
        as_bytes = call(aten.to.dtype, call(aten.where.Scalar, keeps, 1, 0), torch.uint8)
        return call(aten.view.dtype, as_bytes, torch.bool)

"""Blocks of 64 keys that an added mask hides from every row: the kernel reads neither their keys nor their values.

They are found when the program runs (`attn_pass.targets.given_masks`), once for all sites that have the same mask.
"""

from __future__ import annotations

from attn_pass.devices.cpu.cost import FEW_ROWS
from attn_pass.graph.edit import Value
from attn_pass.graph.truth import through_bytes
from attn_pass.model.attention import Attention
from attn_pass.model.expression import expression_axes
from attn_pass.model.index import is_at_most, product
from attn_pass.targets import given_masks
from attn_pass.targets.base import Setting
from attn_pass.targets.lower import Lowering

_SHARE = 8  # a few rows: the mask is read if it is at most such a part of keys and values
_ONCE = 8  # bytes of an element: it is read and compared once, and its truth value is read by every layer
_LEAST_PRODUCTS = 1024  # many rows: multiplications for an element of a mask that all heads share
_LEAST_OF_ALL = 1 << 21  # of a whole attention, if its rows share the mask too: with a quarter it took 3 of 45 us


def is_inspected(a: Attention, setting: Setting) -> bool:
    """Whether the kernel is told which keys the mask rules out: an added mask of the program's, cheap beside the rest.

    For a few rows what counts is reading keys and values; for many, the products, of which those of all heads belong to
    one element of the mask. With 1,024 of them the comparison took up to a seventh of a layer's time, and it serves all
    layers. A mask that all rows share is small beside the products, unless there are few of these.
    """
    bias = given_masks.added(a)
    if bias is None or setting.numerics == "strict":
        return False
    axes = expression_axes(bias)
    if a.keys not in axes:
        return False
    mask_bytes = product(x.size for x in axes - {a.keys}) * _ONCE  # for each key
    key_bytes = product(x.size for x in (*a.batch, *a.kv_heads)) * (a.head_dim + a.value_head_dim)
    if is_at_most(a.q_len * a.groups, FEW_ROWS):
        return is_at_most(_SHARE * mask_bytes, key_bytes * a.compute_dtype.itemsize)
    if axes & set(a.heads):
        return False
    of_heads = a.query_heads * (a.head_dim + a.value_head_dim)
    if is_at_most(_LEAST_PRODUCTS, of_heads):
        return True
    is_shared = not axes & set(a.rows)
    return is_shared and setting.hint(a.batch_size * a.q_len * a.kv_len * of_heads) >= _LEAST_OF_ALL


def keep_of_mask(lower: Lowering) -> Value:
    """The keys that may count, as a boolean tensor that broadcasts to (B, H, L, S)."""
    with lower.plan.sharing():
        return through_bytes(lower.plan.call, given_masks.keep_of_added(lower))
